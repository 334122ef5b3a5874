"""Heads: kinds of them, the features that they read, training by self-distillation."""
