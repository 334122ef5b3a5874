"""Dissimilarity of two outputs, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

Dissimilarity: TypeAlias = Callable[[Sequence[int], Sequence[int]], float]
"""Function of the tokens of two outputs: 0 if they are equal, at most 1."""


def differs(found: Sequence[int], expected: Sequence[int]) -> float:
    """Return 1 if anything differs, else 0."""
    return float(list(found) != list(expected))


def edit_distance(found: Sequence[int], expected: Sequence[int]) -> float:
    """Return the edit distance (Levenshtein 1966), relative to the tokens of the longer output."""
    longer = max(len(found), len(expected))
    if not longer:
        return 0.0
    target = np.asarray(expected)
    row = np.arange(len(target) + 1)
    for number, token in enumerate(found, 1):
        without = np.minimum(row[1:] + 1, row[:-1] + (target != token))
        fresh = np.concatenate([[number], without])
        # Each insertion costs 1 more: take the minimum over all positions where insertions may
        # begin.
        places = np.arange(len(fresh))
        row = np.minimum.accumulate(fresh - places) + places
    return float(row[-1] / longer)


DISSIMILARITIES: Final[Mapping[str, Dissimilarity]] = {
    "differs": differs,
    "edit-distance": edit_distance,
}
"""Built-in functions that compare two answers, by the name in ``--dissimilarity``."""
