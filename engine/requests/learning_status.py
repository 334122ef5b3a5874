"""What is known of learning at a moment: for statistics, metrics and the status page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningStatus:
    """A snapshot of a model's learning."""

    phase: str
    """A value of :class:`.lifecycle.Phase`."""
    text: str
    """The state in words: ``recorded 3,412 of 12,000``."""
    recorded: int
    """Samples that are kept now."""
    wanted: int
    """Samples with which the model is compiled."""
    dropped: int = 0
    """Samples that were drawn and not recorded: the disk was too slow, or full."""
    copies: int = 0
    """Samples that were drawn and are recorded already."""
    unanswered: int = 0
    """Samples that were drawn and that the model answers with NaN or infinity."""
    size_bytes: int = 0
    """Bytes of the recording."""
    attempts: int = 0
    """Compilations that were begun since the server started."""
    failures: int = 0
    """Compilations that failed in a row."""
    step: int = 0
    """Step of the compilation that runs, from 1; 0 where none does."""
    steps: int = 0
    """Steps of a compilation; 0 where that is not known."""
    reason: str = ""
    """Why learning waits, stopped, or found nothing that pays."""
