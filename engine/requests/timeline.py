"""The times of one request in the engine, for those that are traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class StageTime(NamedTuple):
    """A run of a stage on a batch that had samples of the request."""

    label: str
    """The exit at its end, ``exit 3`` or ``final``; ``split`` where there is none."""
    began_s: float
    """Monotonic."""
    ended_s: float
    batch: int
    """Samples in the batch."""
    samples: int
    """Samples of the request in it."""
    answered: int
    """Those of them that were answered here."""


@dataclass(slots=True)
class RequestTimeline:
    """The runs of stages that a request had so far; filled by the streams, in order."""

    stages: list[StageTime] = field(default_factory=list)
    audited: bool = False
    """Whether a sample ran on after its answer, to be compared with the model's own."""
