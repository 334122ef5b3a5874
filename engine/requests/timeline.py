"""The times of one request in the engine, for traced requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class StageTime(NamedTuple):
    """A run of a stage on a batch with samples of the request."""

    label: str
    """Name of the exit at the stage's end: ``exit 3`` or ``final``; ``split`` if there is no exit.
    """
    began_s: float
    """Start time, in seconds of the monotonic clock."""
    ended_s: float
    batch: int
    """Number of samples in the batch."""
    samples: int
    """Number of samples in the batch that belong to the request."""
    answered: int
    """Number of the request's samples that were answered at the end of this stage."""


@dataclass(slots=True)
class RequestTimeline:
    """The runs of stages for a request so far; the streams add them, in order."""

    stages: list[StageTime] = field(default_factory=list)
    audited: bool = False
    """True if a sample ran on after its answer, so that the answer is compared with the model's
    own."""
