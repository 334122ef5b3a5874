"""Records of the exits' predictions at every token of the model's own outputs.

The model's outputs are run once more, all tokens in one pass, and every exit predicts each token.
As long as an answer equals the model's, its next token depends only on these records. So the first
token that differs, if any, is known for any thresholds without decoding again. This is exact with
catch-up, which computes the skipped layers of earlier tokens in full. With state propagation, later
tokens read approximate keys and values, and only decoding shows the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import (
    MODEL_END,
    BoolArray,
    Float32Array,
    FloatArray,
    IntArray,
    first_exit,
)

__all__ = ["TextRecords"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRecords:
    """Predictions of exits at the model's own outputs; tokens of all prompts are concatenated."""

    starts: IntArray
    """int64[prompts + 1]: index of the first token of each prompt, then the number of tokens."""
    confidences: Float32Array
    """float32[exits, tokens]: confidence of each exit at each token."""
    agrees: BoolArray
    """bool[exits, tokens]: True if an exit predicts the model's token."""

    def __post_init__(self) -> None:
        starts, tokens = self.starts, self.confidences.shape[1]
        if self.confidences.shape != self.agrees.shape:
            raise ValueError(
                f"confidences {self.confidences.shape} and agrees {self.agrees.shape} must have "
                "one shape, [exits, tokens]"
            )
        if starts.ndim != 1 or len(starts) < 2 or (starts[0], starts[-1]) != (0, tokens):
            raise ValueError(f"starts must go from 0 to the {tokens} tokens, got {starts}")
        if (np.diff(starts) < 1).any():
            raise ValueError("every prompt needs at least one token; leave out the others")

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.starts) - 1

    @property
    def exits(self) -> int:
        """Number of exits, without the model's end."""
        return len(self.confidences)

    @property
    def lengths(self) -> IntArray:
        """int64[prompts]: number of tokens of each output."""
        return np.diff(self.starts)

    @property
    def places(self) -> IntArray:
        """int64[tokens]: position of each token in its output, from 0."""
        return np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], self.lengths)

    def take(self, prompts: IntArray) -> TextRecords:
        """Return the records of some prompts, in their order."""
        rows = [np.arange(self.starts[p], self.starts[p + 1]) for p in prompts.tolist()]
        tokens = np.concatenate(rows)
        return TextRecords(
            starts=np.concatenate([[0], np.cumsum(self.lengths[prompts])]),
            confidences=self.confidences[:, tokens],
            agrees=self.agrees[:, tokens],
        )

    def of_exits(self, exits: Sequence[int]) -> TextRecords:
        """Return the records of some exits, in their order."""
        chosen = list(exits)
        return TextRecords(
            starts=self.starts, confidences=self.confidences[chosen], agrees=self.agrees[chosen]
        )

    def answered_at(self, thresholds: FloatArray) -> IntArray:
        """Return int64[tokens]: the exit where each token leaves; ``MODEL_END`` if at no exit.

        ``thresholds`` are float64[exits], or float64[exits, positions] if they depend on the
        position of the token in its output; the last column is used for all later positions.
        """
        thresholds = np.asarray(thresholds, np.float64)
        if thresholds.ndim > 1:
            thresholds = thresholds[:, np.minimum(self.places, thresholds.shape[1] - 1)]
        return first_exit(self.confidences, thresholds)

    def wrong(self, answered_at: IntArray) -> BoolArray:
        """Return bool[tokens]: True if the token that an exit answers differs from the model's."""
        rows = np.arange(len(answered_at))
        return np.asarray((answered_at != MODEL_END) & ~self.agrees[answered_at, rows])

    def by_prompt(self, values: NDArray[np.generic]) -> FloatArray:
        """Return float64[prompts]: for each prompt, the sum of the ``values`` of its tokens."""
        return np.add.reduceat(values.astype(np.float64), self.starts[:-1])

    def at_prefix(self, wrong: BoolArray) -> IntArray:
        """Return int64[prompts]: tokens up to and including the first of bool[tokens] wrong."""
        places = np.where(wrong, self.places, np.repeat(self.lengths, self.lengths) - 1)
        return np.minimum.reduceat(places, self.starts[:-1]) + 1

    def differs(self, answered_at: IntArray) -> BoolArray:
        """Return bool[prompts]: True if the output differs from the model's."""
        return self.by_prompt(self.wrong(answered_at)) > 0

    def depth(self, answered_at: IntArray, layers: IntArray) -> float:
        """Return the mean share of the decoder's layers that a token runs.

        ``layers`` is int64[exits + 1]: the number of layers up to each exit, then the number of all
        layers.
        """
        ran = np.where(answered_at == MODEL_END, layers[-1], layers[answered_at])
        return float(ran.mean() / layers[-1])
