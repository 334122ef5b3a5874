"""Audits: the full model generates some answers again in the background, and both are compared.

Audits are drawn when a sequence is submitted, so that the draw does not depend on the answer. When
such a sequence has ended normally, the same scheduler generates the full model's answer while no
other sequence needs the slot. Under full load audits get no slots; audits that could not run are
counted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from offramp.generation.serving.text_differences import compare_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAuditCounts:
    """Counts of audited answers since the start of the server."""

    texts: int = 0
    """Number of answers that were compared with the full model's."""
    differing: int = 0
    """Number of compared answers that differed anywhere."""
    tokens: int = 0
    """Number of tokens that both models chose after the same prefix, and that were compared."""
    differing_tokens: int = 0
    """Number of these tokens that differed: at most one per answer, because prefixes differ after
    it."""
    edits: float = 0.0
    """Sum of the edit distances, each relative to the longer answer's tokens."""
    pending: int = 0
    """Number of audits that wait or run."""
    skipped: int = 0
    """Number of answers that were drawn but not audited, because too many audits waited."""
    lost: int = 0
    """Number of audits that failed."""


class TextAudits:
    """Draws audits, and compares answers; used by one thread."""

    def __init__(self, share: float, seed: int | None) -> None:
        """Audit ``share`` of the sequences; with ``seed`` None, draws differ between runs."""
        self.share = share
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._served: dict[int, tuple[int, ...]] = {}
        """Served answers, by number of the audit."""
        self._full: dict[int, list[int]] = {}
        """Tokens of the full model so far, by number of the audit."""
        self._counts = TextAuditCounts()

    def draw(self) -> bool:
        """Return True if a sequence is to be audited."""
        return self._random.random() < self.share

    def begin(self, number: int, served: tuple[int, ...]) -> None:
        """Record that an audit was submitted."""
        self._served[number], self._full[number] = served, []

    def skipped(self) -> None:
        """Count an answer that was drawn but is not audited."""
        self._add(skipped=1)

    def refused(self, number: int) -> None:
        """Record that an audit found the queue full."""
        del self._served[number], self._full[number]
        self.skipped()

    def given(self, number: int, token: int) -> None:
        """Record a token of the full model's answer."""
        self._full[number].append(token)

    def ended(self, number: int, *, whole: bool) -> None:
        """Compare the answers, if the full model's is complete."""
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
        """Increase some counts."""
        self._counts = replace(
            self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()}
        )
