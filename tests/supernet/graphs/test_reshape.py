"""Effect of a reshape on a part of a dimension, compared with numpy."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import Told, facts

from offramp.supernet.graphs.reshape import ElasticAxis, MixedError, regroup


@given(data=st.data())
def test_it_is_what_numpy_says(data: st.DataObject) -> None:
    """If a dimension is found, slicing after equals slicing before; otherwise none is found."""
    sizes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)
    before = data.draw(sizes.filter(lambda s: max(s) > 1))
    after = data.draw(st.permutations(data.draw(st.sampled_from(divisions(prod(before))))))
    axis = data.draw(st.sampled_from([i for i, size in enumerate(before) if size > 1]))
    kept = data.draw(
        st.sets(st.integers(0, before[axis] - 1), min_size=1, max_size=before[axis] - 1)
    )
    elastic = ElasticAxis(axis=axis, full=before[axis], kept=tuple(sorted(kept)))
    numbers = np.arange(prod(before)).reshape(before)
    wanted = set(numbers.take(elastic.kept, axis).ravel().tolist())
    try:
        found = regroup(before, after, elastic)
    except MixedError:
        ways = [
            set(numbers.reshape(after).take(part, i).ravel().tolist())
            for i, size in enumerate(after)
            for part in subsets(size)
        ]
        assert wanted not in ways
        return
    taken = numbers.reshape(after).take(found.kept, found.axis)
    assert found.full == after[found.axis]
    assert taken.ravel().tolist() == numbers.take(elastic.kept, axis).ravel().tolist()


def divisions(number: int) -> list[list[int]]:
    """All ways to write a number as a product of rising numbers above 1."""
    found = [[number]] if number > 1 else [[1]]
    for first in range(2, number):
        if number % first == 0:
            found += [[first, *rest] for rest in divisions(number // first) if rest[0] >= first]
    return found


def subsets(size: int) -> list[tuple[int, ...]]:
    every = range(1, 2**size - 1) if size <= 8 else ()
    return [tuple(i for i in range(size) if bits >> i & 1) for bits in every]


HALF = ElasticAxis(axis=2, full=8, kept=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("before", "after", "elastic", "wanted"),
    [
        (("batch", 7, 8), ("batch", 7, 4, 2), HALF, (2, 4, (0, 1))),
        (("batch", "n", 8), ("batch", "n", 4, 2), HALF, (2, 4, (0, 1))),
        (("batch", "n", 8), ("batch*n", 8), HALF, (1, 8, (0, 1, 2, 3))),
        (("batch", "?", 8), ("batch", "?", 4, 2), HALF, (2, 4, (0, 1))),
        (("7*batch", 1, 8), ("batch", 7, 8), HALF, (2, 8, (0, 1, 2, 3))),
        (("batch", 3, 2, 2), ("batch", 12), ElasticAxis(axis=1, full=3, kept=(0, 1)),
         (1, 12, tuple(range(8)))),
        (("batch", 3, 8), ("batch", 24), HALF, (1, 24, (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19))),
        # queries, keys and values in one: the first of each part
        (("batch", 7, 12), ("batch", 7, 3, 2, 2),
         ElasticAxis(axis=2, full=12, kept=(0, 1, 4, 5, 8, 9)), (3, 2, (0,))),
    ],
)  # fmt: skip
def test_free_sizes_are_told_apart(
    before: tuple[int | str, ...],
    after: tuple[int | str, ...],
    elastic: ElasticAxis,
    wanted: tuple[int, int, tuple[int, ...]],
) -> None:
    found = regroup(before, after, elastic)
    assert (found.axis, found.full, found.kept) == wanted


@pytest.mark.parametrize(
    ("after", "kept", "message"),
    [
        (("batch", 7, 4, 2), 3, ("[batch, 7, 8] → [batch, 7, 4, 2]", "3 of 8", "multiples of 2")),
        (("8*batch", 7), 4, ("[batch, 7, 8] → [8*batch, 7]", "4 of 8", "whole")),
        (("?", 28), 4, ("unknown size", "[batch, 7, 8, ?, 28]")),
    ],
)
def test_what_is_mixed_is_refused(after: tuple[int | str, ...], kept: int, message: Told) -> None:
    elastic = ElasticAxis(axis=2, full=8, kept=tuple(range(kept)))
    with pytest.raises(MixedError, match=facts(*message)):
        regroup(("batch", 7, 8), after, elastic)


def test_heads_may_be_merged_with_the_batch_and_parted_again() -> None:
    """Torch's attention does this: the kept part repeats with each sample."""
    heads = ElasticAxis(axis=1, full=4, kept=(0, 1))
    merged = regroup(("batch", 4, "n", 2), ("4*batch", "n", 2), heads)
    assert merged == ElasticAxis(axis=0, full=4, kept=(0, 1))
    assert regroup(("4*batch", "n", 2), ("batch", 4, "n", 2), merged) == heads
    straight = regroup((7, "batch", 8), (7, "4*batch", 2), replace(HALF, axis=2))
    assert straight == ElasticAxis(axis=1, full=4, kept=(0, 1))
    # a batch behind the heads repeats nothing
    with pytest.raises(MixedError, match="keep its input whole"):
        regroup((4, "batch", 2), ("4*batch", 2), ElasticAxis(axis=0, full=4, kept=(0, 1)))
