"""How unlike two outputs are, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

Dissimilarity: TypeAlias = Callable[[Sequence[int], Sequence[int]], float]
"""Of the tokens of two outputs; 0 where they are equal, 1 at most."""


def differs(found: Sequence[int], expected: Sequence[int]) -> float:
    """1 where anything differs."""
    return float(list(found) != list(expected))


def edit_distance(found: Sequence[int], expected: Sequence[int]) -> float:
    """Tokens to insert, remove or replace (Levenshtein 1966), over those of the longer output."""
    longer = max(len(found), len(expected))
    if not longer:
        return 0.0
    target = np.asarray(expected)
    row = np.arange(len(target) + 1)
    for number, token in enumerate(found, 1):
        without = np.minimum(row[1:] + 1, row[:-1] + (target != token))
        fresh = np.concatenate([[number], without])
        # An insertion costs 1 for each place further: the least of all that begin before.
        places = np.arange(len(fresh))
        row = np.minimum.accumulate(fresh - places) + places
    return float(row[-1] / longer)


DISSIMILARITIES: Final[Mapping[str, Dissimilarity]] = {
    "differs": differs,
    "edit-distance": edit_distance,
}
"""By the name that it is asked for."""
