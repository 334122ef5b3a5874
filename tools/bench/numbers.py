"""Numbers on the command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    """A number above 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: above 0, at most 1")
    return value


def positives(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]
