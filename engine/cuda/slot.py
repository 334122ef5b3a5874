"""A slot on a GPU: one stream, its buffers and what runs the stages (PAME 4.2).

::

    upload   pinned memory → input area 0
    run      the stage (a CUDA graph from the third time on), its end and the copy of its answer
             are enqueued; then the host waits, with the GIL released, for all of it
    select   nothing, where the stage end found the same survivors: it has brought them to the
             other input area already; else a gather
    buffer     to memory of its own, and waits, so that any slot may join it at once
    join     into an input area

The stage end (``engine/kernels/stage_end.cu``) writes confidences, survivors and their number
to pinned memory; but for these and the answer nothing comes to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Rows, StageResult, TensorBatch
from offramp.engine.cuda.arena import Arena
from offramp.engine.cuda.batch import BufferedBatch, CudaBatch
from offramp.engine.cuda.buffering import ParkingPool
from offramp.engine.cuda.driver import DeviceLostError, DeviceMemoryError, Driver
from offramp.engine.cuda.executable import ExecutableFactory, SlotResources
from offramp.engine.cuda.kernels import DeviceKernels
from offramp.engine.cuda.layout import Layout, Layouts, Placed
from offramp.engine.cuda.moves import Moves, Queue
from offramp.engine.cuda.opened import OpenStages
from offramp.engine.cuda.runs import StageRun, StageRuns, scratch_of
from offramp.engine.cuda.stages import CudaStage, StageFacts, StageRegistry
from offramp.engine.errors import BackendError
from offramp.engine.exit_check import confidence_of

REMEDY = "lower --streams or --max-batch-size"
"""Where memory is short."""
_MOST_LAYOUTS = 4096
"""With inputs of many lengths there is no end of them."""
_EMPTY = np.empty(0, np.float32)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all slots of a backend share."""

    driver: Driver
    factory: ExecutableFactory
    kernels: DeviceKernels
    stages: StageRegistry
    pool: ParkingPool
    graphs: bool
    """Whether stages are captured into CUDA graphs."""
    uncaptured: set[int] = field(default_factory=set)
    """Numbers of the stages of which it was said that they run without."""


class CudaSlot:
    """Runs stages on a stream of its own; see :class:`offramp.engine.backends.base.Slot`.

    A batch is void once its buffer is written again: by the next ``upload`` or ``join``, or two
    stages later. It raises then.
    """

    def __init__(self, shared: Shared, *, closed: Callable[[], None] = lambda: None) -> None:
        """Allocate all that the stages which are prepared need; the driver is current.

        Args:
            shared: With the other slots.
            closed: Called when it is closed.

        Raises:
            DeviceMemoryError: There is not so much; nothing is kept.
        """
        self._shared = shared
        self._driver = shared.driver
        self._on_closed = closed
        self._closed = False
        self._layouts = Layouts()
        self.arena = Arena(shared.driver, self._forget_addresses)
        """Its buffers; to be looked at only."""
        with ExitStack() as failed:
            failed.callback(self.arena.free)
            self.arena.open(shared.stages.needs())
            self._stream = shared.driver.stream()
            failed.callback(self._stream.close)
            self._event = shared.driver.event()
            failed.pop_all()
        self._queue = Queue(shared.driver, self._stream, self._event)
        self._moves = Moves(shared.driver, shared.kernels, self.arena, self._queue)
        self._runs = StageRuns(arena=self.arena, layouts=self._layouts, kernels=shared.kernels)
        self._open = OpenStages(
            registry=shared.stages,
            runs=self._runs,
            graphs=shared.graphs,
            resources=self._resources,
        )

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> CudaBatch:
        """Enqueue the inputs' way to the device; see :class:`Slot`."""
        with self._driver.current():
            try:
                return self._upload(tensors)
            except Exception as error:
                self._fail("the upload failed", error)

    def run(
        self, stage: CudaStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Execute; see :class:`Slot`.

        Args:
            stage: Prepared.
            batch: Of this slot.
            threshold: Instead of the stage's own, where it changed since the stage was prepared.
                Under another one than in force, survivors are taken out by a kernel more.
        """
        assert isinstance(batch, CudaBatch)
        facts = stage.facts
        if threshold is None:
            threshold = facts.spec.threshold
        with self._driver.current():
            try:
                return self._run(facts, batch, threshold)
            except Exception as error:
                self._fail(f"stage {facts.spec.index} failed on {batch.rows} rows", error)

    def select(self, batch: TensorBatch, rows: Rows) -> CudaBatch:
        """Keep the given rows; see :class:`Slot`."""
        assert isinstance(batch, CudaBatch)
        self._check(batch)
        if len(rows) == batch.rows:
            return batch
        if _were_brought(batch, self.arena, rows):
            return self._brought(batch, len(rows))
        with self._driver.current():
            try:
                return self._select(batch, rows)
            except Exception as error:
                self._fail(f"{len(rows)} of {batch.rows} rows could not be selected", error)

    def buffer(self, batch: TensorBatch, rows: Rows) -> BufferedBatch:
        """Copy the given rows to memory of their own, and wait; see :class:`Slot`."""
        assert isinstance(batch, CudaBatch)
        with self._driver.current():
            try:
                return self._buffer(batch, rows)
            except Exception as error:
                self._fail(f"{len(rows)} rows could not be buffered", error)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> CudaBatch:
        """Enqueue copies of buffered rows into an input area; see :class:`Slot`."""
        with self._driver.current():
            try:
                return self._join(parts)
            except Exception as error:
                self._fail("buffered rows could not be joined", error)

    def close(self) -> None:
        """Release everything, whatever goes wrong on the way; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self.arena.growths:
            self._shared.stages.remember(self.arena.sizes)
        with ExitStack() as releases:  # last in, first out
            releases.callback(self._on_closed)  # even if the device cannot be reached any more
            releases.enter_context(self._driver.current())
            releases.callback(self._shared.stages.sweep)
            releases.callback(self.arena.free)
            releases.callback(self._stream.close)
            releases.callback(self._event.close)
            releases.callback(self._open.close)
            releases.callback(self._queue.settle_quietly)

    # The steps; the driver is current.

    def _upload(self, tensors: Mapping[str, NDArray[Any]]) -> CudaBatch:
        self._tidy()
        self._queue.settle()  # the upload before may still be read
        device_dtype, arena = self._shared.factory.device_dtype, self.arena
        arrays = sorted(tensors.items())  # whatever order a client sends them in
        row = tuple((n, device_dtype(array.dtype), array.shape[1:]) for n, array in arrays)
        rows = len(arrays[0][1])
        layout = self._layouts.of(row, rows)
        arena.grow(arena.uploads, layout.size_bytes)
        batch = self._overwrite(0, layout, rows)
        for placed, (_, array) in zip(layout.tensors, arrays, strict=True):
            _fill(arena.uploads.array, placed, array)
        self._queue.pending = True
        sent = arena.uploads.array[: layout.size_bytes]
        self._driver.copy_in(arena.inputs[0].address, sent, self._stream)
        return batch

    def _run(self, facts: StageFacts, batch: CudaBatch, threshold: float) -> StageResult:
        self._check(batch)
        stage = self._open.of(facts)
        batch = self._placed(batch)
        run = self._runs.of(stage, batch)
        carry = self._carry(run, batch)
        self._enqueue(run, threshold)
        self._wait(run)
        if carry is not None and run.compacts:
            carry.survivors = run.survivors[: run.survivor_count[0]].copy()
        if run.answer is None:
            return StageResult(None, _EMPTY, carry)
        answer = run.answer.copy()
        if facts.check is None:
            return StageResult(answer, confidence_of(answer, facts.spec.form), carry)
        return StageResult(answer, run.confidence.copy(), carry)

    def _enqueue(self, run: StageRun, threshold: float) -> None:
        """Everything from the stage to its answer."""
        driver, stream, has_check = self._driver, self._stream, run.stage.facts.check is not None
        self._queue.pending = True
        if has_check and not self.arena.scratch_is_clear:
            driver.clear(*scratch_of(self.arena), stream)
            self.arena.scratch_is_clear = True
        if run.graph is None:
            number = run.number if run.times == 1 and run.stage.graphs else None
            run.stage.executable.enqueue(run.shapes, run.addresses, stream, graph=number)
        else:
            run.graph.launch(stream)
        for copy in run.copies:
            driver.copy_within(*copy, stream)
        if has_check:
            self._shared.kernels.launch(self._runs.end_of(run, threshold), stream)
        if run.answer is not None:
            driver.copy_out(run.answer_bytes, run.answer_address, stream)

    def _wait(self, run: StageRun) -> None:
        """For a stage; when it ran for the second time, its graph is captured."""
        self._queue.record()
        self._queue.wait()
        if run.graph is None:
            run.times += 1
            if run.times == 2 and run.stage.graphs:
                self._capture(run)

    def _capture(self, run: StageRun) -> None:
        """Right after it ran with these very shapes, as TensorRT asks, and is at rest again."""
        stage, stream = run.stage, self._stream

        def enqueue() -> None:
            stage.executable.enqueue(run.shapes, run.addresses, stream, graph=run.number)

        run.graph = self._driver.capture(stream, enqueue)
        if run.graph is None:
            stage.graphs = False
            stage.executable.forget(run.number)
            self._say_uncaptured(stage.facts, run.rows)

    def _say_uncaptured(self, facts: StageFacts, rows: int) -> None:
        """Once a stage, though every slot tries."""
        if facts.number not in self._shared.uncaptured:
            self._shared.uncaptured.add(facts.number)
            logger.warning(
                "Stage %d could not be captured into a CUDA graph with %d rows: where that fails, "
                "it runs without graphs from then on, whatever the batch size",
                facts.spec.index,
                rows,
            )

    def _carry(self, run: StageRun, batch: CudaBatch) -> CudaBatch | None:
        """What goes on after a stage; voids what lies in the buffers that the stage writes."""
        outputs = self.arena.outputs
        version = outputs.replace()
        if run.carried is None:
            return None
        region = self.arena.inputs[run.target]
        brought = region.replace()
        direct = run.stage.facts.spec.answer is None
        passed = batch.stamps if run.passes else ()
        return CudaBatch(
            owner=self,
            rows=run.rows,
            layout=run.carried,
            area=run.target,
            addresses=run.targets if direct else run.sources,
            home=run.targets,
            stamps=((region, brought),) if direct else ((outputs, version), *passed),
            placed=direct,
            brought=brought,
        )

    def _select(self, batch: CudaBatch, rows: Rows) -> CudaBatch:
        area = 1 - batch.area if batch.placed else batch.area
        chosen = self._overwrite(area, batch.layout, len(rows))
        self._moves.gather(
            batch.layout, batch.addresses, chosen.home, source_rows=batch.rows, rows=rows
        )
        return chosen

    def _placed(self, batch: CudaBatch) -> CudaBatch:
        """The whole batch in its input area."""
        if batch.placed:
            return batch
        survivors = batch.survivors
        if survivors is not None and len(survivors) == batch.rows and _is_kept(batch, self.arena):
            return self._brought(batch, batch.rows)
        placed = self._overwrite(batch.area, batch.layout, batch.rows)
        self._moves.copy(batch.layout, batch.addresses, placed.home, batch.rows)
        return placed

    def _buffer(self, batch: CudaBatch, rows: Rows) -> BufferedBatch:
        self._check(batch)
        layout = self._layouts.of(batch.layout.row, len(rows))
        buffered = BufferedBatch(
            pool=self._shared.pool,
            rows=len(rows),
            layout=layout,
            memory=self._shared.pool.take(layout.size_bytes),
            area=batch.area,
            capacity=batch.layout.capacity,
        )
        targets = layout.addresses(buffered.memory.address)
        if len(rows) == batch.rows:
            self._moves.copy(layout, batch.addresses, targets, len(rows))
        elif _were_brought(batch, self.arena, rows):
            self._moves.copy(layout, batch.home, targets, len(rows))
        else:
            self._moves.gather(layout, batch.addresses, targets, source_rows=batch.rows, rows=rows)
        self._queue.settle()
        return buffered

    def _join(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> CudaBatch:
        self._tidy()
        buffered = [(self._own_buffered(batch), rows) for batch, rows in parts]
        first, total = buffered[0][0], sum(len(rows) for _, rows in buffered)
        row = first.layout.row
        if other := next((b.layout.row for b, _ in buffered if b.layout.row != row), None):
            raise BackendError(f"rows of different tensors cannot be joined: {row}, {other}")
        layout = self._layouts.of(row, max(first.capacity, total))
        joined = self._overwrite(first.area, layout, total)
        numbers = self._moves.send([rows for batch, rows in buffered if len(rows) < batch.rows])
        self._queue.held += (batch for batch, _ in buffered)  # not before: sending may wait
        targets = joined.home
        for batch, rows in buffered:
            sources = batch.layout.addresses(batch.memory.address)
            if len(rows) == batch.rows:
                self._moves.copy(layout, sources, targets, len(rows))
            else:
                self._moves.gather(
                    layout, sources, targets, source_rows=batch.rows, rows=rows, numbers=numbers
                )
                numbers += 4 * len(rows)
            targets = tuple(
                address + len(rows) * tensor.row_bytes
                for address, tensor in zip(targets, layout.tensors, strict=True)
            )
        return joined

    # What is where.

    def _overwrite(self, area: int, layout: Layout, rows: int) -> CudaBatch:
        """A batch that is about to be written into an input area; voids what lies there."""
        region = self.arena.inputs[area]
        self.arena.grow(region, layout.size_bytes)
        region.replace()
        return self._in_area(area, layout, rows, layout.addresses(region.address))

    def _brought(self, batch: CudaBatch, rows: int) -> CudaBatch:
        """The rows that the stage end brought to the input area."""
        return self._in_area(batch.area, batch.layout, rows, batch.home)

    def _in_area(
        self, area: int, layout: Layout, rows: int, addresses: tuple[int, ...]
    ) -> CudaBatch:
        region = self.arena.inputs[area]
        return CudaBatch(
            owner=self,
            rows=rows,
            layout=layout,
            area=area,
            addresses=addresses,
            home=addresses,
            stamps=((region, region.version),),
        )

    def _check(self, batch: CudaBatch) -> None:
        if batch.owner is not self:
            raise BackendError("a batch of another slot was used; only buffered ones can be joined")
        if not batch.valid:
            raise BackendError("a batch was used after its buffer was written again")

    def _own_buffered(self, batch: TensorBatch) -> BufferedBatch:
        if not isinstance(batch, BufferedBatch) or batch.pool is not self._shared.pool:
            raise BackendError("only buffered batches of the same backend can be joined")
        return batch

    def _resources(self) -> SlotResources:
        return SlotResources(
            driver=self._driver,
            stream=self._stream,
            scratch_address=self.arena.scratch.address,
            scratch_bytes=self.arena.scratch.size_bytes,
        )

    # Order.

    def _tidy(self) -> None:
        """Let go of stages that nobody can run any more, and of layouts without end."""
        if len(self._layouts) > _MOST_LAYOUTS:
            self._forget_addresses()
            self._layouts.clear()
        if self._open.has_dropped():
            self._queue.settle()
            self._open.close_dropped()

    def _forget_addresses(self) -> None:
        """Before a buffer moves."""
        self._queue.settle()
        self._runs.clear()

    def _fail(self, what: str, error: Exception) -> NoReturn:
        """Bring the slot into order after an error, and raise ours."""
        self.arena.scratch_is_clear = False  # a stage end that was cut short leaves its counters
        self._queue.settle_quietly()
        if not isinstance(error, BackendError) or isinstance(error, DeviceLostError):
            raise error
        remedy = f": {REMEDY}" if isinstance(error, DeviceMemoryError) else ""
        raise BackendError(f"{what}: {error}{remedy}") from error


def _fill(memory: NDArray[np.uint8], placed: Placed, array: NDArray[Any]) -> None:
    """Put an array into an upload, in the type that it has on the device.

    Raises:
        BackendError: Its integers do not fit that type.
    """
    target = memory[placed.offset : placed.offset + len(array) * placed.row_bytes]
    if placed.dtype != array.dtype and placed.dtype.kind in "iu" and array.size:
        limits = np.iinfo(placed.dtype)
        if not limits.min <= array.min() <= array.max() <= limits.max:
            raise BackendError(
                f"{placed.name}: values {array.min()} to {array.max()} do not fit {placed.dtype}, "
                f"which the engine takes for {array.dtype}"
            )
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite there
        np.copyto(target.view(placed.dtype).reshape(array.shape), array, casting="same_kind")


def _is_kept(batch: CudaBatch, arena: Arena) -> bool:
    """Whether what the stage end brought to the input area is still there."""
    return batch.brought == arena.inputs[batch.area].version


def _were_brought(batch: CudaBatch, arena: Arena, rows: Rows) -> bool:
    """Whether the stage end brought just these rows to the input area."""
    survivors = batch.survivors
    if survivors is None or len(survivors) != len(rows) or not _is_kept(batch, arena):
        return False
    return bool((survivors == rows).all())
