"""Measurements: every figure is labelled as measured, and names its environment."""
