"""Audits: some answers are generated again in full, in the background, and compared.

They are drawn when a sequence is submitted, so that the draw does not depend on the answer. When
such a sequence has ended by itself, the same scheduler generates the full model's answer, while no
other sequence wants the slot. Audits that could not run are counted: under full load there are no
slots for them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from offramp.generation.serving.text_differences import compare_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAuditCounts:
    """Counts of audits since the start."""

    texts: int = 0
    """Answers that were compared with the full model's."""
    differing: int = 0
    """Answers that differed anywhere."""
    tokens: int = 0
    """Tokens that were compared at the same prefix."""
    differing_tokens: int = 0
    """Tokens that differed: at most one an answer, as prefixes differ after it."""
    edits: float = 0.0
    """Sum of the edit distances, each by the tokens of the longer answer."""
    pending: int = 0
    """Audits that wait or run."""
    skipped: int = 0
    """Answers that were drawn, but too many audits waited."""
    lost: int = 0
    """Audits that failed."""


class TextAudits:
    """Draws audits, and compares; used by one thread."""

    def __init__(self, share: float, seed: int | None) -> None:
        """``share`` of the sequences are audited; ``seed`` is ``None`` for any."""
        self.share = share
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._served: dict[int, tuple[int, ...]] = {}
        """Served answers, by number of the audit."""
        self._full: dict[int, list[int]] = {}
        """Tokens of the full model up to now, by number of the audit."""
        self._counts = TextAuditCounts()

    def draw(self) -> bool:
        """Draw whether a sequence is audited."""
        return self._random.random() < self.share

    def begin(self, number: int, served: tuple[int, ...]) -> None:
        """Note that an audit was submitted."""
        self._served[number], self._full[number] = served, []

    def skipped(self) -> None:
        """Count an answer that is not audited after all."""
        self._add(skipped=1)

    def refused(self, number: int) -> None:
        """Note that an audit that began found no room."""
        del self._served[number], self._full[number]
        self.skipped()

    def given(self, number: int, token: int) -> None:
        """Note a token of the full model's answer."""
        self._full[number].append(token)

    def ended(self, number: int, *, whole: bool) -> None:
        """Compare, if the full model's answer is whole."""
        served, full = self._served.pop(number), self._full.pop(number)
        if not whole:
            self._add(lost=1)
            return
        difference = compare_texts(served, full)
        self._add(
            texts=1,
            differing=int(difference.differs),
            tokens=difference.compared,
            differing_tokens=int(difference.differs),
            edits=difference.edits,
        )

    def counts(self) -> TextAuditCounts:
        """Return the counts up to now."""
        self._add(pending=len(self._served) - self._counts.pending)
        return self._counts

    def _add(self, **more: float) -> None:
        """Add to some counts."""
        self._counts = replace(
            self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()}
        )
