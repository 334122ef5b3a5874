"""The slot of a GPU: one stream, its buffers and the executables of stages (PAME 4.2).

::

    upload   pinned memory → input area 0
    run      the stage (a CUDA graph from the third time on), its end and the copy of its answer
             are enqueued; then the host waits, with the GIL released, for all of them
    select   no work if the stage end found the same survivors: it has already copied them to the
             other input area; else a gather
    buffer   copies rows to their own memory, and waits, so that any slot may merge them
    merge    copies rows into an input area; rows of another device pass through the host

The stage end (``engine/kernels/stage_end.cu``) writes confidences, survivors and their number to
pinned memory; only these and the answer are copied to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.common.errors import BackendError, TensorsLostError
from offramp.engine.cuda.batch_sizes import padded
from offramp.engine.cuda.device_batch import BufferedRows, CudaBatch, Layout, Layouts
from offramp.engine.cuda.driver import DeviceLostError, DeviceMemoryError, Driver
from offramp.engine.cuda.executable import ExecutableFactory, SlotResources
from offramp.engine.cuda.execution import StageRun
from offramp.engine.cuda.memory import Arena, HostRegion, MemoryPool
from offramp.engine.cuda.prepared_stages import CudaStage, StageFacts, StageRegistry
from offramp.engine.cuda.runs import OpenStages, StageRuns
from offramp.engine.cuda.stream import DeviceKernels, SlotStream
from offramp.engine.kernels.kernel_arguments import Scratch
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch

REMEDY = "lower --streams or --max-batch-size"
_MOST_LAYOUTS = 4096
"""Largest number of layouts; inputs of variable length have unlimited shapes."""
_EMPTY = np.empty(0, np.float32)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBySlots:
    """Objects that all slots of a backend share."""

    driver: Driver
    factory: ExecutableFactory
    kernels: DeviceKernels
    stages: StageRegistry
    pool: MemoryPool
    graphs: bool
    uncaptured: set[int] = field(default_factory=set)
    """Numbers of the stages for which a missing graph has been logged."""


class CudaSlot:
    """Runs stages on its own stream: a :class:`offramp.engine.stages.backend_protocol.Slot`.

    A batch is invalid after its buffer is written again: by the next ``upload`` or ``merge``, or
    two stages later. Using it then raises an error. All memory that the prepared stages need is
    allocated at the start, while the driver is current; nothing is kept if it is short
    (DeviceMemoryError). ``closed`` is called when the slot is closed.
    """

    def __init__(self, shared: SharedBySlots, *, closed: Callable[[], None] = lambda: None) -> None:
        self._shared = shared
        self._driver = driver = shared.driver
        self._on_closed = closed
        self._closed = False
        self._layouts = Layouts()
        self.arena = Arena(driver, self._forget_addresses)
        """Buffers of the slot; read-only for others."""
        self._staging = HostRegion(driver)
        """Buffer between the host and another device."""
        with ExitStack() as failed:
            failed.callback(self.arena.free)
            self.arena.open(shared.stages.needs())
            self._stream = driver.stream()
            failed.callback(self._stream.close)
            self._event = driver.event()
            failed.pop_all()
        self._work = SlotStream(driver, shared.kernels, self.arena, self._stream, self._event)
        self._runs = StageRuns(arena=self.arena, layouts=self._layouts, kernels=shared.kernels)
        self._open = OpenStages(
            registry=shared.stages, runs=self._runs, graphs=shared.graphs, resources=self._resources
        )

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> CudaBatch:
        """Enqueue the copy of the inputs to the device, through pinned memory."""
        with self._at_work("the upload failed"):
            self._tidy()
            self._work.wait()  # the previous upload may still be read
            device_dtype, arena = self._shared.factory.device_dtype, self.arena
            arrays = sorted(tensors.items())  # independent of the client's order
            row = tuple((n, device_dtype(array.dtype), array.shape[1:]) for n, array in arrays)
            rows = len(arrays[0][1])
            room = padded(rows, max(rows, arena.by_row.rows))  # for padding
            layout = self._layouts.of(row, room)
            arena.grow(arena.uploads, layout.size_bytes)
            batch = self._overwrite(0, layout, rows)
            for placed, (_, array) in zip(layout.tensors, arrays, strict=True):
                placed.fill(arena.uploads.array, array)
            self._work.pending = True
            last = layout.tensors[-1]
            sent = arena.uploads.array[: last.offset + rows * last.row_bytes]
            self._driver.copy_in(arena.inputs[0].address, sent, self._stream)
            return batch

    def run(
        self, stage: CudaStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Execute a stage, its end and the copy of its answer, and wait for them.

        With a ``threshold`` other than the active one, an additional kernel removes leaving rows.
        """
        assert isinstance(batch, CudaBatch)
        facts = stage.facts
        with self._at_work("stage %d failed on %d rows", facts.spec.index, batch.rows):
            self._check(batch)
            open_stage = self._open.of(facts)
            batch = self._in_place(batch)
            run = self._runs.of(open_stage, batch)
            carry = self._carry(run, batch)
            self._enqueue(run, facts.spec.threshold if threshold is None else threshold)
            self._wait(run)
            return self._result(run, carry)

    def select(self, batch: TensorBatch, rows: Rows) -> CudaBatch:
        """Return a batch of the given rows; survivors that the stage end found need no copy."""
        assert isinstance(batch, CudaBatch)
        self._check(batch)
        if len(rows) == batch.rows:
            return batch
        if batch.was_copied(rows):
            return self._in_area(batch.area, batch.layout, len(rows), batch.home)
        with self._at_work("%d of %d rows could not be selected", len(rows), batch.rows):
            area = 1 - batch.area if batch.placed else batch.area
            chosen = self._overwrite(area, batch.layout, len(rows))
            self._work.gather(
                batch.layout, batch.addresses, chosen.home, source_rows=batch.rows, rows=rows
            )
            return chosen

    def buffer(self, batch: TensorBatch, rows: Rows) -> BufferedRows:
        """Copy the given rows to their own memory, and wait."""
        assert isinstance(batch, CudaBatch)
        with self._at_work("%d rows could not be buffered", len(rows)):
            self._check(batch)
            layout = self._layouts.of(batch.layout.row, len(rows))
            buffered = BufferedRows(
                pool=self._shared.pool,
                rows=len(rows),
                layout=layout,
                memory=self._shared.pool.take(layout.size_bytes),
                area=batch.area,
                capacity=batch.layout.capacity,
            )
            targets = layout.addresses(buffered.memory.address)
            if len(rows) == batch.rows:
                self._work.copy(layout, batch.addresses, targets, len(rows))
            elif batch.was_copied(rows):
                self._work.copy(layout, batch.home, targets, len(rows))
            else:
                self._work.gather(
                    layout, batch.addresses, targets, source_rows=batch.rows, rows=rows
                )
            self._work.wait()
            return buffered

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> CudaBatch:
        """Enqueue copies of buffered rows into an input area, part after part."""
        with self._at_work("buffered rows could not be merged"):
            self._tidy()
            buffered = [(self._on_this_device(batch), rows) for batch, rows in parts]
            first, total = buffered[0][0], sum(len(rows) for _, rows in buffered)
            row = first.layout.row
            if other := next((b.layout.row for b, _ in buffered if b.layout.row != row), None):
                raise BackendError(f"rows of different tensors cannot be merged: {row}, {other}")
            layout = self._layouts.of(row, max(first.capacity, total))
            merged = self._overwrite(first.area, layout, total)
            numbers = self._work.send([rows for batch, rows in buffered if len(rows) < batch.rows])
            self._work.held += (batch for batch, _ in buffered)  # only now: sending may wait
            targets = merged.home
            for batch, rows in buffered:
                sources = batch.layout.addresses(batch.memory.address)
                if len(rows) == batch.rows:
                    self._work.copy(layout, sources, targets, len(rows))
                else:
                    self._work.gather(
                        layout, sources, targets, source_rows=batch.rows, rows=rows, numbers=numbers
                    )
                    numbers += 4 * len(rows)
                targets = tuple(
                    address + len(rows) * tensor.row_bytes
                    for address, tensor in zip(targets, layout.tensors, strict=True)
                )
            return merged

    def download(self, batch: TensorBatch) -> dict[str, NDArray[Any]]:
        """Copy the tensors of a batch to the host, and wait."""
        assert isinstance(batch, CudaBatch)
        with self._at_work("%d rows could not be copied to the host", batch.rows):
            self._check(batch)
            self._work.wait()  # earlier work may still use the region
            self._staging.reserve(batch.layout.size_bytes)
            found = {}
            for tensor, address in zip(batch.layout.tensors, batch.addresses, strict=True):
                end = tensor.offset + batch.rows * tensor.row_bytes
                content = self._staging.array[tensor.offset : end]
                self._work.pending = True
                if content.size:
                    self._driver.copy_out(content, address, self._stream)
                found[tensor.name] = content.view(tensor.dtype).reshape(
                    (batch.rows, *tensor.sample_shape)
                )
            self._work.wait()
            return {name: array.copy() for name, array in found.items()}

    @property
    def graphs(self) -> int:
        """Number of CUDA graphs that the slot has captured."""
        return self._runs.graphs

    def wait(self) -> None:
        """Wait for all enqueued work; the slot's batches can be read then."""
        with self._at_work("waiting failed"):
            self._work.wait()

    def close(self) -> None:
        """Release everything, even if an error occurs; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self.arena.growths:
            self._shared.stages.remember(self.arena.sizes)
        with ExitStack() as releases:  # last in, first out
            releases.callback(self._on_closed)  # even if the device is lost
            releases.enter_context(self._driver.current())
            releases.callback(self._shared.stages.sweep)
            releases.callback(self.arena.free)
            releases.callback(self._staging.free)
            releases.callback(self._stream.close)
            releases.callback(self._event.close)
            releases.callback(self._open.close)
            releases.callback(self._work.wait_quietly)

    @contextmanager
    def _at_work(self, what: str, *numbers: int) -> Iterator[None]:
        """Work with the driver current; after an error, restore the slot's state.

        ``what`` is the beginning of the BackendError's message: a format string for ``numbers``.
        """
        with self._driver.current():
            try:
                yield
            except Exception as error:
                self.arena.by_row.scratch_is_clear = False  # a stage end may be incomplete
                self._work.wait_quietly()
                passed = isinstance(error, DeviceLostError | TensorsLostError)
                if passed or not isinstance(error, BackendError):
                    raise
                remedy = f": {REMEDY}" if isinstance(error, DeviceMemoryError) else ""
                raise BackendError(f"{what % numbers}: {error}{remedy}") from error

    # The steps of a stage.

    def _enqueue(self, run: StageRun, threshold: float) -> None:
        """Enqueue everything from the stage to its answer."""
        driver, stream, has_check = self._driver, self._stream, run.facts.check is not None
        by_row = self.arena.by_row
        self._work.pending = True
        if has_check and not by_row.scratch_is_clear:
            scratch = by_row.scratch
            driver.clear(scratch.address, Scratch.bytes_for(scratch.rows), stream)
            by_row.scratch_is_clear = True
        for fill in run.fills:
            driver.copy_within(*fill, stream)
        run.execution.enqueue(stream)
        for copy in run.copies:
            driver.copy_within(*copy, stream)
        if has_check:
            self._shared.kernels.launch(self._runs.end_of(run, threshold), stream)
        if run.answer is not None:
            driver.copy_out(run.answer_bytes, run.answer_address, stream)

    def _wait(self, run: StageRun) -> None:
        """Wait for a stage; after its second run, capture its graph."""
        self._work.wait()
        if not run.execution.was_run(self._driver, self._stream):
            self._say_uncaptured(run.facts, run.rows)

    def _result(self, run: StageRun, carry: CudaBatch | None) -> StageResult:
        """Copy the stage's results out of pinned memory."""
        facts = run.facts
        if carry is not None and run.compacts:
            carry.survivors = run.survivors[: run.survivor_count[0]].copy()
        if run.answer is None:
            return StageResult(None, _EMPTY, carry)
        answer = run.answer.copy()
        if facts.check is None:
            return StageResult(
                answer, confidence_of(answer, facts.spec.form, facts.spec.task), carry
            )
        return StageResult(answer, run.confidence.copy(), carry)

    def _say_uncaptured(self, facts: StageFacts, rows: int) -> None:
        """Log once for each stage that it has no graph; every slot tries to capture one."""
        if facts.number not in self._shared.uncaptured:
            self._shared.uncaptured.add(facts.number)
            logger.warning(
                "Stage %d could not be captured into a CUDA graph with %d rows; where that fails, "
                "it runs without CUDA graphs from then on, at all batch sizes",
                facts.spec.index,
                rows,
            )

    # Where batches are stored.

    def _carry(self, run: StageRun, batch: CudaBatch) -> CudaBatch | None:
        """Make the carried batch; invalidates batches in the buffers that the stage writes."""
        outputs = self.arena.outputs
        version = outputs.replace()
        carried = run.execution.carried
        if carried is None:
            return None
        region = self.arena.inputs[run.target]
        brought = (region, region.replace())
        direct = run.facts.spec.answer is None
        passed = batch.stamps if run.passes else ()
        return CudaBatch(
            owner=self,
            rows=run.rows,
            layout=carried,
            area=run.target,
            addresses=run.targets if direct else run.sources,
            home=run.targets,
            stamps=(brought,) if direct else ((outputs, version), *passed),
            placed=direct,
            brought=brought,
        )

    def _in_place(self, batch: CudaBatch) -> CudaBatch:
        """Copy the whole batch to its input area, if the batch is not there."""
        if batch.placed:
            return batch
        if batch.was_copied(None):
            return self._in_area(batch.area, batch.layout, batch.rows, batch.home)
        placed = self._overwrite(batch.area, batch.layout, batch.rows)
        self._work.copy(batch.layout, batch.addresses, placed.home, batch.rows)
        return placed

    def _overwrite(self, area: int, layout: Layout, rows: int) -> CudaBatch:
        """Make a batch to be written to an input area; invalidates the area's content."""
        region = self.arena.inputs[area]
        self.arena.grow(region, layout.size_bytes)
        region.replace()
        return self._in_area(area, layout, rows, layout.addresses(region.address))

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
            raise BackendError("a batch of another slot was used; only buffered ones can be merged")
        if not batch.valid:
            raise BackendError("a batch was used after its buffer was written again")

    def _on_this_device(self, batch: TensorBatch) -> BufferedRows:
        """Return buffered rows that this slot can copy; those of another device are fetched."""
        if not isinstance(batch, BufferedRows):
            raise BackendError("only buffered batches can be merged")
        if batch.pool is self._shared.pool:
            return batch
        size_bytes = batch.layout.size_bytes
        try:
            content = batch.pool.read(batch.memory, size_bytes)
        except DeviceLostError as error:  # of the other device only
            raise TensorsLostError(f"rows buffered on another GPU are lost: {error}") from error
        self._work.wait()  # earlier rows may still be read from the region
        self._staging.reserve(size_bytes)
        self._staging.array[:size_bytes] = content
        fetched = replace(batch, pool=self._shared.pool, memory=self._shared.pool.take(size_bytes))
        self._work.pending = True
        self._work.held.append(fetched)
        sent = self._staging.array[:size_bytes]
        self._driver.copy_in(fetched.memory.address, sent, self._stream)
        return fetched

    def _resources(self) -> SlotResources:
        return SlotResources(
            driver=self._driver,
            stream=self._stream,
            scratch_address=self.arena.scratch.address,
            scratch_bytes=self.arena.scratch.size_bytes,
        )

    def _tidy(self) -> None:
        """Close stages that cannot be run any more, and limit the number of layouts."""
        if len(self._layouts) > _MOST_LAYOUTS:
            self._forget_addresses()
            self._layouts.clear()
        if self._open.has_dropped():
            self._work.wait()
            self._open.close_dropped()
            self._shared.stages.sweep()

    def _forget_addresses(self) -> None:
        """Wait, and forget all runs: a buffer will move."""
        self._work.wait()
        self._runs.clear()
