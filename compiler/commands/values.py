"""Readers of single values of the command line; argparse shows the reason of a refusal."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from offramp.compiler.common.options import SEEDS
from offramp.engine.models.options import MOST_SHARE

_INF = float("inf")


def _number(text: str, fits: Callable[[float], bool], reason: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r:.80} {reason}")
    return value


def share(text: str) -> float:
    """Read a number above 0 and below 1, by :data:`.MOST_SHARE`."""
    reason = "is not a share: a number above 0, and below 1 by 1e-9 or more"
    return _number(text, lambda value: 0 < value <= MOST_SHARE, reason)


def share_from_0(text: str) -> float:
    """Read a number of at least 0 and less than 1."""
    return _number(text, lambda value: 0 <= value < 1, "is not 0 or between 0 and 1")


def share_up_to_1(text: str) -> float:
    """Read a number above 0, and at most 1."""
    return _number(text, lambda value: 0 < value <= 1, "is not above 0, and at most 1")


def distance(text: str) -> float:
    """Read a finite number of at least 0."""
    return _number(text, lambda value: 0 <= value < _INF, "is no distance; give 0 or more")


def seconds(text: str) -> float:
    """Read a finite number above 0."""
    reason = "is no number of seconds; give for instance 60"
    return _number(text, lambda value: 0 < value < _INF, reason)


def above_0(text: str) -> float:
    """Read a finite number above 0."""
    return _number(text, lambda value: 0 < value < _INF, "is not a number above 0")


def gib(text: str) -> float:
    """Read a number of GiB."""
    reason = "is no number of GiB; give for instance 4"
    return _number(text, lambda value: 0 < value < _INF, reason)


def _whole(text: str, fits: Callable[[int], bool], reason: str) -> int:
    try:
        value: int | None = int(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r:.80} {reason}")
    return value


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _whole(text, lambda value: value >= 1, "is not a whole number above 0")


def seed(text: str) -> int:
    """Read a seed of random numbers."""
    reason = f"is not a whole number from 0 to {SEEDS - 1}"
    return _whole(text, lambda value: 0 <= value < SEEDS, reason)


def tokens(text: str) -> tuple[int, ...]:
    """Read ids of tokens, with commas between them."""
    try:
        return tuple(int(token) for token in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not ids of tokens; give for instance 2152,9693"
        ) from error
