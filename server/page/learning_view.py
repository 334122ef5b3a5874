"""How far learning exits is, on the status page: in words and figures."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.learning_status import LearningStatus
from offramp.server.page.agreement_view import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningView:
    """The state of learning."""

    text: str
    """A sentence without its full stop."""
    alarming: bool
    """Whether an attempt failed, or learning stopped."""
    figures: tuple[Figure, ...]


def view_learning(status: LearningStatus | None) -> LearningView | None:
    """Put the state of learning into words; ``None`` where nothing is learned."""
    if status is None:
        return None
    counts = (
        ("recorded inputs", status.recorded, False),
        ("wanted", status.wanted, False),
        ("drawn and not recorded", status.dropped, True),
        ("drawn, and recorded already", status.copies, False),
        ("answered with NaN or infinity, left out", status.unanswered, False),
        ("compilations begun", status.attempts, False),
        ("failed in a row", status.failures, True),
    )
    return LearningView(
        text=status.text,
        alarming=status.phase in (Phase.WAITING, Phase.STOPPED),
        figures=(
            *(
                Figure(value=f"{count:,}", label=label, alarming=alarming and count > 0)
                for label, count, alarming in counts
            ),
            Figure(value=f"{status.size_bytes / 2**20:,.1f} MiB", label="of recorded inputs"),
        ),
    )
