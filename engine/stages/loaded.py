"""Sessions whose times are compared: all are loaded together, or one at a time if they are large.

A session packs the weights of matrix products into its own copy. The source model and the stages
together need up to four such copies. For a large model, only one session is loaded at a time; it
must be loaded again in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from offramp.bundle.graph_weights import filled_size

TOGETHER_BYTES: Final = 2**29
"""Largest size of a model's weights, in bytes, with which several sessions are loaded together."""

_T = TypeVar("_T")


def fits_together(graph: bytes) -> bool:
    """Return whether several sessions of a serialised model may be in memory together."""
    return filled_size(graph) <= TOGETHER_BYTES


class Loaded(Generic[_T]):
    """Objects that are slow to load and need much memory: all loaded, or one at a time."""

    def __init__(self, makers: Sequence[Callable[[], _T]], *, together: bool) -> None:
        """Load all objects if ``together``; otherwise load each object when it is accessed."""
        self._makers, self.together = makers, together
        self._made = [make() for make in makers] if together else []
        self._last: tuple[int, _T] | None = None

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: int) -> _T:
        if self.together:
            return self._made[index]
        if self._last is None or self._last[0] != index:
            self._last = None  # free it before loading the next
            self._last = index, self._makers[index]()
        return self._last[1]
