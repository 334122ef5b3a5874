"""Slots of caches hold what was written to them, and nothing of another slot."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.generation.bundle.tensor_names import KINDS
from offramp.generation.stages.cache_slots import CacheSlots, Span, padded_rows

SIZES = ((2, 3), (1, 4))
SLOTS, LENGTH = 5, 9


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
    cache = CacheSlots(SIZES, slots=SLOTS, length=LENGTH)
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
        for (layer, kind), array in right.items():
            heads, size = SIZES[layer]
            shape = (len(span.slots), heads, int(span.counts.max()), size)
            new = rng.standard_normal(shape).astype(np.float32)
            cache.write(layer, kind, span, new)
            for row, slot in enumerate(span.slots):
                count = span.counts[row]
                array[slot, :, filled[slot] : filled[slot] + count] = new[row, :, :count]
        filled[span.slots] = span.ends
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
        longest = int(filled[slots].max())
        for (layer, kind), array in right.items():
            found = cache.read(layer, kind, slots, longest)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, array[slots, :, :longest])


def test_what_is_read_is_a_copy() -> None:
    cache = CacheSlots(SIZES, slots=2, length=LENGTH)
    slots = np.array([0, 1])
    cache.read(0, "key", slots, 4)[:] = 1
    assert not cache.read(0, "key", slots, 4).any()
    assert cache.read(0, "key", slots, 0).shape == (2, 2, 0, 3)


def test_sizes_are_those_of_both_kinds() -> None:
    cache = CacheSlots(SIZES, slots=SLOTS, length=LENGTH)
    assert cache.size_bytes == 2 * 4 * SLOTS * LENGTH * (2 * 3 + 1 * 4)
    assert cache.length == LENGTH


def test_rows_are_padded_on_the_right() -> None:
    rows = [np.array([3, 4, 5]), np.array([6]), np.array([], np.int64)]
    assert padded_rows(rows, 4).tolist() == [[3, 4, 5, 0], [6, 0, 0, 0], [0, 0, 0, 0]]


def test_a_span_is_taken_apart_by_rows() -> None:
    span = Span(np.array([4, 2, 7]), np.array([0, 5, 1]), np.array([1, 2, 3]))
    part = span.part(np.array([2, 0]))
    assert [array.tolist() for array in part] == [[7, 4], [1, 0], [3, 1]]
    assert span.ends.tolist() == [1, 7, 4]
