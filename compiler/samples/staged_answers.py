"""Answers of a bundle's stages, as the server runs them, in batches of many sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Plan

BATCH_SIZES = (1, 7, 32, 2, 19, 64, 3, 11)
"""Batch sizes that the data is cut into, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswers:
    """Answers to a batch of b samples, and the exits that gave them."""

    answer: NDArray[Any]
    """Answers of the batch, [b, …]."""
    exit: NDArray[np.int32]
    """Index of the exit that gave the answer, [b]; :data:`~offramp.certify.MODEL_END` for the
    model's own answer."""
    confidence: NDArray[np.float32]
    """Confidences of the answers, [b]."""


class AnsweringStages:
    """The stages of a plan, loaded on the CPU."""

    def __init__(self, plan: Plan, *, threads: int = 1) -> None:
        """Load the stages; BackendError if one cannot be loaded."""
        self._pipeline = Pipeline(OnnxRuntimeBackend(threads=threads), plan)
        self._slot = self._pipeline.backend.open_slot()
        self._exits = [s.answered_by for s in plan.stages]

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> BatchAnswers:
        """Run the stages on a batch, and return the answers."""
        departures = list(self._pipeline.run(self._slot, tensors))
        size, first = len(next(iter(tensors.values()))), departures[0].answer
        answer = np.empty((size, *first.shape[1:]), first.dtype)
        exit_, confidence = np.empty(size, np.int32), np.empty(size, np.float32)
        for departure in departures:
            answer[departure.rows] = departure.answer
            exit_[departure.rows] = self._exits[departure.stage]
            confidence[departure.rows] = departure.confidence
        return BatchAnswers(answer=answer, exit=exit_, confidence=confidence)


def batches_of_many_sizes(samples: int) -> Iterator[slice]:
    """Cut samples into batches of varying sizes; the last batch has the remaining samples."""
    start, sizes = 0, itertools.cycle(BATCH_SIZES)
    while start < samples:
        stop = min(start + next(sizes), samples)
        yield slice(start, stop)
        start = stop
