"""Protocol of backends, which run a generating model's graphs on rows of several sequences.

A sequence holds a *slot*, which has space for the keys and values of a fixed number of tokens in
every decoder layer, and keeps the state for its next token. A *stage* is the layers after the
previous stage, up to an exit in use and with that exit, or up to the model's end: a token runs
stage 0, then the next stages until its confidence is high enough. Layers that a token skips lack
its keys and values, which later tokens read. :meth:`TextBackend.leave` fills these layers (state
propagation, CALM 3.3), or they catch up when a later token reaches them.

The scheduler (:mod:`offramp.generation.scheduling`) knows slots, stages, tokens and confidences,
and no tensors. All methods are called from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_TOKEN: Final = -1
"""Placeholder of a token that was not computed."""


class TokenAnswers(NamedTuple):
    """Predictions of a stage: the next token of each row."""

    tokens: NDArray[np.int64]
    """[n]: the most likely next token; may be ``NO_TOKEN`` if the row does not leave."""
    confidences: NDArray[np.float32]
    """[n]: confidence of the exit, 0 to 1; 1 at the model's end."""


class TextBackend(Protocol):
    """Backend that runs the stages of one generating model.

    Raises:
        BackendError: From any method: the rows of that call have failed, and their slots must be
            closed; other slots are unchanged.
    """

    stages: int
    """Number of stages: the exits in use, and the model's end."""
    slots: int
    """Number of sequences with cache memory at a time."""
    length: int
    """Number of tokens that fit in a slot: prompt and answer; for an encoder-decoder, the
    answer."""
    ragged: bool
    """True if sequences of different lengths may share a step.

    The length of a sequence is its number of tokens in the slot; so prompts of an encoder-decoder
    may always have different lengths.
    """
    prompt_in_slot: bool
    """True if the prompt's tokens are in the slot; false for an encoder-decoder."""
    longest_prompt: int
    """Largest number of tokens in a prompt; a decoder's prompt must leave space for an answer
    token."""
    vocabulary: int
    """Number of token ids, which begin at 0."""

    def open(self, slot: int, inputs: NDArray[np.int64]) -> None:
        """Start a sequence in a free slot with its prompt, int64[tokens], which runs later."""
        ...

    def prefill(self, slots: Sequence[int]) -> None:
        """Run prompts of opened slots through all layers.

        A decoder runs all tokens except the last, which stage 0 runs first; an encoder-decoder runs
        the encoder, and stage 0 then starts with the start token.
        """
        ...

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        """Run a stage for one token of each slot; each slot's token must wait for this stage.

        ``limits`` are the lowest confidences at which tokens leave. If an exit computes its
        confidence before its token, it need not compute the tokens of rows that stay. With ``None``
        it computes the tokens of all rows.
        """
        ...

    def leave(self, stage: int, slots: Sequence[int]) -> None:
        """Record that the tokens of these slots leave after the stage that they just ran.

        It is not called for the last stage.
        """
        ...

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the token of each slot that stage 0 runs next."""
        ...

    def close_slot(self, slot: int) -> None:
        """Release a slot at any time between calls; its cache may be overwritten."""
        ...

    def close(self) -> None:
        """Release all memory."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Return counts, for instance of tokens that ran in a catch-up."""
        ...
