"""Numbers within limits, as more than one command's arguments take them."""

from __future__ import annotations

import argparse


def share_from_0(text: str) -> float:
    """Read a number of at least 0 and less than 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or between 0 and 1")
    return value
