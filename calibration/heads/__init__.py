"""Heads: families of them, features that they read, training by self-distillation."""
