"""How many samples train, tune and certify: the sizes of the splits of calibration data."""

from __future__ import annotations

import itertools
import math
from typing import Final

TUNE_SHARE: Final = 0.15
CERTIFY_SHARE: Final = 0.25
"""The shares of the data that do not train: heads gain most from more data, while certification
flattens beyond some 5,000 samples."""


def split_sizes(samples: int, certify_at_least: int) -> tuple[int, int] | None:
    """Return how many samples train and tune, where the others certify; ``None`` if too few."""
    certify = max(round(samples * CERTIFY_SHARE), certify_at_least)
    tune = round(samples * TUNE_SHARE)
    train = samples - certify - tune
    return (train, tune) if train >= max(certify, 2) and tune >= 1 else None


def least_to_split(certify_at_least: int) -> int:
    """Return the fewest samples of which so many can certify, and the others train and tune."""
    begin = math.floor(2 * certify_at_least)  # as many train as certify
    return next(n for n in itertools.count(begin) if split_sizes(n, certify_at_least))
