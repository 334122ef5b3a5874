"""Where the rows of a model left, as they are counted while it serves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Rows that were answered while some exits were in use, by where they left.

    A row counts once, when it is answered: not where it was tried again, nor what it does after
    its answer (audits, release mode), nor if it never has one.
    """

    exits: tuple[int, ...]
    """In use, in depth order; those in shadow mode too, where nothing leaves."""
    left: tuple[int, ...]
    """[exits + 1]: rows that left at each, sure enough; the last is the model's end."""
    forced: tuple[int, ...]
    """[exits + 1]: rows that had to leave there though they were not sure enough."""

    def __sub__(self, before: Departures) -> Departures:
        """Give what was counted since ``before``, of the same exits."""
        return Departures(
            exits=self.exits,
            left=tuple(a - b for a, b in zip(self.left, before.left, strict=True)),
            forced=tuple(a - b for a, b in zip(self.forced, before.forced, strict=True)),
        )

    def decided(self) -> tuple[int, ...]:
        """[exits]: rows that each exit decided about: all that left there or deeper."""
        here = [sure + forced for sure, forced in zip(self.left, self.forced, strict=True)]
        return tuple(accumulate(reversed(here)))[::-1][:-1]

    def went_on(self) -> tuple[int, ...]:
        """[exits]: those that did not leave there of themselves.

        What was forced to leave counts as going on, and says nothing of deeper exits.
        """
        pairs = zip(self.decided(), self.left[:-1], strict=True)
        return tuple(decided - left for decided, left in pairs)
