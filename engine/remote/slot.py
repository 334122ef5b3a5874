"""A slot that runs its stages in a worker; how tensors get there is its :mod:`.tensors`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Rows, StageResult, TensorBatch
from offramp.engine.errors import BackendError, WorkerLostError
from offramp.engine.plan import StageSpec
from offramp.engine.remote.launching import WorkerHandle
from offramp.engine.remote.tensors import RemoteBatch, form_of
from offramp.engine.remote.transport import (
    ConnectionLostError,
    Frame,
    MemoryBlock,
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

FIRST_LIMIT_S: Final = 60.0
"""Limit of a stage that was never run: kernels are chosen, memory is allocated."""
LEAST_LIMIT_S: Final = 1.0
_KEPT_BYTES: Final = 1 << 14
"""Most that an answer may keep of a message that it came in."""
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


class RemoteSlot:
    """A slot of one worker.

    ``load`` has the worker load a stage that it does not have yet; ``least_s`` is the least time
    that a stage is given; ``closed`` is called once the slot is.
    """

    def __init__(
        self,
        worker: WorkerHandle,
        *,
        load: Callable[[WorkerHandle, RemoteStage], None],
        least_s: float = LEAST_LIMIT_S,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._load = load
        self._least_s = least_s
        self._closed = closed
        self._connection, self._tensors = worker.open_slot()

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
            raise WorkerLostError(f"{worker.name} was lost before")
        if stage.number not in worker.stages:
            self._load(worker, stage)
        room = int(stage.row_bytes * batch.rows) + ALIGNMENT if stage.row_bytes else 0
        batch, region = self._tensors.placed(batch, room)
        places, tensors = batch.places, batch.tensors
        arrays = tuple([PlacedArray(form_of(n, a), places[n]) for n, a in tensors.items()])
        given_bytes = sum([array.nbytes for array in tensors.values()])
        where = (region.start, region.size_bytes) if region else (0, 0)
        header = encode(RunStage(stage.number, batch.rows, threshold, where, arrays))
        limit_s = stage.limit_s(given_bytes, self._least_s)
        started_s = time.perf_counter()
        try:
            self._connection.send(header, self._tensors.travelling(batch), limit_s)
            frame = self._connection.receive(limit_s)
            result = self._result(stage, frame, batch, region)
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
        taken = self._tensors.room(forms)
        for name, array in batch.tensors.items():  # "clip", as "raise" copies twice
            array.take(rows, axis=0, out=taken.tensors[name], mode="clip")
        return taken

    def buffer(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Copy the given rows, to where any slot may take them from."""
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
        forms = {n: TensorForm(n, a.dtype, (count, *a.shape[1:])) for n, a in firsts}
        merged = self._tensors.room(forms)
        for name in names:
            np.concatenate([tensors[name] for tensors in chosen], out=merged.tensors[name])
        return merged

    def close(self) -> None:
        """Close the connection, with which the worker's slot ends."""
        self._connection.close()
        self._tensors.close()
        self._closed()

    def _result(
        self,
        stage: RemoteStage,
        frame: Frame,
        batch: RemoteBatch,
        region: MemoryBlock | None,
    ) -> StageResult:
        """Read what the worker says; FrameError if it is nothing that the run may lead to."""
        said = _read(frame.header, len(frame.body))
        if isinstance(said, Failed):
            raise BackendError(said.message)
        begins, ends = (region.start, region.end) if region else (0, 0)
        if said.begins < begins or said.ends > ends:
            raise FrameError(f"it wrote from {said.begins} to {said.ends}, not {begins} to {ends}")
        stage.row_bytes = max(stage.row_bytes, said.result_bytes / batch.rows)
        *answers, confidence = [self._own(a, o, frame) for a, o in said.answers]
        answer = answers[0] if answers else None
        if said.carried is None:
            return StageResult(answer, confidence, None)
        tensors: dict[str, NDArray[Any]] = {}
        places: dict[str, int] = {}
        blocks: tuple[MemoryBlock, ...] = (region,) if region else ()
        passed = False
        for (form, place), offset in said.carried:
            name = form.name
            if place == INLINE:
                tensors[name] = array_in(frame.body, form, offset)
            elif place != GIVEN:
                tensors[name], places[name] = self._tensors.array(form, place), place
            elif name in batch.places:
                tensors[name], places[name] = batch.tensors[name], batch.places[name]
                passed = True
            else:
                raise FrameError(f"it passes {name!r:.60} on, which it was not given")
        blocks += batch.blocks if passed else ()
        carry = RemoteBatch(tensors, batch.rows, self._tensors.memory, places, blocks)
        return StageResult(answer, confidence, carry)

    def _own(self, array: PlacedArray, offset: int, frame: Frame) -> NDArray[Any]:
        """Give an array that is the caller's: not in memory that is used again."""
        form, place = array
        if place != INLINE:
            return self._tensors.array(form, place).copy()
        found = array_in(frame.body, form, offset)
        return found if len(frame.body) <= _KEPT_BYTES + form.size_bytes else found.copy()


class _Said(NamedTuple):
    """What a worker says of a run, taken apart."""

    answers: tuple[tuple[PlacedArray, int], ...]
    """Answer, if there is one, and confidence, each with its offset if it is inline."""
    carried: tuple[tuple[PlacedArray, int], ...] | None
    begins: float
    ends: float
    """Where it wrote in shared memory; infinity and 0 if nowhere."""
    result_bytes: int
    """What all that it gave would take there."""


@lru_cache(maxsize=1024)  # batches of the same sizes have the same results at the same places
def _read(header: bytes, body_bytes: int) -> _Said | Failed:
    """Take apart what a worker says of a run; FrameError if it is nothing that it may say."""
    done = decode(header)
    if isinstance(done, Failed):
        return done
    if not isinstance(done, StageDone):
        raise FrameError(f"it answered a run with {type(done).__name__}")
    answers = (done.confidence,) if done.answer is None else (done.answer, done.confidence)
    if any(array.place == GIVEN for array in answers):
        raise FrameError("it passes an answer on")
    arrays = (*answers, *(done.carried or ()))
    pairs = tuple(zip(arrays, inline_offsets(arrays, body_bytes), strict=True))
    shared = [(place, place + form.size_bytes) for form, place in arrays if place >= 0]
    return _Said(
        answers=pairs[: len(answers)],
        carried=None if done.carried is None else pairs[len(answers) :],
        begins=min([begins for begins, _ in shared], default=math.inf),
        ends=max([ends for _, ends in shared], default=0),
        result_bytes=sum([aligned(form.size_bytes) for form, place in arrays if place != GIVEN]),
    )
