"""The open stages of a slot, and all facts known before a stage runs on a number of rows.

Between two stages the host only looks up a :class:`.execution.StageRun`, which has the addresses,
the arguments of the stage end and all copies.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.batch_sizes import padded
from offramp.engine.cuda.device_batch import CudaBatch, Layout, Layouts, Row, RowPart, row_bytes
from offramp.engine.cuda.executable import PreparedStage, Shape, SlotResources
from offramp.engine.cuda.execution import Execution, OpenStage, StageRun
from offramp.engine.cuda.memory import Arena
from offramp.engine.cuda.prepared_stages import StageFacts, StageRegistry
from offramp.engine.cuda.stream import DeviceKernels, row_copies
from offramp.engine.kernels.kernel_arguments import MOST_TENSORS, ExitCheck, Launch, stage_end

MOST_EXECUTIONS = 1024
"""Largest number of executions of a slot: inputs of variable length have unlimited shapes, and a
graph takes memory. The least recently used one is replaced."""


@dataclass(slots=True, kw_only=True)
class StageRuns:
    """All :class:`.StageRun` of a slot, each made when it is first needed."""

    arena: Arena
    layouts: Layouts
    kernels: DeviceKernels
    _made: OrderedDict[tuple[int, Layout, int, int], Execution] = field(default_factory=OrderedDict)
    """Executions by stage, layout, padded rows and area, in order of last use."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def of(self, stage: OpenStage, batch: CudaBatch) -> StageRun:
        """Return the run of a stage on a batch in an input area.

        BackendError if the stage does not take the batch. The host has waited for all earlier work.
        """
        rows = _rows_of(stage.facts.prepared, batch)
        key = (stage.facts.number, batch.layout, rows, batch.area)
        execution = self._made.get(key)
        if execution is None:
            execution = self._execution(stage, batch, rows)
            while len(self._made) >= MOST_EXECUTIONS:
                _, oldest = self._made.popitem(last=False)
                oldest.release()
            self._made[key] = execution
        else:
            self._made.move_to_end(key)
        run = execution.runs.get(batch.rows)
        if run is None:
            run = execution.runs[batch.rows] = self._run(execution, batch)
        return run

    @property
    def graphs(self) -> int:
        """Number of CUDA graphs of these runs."""
        return sum(execution.graph is not None for execution in self._made.values())

    def clear(self) -> None:
        """Release all runs, with their CUDA graphs; the host has waited for them."""
        made, self._made = self._made, OrderedDict()
        _release(list(made.values()))

    def forget(self, stage: OpenStage) -> None:
        """Release the runs of a stage; the host has waited for them."""
        gone = [key for key, execution in self._made.items() if execution.stage is stage]
        _release([self._made.pop(key) for key in gone])

    def end_of(self, run: StageRun, threshold: float) -> Launch:
        """Return the kernel launch after a stage; its threshold may change with every batch."""
        if run.end is None or run.threshold != threshold:
            run.end, run.threshold = self._end(run, threshold), threshold
        return run.end

    def _execution(self, stage: OpenStage, batch: CudaBatch, rows: int) -> Execution:
        facts, spec, prepared = stage.facts, stage.facts.spec, stage.facts.prepared
        _check(facts, batch)
        shapes = {t.name: (rows, *t.sample_shape) for t in batch.layout.tensors}
        inputs = dict(zip(shapes, batch.addresses, strict=True))
        given = _given_rows(stage, shapes)
        carried = self._carried(facts, batch, given)
        # Without an exit, carried tensors are written directly to their target.
        direct = spec.answer is None
        extra = {n: row for n, row in given.items() if not (direct and n in facts.given)}
        outputs = self.layouts.of(tuple(extra.values()), prepared.max_rows)
        target = 1 - batch.area
        answer_bytes = rows * row_bytes(*given[spec.answer][1:]) if spec.answer else 0
        self._reserve(prepared.max_rows, target, carried, outputs, answer_bytes)

        addresses = dict(zip(extra, outputs.addresses(self.arena.outputs.address), strict=True))
        targets = _addresses(carried, self.arena.inputs[target].address)
        if direct:
            addresses |= {name: targets[name] for name in facts.given}
        return Execution(
            stage=stage,
            number=next(self._numbers),
            rows=rows,
            shapes=shapes,
            addresses={**inputs, **addresses},
            given=given,
            carried=carried,
            targets=targets,
        )

    def _run(self, execution: Execution, batch: CudaBatch) -> StageRun:
        facts, spec, rows = execution.stage.facts, execution.stage.facts.spec, batch.rows
        addresses, targets = execution.addresses, execution.targets
        tensors = {tensor.name: tensor for tensor in batch.layout.tensors}
        direct = spec.answer is None
        passed = [name for name in targets if name not in facts.given]
        answer_row = execution.given[spec.answer] if spec.answer else None
        answer_bytes = rows * row_bytes(*answer_row[1:]) if answer_row else 0
        answer = self.arena.answers.array[:answer_bytes]
        confidence, survivors, survivor_count = self.arena.by_row.views(rows)
        return StageRun(
            execution=execution,
            rows=rows,
            target=1 - batch.area,
            targets=tuple(targets.values()),
            sources=tuple(addresses[name] for name in targets),
            passes=bool(passed),
            fills=tuple(
                _fill(addresses[t.name], tensors[t.name].row_bytes, rows, execution.rows)
                for t in facts.prepared.inputs
                if execution.rows > rows
            ),
            copies=tuple(
                (targets[name], addresses[name], rows * tensors[name].row_bytes)
                for name in passed
                if direct
            ),
            compacts=facts.check is not None and 0 < len(targets) <= MOST_TENSORS,
            answer=_view(answer, answer_row, rows) if answer_row else None,
            answer_bytes=answer,
            answer_address=addresses[spec.answer] if spec.answer else 0,
            confidence=confidence,
            survivors=survivors,
            survivor_count=survivor_count,
        )

    def _carried(
        self, facts: StageFacts, batch: CudaBatch, given: dict[str, RowPart]
    ) -> Layout | None:
        if facts.spec.final:
            return None
        there = {part[0]: part for part in batch.layout.row} | given
        lacking = [name for name in facts.spec.carried if name not in there]
        if lacking:
            raise BackendError(
                f"{', '.join(lacking)} must be passed on to the next stage, but is missing"
            )
        row: Row = tuple(there[name] for name in facts.spec.carried)
        return self.layouts.of(row, facts.prepared.max_rows)

    def _reserve(
        self, rows: int, target: int, carried: Layout | None, outputs: Layout, answer_bytes: int
    ) -> None:
        """Ensure that the slot's buffers suffice, also for samples larger than expected."""
        self.arena.grow_rows(rows)
        self.arena.grow(self.arena.outputs, outputs.size_bytes)
        self.arena.grow(self.arena.answers, answer_bytes)
        if carried is not None:
            self.arena.grow(self.arena.inputs[target], carried.size_bytes)

    def _end(self, run: StageRun, threshold: float) -> Launch:
        check, by_row = run.facts.check, self.arena.by_row
        assert check is not None
        compacted = run.execution.carried if run.compacts else None
        return stage_end(
            ExitCheck(kind=check.kind, classes=check.classes, threshold=threshold),
            rows=run.rows,
            scores=run.execution.addresses[check.scores],
            score_type=check.score_type,
            results=by_row.results,
            scratch=by_row.scratch,
            multiprocessors=self.kernels.multiprocessors,
            tensors=row_copies(compacted, run.sources, run.targets) if compacted else (),
        )


@dataclass(slots=True, kw_only=True)
class OpenStages:
    """The stages that are open in one slot; used by the slot's thread."""

    registry: StageRegistry
    runs: StageRuns
    graphs: bool
    resources: Callable[[], SlotResources]
    _open: dict[int, OpenStage] = field(default_factory=dict)
    _drops: int = 0
    """Number of dropped stages at this slot's last check."""

    def of(self, facts: StageFacts) -> OpenStage:
        """Return a stage's executable in this slot, made at the first call."""
        stage = self._open.get(facts.number)
        if stage is None:
            self._reserve_scratch(facts)
            executable = self.registry.open(facts, self.resources())
            graphs = self.graphs and facts.prepared.capturable
            stage = OpenStage(facts=facts, executable=executable, graphs=graphs)
            self._open[facts.number] = stage
        return stage

    def has_dropped(self) -> bool:
        """Return whether stages were dropped since the last :meth:`close_dropped`."""
        return self.registry.drops != self._drops

    def close_dropped(self) -> None:
        """Close stages that cannot be run any more; the host has waited for all work."""
        self._drops = self.registry.drops
        for stage in [s for s in self._open.values() if self.registry.is_dropped(s.facts)]:
            self.runs.forget(stage)
            del self._open[stage.facts.number]
            self.registry.close(stage.facts, stage.executable)
        self.registry.sweep()

    def close(self) -> None:
        """Close all stages, even if an error occurs; the host has waited for all work."""
        stages, self._open = list(self._open.values()), {}
        with ExitStack() as releases:
            for stage in stages:
                releases.callback(self.registry.close, stage.facts, stage.executable)
            releases.callback(self.runs.clear)

    def _reserve_scratch(self, facts: StageFacts) -> None:
        """Ensure that there is enough scratch memory for a stage.

        Executables keep its address, so all of them are reopened if it moves.
        """
        scratch = self.runs.arena.scratch
        if facts.prepared.scratch_bytes > scratch.size_bytes:
            self.runs.arena.settle()
            self.close()
            self.runs.arena.grow(scratch, self.registry.needs().scratch_bytes)


def _release(executions: list[Execution]) -> None:
    with ExitStack() as releases:  # even if an error occurs
        for execution in executions:
            releases.callback(execution.release)


def _rows_of(prepared: PreparedStage, batch: CudaBatch) -> int:
    """Return the number of rows, with padding, that are run; the buffers limit it."""
    if not prepared.pads:
        return batch.rows
    room = min(prepared.padding_limit(batch.rows), batch.layout.capacity)
    return padded(batch.rows, room) if batch.rows < room else batch.rows


def _fill(address: int, row_bytes: int, rows: int, padded_rows: int) -> tuple[int, int, int]:
    """Return the copy of the first rows to the place after the last row; the two never overlap."""
    return address + rows * row_bytes, address, (padded_rows - rows) * row_bytes


def _check(facts: StageFacts, batch: CudaBatch) -> None:
    """Raise BackendError if a stage does not take a batch."""
    prepared, there = facts.prepared, {name: dtype for name, dtype, _ in batch.layout.row}
    if batch.rows > prepared.max_rows:
        raise BackendError(
            f"the stage takes at most {prepared.max_rows} rows: lower --max-batch-size, or build "
            f"its engines for larger batches"
        )
    for tensor in prepared.inputs:
        if tensor.name not in there:
            raise BackendError(
                f"the stage reads tensor {tensor.name}, but the batch has {', '.join(there)}"
            )
        if there[tensor.name] != tensor.dtype:
            raise BackendError(
                f"the stage reads tensor {tensor.name} as {tensor.dtype}, but the batch has "
                f"{there[tensor.name]}"
            )


def _given_rows(stage: OpenStage, shapes: dict[str, Shape]) -> dict[str, RowPart]:
    """Return the row part of each output; BackendError if the stage does not take the inputs."""
    rows = next(iter(shapes.values()))[0]
    given = stage.executable.output_shapes(shapes)
    for name, shape in given.items():
        if shape[0] != rows:
            raise BackendError(f"the stage returns {name} {list(shape)} for {rows} rows")
    return {
        tensor.name: (tensor.name, tensor.dtype, tuple(given[tensor.name][1:]))
        for tensor in stage.facts.prepared.outputs
    }


def _addresses(layout: Layout | None, base: int) -> dict[str, int]:
    return {} if layout is None else {t.name: base + t.offset for t in layout.tensors}


def _view(pinned: NDArray[np.uint8], row: RowPart, rows: int) -> NDArray[Any]:
    _, dtype, sample_shape = row
    return pinned.view(dtype).reshape(rows, *sample_shape)
