"""Answers: agreement, differences, confidence, and the exit check."""
