"""The sample is uniform however rows come, and slots that could not be filled are filled later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.engine.learning.reservoir import Reservoir


def kept_rows(reservoir: Reservoir, sizes: list[int], kept: dict[int, int] | None = None) -> dict:
    """Numbers of the rows that are in the sample, by slot, after requests of such sizes."""
    kept = {} if kept is None else kept
    first = reservoir.seen
    for size in sizes:
        kept |= {slot: first + row for row, slot in reservoir.offer(size)}
        first += size
    return kept


@pytest.mark.parametrize("request_rows", [1, 7, 200])
def test_every_row_is_kept_with_the_same_probability(request_rows: int) -> None:
    rows, capacity, trials = 200, 20, 3000
    counts = np.zeros(rows)
    sizes = [request_rows] * (rows // request_rows) + [rows % request_rows]
    for seed in range(trials):
        counts[list(kept_rows(Reservoir(capacity, seed=seed), sizes).values())] += 1
    expected = trials * capacity / rows
    chi_square = ((counts - expected) ** 2 / (expected * (1 - capacity / rows))).sum()
    # 199 degrees of freedom: mean 199, standard deviation 20; the seeds are fixed
    assert chi_square < 199 + 4 * 20


def test_a_sample_that_goes_on_after_a_restart_is_uniform() -> None:
    rows, capacity, trials = 100, 10, 4000
    counts = np.zeros(rows)
    for seed in range(trials):
        kept = kept_rows(first := Reservoir(capacity, seed=seed), [50])
        second = Reservoir(capacity, seen=first.seen, filled=kept.keys(), seed=trials + seed)
        counts[list(kept_rows(second, [50], kept).values())] += 1
    expected = trials * capacity / rows
    chi_square = ((counts - expected) ** 2 / (expected * (1 - capacity / rows))).sum()
    assert chi_square < 99 + 4 * 14.1


@given(st.integers(1, 30), st.lists(st.integers(1, 9), max_size=40))
def test_all_slots_are_filled_first_and_no_row_is_out_of_range(
    capacity: int, sizes: list[int]
) -> None:
    reservoir, kept = Reservoir(capacity, seed=1), dict[int, int]()
    for size in sizes:
        wanted = reservoir.offer(size)
        assert all(0 <= row < size and 0 <= slot < capacity for row, slot in wanted)
        kept |= {slot: row for row, slot in wanted}
    assert len(kept) == min(capacity, sum(sizes))
    assert reservoir.seen == sum(sizes)


def test_slots_that_come_back_are_filled_by_the_next_rows() -> None:
    reservoir = Reservoir(5, seed=2)
    reservoir.offer(1000)
    reservoir.give_back(3)
    reservoir.give_back(3)  # once is enough
    assert reservoir.offer(1) == [(0, 3)]


def test_a_smaller_sample_keeps_to_the_slots_that_are_filled() -> None:
    reservoir = Reservoir(100, seed=3)
    reservoir.offer(8)
    reservoir.shrink([1, 4, 6])
    assert reservoir.capacity == 3
    slots = {slot for _ in range(300) for _, slot in reservoir.offer(1)}
    assert slots == {1, 4, 6}


def test_a_reservoir_needs_capacity_for_a_sample() -> None:
    with pytest.raises(ValueError, match="capacity is 0, expected at least 1"):
        Reservoir(0)
    with pytest.raises(ValueError, match="at least one slot"):
        Reservoir(2).shrink([])
