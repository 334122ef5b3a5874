"""The stages of a plan, prepared by a backend: one step of one batch at a time.

Executor and benchmarks both run batches through here, so that the stages that are measured are
those that are served (what the executor adds around them is in a served request's time only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER
from offramp.engine.backends.base import Backend, Rows, Slot, Stage, StageResult, TensorBatch
from offramp.engine.exit_check import exits
from offramp.engine.plan import Mode, Plan, StageSpec


class Step(NamedTuple):
    """What a stage did to a batch of b rows."""

    result: StageResult
    exited: NDArray[np.bool_]
    """[b]: rows that leave with the stage's answer."""


class Departure(NamedTuple):
    """Rows that left a batch together."""

    stage: int
    rows: Rows
    """Row numbers in the batch as it was uploaded."""
    answer: NDArray[Any]
    """[len(rows), classes]."""
    confidence: NDArray[np.float32]
    """[len(rows)]."""


class Pipeline:
    """A plan's prepared stages; shared by all slots."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        *,
        prepare: Callable[[StageSpec], Stage] | None = None,
    ) -> None:
        """Prepare every stage; takes seconds.

        Args:
            backend: Executes.
            plan: Says what.
            prepare: Instead of the backend's own, to use stages again that are prepared.

        Raises:
            BackendError: A stage cannot be loaded.
        """
        self.backend = backend
        self.plan = plan
        prepare = prepare or backend.prepare
        self._stages: tuple[Stage, ...] = tuple(prepare(spec) for spec in plan.stages)
        # In release mode everything runs on: whatever is sure is among the survivors too.
        self._leaving = tuple(
            NEVER if plan.mode is Mode.RELEASE else spec.threshold for spec in plan.stages
        )

    def step(self, slot: Slot, index: int, batch: TensorBatch) -> Step:
        """Run stage ``index`` on a batch and check who exits."""
        result = slot.run(self._stages[index], batch, self._leaving[index])
        return Step(result, self._exited(self.plan.stages[index], result, len(batch)))

    def run(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
        """Run one batch to its end, giving the rows that leave as they leave."""
        batch = slot.upload(tensors)
        rows = np.arange(len(batch), dtype=np.intp)
        for index in range(len(self._stages)):
            step = self.step(slot, index, batch)
            result = step.result
            leaving = np.count_nonzero(step.exited)
            if leaving == len(rows):
                assert result.answer is not None
                yield Departure(index, rows, result.answer, result.confidence)
                return
            assert result.carry is not None
            batch = result.carry
            if leaving:
                assert result.answer is not None
                left = step.exited
                yield Departure(index, rows[left], result.answer[left], result.confidence[left])
                staying = np.flatnonzero(~left)
                rows, batch = rows[staying], slot.select(batch, staying)

    def warm_up(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Run one batch through every stage with nobody leaving (allocates for its size)."""
        batch = slot.upload(tensors)
        for stage in self._stages:
            carry = slot.run(stage, batch).carry
            if carry is not None:
                batch = carry

    @staticmethod
    def _exited(spec: StageSpec, result: StageResult, count: int) -> NDArray[np.bool_]:
        if spec.final:
            return np.ones(count, np.bool_)
        if result.answer is None:
            return np.zeros(count, np.bool_)
        return exits(result.confidence, spec.threshold)
