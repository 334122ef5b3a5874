"""The difference between two answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.generation.promise.dissimilarity import edit_distance


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """The difference between a served answer and the full model's."""

    compared: int
    """Number of tokens chosen after the same prefix: up to and including the first token that
    differs."""
    differs: bool
    """True if the answers differ anywhere; then the last of the compared tokens differs."""
    edits: float
    """Edit distance relative to the tokens of the longer answer, 0 to 1."""


def compare_texts(served: Sequence[int], full: Sequence[int]) -> TextDifference:
    """Compare two answers; at most one answer may be empty."""
    alike = _alike(served, full)
    differs = len(served) != len(full) or alike < len(full)
    return TextDifference(
        compared=min(alike + 1, max(len(served), len(full))),
        differs=differs,
        edits=edit_distance(served, full),
    )


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
