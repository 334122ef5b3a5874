"""The state of learning at one time, for statistics, metrics and the status page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningStatus:
    """A snapshot of a model's learning."""

    phase: str
    """Phase: a value of :class:`.lifecycle.Phase`."""
    text: str
    """State in words: ``recorded 3,412 of 12,000``."""
    recorded: int
    """Number of samples that are kept now."""
    wanted: int
    """Number of samples from which the model will be compiled."""
    dropped: int = 0
    """Drawn samples that were not recorded: the disk was too slow, or full."""
    copies: int = 0
    """Drawn samples that are already recorded."""
    unanswered: int = 0
    """Drawn samples that the model answers with NaN or infinity."""
    size_bytes: int = 0
    """Size of the recording's file, in bytes."""
    attempts: int = 0
    """Number of compilations that were started since the server started."""
    failures: int = 0
    """Number of compilations that failed in a row."""
    step: int = 0
    """Step of the running compilation, from 1; 0 without one."""
    steps: int = 0
    """Number of steps of a compilation; 0 if unknown."""
    reason: str = ""
    """Reason why learning waits, stopped, or found no profitable exit."""
