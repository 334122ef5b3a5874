"""What every exit sees while the model answers in full: recorded by the backend that serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offramp.generation.compiling.decoding import DecodedText
from offramp.generation.compiling.prompts import Tokens
from offramp.generation.stages.onnx_text import OnnxTextBackend
from offramp.generation.stages.text_backend import TokenAnswers
from offramp.generation.training.exit_samples import ExitSamples

States = NDArray[np.float32]


class RecordingBackend(OnnxTextBackend):
    """Runs as its base does, and keeps the states behind all exits of each token.

    Where it is ``told`` an answer, it reads that instead of saying its own tokens.

    For answers in full, that is with no exit in use: then a token runs every stage once.
    """

    recorded: dict[bytes, tuple[States, States]]
    """By a prompt's bytes: states float32 [exits, tokens, width], and what exits without a head
    of their own say of them, confidences float32 [exits, tokens]."""
    told: dict[bytes, Sequence[int]]
    """Tokens of answers, by their prompts' bytes."""

    def record(self) -> None:
        """Begin anew."""
        self.recorded, self.told = {}, {}
        self._running: dict[int, tuple[bytes, list[list[States]], list[list[float]]]] = {}

    def open(self, slot: int, inputs: Tokens) -> None:
        """Begin a sequence."""
        super().open(slot, inputs)
        exits = range(self.stages - 1)
        self._running[slot] = (inputs.tobytes(), [[] for _ in exits], [[] for _ in exits])

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        """Run a stage, and keep what is behind it."""
        answers = super().run(stage, slots, limits)
        if stage == self.stages - 1:
            return answers._replace(tokens=self._as_told(slots, answers.tokens))
        states = self.states_behind(stage, slots)
        for slot, state, sure in zip(slots, states, answers.confidences, strict=True):
            _, kept, confidences = self._running[slot]
            kept[stage].append(state)
            confidences[stage].append(float(sure))
        return answers

    def close_slot(self, slot: int) -> None:
        """End a sequence, and keep what was seen of it."""
        super().close_slot(slot)
        if slot not in self._running:  # it could not be opened
            return
        prompt, kept, confidences = self._running.pop(slot)
        if len({len(states) for states in kept}) == 1 and kept[0]:  # all of it in full
            states = np.array(kept, np.float32)
            self.recorded[prompt] = (states, np.array(confidences, np.float32))

    def _as_told(self, slots: Sequence[int], tokens: Tokens) -> Tokens:
        """Put the next tokens of told answers in the place of a model's own, int64[slots]."""
        tokens = tokens.copy()
        for row, slot in enumerate(slots):
            prompt, kept, _ = self._running[slot]
            if prompt in self.told:
                tokens[row] = self.told[prompt][len(kept[0]) - 1]
        return tokens


class ExitStates:
    """States of many answers, one token after another, by exit."""

    def __init__(
        self,
        backend: RecordingBackend,
        prompts: Sequence[Tokens],
        texts: Sequence[DecodedText],
    ) -> None:
        """Take what a backend has recorded of the prompts that these texts answer."""
        found = [backend.recorded[prompt.tobytes()] for prompt in prompts]
        self.starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
        """int64[prompts + 1]: where the tokens of each prompt begin, and where the last end."""
        self.tokens = np.concatenate([text.tokens for text in texts]).astype(np.int64)
        """int64[tokens]: the model's own."""
        self.states = np.concatenate([states for states, _ in found], axis=1)
        """float32[exits, tokens, width]."""
        self.confidences = np.concatenate([sure for _, sure in found], axis=1)
        """float32[exits, tokens], of exits without heads of their own."""

    def samples(self, exit_: int) -> ExitSamples:
        """Return what an exit learns of."""
        return ExitSamples(states=self.states[exit_], tokens=self.tokens)
