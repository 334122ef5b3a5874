"""Keys and values of sequences, in slots that are allocated once.

A slot has room for so many positions in every decoder layer. A step reads what is filled of some
slots, padded on the right to the longest, and writes the keys and values of the new positions.
Layers are filled to different lengths where tokens left before the deeper ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.generation.bundle.tensor_names import KINDS, CacheKind, stacked_name

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


class _Part(NamedTuple):
    """Caches of some layers of equal heads and size."""

    names: tuple[str, ...]
    """Inputs that read them: keys and values of each layer in turn."""
    output: str
    """Output with what is new of all of them."""
    held: FloatArray
    """A view, [layers * 2, slots, heads, length, size]."""
    firsts: IntArray
    """[layers * 2, 1]: row of each one's slot 0 where both first axes are one."""


class CacheSlots:
    """Keys and values float32 [slots, heads, length, size] of some layers.

    Those of equal heads and size are one array: to read or to write all of a stage is then one call
    of numpy. One call for each layer took longer than the layers themselves.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        name: Callable[[int, CacheKind], str],
        *,
        slots: int,
        length: int,
    ) -> None:
        """Allocate them; ``sizes`` are heads and size of each layer, ``name`` names inputs."""
        self.length = length
        self._sizes, self._name = tuple(sizes), name
        self._held: dict[tuple[int, int], FloatArray] = {
            size: np.zeros(
                (2 * self._sizes.count(size), slots, size[0], length, size[1]), np.float32
            )
            for size in dict.fromkeys(sizes)
        }
        self._known: dict[range, list[_Part]] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that all slots take."""
        return sum(held.nbytes for held in self._held.values())

    def read(self, layers: range, slots: IntArray, longest: int) -> dict[str, FloatArray]:
        """Copy the first positions of some slots: float32 [n, heads, longest, size] by input.

        What is beyond a slot's filled length is 0, or what a later position was.
        """
        read: dict[str, FloatArray] = {}
        for part in self._parts(layers):
            count, _, heads, length, size = part.held.shape
            flat = part.held.reshape(-1, heads, length, size)
            # Whole slots would be copied by flat[rows] first, however short the sequences are.
            copied = flat[(part.firsts + slots).reshape(-1), :, :longest]
            each = copied.reshape(count, len(slots), heads, longest, size)
            read |= zip(part.names, each, strict=True)
        return read

    def write(self, layers: range, span: Span, new: Mapping[str, FloatArray]) -> None:
        """Write new positions of some layers, of each slot as many as the span has.

        ``new`` has them as :func:`.stacked_name` tells.
        """
        for part in self._parts(layers):
            stacked = new[part.output]
            rows = stacked.reshape(len(part.held), len(span.slots), *stacked.shape[1:])
            if rows.shape[3] == 1:
                part.held[:, span.slots, :, span.starts] = rows[:, :, :, 0].swapaxes(0, 1)
                continue
            for row, (slot, start, count) in enumerate(zip(*span, strict=True)):
                part.held[:, slot, :, start : start + count] = rows[:, row, :, :count]

    def _parts(self, layers: range) -> list[_Part]:
        """Return the caches of some layers, by their sizes."""
        if layers not in self._known:
            self._known[layers] = [
                self._part(size, [n for n in layers if self._sizes[n] == size])
                for size in dict.fromkeys(self._sizes[n] for n in layers)
            ]
        return self._known[layers]

    def _part(self, size: tuple[int, int], layers: Sequence[int]) -> _Part:
        first = 2 * self._sizes[: layers[0]].count(size)
        held = self._held[size][first : first + 2 * len(layers)]
        return _Part(
            names=tuple(self._name(layer, kind) for layer in layers for kind in KINDS),
            output=stacked_name(*size),
            held=held,
            firsts=(np.arange(len(held)) * held.shape[1])[:, None],
        )

    def clear(self, slot: int, filled: int) -> None:
        """Set the first positions of a slot to 0.

        Padding is masked, but 0 times what is no number is none: what a failed sequence left would
        spoil the next one of its slot.
        """
        for held in self._held.values():
            held[:, slot, :, :filled] = 0


def padded_rows(rows: Sequence[IntArray], width: int) -> IntArray:
    """Lay out tokens of different lengths, padded on the right with 0: int64 [n, width]."""
    padded = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
