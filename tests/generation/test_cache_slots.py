"""Slots of caches hold what was written to them, and nothing of another slot."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.generation.bundle.tensor_names import KINDS, past_name, stacked_name
from offramp.generation.stages.cache_slots import CacheSlots, Span, padded_rows

SIZES = ((2, 3), (1, 4), (2, 3), (2, 3))
SLOTS, LENGTH = 5, 9

PARTS = (range(1), range(1, 3), range(3, 4))
"""Layers that are written and read together."""


def slots_of(count: int = SLOTS) -> CacheSlots:
    return CacheSlots(SIZES, past_name, slots=count, length=LENGTH)


def stacked(layers: range, new: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return new keys and values of some layers in the form of graph outputs."""
    alike: dict[str, list[NDArray[np.float32]]] = {}
    for layer in layers:
        for kind in KINDS:
            alike.setdefault(stacked_name(*SIZES[layer]), []).append(new[past_name(layer, kind)])
    return {name: np.concatenate(arrays) for name, arrays in alike.items()}


def drawn(rng: np.random.Generator, filled: NDArray[np.int64]) -> Span:
    """Some slots that have room, each with some more positions."""
    open_slots = rng.permutation(np.flatnonzero(filled < LENGTH))
    slots = open_slots[: rng.integers(1, len(open_slots) + 1)]
    room = LENGTH - filled[slots]
    counts = np.array([rng.integers(1, min(3, free) + 1) for free in room])
    return Span(slots, filled[slots], counts)


@pytest.mark.parametrize("seed", range(5))
def test_slots_hold_what_was_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = slots_of()
    filled = np.zeros(SLOTS, np.int64)
    right = {
        (layer, kind): np.zeros((SLOTS, heads, LENGTH, size), np.float32)
        for layer, (heads, size) in enumerate(SIZES)
        for kind in KINDS
    }
    for _ in range(60):
        if rng.random() < 0.3 or filled.min() == LENGTH:
            slot = int(rng.integers(SLOTS))
            cache.clear(slot, int(filled[slot]))
            filled[slot] = 0
            for array in right.values():
                array[slot] = 0
            continue
        span = drawn(rng, filled)
        new: dict[str, NDArray[np.float32]] = {}
        for (layer, kind), array in right.items():
            heads, size = SIZES[layer]
            shape = (len(span.slots), heads, int(span.counts.max()), size)
            rows = rng.standard_normal(shape).astype(np.float32)
            new[past_name(layer, kind)] = rows
            for row, slot in enumerate(span.slots):
                count = span.counts[row]
                array[slot, :, filled[slot] : filled[slot] + count] = rows[row, :, :count]
        for layers in PARTS:
            cache.write(layers, span, stacked(layers, new))
        filled[span.slots] = span.ends
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        longest = int(filled[slots].max())
        found = {}
        for layers in PARTS:
            part = cache.read(layers, slots, longest)
            assert part.keys() == {past_name(layer, kind) for layer in layers for kind in KINDS}
            found |= part
        for (layer, kind), array in right.items():
            one = found[past_name(layer, kind)]
            assert one.flags.c_contiguous
            np.testing.assert_array_equal(one, array[slots, :, :longest])


def test_what_is_read_is_a_copy() -> None:
    cache = slots_of(2)
    slots = np.array([0, 1])
    cache.read(range(1), slots, 4)["past.0.key"][:] = 1
    assert not cache.read(range(1), slots, 4)["past.0.key"].any()
    assert cache.read(range(1), slots, 0)["past.0.key"].shape == (2, 2, 0, 3)


def test_sizes_are_those_of_both_kinds() -> None:
    cache = slots_of()
    assert cache.size_bytes == 2 * 4 * SLOTS * LENGTH * (3 * 2 * 3 + 1 * 4)
    assert cache.length == LENGTH


def test_rows_are_padded_on_the_right() -> None:
    rows = [np.array([3, 4, 5]), np.array([6]), np.array([], np.int64)]
    assert padded_rows(rows, 4).tolist() == [[3, 4, 5, 0], [6, 0, 0, 0], [0, 0, 0, 0]]


def test_a_span_is_taken_apart_by_rows() -> None:
    span = Span(np.array([4, 2, 7]), np.array([0, 5, 1]), np.array([1, 2, 3]))
    part = span.part(np.array([2, 0]))
    assert [array.tolist() for array in part] == [[7, 4], [1, 0], [3, 1]]
    assert span.ends.tolist() == [1, 7, 4]
