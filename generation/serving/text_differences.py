"""The difference between two answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """The difference between a served answer and the full model's."""

    compared: int
    """Tokens that were chosen at the same prefix: up to the first that differs, that one too."""
    differs: bool
    """Whether the answers differ anywhere; then the last of ``compared`` does."""
    edits: float
    """Edit distance by the tokens of the longer answer, 0 to 1."""


def compare_texts(served: Sequence[int], full: Sequence[int]) -> TextDifference:
    """Compare two answers, of which at least one has a token."""
    alike = _alike(served, full)
    differs = len(served) != len(full) or alike < len(full)
    return TextDifference(
        compared=min(alike + 1, max(len(served), len(full))),
        differs=differs,
        edits=edit_distance(served, full) / max(len(served), len(full)) if differs else 0.0,
    )


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens to insert, delete or replace to make one sequence of another."""
    start = _alike(one, other)
    end = _alike(one[start:][::-1], other[start:][::-1])
    rows, columns = one[start : len(one) - end], other[start : len(other) - end]
    if not len(rows) or not len(columns):
        return max(len(rows), len(columns))
    places = np.arange(len(columns) + 1)
    distances = places
    for number, token in enumerate(rows, 1):
        following = np.empty_like(distances)
        following[0] = number
        replaced = distances[:-1] + (np.asarray(columns) != token)
        following[1:] = np.minimum(replaced, distances[1:] + 1)
        # Insertions run along the row: d[j] is the least of d[k] + (j - k) for k up to j.
        distances = np.minimum.accumulate(following - places) + places
    return int(distances[-1])


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
