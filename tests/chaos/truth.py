"""The model's results for every input at every exit, computed before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.certify.decision import MODEL_END, NEVER
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan

TOLERANCE: Final = 1e-3
"""Stages of another cut, and batches of another size, sum in another order: relative to the
largest magnitude of an answer."""
_APART: Final = 4.0
"""Two inputs are of use if their answers are so many tolerances apart: mixed up, they are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Inputs whose answers tell them apart, and these answers."""

    inputs: Mapping[str, NDArray[Any]]
    output: str
    answers: Mapping[int, NDArray[Any]]
    """Answers by exit, :data:`MODEL_END` for the model's: [n, classes]."""
    confidences: Mapping[int, NDArray[np.float32]]
    """Confidences by exit: [n]."""
    max_disagreement: float

    @classmethod
    def of(cls, bundle: Bundle, inputs: Mapping[str, NDArray[Any]]) -> Truth:
        """Run all inputs through all exits; leave out those that others could be taken for."""
        exits = range(len(bundle.manifest.exits))
        everything = tuple(ActiveExit(exit=index, threshold=NEVER) for index in exits)
        plan = make_plan(bundle, ExitPolicy(version=1, active=everything), Mode.AUDIT)
        pipeline = Pipeline(OnnxRuntimeBackend(), plan)
        slot = pipeline.backend.open_slot()
        batch = slot.upload(inputs)
        answers, confidences = {}, {}
        for index, stage in enumerate(plan.stages):
            result = pipeline.step(slot, index, batch).result
            assert result.answer is not None
            answers[stage.answered_by] = result.answer
            confidences[stage.answered_by] = result.confidence
            if result.carry is not None:
                batch = result.carry
        kept = _apart(answers, confidences)
        promise = bundle.policy.promise
        return cls(
            inputs={name: array[kept] for name, array in inputs.items()},
            output=bundle.manifest.answer.output,
            answers={exit_: array[kept] for exit_, array in answers.items()},
            confidences={exit_: array[kept] for exit_, array in confidences.items()},
            max_disagreement=promise.max_disagreement if promise else 1.0,
        )

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The inputs of some rows."""
        return {name: array[list(rows)] for name, array in self.inputs.items()}

    def wrong(
        self,
        rows: Sequence[int],
        exits: Sequence[int],
        answers: NDArray[Any],
        confidences: Sequence[float],
    ) -> str | None:
        """Return the first answer that differs from its input's at the named exit, if any does."""
        if not len(rows) == len(exits) == len(answers) == len(confidences):
            return (
                f"{len(rows)} samples were sent, and there are {len(exits)} exits, "
                f"{len(answers)} answers, {len(confidences)} confidences"
            )
        for row, exit_, answer, sure in zip(rows, exits, answers, confidences, strict=True):
            if exit_ not in self.answers:
                return f"there is no exit {exit_}"
            true = self.answers[exit_][row]
            if not (
                np.abs(answer - true).max() <= _allowed(true)
                and abs(sure - self.confidences[exit_][row]) <= TOLERANCE
            ):
                return f"input {row} is answered {self._whose(answer)}, at exit {exit_}"
        return None

    def _whose(self, answer: NDArray[Any]) -> str:
        for exit_, answers in self.answers.items():
            (rows,) = np.nonzero(np.abs(answers - answer).max(axis=1) <= _allowed(answer))
            if len(rows):
                return f"as input {rows[0]} is at exit {exit_}"
        return "as no input is"

    def disagreements(self, rows: Sequence[int], answers: NDArray[Any]) -> int:
        """Return the number of answers with another class than the source model's."""
        source = self.answers[MODEL_END][list(rows)].argmax(axis=1)
        return int((answers.argmax(axis=1) != source).sum())


def _allowed(answer: NDArray[Any]) -> float:
    return TOLERANCE * max(1.0, float(np.abs(answer).max()))


def _apart(
    answers: Mapping[int, NDArray[Any]], confidences: Mapping[int, NDArray[np.float32]]
) -> list[int]:
    """Rows that can be told from every other one of them, at every exit."""
    kept: list[int] = []
    for row in range(len(answers[MODEL_END])):
        if all(
            (
                (np.abs(array[kept] - array[row]).max(axis=1) > _APART * _allowed(array[row]))
                | (np.abs(confidences[exit_][kept] - confidences[exit_][row]) > _APART * TOLERANCE)
            ).all()
            for exit_, array in answers.items()
        ):
            kept.append(row)
    return kept
