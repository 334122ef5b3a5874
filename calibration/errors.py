"""The error of data that cannot be used."""


class DataError(Exception):
    """The calibration or test data cannot be used; the message names the array and the remedy."""
