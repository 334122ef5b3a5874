"""Errors of calibration, in a module of their own: nothing large is imported with them."""


class UntrainableError(Exception):
    """A graph cannot be trained as a whole; the message says why, and what can be done."""


class DataError(Exception):
    """The calibration or test data cannot be used; the message names the array and the remedy."""
