"""Keys and values of sequences, in slots that are allocated once.

A slot has room for so many positions in every decoder layer. A step reads what is filled of some
slots, padded on the right to the longest, and writes the keys and values of the new positions.
Layers are filled to different lengths where tokens left before the deeper ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.generation.bundle.tensor_names import KINDS, CacheKind

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]


class Span(NamedTuple):
    """Positions of some slots that follow each other; of each slot any number."""

    slots: IntArray
    """[n]."""
    starts: IntArray
    """[n]: the first position of each."""
    counts: IntArray
    """[n]: positions of each, 1 at least."""

    def part(self, rows: NDArray[np.intp] | slice) -> Span:
        """Return some of the rows."""
        return Span(self.slots[rows], self.starts[rows], self.counts[rows])

    @property
    def ends(self) -> IntArray:
        """The positions behind each."""
        return self.starts + self.counts


class CacheSlots:
    """Keys and values float32 [slots, heads, length, size] of some layers."""

    def __init__(self, sizes: Sequence[tuple[int, int]], *, slots: int, length: int) -> None:
        """Allocate them; ``sizes`` are heads and size of each layer."""
        self.length = length
        self._held: list[dict[CacheKind, FloatArray]] = [
            {kind: np.zeros((slots, heads, length, size), np.float32) for kind in KINDS}
            for heads, size in sizes
        ]

    @property
    def size_bytes(self) -> int:
        """Memory that all slots take."""
        return sum(array.nbytes for layer in self._held for array in layer.values())

    def read(self, layer: int, kind: CacheKind, slots: IntArray, longest: int) -> FloatArray:
        """Copy the first positions of some slots: float32 [n, heads, longest, size].

        What is beyond a slot's filled length is 0, or what a later position was.
        """
        # Whole slots would be copied by held[slots] first, however short the sequences are.
        return self._held[layer][kind][slots, :, :longest]

    def write(self, layer: int, kind: CacheKind, span: Span, new: FloatArray) -> None:
        """Write new positions [n, heads, tokens, size], of each slot as many as the span has."""
        held = self._held[layer][kind]
        if np.all(span.counts == 1):
            held[span.slots, :, span.starts] = new[:, :, 0]
            return
        for row, (slot, start, count) in enumerate(zip(*span, strict=True)):
            held[slot, :, start : start + count] = new[row, :, :count]

    def clear(self, slot: int, filled: int) -> None:
        """Set the first positions of a slot to 0.

        Padding is masked, but 0 times what is no number is none: what a failed sequence left would
        spoil the next one of its slot.
        """
        for layer in self._held:
            for held in layer.values():
                held[slot, :, :filled] = 0


def padded_rows(rows: Sequence[IntArray], width: int) -> IntArray:
    """Lay out tokens of different lengths, padded on the right with 0: int64 [n, width]."""
    padded = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
