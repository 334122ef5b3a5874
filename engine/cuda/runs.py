"""The open stages of a slot, and all that can be known before a stage runs on so many rows.

Between two stages the host only looks a :class:`StageRun` up; addresses, shapes, the arguments of
the stage end and, after the second time, the CUDA graph are in it.
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

from offramp.engine.cuda.batch import CudaBatch, Layout, Layouts, Row, RowPart, row_bytes
from offramp.engine.cuda.driver import Driver, Graph, Stream
from offramp.engine.cuda.executable import Executable, Shape, SlotResources
from offramp.engine.cuda.memory import Arena
from offramp.engine.cuda.stages import StageFacts, StageRegistry
from offramp.engine.cuda.stream import DeviceKernels, row_copies
from offramp.engine.errors import BackendError
from offramp.engine.kernels.arguments import MOST_TENSORS, ExitCheck, Launch, stage_end

MOST_RUNS = 1024
"""Of a slot; with inputs of many lengths there is no end of them, and a graph takes memory.
The one that was not used for longest gives way to a new one."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStage:
    """A stage with what runs it in one slot."""

    facts: StageFacts
    executable: Executable
    graphs: bool
    """Whether to capture it; not any more once that failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class StageRun:
    """A stage's run on so many rows of a shape at certain addresses, worked out once."""

    stage: OpenStage
    number: int
    """Of the graph, for what it is captured from; never used twice in a slot."""
    rows: int
    shapes: dict[str, Shape]
    addresses: dict[str, int]
    """Of the batch's tensors, and of what the stage gives."""
    carried: Layout | None
    """Of what goes on, in the next input area; ``None`` after the last stage."""
    target: int
    targets: tuple[int, ...]
    """Addresses of what goes on there."""
    sources: tuple[int, ...]
    """Addresses of what goes on, before rows are taken out."""
    passes: bool
    """Whether some of it are inputs that pass through."""
    copies: tuple[tuple[int, int, int], ...]
    """(target, source, bytes) of inputs that pass through, where nobody can exit."""
    compacts: bool
    """Whether the stage end brings what goes on to the next input area."""
    answer: NDArray[Any] | None
    """[rows, classes], in pinned memory."""
    answer_bytes: NDArray[np.uint8]
    answer_address: int
    confidence: NDArray[np.float32]
    """[rows], in pinned memory, as the next two."""
    survivors: NDArray[np.int32]
    """[rows], of which as many are valid as there are."""
    survivor_count: NDArray[np.int32]
    """[1]."""
    times: int = 0
    """How often it was run without a graph."""
    graph: Graph | None = None
    threshold: float = -1.0
    end: Launch | None = None
    """The launch after the stage."""

    def enqueue(self, stream: Stream, graph: int | None) -> None:
        """Enqueue the stage; with a graph's number, to be captured into it."""
        self.stage.executable.enqueue(self.shapes, self.addresses, stream, graph=graph)

    def capture(self, driver: Driver, stream: Stream) -> bool:
        """Make the graph, and say whether it could be made; if not, the stage does without.

        To be called right after the stage ran with these very shapes, as TensorRT asks, and is at
        rest again.
        """
        self.graph = driver.capture(stream, lambda: self.enqueue(stream, self.number))
        if self.graph is None:
            self.stage.graphs = False
            self.stage.executable.forget(self.number)
        return self.graph is not None

    def release(self) -> None:
        """Close the graph, and let go of what it was captured from; the host has waited."""
        graph, self.graph = self.graph, None
        with ExitStack() as releases:  # last in, first out
            if self.times:  # before, it was not prepared for a graph
                releases.callback(self.stage.executable.forget, self.number)
            if graph is not None:
                releases.callback(graph.close)


@dataclass(slots=True, kw_only=True)
class StageRuns:
    """The stage runs of a slot, made when first needed."""

    arena: Arena
    layouts: Layouts
    kernels: DeviceKernels
    _made: OrderedDict[tuple[int, Layout, int, int], StageRun] = field(default_factory=OrderedDict)
    """What was used last comes last."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def of(self, stage: OpenStage, batch: CudaBatch) -> StageRun:
        """Tell how to run a stage on a batch in an input area; BackendError if it does not take it.

        The host has waited for all that was run before.
        """
        key = (stage.facts.number, batch.layout, batch.rows, batch.area)
        run = self._made.get(key)
        if run is None:
            run = self._make(stage, batch)
            while len(self._made) >= MOST_RUNS:
                _, oldest = self._made.popitem(last=False)
                oldest.release()
            self._made[key] = run
        else:
            self._made.move_to_end(key)
        return run

    @property
    def graphs(self) -> int:
        """How many of them have a graph."""
        return sum(run.graph is not None for run in self._made.values())

    def clear(self) -> None:
        """Forget all, with their graphs; the host has waited for them."""
        made, self._made = self._made, OrderedDict()
        _release(list(made.values()))

    def forget(self, stage: OpenStage) -> None:
        """Forget those of a stage; the host has waited for them."""
        gone = [key for key, run in self._made.items() if run.stage is stage]
        _release([self._made.pop(key) for key in gone])

    def end_of(self, run: StageRun, threshold: float) -> Launch:
        """Make the launch after a stage; its threshold may change from batch to batch."""
        if run.end is None or run.threshold != threshold:
            run.end, run.threshold = self._end(run, threshold), threshold
        return run.end

    def _make(self, stage: OpenStage, batch: CudaBatch) -> StageRun:
        spec, prepared = stage.facts.spec, stage.facts.prepared
        _check(stage.facts, batch)
        tensors = batch.layout.tensors
        shapes = {t.name: (batch.rows, *t.sample_shape) for t in tensors}
        inputs = dict(zip(shapes, batch.addresses, strict=True))
        given = _given_rows(stage, shapes)
        carried = self._carried(stage.facts, batch, given)
        # Where nobody can exit, what goes on is written to where it goes.
        direct = spec.answer is None
        beside = {n: row for n, row in given.items() if not (direct and n in stage.facts.given)}
        outputs = self.layouts.of(tuple(beside.values()), prepared.max_rows)
        target = 1 - batch.area
        answer_bytes = batch.rows * row_bytes(*given[spec.answer][1:]) if spec.answer else 0
        self._reserve(prepared.max_rows, target, carried, outputs, answer_bytes)

        addresses = dict(zip(beside, outputs.addresses(self.arena.outputs.address), strict=True))
        targets = _addresses(carried, self.arena.inputs[target].address)
        if direct:
            addresses |= {name: targets[name] for name in stage.facts.given}
        addresses = {**inputs, **addresses}
        passed = [name for name in targets if name not in stage.facts.given]
        answer = self.arena.answers.array[:answer_bytes]
        confidence, survivors, survivor_count = self.arena.by_row.views(batch.rows)
        return StageRun(
            stage=stage,
            number=next(self._numbers),
            rows=batch.rows,
            shapes=shapes,
            addresses=addresses,
            carried=carried,
            target=target,
            targets=tuple(targets.values()),
            sources=tuple(addresses[name] for name in targets),
            passes=bool(passed),
            copies=tuple(
                (targets[t.name], inputs[t.name], batch.rows * t.row_bytes)
                for t in tensors
                if direct and t.name in passed
            ),
            compacts=stage.facts.check is not None and 0 < len(targets) <= MOST_TENSORS,
            answer=_view(answer, given[spec.answer], batch.rows) if spec.answer else None,
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
            raise BackendError(f"{', '.join(lacking)} shall go on, but it is not there")
        row: Row = tuple(there[name] for name in facts.spec.carried)
        return self.layouts.of(row, facts.prepared.max_rows)

    def _reserve(
        self, rows: int, target: int, carried: Layout | None, outputs: Layout, answer_bytes: int
    ) -> None:
        """Have room, also for larger samples than were foreseen."""
        self.arena.grow_rows(rows)
        self.arena.grow(self.arena.outputs, outputs.size_bytes)
        self.arena.grow(self.arena.answers, answer_bytes)
        if carried is not None:
            self.arena.grow(self.arena.inputs[target], carried.size_bytes)

    def _end(self, run: StageRun, threshold: float) -> Launch:
        check, by_row = run.stage.facts.check, self.arena.by_row
        assert check is not None
        compacted = run.carried if run.compacts else None
        return stage_end(
            ExitCheck(kind=check.kind, channels=check.channels, threshold=threshold),
            rows=run.rows,
            scores=run.addresses[check.scores],
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
    """Handles that were gone when this slot looked last."""

    def of(self, facts: StageFacts) -> OpenStage:
        """Give what runs a stage here; the first time it is made, if it can be."""
        stage = self._open.get(facts.number)
        if stage is None:
            self._reserve_scratch(facts)
            executable = self.registry.open(facts, self.resources())
            graphs = self.graphs and facts.prepared.capturable
            stage = OpenStage(facts=facts, executable=executable, graphs=graphs)
            self._open[facts.number] = stage
        return stage

    def has_dropped(self) -> bool:
        """Whether stages are gone since :meth:`close_dropped` was called last."""
        return self.registry.drops != self._drops

    def close_dropped(self) -> None:
        """Let go of what nobody can run any more; the host has waited for all work."""
        self._drops = self.registry.drops
        for stage in [s for s in self._open.values() if self.registry.is_dropped(s.facts)]:
            self.runs.forget(stage)
            del self._open[stage.facts.number]
            self.registry.close(stage.facts, stage.executable)
        self.registry.sweep()

    def close(self) -> None:
        """Close all, whatever goes wrong on the way; the host has waited for all work."""
        stages, self._open = list(self._open.values()), {}
        with ExitStack() as releases:
            for stage in stages:
                releases.callback(self.registry.close, stage.facts, stage.executable)
            releases.callback(self.runs.clear)

    def _reserve_scratch(self, facts: StageFacts) -> None:
        """Executables keep its address for life: if it moves, all of them go, and come back."""
        scratch = self.runs.arena.scratch
        if facts.prepared.scratch_bytes > scratch.size_bytes:
            self.runs.arena.settle()
            self.close()
            self.runs.arena.grow(scratch, self.registry.needs().scratch_bytes)


def _release(runs: list[StageRun]) -> None:
    with ExitStack() as releases:  # whatever goes wrong on the way
        for run in runs:
            releases.callback(run.release)


def _check(facts: StageFacts, batch: CudaBatch) -> None:
    """Check that a stage takes a batch; BackendError if it does not."""
    prepared, there = facts.prepared, {name: dtype for name, dtype, _ in batch.layout.row}
    if batch.rows > prepared.max_rows:
        raise BackendError(
            f"it takes at most {prepared.max_rows} rows: lower --max-batch-size, or build its "
            f"engines for larger batches"
        )
    for tensor in prepared.inputs:
        if tensor.name not in there:
            raise BackendError(f"it reads {tensor.name}, the batch has {', '.join(there)}")
        if there[tensor.name] != tensor.dtype:
            raise BackendError(
                f"it reads {tensor.name} as {tensor.dtype}, the batch has {there[tensor.name]}"
            )


def _given_rows(stage: OpenStage, shapes: dict[str, Shape]) -> dict[str, RowPart]:
    """Tell what a row of each output is; the stage has to take such inputs."""
    rows = next(iter(shapes.values()))[0]
    given = stage.executable.output_shapes(shapes)
    for name, shape in given.items():
        if shape[0] != rows:
            raise BackendError(f"it gives {name} {list(shape)} for {rows} rows")
    return {
        tensor.name: (tensor.name, tensor.dtype, tuple(given[tensor.name][1:]))
        for tensor in stage.facts.prepared.outputs
    }


def _addresses(layout: Layout | None, base: int) -> dict[str, int]:
    return {} if layout is None else {t.name: base + t.offset for t in layout.tensors}


def _view(pinned: NDArray[np.uint8], row: RowPart, rows: int) -> NDArray[Any]:
    _, dtype, sample_shape = row
    return pinned.view(dtype).reshape(rows, *sample_shape)
