"""Readers of single command line values; what they refuse is refused with the reason."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from offramp.engine.models.options import MOST_SHARE
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode


def named_path(text: str) -> tuple[str, Path]:
    """Read ``NAME=PATH``."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not NAME=PATH, for instance resnet=/models/resnet.ee"
        )
    return name, Path(path)


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers in [least, most]."""
    span = f"from {least} to {most}" if most is not None else f"from {least} on"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number {span}")
        return value

    return parse


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """A reader of finite numbers ≥ ``least``, or > ``least`` if ``above``."""
    span = f"above {least:g}" if above else f"from {least:g} on"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value < math.inf if above else least <= value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number {span}")
        return value

    return parse


port = integer(0, 65535)
"""A reader of port numbers; 0 asks for any free one."""


def share(text: str) -> float:
    """Read a number above 0, at most :data:`.MOST_SHARE`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= MOST_SHARE:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a share: a number above 0 and below 1"
        )
    return value


def policy(text: str) -> PolicyName:
    """Read the name of a scheduling policy."""
    try:
        return PolicyName.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def mode(text: str) -> Mode:
    """Read a mode."""
    try:
        return Mode(text)
    except ValueError:
        known = ", ".join(repr(known.value) for known in Mode)
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no mode; choose from {known}") from None
