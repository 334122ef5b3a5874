"""The stages of a plan, prepared by a backend: one step of one batch at a time.

Executor and benchmarks both run batches through here, so that the stages that are measured are
those that are served (what the executor adds around them is in a served request's time only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER
from offramp.certify import leaves
from offramp.engine.backends.base import Backend, Rows, Slot, Stage, StageResult, TensorBatch
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
        self._at_least = tuple(np.float32(spec.threshold) for spec in plan.stages)
        self._thresholds = tuple(float(threshold) for threshold in self._at_least)

    def step(self, slot: Slot, index: int, batch: TensorBatch) -> Step:
        """Run stage ``index`` on a batch and check who exits."""
        result = slot.run(self._stages[index], batch, self._leaving[index])
        if self.plan.stages[index].final:
            return Step(result, _same(len(batch), value=True))
        if result.answer is None:
            return Step(result, _same(len(batch), value=False))
        return Step(result, leaves(result.confidence, self._at_least[index]))

    def run(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
        """Run one batch to its end, giving the rows that leave as they leave."""
        batch = slot.upload(tensors)
        rows = _first(len(batch))
        for index, stage in enumerate(self._stages):
            result = slot.run(stage, batch, self._leaving[index])
            answer, confidence, carry = result
            if carry is None:
                assert answer is not None
                yield Departure(index, rows, answer, confidence)
                return
            batch = carry
            # That nobody leaves Python sees sooner than numpy, whose first call after a stage is
            # slow. A NaN is never the largest, or is the first: then numpy decides below.
            if answer is None or max(confidence.tolist(), default=0.0) < self._thresholds[index]:
                continue
            exited = leaves(confidence, self._at_least[index])
            (left,) = exited.nonzero()
            if len(left) == len(rows):
                yield Departure(index, rows, answer, confidence)
                return
            if len(left):
                yield Departure(index, rows[left], answer[left], confidence[left])
                (staying,) = (~exited).nonzero()
                rows, batch = rows[staying], slot.select(batch, staying)

    def warm_up(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Run one batch through every stage with nobody leaving (allocates for its size)."""
        batch = slot.upload(tensors)
        for stage in self._stages:
            carry = slot.run(stage, batch).carry
            if carry is not None:
                batch = carry


@lru_cache(maxsize=256)
def _first(count: int) -> Rows:
    """The first row numbers; whoever wants to change them copies them."""
    rows = np.arange(count, dtype=np.intp)
    rows.flags.writeable = False
    return rows


@lru_cache(maxsize=256)
def _same(count: int, *, value: bool) -> NDArray[np.bool_]:
    """As often the same; whoever wants to change it copies it."""
    full = np.full(count, value, np.bool_)
    full.flags.writeable = False
    return full
