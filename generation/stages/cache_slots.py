"""Keys and values of sequences, in slots that are allocated once.

A slot has space for a fixed number of positions in every decoder layer. A step reads the filled
positions of some slots, padded on the right to the longest, and writes the keys and values of the
new positions. If tokens left early, deeper layers are filled to a smaller length.
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
    """Consecutive positions of some slots, any number for each slot."""

    slots: IntArray
    """int [n]: slot of each row."""
    starts: IntArray
    """int [n]: first position of each slot."""
    counts: IntArray
    """[n]: number of positions of each slot, at least 1."""

    def part(self, rows: NDArray[np.intp] | slice) -> Span:
        """Return the spans of the slots at these indices."""
        return Span(self.slots[rows], self.starts[rows], self.counts[rows])

    @property
    def ends(self) -> IntArray:
        """Position after the last position of each slot, int [n]."""
        return self.starts + self.counts


class _Part(NamedTuple):
    """Caches of layers that have the same number of heads and the same size."""

    names: tuple[str, ...]
    """Names of the graph inputs for these caches: keys, then values, of one layer after the other.
    """
    output: str
    """Name of the graph output with the new keys and values of all layers of the part."""
    held: FloatArray
    """View of the cache, [layers * 2, slots, heads, length, size]."""
    firsts: IntArray
    """[layers * 2, 1]: index of slot 0 of each layer's keys or values, if the first two axes of
    ``held`` are flattened to one axis."""


class CacheSlots:
    """Keys and values float32 [slots, heads, length, size] of some layers.

    Layers of equal heads and size share one array, so that one call of numpy reads or writes all
    layers of a stage. One call per layer took longer than the layers themselves.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        name: Callable[[int, CacheKind], str],
        *,
        slots: int,
        length: int,
    ) -> None:
        """Allocate the caches.

        ``sizes`` has, for each layer, the number of heads and the size of keys and values; ``name``
        returns the name of a graph input from layer and kind.
        """
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
        """Memory that the caches of all slots take, in bytes."""
        return sum(held.nbytes for held in self._held.values())

    def read(self, layers: range, slots: IntArray, longest: int) -> dict[str, FloatArray]:
        """Copy the first ``longest`` positions of n slots: [n, heads, longest, size] by input.

        Positions beyond a slot's filled length are meaningless: they are 0, or have values of
        earlier use.
        """
        read: dict[str, FloatArray] = {}
        for part in self._parts(layers):
            count, _, heads, length, size = part.held.shape
            flat = part.held.reshape(-1, heads, length, size)
            # Not flat[rows][..., :longest], which would first copy whole slots, however short the
            # sequences.
            copied = flat[(part.firsts + slots).reshape(-1), :, :longest]
            each = copied.reshape(count, len(slots), heads, longest, size)
            read |= zip(part.names, each, strict=True)
        return read

    def write(self, layers: range, span: Span, new: Mapping[str, FloatArray]) -> None:
        """Write the new positions of a span in some layers.

        ``new`` has the outputs of :func:`.stacked_name`.
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
        """Return the caches of some layers, grouped by size."""
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

        Padding is masked, but 0 times NaN is NaN: NaN left by a failed sequence would spoil the
        next sequence in its slot.
        """
        for held in self._held.values():
            held[:, slot, :, :filled] = 0


def padded_rows(rows: Sequence[IntArray], width: int) -> IntArray:
    """Return rows of tokens as int64 [n, width], padded on the right with 0."""
    padded = np.zeros((len(rows), width), np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
