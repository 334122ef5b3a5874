"""The protocol of what runs a generating model's graphs: rows of different sequences, with caches.

A sequence holds a *slot*, which has room for the keys and values of so many tokens in every decoder
layer, and keeps what its next token needs. A *stage* is the layers up to an exit in use and that
exit, or up to the model's end: a token runs stage 0, and the next one as long as it is not sure
enough. The layers that it skips then have no keys and values for it, which later tokens look at:
:meth:`TextBackend.leave` sees to those (state propagation, CALM 3.3; or a catch-up when a later
token comes so deep).

Whoever decides (:mod:`offramp.generation.scheduling`) knows slots, stages, tokens and confidences,
and no tensors. All methods are called from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_TOKEN: Final = -1
"""In the place of a token that was not computed."""


class TokenAnswers(NamedTuple):
    """What a stage says of the next token of each row."""

    tokens: NDArray[np.int64]
    """[n]: the most likely next token; may be ``NO_TOKEN`` where the row does not leave."""
    confidences: NDArray[np.float32]
    """[n]: how sure the exit is, 0 to 1; 1 at the model's end."""


class TextBackend(Protocol):
    """Runs the stages of one generating model.

    Raises:
        BackendError: From any method: the rows of that call have failed, and their slots are to be
            closed; other slots are as they were.
    """

    stages: int
    """The exits in use, and the model's end."""
    slots: int
    """Sequences that have room at a time."""
    length: int
    """Tokens that a slot has room for, prompt and answer; of an encoder-decoder the answer's."""
    ragged: bool
    """Whether sequences of different lengths may share a step; else only equal ones.

    A length is what the slot holds: prompts of an encoder-decoder may differ in any case.
    """
    prompt_in_slot: bool
    """Whether the prompt takes room in the slot: a decoder's does, an encoder-decoder's does not.
    """
    longest_prompt: int
    """Tokens that a prompt may have; a decoder's must leave room for one of the answer."""
    vocabulary: int
    """Tokens are from 0 to below it."""

    def open(self, slot: int, inputs: NDArray[np.int64]) -> None:
        """Begin a sequence in a free slot with its prompt, int64[tokens], which runs later."""
        ...

    def prefill(self, slots: Sequence[int]) -> None:
        """Run prompts of opened slots, through all layers.

        Of a decoder, all tokens but the last, which is the first that stage 0 runs; of an
        encoder-decoder the encoder, behind which stage 0 runs the start token.
        """
        ...

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        """Run a stage for one token of each slot: each has come to it, and is there once.

        ``limits`` are the least confidence that each leaves with, by which an exit that knows it
        before the token need not compute the others; ``None`` asks for all tokens.
        """
        ...

    def leave(self, stage: int, slots: Sequence[int]) -> None:
        """Note that the tokens of these slots leave behind a stage that they just ran.

        Not called behind the last stage.
        """
        ...

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Give the token of each slot that stage 0 runs next."""
        ...

    def close_slot(self, slot: int) -> None:
        """Free a slot at any time between calls; its cache may be overwritten."""
        ...

    def close(self) -> None:
        """Free all memory."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Give counts, for instance of tokens whose layers were caught up with."""
        ...
