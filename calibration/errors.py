"""Errors of what needs data."""


class DataError(Exception):
    """The calibration or test data cannot be used; the message names the array and the remedy."""
