"""Counts of the exits at which rows of a model left, while it serves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Numbers of rows (samples) by the exit where they left, for one set of exits in use.

    A row counts once, when it is answered. Retries, stages after the answer (audits, release mode)
    and rows without an answer do not count.
    """

    exits: tuple[int, ...]
    """Exits in use, in depth order, including those in shadow mode, where no row leaves."""
    left: tuple[int, ...]
    """[exits + 1]: rows that left at each exit with enough confidence; the last is the model's end.
    """
    forced: tuple[int, ...]
    """[exits + 1]: rows that were forced to leave at each exit, with less confidence than its
    threshold."""

    def __sub__(self, before: Departures) -> Departures:
        """Return the counts since ``before``, of the same exits."""
        return Departures(
            exits=self.exits,
            left=tuple(a - b for a, b in zip(self.left, before.left, strict=True)),
            forced=tuple(a - b for a, b in zip(self.forced, before.forced, strict=True)),
        )

    def decided(self) -> tuple[int, ...]:
        """[exits]: for each exit, rows about which it decided: rows that left there or deeper."""
        here = [sure + forced for sure, forced in zip(self.left, self.forced, strict=True)]
        return tuple(accumulate(reversed(here)))[::-1][:-1]

    def went_on(self) -> tuple[int, ...]:
        """[exits]: for each exit, rows that did not reach its threshold.

        Rows that were forced to leave at an exit count for this exit, but not for deeper exits.
        """
        pairs = zip(self.decided(), self.left[:-1], strict=True)
        return tuple(decided - left for decided, left in pairs)
