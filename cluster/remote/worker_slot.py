"""A slot that runs its stages in a worker; :mod:`.slot_tensors` transfers tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.launching import WorkerHandle
from offramp.cluster.remote.run_layouts import (
    Order,
    ReplyArray,
    RunReply,
    TensorLayout,
    form_set,
    forms_of,
    keep,
)
from offramp.cluster.remote.slot_tensors import RemoteBatch
from offramp.cluster.remote.transport import (
    ConnectionLostError,
    Frame,
    MemoryBlock,
    TransportTimeoutError,
)
from offramp.cluster.remote.worker_messages import (
    ALIGNMENT,
    GIVEN,
    INLINE,
    Failed,
    FrameError,
    PlacedArray,
    StageDone,
    TensorForm,
    aligned,
    array_in,
    decode,
    inline_offsets,
)
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.stages.backend_protocol import Rows, StageResult, TensorBatch
from offramp.engine.stages.plan import StageSpec

FIRST_LIMIT_S: Final = 60.0
"""Time limit of a stage's first run, in seconds: kernels are chosen, memory is allocated."""
LEAST_LIMIT_S: Final = 1.0
_KEPT_BYTES: Final = 1 << 14
"""Largest number of unneeded bytes of a message that an answer may keep in memory; if there are
more, the answer is copied out of the message."""
HANG_FACTOR: Final = 10.0
"""A run counts as hanging after this factor times the duration of the stage's longest run."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownRun:
    """A stage's result for one sample. Probes run this sample again, and reuse the result."""

    given: Mapping[str, NDArray[Any]]
    result: StageResult

    def is_of(self, batch: RemoteBatch) -> bool:
        """Return whether a batch equals the input of this result, bit for bit."""
        found = batch.tensors
        return found.keys() == self.given.keys() and all(
            (array.dtype, array.shape) == (found[name].dtype, found[name].shape)
            and array.tobytes() == found[name].tobytes()
            for name, array in self.given.items()
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class RemoteStage:
    """A stage that workers load, by its number."""

    number: int
    spec: StageSpec
    document: str
    graph: bytes
    """Graph of a stage without a bundle."""
    made_of: tuple[object, ...] = ()
    """Key of a stage of a bundle: parts of its graph, inputs and outputs."""
    row_bytes: float = 0.0
    """Largest size, in bytes, of one row of the stage's results in shared memory."""
    longest_s: float = 0.0
    """Seconds of the longest finished run."""
    largest_bytes: int = 0
    """Largest input of a run, in bytes."""
    known: KnownRun | None = None
    """Result of the first run on a single sample."""

    def observe(self, given_bytes: int, seconds: float) -> None:
        """Record the time and input bytes of a run."""
        self.longest_s = max(self.longest_s, seconds)
        self.largest_bytes = max(self.largest_bytes, given_bytes)

    def limit_s(self, given_bytes: int, least_s: float) -> float:
        """Return the seconds after which a run hangs: ten times the longest, scaled by size."""
        if not self.largest_bytes:
            return max(FIRST_LIMIT_S, least_s)
        limit_s = HANG_FACTOR * self.longest_s
        if given_bytes > self.largest_bytes:
            limit_s *= given_bytes / self.largest_bytes
        return limit_s if limit_s > least_s else least_s


class RemoteSlot:
    """A slot of one worker.

    ``load`` loads a stage in a worker that lacks it; ``least_s`` is the smallest time limit of a
    stage; ``closed`` is called when the slot is closed.
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
        """Return a batch of the arrays; they are copied when a stage runs on them."""
        return RemoteBatch(tensors, len(next(iter(tensors.values()))), forms_of(tensors))

    def run(
        self, stage: RemoteStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        """Execute a stage in the worker.

        WorkerLostError if the worker ends, or hangs and is killed: the batch is unchanged.
        """
        assert isinstance(batch, RemoteBatch)
        worker = self._worker
        if worker.lost:
            raise WorkerLostError(f"{worker.name} was lost before")
        if stage.number not in worker.stages:
            self._load(worker, stage)
        room = int(stage.row_bytes * batch.rows) + ALIGNMENT if stage.row_bytes else 0
        batch, layout, region = self._tensors.placed(batch, room)
        where = (region.start, region.size_bytes) if region else (0, 0)
        order = layout.order(stage.number, batch.rows, threshold, where)
        given_bytes = layout.forms.size_bytes
        limit_s = stage.limit_s(given_bytes, self._least_s)
        started_s = time.perf_counter()
        try:
            self._connection.send(order.header, self._tensors.inline_arrays(batch), limit_s)
            frame = self._connection.receive(limit_s)
            result = self._result(stage, order, frame, batch, region)
        except ConnectionLostError as error:
            raise worker.lose("") from error
        except (TransportTimeoutError, FrameError) as error:
            raise worker.lose(f"stage {stage.spec.index}: {error}") from error
        took_s = time.perf_counter() - started_s
        if took_s <= limit_s:  # sending and receiving may both take limit_s
            stage.observe(given_bytes, took_s)
        return result

    def select(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Return the given rows; unless these are all rows, copy them to memory for the worker."""
        assert isinstance(batch, RemoteBatch)
        if len(rows) == batch.rows:
            return batch
        tensors, count = batch.tensors, len(rows)
        forms = [TensorForm(n, a.dtype, (count, *a.shape[1:])) for n, a in tensors.items()]
        taken = self._tensors.room(form_set(tuple(forms)), count)
        for name, array in tensors.items():  # "clip", because "raise" copies twice
            array.take(rows, axis=0, out=taken.tensors[name], mode="clip")
        return taken

    def buffer(self, batch: TensorBatch, rows: Rows) -> RemoteBatch:
        """Copy the given rows to memory that any slot can read."""
        assert isinstance(batch, RemoteBatch)
        kept = {name: array.take(rows, axis=0) for name, array in batch.tensors.items()}
        return RemoteBatch(kept, len(rows), forms_of(kept))

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> RemoteBatch:
        """Concatenate the rows of the parts, in order, in memory that the worker reads."""
        chosen = []
        for batch, rows in parts:
            assert isinstance(batch, RemoteBatch)
            whole = len(rows) == batch.rows
            tensors = batch.tensors.items()
            chosen.append({n: a if whole else a.take(rows, axis=0) for n, a in tensors})
        # If a criterion's function failed on one part, its state is missing there, and starts
        # again.
        names = [name for name in chosen[0] if all(name in tensors for tensors in chosen)]
        count = sum(len(rows) for _, rows in parts)
        firsts = [(name, chosen[0][name]) for name in names]
        forms = [TensorForm(n, a.dtype, (count, *a.shape[1:])) for n, a in firsts]
        merged = self._tensors.room(form_set(tuple(forms)), count)
        for name in names:
            np.concatenate([tensors[name] for tensors in chosen], out=merged.tensors[name])
        return merged

    def close(self) -> None:
        """Close the connection, which ends the worker's slot."""
        self._connection.close()
        self._tensors.close()
        self._closed()

    def _result(
        self,
        stage: RemoteStage,
        order: Order,
        frame: Frame,
        batch: RemoteBatch,
        region: MemoryBlock | None,
    ) -> StageResult:
        """Return the worker's result of a run; FrameError if this result is not possible."""
        reply = order.replies.get(frame.header)
        if reply is None or reply.body_bytes != len(frame.body):
            reply = self._read(stage, order, frame, batch)
        stage.row_bytes = max(stage.row_bytes, reply.row_bytes)
        answer = None if reply.answer is None else _own(reply.answer, frame)
        confidence = _own(reply.confidence, frame)
        if reply.carried is None:
            return StageResult(answer, confidence, None)
        blocks: tuple[MemoryBlock, ...] = () if region is None else (region,)
        if reply.passed:
            blocks += batch.blocks
        layout = reply.layout
        if layout is not None:
            carry = RemoteBatch(layout.tensors, batch.rows, layout.forms, layout, blocks)
        else:
            found = {a.form.name: _found(a, frame, batch) for a in reply.carried}
            carry = RemoteBatch(found, batch.rows, forms_of(found), None, blocks)
        return StageResult(answer, confidence, carry)

    def _read(self, stage: RemoteStage, order: Order, frame: Frame, batch: RemoteBatch) -> RunReply:
        """Parse a worker's reply with a new header; FrameError if it is malformed."""
        done = decode(frame.header)
        if isinstance(done, Failed):
            raise BackendError(done.message)
        if not isinstance(done, StageDone):
            raise FrameError(f"it answered a run with {type(done).__name__}")
        answers = (done.confidence,) if done.answer is None else (done.answer, done.confidence)
        if any(array.place == GIVEN for array in answers):
            raise FrameError("it returned an answer as an unchanged input")
        arrays = (*answers, *(done.carried or ()))
        order.check(arrays)
        offsets = inline_offsets(arrays, len(frame.body))
        *first, confidence = map(self._reply_array, answers, offsets)
        carried, layout = None, None
        if done.carried is not None:
            carried = tuple(map(self._reply_array, done.carried, offsets[len(answers) :]))
            layout = self._layout(done.carried, batch)
        _check(stage.spec, done, batch.rows)
        reply = RunReply(
            answer=first[0] if first else None,
            confidence=confidence,
            carried=carried,
            layout=layout,
            passed=any(array.place == GIVEN for array in done.carried or ()),
            row_bytes=sum([aligned(f.size_bytes) for f, p in arrays if p != GIVEN]) / batch.rows,
            body_bytes=len(frame.body),
        )
        keep(order.replies, frame.header, reply)
        return reply

    def _reply_array(self, array: PlacedArray, offset: int) -> ReplyArray:
        form, place = array
        view = self._tensors.array(form, place) if place >= 0 else None
        return ReplyArray(form=form, offset=offset, view=view)

    def _layout(self, carried: Sequence[PlacedArray], batch: RemoteBatch) -> TensorLayout | None:
        """Return the layout of the carried tensors; ``None`` if not all are in shared memory."""
        places = []
        for form, place in carried:
            if place == GIVEN:
                given = batch.tensors.get(form.name)
                if given is None or (given.dtype, given.shape) != form[1:]:
                    raise FrameError(f"it passed on {form.name!r:.60}, which was not an input")
            there = batch.layout.places if batch.layout is not None else {}
            places.append(there.get(form.name, INLINE) if place == GIVEN else place)
        if INLINE in places:
            return None
        return self._tensors.layout(form_set(tuple([form for form, _ in carried])), tuple(places))


def _check(spec: StageSpec, done: StageDone, rows: int) -> None:
    """Raise FrameError if a stage cannot have these results for this number of rows."""
    answer, confidence = done.answer, done.confidence.form
    expected = rows if spec.answer is not None else 0
    if (answer is not None) != (spec.answer is not None):
        raise FrameError(
            f"it returned {'no' if answer is None else 'an'} answer at stage {spec.index}"
        )
    if confidence.dtype != np.float32 or confidence.shape not in ((rows,), (expected,)):
        raise FrameError(
            f"it returned confidences {confidence.dtype} {list(confidence.shape)} for {rows} rows"
        )
    names = {form.name for form, _ in done.carried or ()}
    if (done.carried is None) != spec.final or not names.issuperset(spec.carried):
        raise FrameError(
            f"it passed on the tensors {sorted(names)!s:.100}, expected {list(spec.carried)}"
        )
    for form, _ in (*(() if answer is None else (answer,)), *(done.carried or ())):
        if form.shape[:1] != (rows,):
            raise FrameError(
                f"{form.name!r:.60} has shape {list(form.shape)}, expected {rows} rows"
            )


def _own(array: ReplyArray, frame: Frame) -> NDArray[Any]:
    """Return a result as an array that the caller owns; later runs do not overwrite it."""
    if array.view is not None:
        return array.view.copy()
    found = array_in(frame.body, array.form, array.offset)
    return found if len(frame.body) <= _KEPT_BYTES + array.form.size_bytes else found.copy()


def _found(array: ReplyArray, frame: Frame, batch: RemoteBatch) -> NDArray[Any]:
    """Return a carried tensor from its place: the frame, shared memory, or the run's inputs."""
    if array.view is not None:
        return array.view
    if array.offset < 0:
        return batch.tensors[array.form.name]
    return array_in(frame.body, array.form, array.offset)
