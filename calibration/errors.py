"""Errors of calibration that are caught where torch is not imported."""


class UntrainableError(Exception):
    """A graph cannot be trained as a whole; the message says why, and what can be done."""
