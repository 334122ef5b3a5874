"""Comparison of controllers on one sequence of samples whose distribution shifts."""
