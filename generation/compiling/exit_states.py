"""States at all exits while the unmodified model answers, recorded by the serving backend."""

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
    """Backend that also keeps the states at all exits for each token.

    Use it without exits, so that every token runs each stage once. If ``given`` has an answer for a
    prompt, the decoder reads its tokens in place of the tokens that the backend predicts.
    """

    recorded: dict[bytes, tuple[States, States]]
    """Records by the bytes of a prompt: states float32 [exits, tokens, width], and confidences
    float32 [exits, tokens]; the confidences are valid for exits without their own head."""
    given: dict[bytes, Sequence[int]]
    """Answers' tokens that the decoder reads, by the bytes of the prompt."""

    def record(self) -> None:
        """Start recording, and drop earlier records."""
        self.recorded, self.given = {}, {}
        self._running: dict[int, tuple[bytes, list[list[States]], list[list[float]]]] = {}

    def open(self, slot: int, inputs: Tokens) -> None:
        """Begin a sequence in a slot, and its recording."""
        super().open(slot, inputs)
        exits = range(self.stages - 1)
        self._running[slot] = (inputs.tobytes(), [[] for _ in exits], [[] for _ in exits])

    def run(
        self, stage: int, slots: Sequence[int], limits: Sequence[float] | None = None
    ) -> TokenAnswers:
        """Run a stage, and keep the states after it."""
        answers = super().run(stage, slots, limits)
        if stage == self.stages - 1:
            return answers._replace(tokens=self._as_given(slots, answers.tokens))
        states = self.states_behind(stage, slots)
        for slot, state, sure in zip(slots, states, answers.confidences, strict=True):
            _, kept, confidences = self._running[slot]
            kept[stage].append(state)
            confidences[stage].append(float(sure))
        return answers

    def close_slot(self, slot: int) -> None:
        """End a sequence, and keep its records."""
        super().close_slot(slot)
        if slot not in self._running:  # it could not be opened
            return
        prompt, kept, confidences = self._running.pop(slot)
        if len({len(states) for states in kept}) == 1 and kept[0]:  # every token ran all stages
            states = np.array(kept, np.float32)
            self.recorded[prompt] = (states, np.array(confidences, np.float32))

    def _as_given(self, slots: Sequence[int], tokens: Tokens) -> Tokens:
        """Replace the model's tokens, int64[slots], by the next tokens of the ``given`` answers."""
        tokens = tokens.copy()
        for row, slot in enumerate(slots):
            prompt, kept, _ = self._running[slot]
            if prompt in self.given:
                tokens[row] = self.given[prompt][len(kept[0]) - 1]
        return tokens


class ExitStates:
    """States of many answers by exit; the tokens of all answers are concatenated."""

    def __init__(
        self,
        backend: RecordingBackend,
        prompts: Sequence[Tokens],
        texts: Sequence[DecodedText],
    ) -> None:
        """Collect the records of ``prompts``; ``texts`` are their answers, in the same order."""
        found = [backend.recorded[prompt.tobytes()] for prompt in prompts]
        self.starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
        """int64[prompts + 1]: index of the first token of each prompt, then the number of
        tokens."""
        self.tokens = np.concatenate([text.tokens for text in texts]).astype(np.int64)
        """int64[tokens]: the model's own tokens."""
        self.states = np.concatenate([states for states, _ in found], axis=1)
        """float32[exits, tokens, width]: state of each token at each exit."""
        self.confidences = np.concatenate([sure for _, sure in found], axis=1)
        """float32[exits, tokens]: confidences; valid for exits without their own head."""

    def samples(self, exit_: int) -> ExitSamples:
        """Return the training samples of an exit."""
        return ExitSamples(states=self.states[exit_], tokens=self.tokens)
