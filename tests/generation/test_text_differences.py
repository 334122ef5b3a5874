"""Differences of two answers."""

from __future__ import annotations

import random

import pytest

from offramp.generation.promise.dissimilarity import edit_distance
from offramp.generation.serving.text_differences import compare_texts


def slow_distance(one: list[int], other: list[int]) -> int:
    """Levenshtein's recursion, cell by cell."""
    above = list(range(len(other) + 1))
    for row, a in enumerate(one, 1):
        here = [row]
        for column, b in enumerate(other, 1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (a != b)))
        above = here
    return above[-1]


def test_edit_distance_is_levenshteins() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        one = [draw.randrange(3) for _ in range(draw.randrange(9))]
        other = [draw.randrange(3) for _ in range(draw.randrange(9))]
        longer = max(len(one), len(other), 1)
        expected = slow_distance(one, other) / longer
        assert edit_distance(one, other) == pytest.approx(expected), (one, other)


@pytest.mark.parametrize(
    ("served", "full", "compared", "differs", "edits"),
    [
        ([1, 2, 3], [1, 2, 3], 3, False, 0.0),
        ([1, 2, 3], [1, 9, 3], 2, True, 1 / 3),
        ([7, 2], [1, 2, 3, 4], 1, True, 3 / 4),
        ([1, 2], [1, 2, 3], 3, True, 1 / 3),
        ([1, 2, 3], [1, 2], 3, True, 1 / 3),
    ],
)
def test_answers_are_compared(
    served: list[int], full: list[int], compared: int, differs: bool, edits: float
) -> None:
    difference = compare_texts(served, full)
    assert (difference.compared, difference.differs) == (compared, differs)
    assert difference.edits == pytest.approx(edits)
