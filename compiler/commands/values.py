"""Parsers of single values of the command line; argparse shows the reason of a refusal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from offramp.compiler.common.options import SEEDS
from offramp.engine.models.options import MOST_SHARE

_INF = float("inf")
_T = TypeVar("_T")


def _reader(
    kind: Callable[[str], _T], fits: Callable[[_T], bool], reason: str
) -> Callable[[str], _T]:
    """Return a parser of values of a kind. It refuses unsuitable values with ``reason``."""

    def read(text: str) -> _T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r:.80} {reason}")
        return value

    return read


share = _reader(
    float,
    lambda value: 0 < value <= MOST_SHARE,
    "is not a share: a number above 0, and below 1 by 1e-9 or more",
)
"""Parser of a number above 0 and at most :data:`.MOST_SHARE`, which is just below 1."""
share_from_0 = _reader(float, lambda value: 0 <= value < 1, "is not 0 or between 0 and 1")
share_up_to_1 = _reader(float, lambda value: 0 < value <= 1, "is not above 0, and at most 1")
distance = _reader(float, lambda value: 0 <= value < _INF, "is not a distance; use 0 or more")
seconds = _reader(
    float, lambda value: 0 < value < _INF, "is not a number of seconds; use for instance 60"
)
above_0 = _reader(float, lambda value: 0 < value < _INF, "is not a number above 0")
gib = _reader(float, lambda value: 0 < value < _INF, "is not a number of GiB; use for instance 4")
positive = _reader(int, lambda value: value >= 1, "is not a whole number above 0")
seed = _reader(
    int, lambda value: 0 <= value < SEEDS, f"is not a whole number from 0 to {SEEDS - 1}"
)
"""Parser of a seed of random numbers."""


def tokens(text: str) -> tuple[int, ...]:
    """Parse ids of tokens, separated by commas."""
    return _whole_numbers(text, "ids of tokens; use for instance 2152,9693")


def layers(text: str) -> tuple[int, ...]:
    """Parse numbers of the model's layers, separated by commas."""
    return _whole_numbers(text, "numbers of layers; use for instance 2,4")


def _whole_numbers(text: str, expected: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not {expected}") from error
