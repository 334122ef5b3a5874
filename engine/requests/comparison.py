"""Answers of exits that wait for the comparison with the model's end.

If answers are compared as classes, each answer has its code immediately. If answers agree when
their values are near each other, agreement is known only at the model's end; until then the values
are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.answers.agreement import agreement_of

SampleIds = NDArray[np.int64]


class TakesCodes(Protocol):
    """A receiver of answer codes: a :class:`.Recorder`, or the audits of a variant."""

    def passed(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        confidence: NDArray[np.float32],
        prediction: NDArray[np.int32],
    ) -> None:
        """Record an exit's answers, ``UNKNOWN`` where the code is not known yet."""

    def compared(
        self, sample_ids: SampleIds, exit_index: int, prediction: NDArray[np.int32]
    ) -> None:
        """Record the codes of an exit's earlier answers, once the model's end has answered, too.

        ``prediction`` [n] are codes (:func:`.agreement_of`), equal to the end's where both agree.
        """

    def final(self, sample_ids: SampleIds, prediction: NDArray[np.int32]) -> None:
        """Record the answers of the model's end."""


class AnswerLog(Protocol):
    """Receives the answers to samples, and passes their codes to a recorder."""

    def begin(self, sample_ids: SampleIds, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Keep what the comparison needs of the inputs [n, …] of starting samples [n]."""

    def record_answers(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        answer: NDArray[Any],
        confidence: NDArray[np.float32],
    ) -> None:
        """Take answers [n, …] of an exit, or ``MODEL_END``, with their confidence [n]."""

    def forget(self, sample_ids: SampleIds) -> None:
        """Drop samples that get no more answers."""


def answer_log(answer: Answer, recorder: TakesCodes) -> AnswerLog:
    """Make the object that compares a model's answers while serving."""
    return _ComparedAtEnd(answer, recorder) if answer.task.is_relative else _Codes(answer, recorder)


class _Codes:
    """Answers whose code determines agreement."""

    def __init__(self, answer: Answer, recorder: TakesCodes) -> None:
        self._agreement, self._recorder = agreement_of(answer), recorder

    def begin(self, sample_ids: SampleIds, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Do nothing: no inputs are needed."""

    def record_answers(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        answer: NDArray[Any],
        confidence: NDArray[np.float32],
    ) -> None:
        codes = self._agreement.codes(self._agreement.reduce(answer))
        if exit_index == MODEL_END:
            self._recorder.final(sample_ids, codes)
        else:
            self._recorder.passed(sample_ids, exit_index, confidence, codes)

    def forget(self, sample_ids: SampleIds) -> None:
        """Do nothing: nothing is kept."""


class _Waiting(NamedTuple):
    """A sample in progress: the mask of its inputs, and its answers by exit."""

    mask: NDArray[Any] | None
    said: dict[int, NDArray[Any]]


class _ComparedAtEnd:
    """Answers that are kept until they can be compared.

    Each sample belongs to one stream's thread at a time, and has its own entry.
    """

    def __init__(self, answer: Answer, recorder: TakesCodes) -> None:
        self._agreement, self._recorder = agreement_of(answer), recorder
        self._waiting: dict[int, _Waiting] = {}

    def begin(self, sample_ids: SampleIds, inputs: Mapping[str, NDArray[Any]]) -> None:
        masks = self._agreement.mask_in(inputs)
        for row, sample in enumerate(sample_ids.tolist()):
            self._waiting[sample] = _Waiting(None if masks is None else masks[row], {})

    def record_answers(
        self,
        sample_ids: SampleIds,
        exit_index: int,
        answer: NDArray[Any],
        confidence: NDArray[np.float32],
    ) -> None:
        reduced = self._agreement.reduce(answer)
        if exit_index == MODEL_END:
            self._compare(sample_ids, reduced)
            return
        unknown = np.full(len(sample_ids), UNKNOWN, np.int32)
        self._recorder.passed(sample_ids, exit_index, confidence, unknown)
        for row, sample in enumerate(sample_ids.tolist()):
            if (waiting := self._waiting.get(sample)) is not None:
                waiting.said[exit_index] = reduced[row].copy()

    def forget(self, sample_ids: SampleIds) -> None:
        for sample in sample_ids.tolist():
            self._waiting.pop(sample, None)

    def _compare(self, sample_ids: SampleIds, ends: NDArray[Any]) -> None:
        self._recorder.final(sample_ids, self._agreement.codes(ends))
        for row, sample in enumerate(sample_ids.tolist()):
            if (waiting := self._waiting.pop(sample, None)) is None:
                continue
            mask = None if waiting.mask is None else waiting.mask[None]
            for exit_index, said in waiting.said.items():
                codes = self._agreement.codes_against(said[None], ends[row : row + 1], mask)
                self._recorder.compared(sample_ids[row : row + 1], exit_index, codes)
