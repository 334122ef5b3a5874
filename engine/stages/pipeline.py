"""A plan's stages as prepared by a backend, and the step that runs one of them on a batch.

Executor and benchmarks use the same step, so that measured and served stages are equal. (Only a
served request's time includes the time of the executor itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Manifest
from offramp.certify import NEVER, leaves
from offramp.engine.common.errors import BackendError
from offramp.engine.scheduling.decisions import all_rows, uniform
from offramp.engine.stages.backend_protocol import (
    Backend,
    Rows,
    Slot,
    Stage,
    StageResult,
    TensorBatch,
)
from offramp.engine.stages.plan import Mode, Plan, StageSpec

_ONE_ROW = (uniform(1, value=False), uniform(1, value=True))


class StageStep(NamedTuple):
    """The result of a stage on a batch of b rows, and the rows that exit."""

    result: StageResult
    exited: NDArray[np.bool_]
    """[b]: whether the row leaves with the stage's answer; read-only."""
    leaving: int
    """Number of rows that leave at this stage."""


class Departure(NamedTuple):
    """Rows that left a batch at the same exit, and their answers."""

    stage: int
    rows: Rows
    """Row numbers in the batch as it was uploaded."""
    answer: NDArray[Any]
    """[len(rows), …], for instance classes."""
    confidence: NDArray[np.float32]
    """[len(rows)]: confidence of each answer."""


class Pipeline:
    """A plan's prepared stages; shared by all slots.

    Preparing takes seconds, and raises BackendError if a stage cannot be loaded. ``prepare`` is
    called instead of the backend's method, to reuse prepared stages.
    """

    def __init__(
        self, backend: Backend, plan: Plan, *, prepare: Callable[[StageSpec], Stage] | None = None
    ) -> None:
        self.backend = backend
        self.plan = plan
        prepare = prepare or backend.prepare
        self._stages: tuple[Stage, ...] = tuple(prepare(spec) for spec in plan.stages)
        self.missing = tuple(m for s in self._stages if (m := backend.missing(s)) is not None)
        """Engines that would run stages if they were built."""
        # In release mode every row runs on, so sure rows are among the survivors too.
        self._leaving = tuple(
            NEVER if plan.mode is Mode.RELEASE else spec.threshold for spec in plan.stages
        )
        # The same number twice: numpy compares with a float32, Python with a float.
        self._at_least = tuple(np.float32(spec.threshold) for spec in plan.stages)
        self._thresholds = tuple(float(threshold) for threshold in self._at_least)

    def step(self, slot: Slot, index: int, batch: TensorBatch) -> StageStep:
        """Run stage ``index`` on a batch, and decide which rows exit."""
        result = slot.run(self._stages[index], batch, self._leaving[index])
        answer, confidence, carry = result
        rows = len(batch)
        if carry is None:
            return StageStep(result, uniform(rows, value=True), rows)
        # Each call of numpy takes some µs between two stages, whose code has replaced it in the
        # caches: a single row needs one call, and Python detects an empty exit set faster. A NaN
        # is never the largest, or is the first: then numpy decides below.
        if rows == 1 and answer is not None:
            leaving = int(confidence.item() >= self._thresholds[index])
            return StageStep(result, _ONE_ROW[leaving], leaving)
        if answer is None or max(confidence.tolist(), default=0.0) < self._thresholds[index]:
            return StageStep(result, uniform(rows, value=False), 0)
        exited = leaves(confidence, self._at_least[index])
        return StageStep(result, exited, exited.tolist().count(True))

    def run(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
        """Run one batch to its end; yield the rows that leave as they leave."""
        batch = slot.upload(tensors)
        rows = all_rows(len(batch))
        for index in range(len(self._stages)):
            (answer, confidence, carry), exited, leaving = self.step(slot, index, batch)
            if carry is None or 0 < leaving == len(rows):
                assert answer is not None
                yield Departure(index, rows, answer, confidence)
                return
            batch = carry
            if leaving:
                assert answer is not None
                (left,) = exited.nonzero()
                yield Departure(index, rows[left], answer[left], confidence[left])
                (staying,) = (~exited).nonzero()
                rows, batch = rows[staying], slot.select(batch, staying)

    def warm_up(self, slot: Slot, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Run one batch through every stage; no row leaves. This allocates memory for its size.

        BackendError if a stage fails, or its answer does not have the model's form.
        """
        batch = slot.upload(tensors)
        for spec, stage in zip(self.plan.stages, self._stages, strict=True):
            result = slot.run(stage, batch)
            _check_form(spec, result, len(batch))
            if result.carry is not None:
                batch = result.carry


def _check_form(spec: StageSpec, result: StageResult, rows: int) -> None:
    """Raise BackendError if an answer has a shape or dtype that later code does not expect."""
    answer, confidence, _ = result
    if answer is None:
        return
    shape, dtype = (rows, *answer.shape[1:]), str(answer.dtype)
    if spec.bundle is not None:
        (output,) = spec.bundle.manifest.outputs
        sizes = zip(output.shape[1:], answer.shape[1:], strict=False)
        fixed = (size if isinstance(size, int) else found for size, found in sizes)
        shape, dtype = (rows, *fixed), output.dtype
    form = f"{dtype} {list(shape)} with confidences float32 {[rows]}"
    found = (
        f"{answer.dtype} {list(answer.shape)} with confidences "
        f"{confidence.dtype} {list(confidence.shape)}"
    )
    if found != form:
        raise BackendError(
            f"stage {spec.index} answers {rows} rows with {found}, expected {form}; "
            "compile the model again"
        )


def zeros(manifest: Manifest, batch_size: int) -> dict[str, NDArray[Any]]:
    """Return a batch of zeros with the shapes of the calibration data."""
    shapes: Mapping[str, Sequence[int]] = manifest.calibration.sample_shapes
    return {t.name: np.zeros((batch_size, *shapes[t.name]), t.dtype) for t in manifest.inputs}
