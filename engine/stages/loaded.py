"""What is measured beside each other, loaded all together or, where it is large, in turn.

A session packs the weights of matrix products into a copy of its own. Source model and stages
beside each other are up to four such copies: of a large model there is one at a time, which costs
loading it again in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from offramp.bundle.graph_weights import filled_size

TOGETHER_BYTES: Final = 2**29
"""Weights of a model up to which several sessions of it are loaded beside each other."""

_T = TypeVar("_T")


def fits_together(graph: bytes) -> bool:
    """Whether several sessions of a serialised model may be in memory at once."""
    return filled_size(graph) <= TOGETHER_BYTES


class Loaded(Generic[_T]):
    """Some things that take long to load and much memory: all of them at once, or one at a time."""

    def __init__(self, makers: Sequence[Callable[[], _T]], *, together: bool) -> None:
        """Load all, if they are to be there together; else each when it is asked for."""
        self._makers, self.together = makers, together
        self._made = [make() for make in makers] if together else []
        self._last: tuple[int, _T] | None = None

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: int) -> _T:
        if self.together:
            return self._made[index]
        if self._last is None or self._last[0] != index:
            self._last = None  # before the next takes its memory
            self._last = index, self._makers[index]()
        return self._last[1]
