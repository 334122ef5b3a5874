"""A slot that runs its stages in a worker, on tensors that lie in memory of both.

Each slot has a piece of shared memory, of which only the router says what is taken. Tensors that a
stage was given there, or gave there, are not copied again for the next one; parts are free again as
soon as no batch needs them. Where there is no room the slot takes more memory, and until it knows
how much a stage gives, the worker sends that inline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Rows, StageResult, TensorBatch
from offramp.engine.errors import BackendError, WorkerLostError
from offramp.engine.plan import StageSpec
from offramp.engine.remote.process import WorkerProcess
from offramp.engine.remote.transport import (
    ConnectionLostError,
    Frame,
    MemoryBlock,
    Regions,
    SharedMemory,
    TooLateError,
)
from offramp.engine.remote.wire import (
    ALIGNMENT,
    DTYPES,
    GIVEN,
    INLINE,
    Failed,
    FrameError,
    PlacedArray,
    RunStage,
    StageDone,
    TensorForm,
    aligned,
    array_in,
    decode,
    encode,
    inline_offsets,
)

FIRST_MEMORY: Final = 1 << 20
"""Bytes of shared memory that a slot begins with."""
FIRST_LIMIT_S: Final = 60.0
"""Limit of a stage that was never run: kernels are chosen, memory is allocated."""
LEAST_LIMIT_S: Final = 1.0
HANG_FACTOR: Final = 10.0
"""A stage that takes this many times longer than it ever took hangs."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RemoteStage:
    """A stage that workers load, by its number."""

    number: int
    spec: StageSpec
    document: str
    graph: bytes
    """Of a stage of no bundle."""
    row_bytes: float = 0.0
    """Most that a row of its results took in shared memory."""
    longest_s: float = 0.0
    """Longest run so far, that is over."""
    largest_bytes: int = 0
    """Most that it was given in one."""

    def observe(self, given_bytes: int, seconds: float) -> None:
        """Take note of a run."""
        self.longest_s = max(self.longest_s, seconds)
        self.largest_bytes = max(self.largest_bytes, given_bytes)

    def limit_s(self, given_bytes: int, least_s: float) -> float:
        """Seconds after which a run hangs: ten times the longest, more for more than ever."""
        if not self.largest_bytes:
            return max(FIRST_LIMIT_S, least_s)
        more = max(given_bytes / self.largest_bytes, 1.0)
        return max(HANG_FACTOR * more * self.longest_s, least_s)


@dataclass(slots=True)
class RemoteBatch:
    """Rows of named arrays; those of ``places`` are in ``memory``, in parts that are held."""

    tensors: Mapping[str, NDArray[Any]]
    rows: int
    memory: SharedMemory | None = None
    places: Mapping[str, int] = field(default_factory=dict)
    """Offsets, by name."""
    blocks: tuple[MemoryBlock, ...] = ()
    """Those parts, not taken by others as long as this lasts."""

    def __len__(self) -> int:
        return self.rows


class RemoteSlot:
    """A slot of one worker.

    ``load`` has the worker load a stage that it does not have yet; ``least_s`` is the least time
    that a stage is given; ``closed`` is called once the slot is.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        *,
        load: Callable[[WorkerProcess, RemoteStage], None],
        least_s: float = LEAST_LIMIT_S,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._load = load
        self._least_s = least_s
        self._closed = closed
        self._memory = SharedMemory.create(FIRST_MEMORY)
        self._regions = Regions(FIRST_MEMORY)
        self._given = True
        """Whether the worker has that memory."""
        try:
            self._number, self._connection = worker.open_slot(self._memory)
        finally:
            self._memory.close_fd()

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> RemoteBatch:
        """Take the arrays as they are; they are copied once a stage is run on them."""
        for name, array in tensors.items():
            if array.dtype not in DTYPES:
                raise BackendError(
                    f"tensor {name!r} of dtype {array.dtype} cannot be sent to a worker; serve "
                    "without workers"
                )
        return RemoteBatch(tensors, len(next(iter(tensors.values()))))

    def run(
        self, stage: RemoteStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Have the worker execute a stage.

        WorkerLostError if the worker ends, or hangs and was ended: the batch is as it was.
        """
        assert isinstance(batch, RemoteBatch)
        worker = self._worker
        if worker.lost:
            raise WorkerLostError(f"worker {worker.pid} was lost before")
        if stage.number not in worker.stages:
            self._load(worker, stage)
        room = int(stage.row_bytes * batch.rows) + ALIGNMENT if stage.row_bytes else 0
        batch, region = self._placed(batch, room)
        if not self._given:
            worker.give_memory(self._number, self._memory)
            self._given = True
        places, tensors = batch.places, batch.tensors
        arrays = tuple([PlacedArray(_form(n, a), places[n]) for n, a in tensors.items()])
        given_bytes = sum([array.nbytes for array in tensors.values()])
        where = (region.start, region.size_bytes) if region else (0, 0)
        header = encode(RunStage(stage.number, batch.rows, threshold, where, arrays))
        started_s = time.perf_counter()
        try:
            self._connection.send(header)
            frame = self._connection.receive(stage.limit_s(given_bytes, self._least_s))
            result = self._result(stage, _done(frame), frame, batch, region)
        except ConnectionLostError as error:
            raise worker.lose("") from error
        except (TooLateError, FrameError) as error:
            raise worker.lose(f"stage {stage.spec.index}: {error}") from error
        stage.observe(given_bytes, time.perf_counter() - started_s)
        return result

    def select(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Copy the given rows, unless they are all there are, to where the worker reads them."""
        assert isinstance(batch, RemoteBatch)
        if len(rows) == batch.rows:
            return batch
        forms = {
            name: TensorForm(name, array.dtype, (len(rows), *array.shape[1:]))
            for name, array in batch.tensors.items()
        }
        taken = self._room(forms)
        for name, array in batch.tensors.items():  # "clip", as "raise" copies twice
            array.take(rows, axis=0, out=taken.tensors[name], mode="clip")
        return taken

    def buffer(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Copy the given rows out of shared memory, for any slot."""
        assert isinstance(batch, RemoteBatch)
        kept = {name: array.take(rows, axis=0) for name, array in batch.tensors.items()}
        return RemoteBatch(kept, len(rows))

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> RemoteBatch:
        """Concatenate rows of the parts, in their order, where the worker reads them."""
        chosen = []
        for batch, rows in parts:
            assert isinstance(batch, RemoteBatch)
            whole = len(rows) == batch.rows
            tensors = batch.tensors.items()
            chosen.append({n: a if whole else a.take(rows, axis=0) for n, a in tensors})
        # A criterion whose function failed on a part has no state there, and begins anew.
        names = [name for name in chosen[0] if all(name in tensors for tensors in chosen)]
        count = sum(len(rows) for _, rows in parts)
        firsts = [(name, chosen[0][name]) for name in names]
        merged = self._room({n: TensorForm(n, a.dtype, (count, *a.shape[1:])) for n, a in firsts})
        for name in names:
            np.concatenate([tensors[name] for tensors in chosen], out=merged.tensors[name])
        return merged

    def close(self) -> None:
        """Close the connection, with which the worker's slot ends."""
        self._connection.close()
        self._memory.close_fd()
        self._closed()

    def _room(self, forms: Mapping[str, TensorForm]) -> RemoteBatch:
        """Give a batch of these forms in shared memory, still to be filled."""
        size = sum([aligned(form.size_bytes) for form in forms.values()])
        block = self._regions.take(size)
        if block is None:
            self._grow(size)
            block = self._regions.take(size)
        assert block is not None
        return self._in_block(forms, block)

    def _in_block(self, forms: Mapping[str, TensorForm], block: MemoryBlock) -> RemoteBatch:
        tensors, places, start = {}, {}, block.start
        for name, form in forms.items():
            tensors[name], places[name] = self._memory.array(form, start), start
            start += aligned(form.size_bytes)
        rows = next(iter(forms.values())).shape[0]
        return RemoteBatch(tensors, rows, self._memory, places, (block,))

    def _placed(self, batch: RemoteBatch, room: int) -> tuple[RemoteBatch, MemoryBlock | None]:
        """Bring all of a batch into shared memory, and find room for what it leads to."""
        tensors = batch.tensors
        while True:
            there = batch.places if batch.memory is self._memory else {}
            lacking = {n: _form(n, a) for n, a in tensors.items() if n not in there}
            size = sum([aligned(form.size_bytes) for form in lacking.values()])
            block = self._regions.take(size) if lacking else None
            region = self._regions.take(room) if room else None
            if bool(block) >= bool(lacking) and bool(region) >= bool(room):
                break
            block = region = None
            self._grow(room + sum([aligned(array.nbytes) for array in tensors.values()]))
        if block is None:
            return batch, region
        copied = self._in_block(lacking, block)
        for name in lacking:
            copied.tensors[name][...] = tensors[name]
        if there:
            copied.tensors = {**tensors, **copied.tensors}
            copied.places = {**there, **copied.places}
            copied.blocks += batch.blocks
        return copied, region

    def _grow(self, size_bytes: int) -> None:
        """Take other memory, with room for this and as much again; the next run gives it away.

        What lies in the memory so far is copied when it is needed, and lasts as long as its batch.
        """
        size_bytes = 2 * max(size_bytes, self._memory.size_bytes)
        try:
            memory = SharedMemory.create(size_bytes)
        except OSError as error:
            raise BackendError(f"no {size_bytes} bytes to share with a worker: {error}") from error
        self._memory.close_fd()
        self._memory, self._regions, self._given = memory, Regions(size_bytes), False

    def _result(
        self,
        stage: RemoteStage,
        done: StageDone,
        frame: Frame,
        batch: RemoteBatch,
        region: MemoryBlock | None,
    ) -> StageResult:
        """Read what the worker says; FrameError if it is nothing that the run may lead to."""
        answers = () if done.answer is None else (done.answer,)
        carried = done.carried or ()
        placed = (*answers, done.confidence, *carried)
        arrays = self._arrays(placed, frame, batch, region)
        sizes = [aligned(a.form.size_bytes) for a in placed if a.place != GIVEN]
        stage.row_bytes = max(stage.row_bytes, sum(sizes) / batch.rows)
        *first, confidence = arrays[: len(answers) + 1]
        answer = None
        if done.answer is not None:  # it is the caller's: not in memory that is used again
            answer = first[0] if done.answer.place == INLINE else first[0].copy()
        if done.confidence.place != INLINE:
            confidence = confidence.copy()
        if done.carried is None:
            return StageResult(answer, confidence, None)
        names = [array.form.name for array in carried]
        places = {
            name: batch.places[name] if place == GIVEN else place
            for name, (_, place) in zip(names, carried, strict=True)
            if place != INLINE
        }
        tensors = dict(zip(names, arrays[len(answers) + 1 :], strict=True))
        blocks = batch.blocks if any(place == GIVEN for _, place in carried) else ()
        blocks += (region,) if region else ()
        carry = RemoteBatch(tensors, batch.rows, self._memory, places, blocks)
        return StageResult(answer, confidence, carry)

    def _arrays(
        self,
        placed: Sequence[PlacedArray],
        frame: Frame,
        batch: RemoteBatch,
        region: MemoryBlock | None,
    ) -> list[NDArray[Any]]:
        """View the arrays of a result; FrameError for one that is where it must not be."""
        arrays: list[NDArray[Any]] = []
        offsets = inline_offsets(placed, len(frame.body))
        for (form, place), offset in zip(placed, offsets, strict=True):
            if place == INLINE:
                arrays.append(array_in(frame.body, form, offset))
            elif place == GIVEN:
                if form.name not in batch.places:
                    raise FrameError(f"it passes {form.name!r:.60} on, which it was not given")
                arrays.append(batch.tensors[form.name])
            else:
                begins, ends = place, place + form.size_bytes
                if region is None or not (
                    region.start <= begins and ends <= region.start + region.size_bytes
                ):
                    raise FrameError(f"it put {form.name!r:.60} outside of its region")
                arrays.append(self._memory.array(form, place))
        return arrays


def _done(frame: Frame) -> StageDone:
    """Read what a worker says of a run; BackendError if that failed, FrameError if it is none."""
    message = decode(frame.header)
    if isinstance(message, Failed):
        raise BackendError(message.message)
    if not isinstance(message, StageDone):
        raise FrameError(f"it answered a run with {type(message).__name__}")
    return message


def _form(name: str, array: NDArray[Any]) -> TensorForm:
    return TensorForm(name, array.dtype, array.shape)
