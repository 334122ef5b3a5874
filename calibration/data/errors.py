"""Errors of calibration, in a separate module that imports nothing large."""


class UntrainableError(Exception):
    """A graph cannot be trained as a whole; the message states the reason and a remedy."""


class DataError(Exception):
    """The calibration or test data cannot be used; the message names the array and the remedy."""
