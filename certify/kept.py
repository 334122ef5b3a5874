"""Reads values of a saved state, which is not trusted: values that do not fit are ValueErrors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from offramp.certify.decision import FloatArray

MOST: Final = 2**53
"""Largest count and number: float64 represents every integer up to it, and no server reaches it."""


def kept_part(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping ``state[name]``; ValueError if it is anything else."""
    value = state.get(name)
    if not isinstance(value, Mapping):
        raise _misfit(name, value, "a mapping")
    return value


def kept_count(state: Mapping[str, Any], name: str, *, least: int = 0, most: int = MOST) -> int:
    """Read an integer from ``least`` to ``most``."""
    value = state.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _misfit(name, value, f"a count of at least {least}")
    return value


def kept_number(state: Mapping[str, Any], name: str, *, most: float = MOST) -> float:
    """Read a number from 0 to ``most``."""
    value = state.get(name)
    # NaN compares as false, and integers beyond float64 are compared before they are converted
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise _misfit(name, value, f"a number in [0, {most:g}]")
    return float(value)


def kept_flag(state: Mapping[str, Any], name: str) -> bool:
    """Read a boolean; numbers are refused."""
    value = state.get(name)
    if type(value) is not bool:
        raise _misfit(name, value, "true or false")
    return value


def kept_array(
    state: Mapping[str, Any],
    name: str,
    shape: tuple[int | None, ...],
    *,
    least: float = -MOST,
    most: float = MOST,
) -> FloatArray:
    """Read numbers from ``least`` to ``most`` as a new float64 array.

    ``None`` in ``shape`` is a dimension of any length.
    """
    value = state.get(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise _misfit(name, value, "an array of numbers")
    fits = len(value.shape) == len(shape) and all(
        expected in (None, found) for expected, found in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = [math.inf if length is None else length for length in shape]
        raise ValueError(f"state: {name!r} has shape {value.shape}, expected {wanted} (inf: any)")
    if not ((value >= least) & (value <= most)).all():  # false for NaN
        raise ValueError(f"state: {name!r} must be finite numbers in [{least:g}, {most:g}]")
    return value.astype(np.float64)


def kept_exits(state: Mapping[str, Any], name: str, exits: int) -> tuple[int, ...]:
    """Read rising exit indices of a bundle that has ``exits`` exits."""
    value = state.get(name)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        raise _misfit(name, value, "a row of exits")
    found: list[int] = value.tolist()
    if found != sorted(set(found)) or (found and found[0] < 0):
        raise ValueError(
            f"state: {name!r} is {_shown(found)}; indices of exits must increase from 0"
        )
    if found and found[-1] >= exits:
        raise ValueError(f"state: exit {found[-1]} is in use, but the bundle has {exits} exits")
    return tuple(found)


def _misfit(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"state: {name!r} is {_shown(value)}, expected {expected}")


def _shown(value: object) -> str:
    """Return the beginning of a value, for a message."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if type(value) is int and abs(value) > MOST:  # Python refuses to print very long ones
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.40}"
