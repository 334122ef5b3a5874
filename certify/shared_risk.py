"""Two statements that are to hold together, each of which may fail: they share one risk."""

from __future__ import annotations


def half_risk(confidence_level: float) -> float:
    """The confidence level at which each of two statements holds, so that both do at the given."""
    return 1 - (1 - confidence_level) / 2


def both_hold(confidence_level: float) -> float:
    """The confidence level of two statements that each hold at the given: undoes half_risk."""
    return 1 - 2 * (1 - confidence_level)
