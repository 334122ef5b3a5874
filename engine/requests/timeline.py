"""The times of one request in the engine, for traced requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class StageTime(NamedTuple):
    """A run of a stage on a batch with samples of the request."""

    label: str
    """Name of the exit at its end, ``exit 3`` or ``final``; ``split`` without one."""
    began_s: float
    """Start time, in seconds of the monotonic clock."""
    ended_s: float
    batch: int
    """Number of samples in the batch."""
    samples: int
    """Number of samples of the request in it."""
    answered: int
    """Number of these that were answered here."""


@dataclass(slots=True)
class RequestTimeline:
    """The runs of stages for a request so far; the streams add them, in order."""

    stages: list[StageTime] = field(default_factory=list)
    audited: bool = False
    """True if a sample ran on after its answer, to be compared with the model's own."""
