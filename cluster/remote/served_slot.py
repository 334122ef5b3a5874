"""The worker's side of a slot: runs ordered stages and replies.

Repeated work is cached. Equal headers of orders mean the same tensors, whose views are reused.
Results of equal forms have the same offsets, and get the same header of the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.run_layouts import keep
from offramp.cluster.remote.transport import Connection, ConnectionLostError, Frame, SharedMemory
from offramp.cluster.remote.worker_messages import (
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
from offramp.engine.common.errors import BackendError, EngineError
from offramp.engine.stages.backend_protocol import (
    DeviceSlot,
    Slot,
    Stage,
    StageResult,
    TensorBatch,
)

_log = logging.getLogger(__name__)

Reached: TypeAlias = Callable[[str], None]
"""Function that is called with the name of a point that the protocol has reached; tests end the
worker there."""
Arrays: TypeAlias = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReadOrder:
    """A parsed order to run a stage, and the replies to it so far."""

    stage: int
    threshold: float | None
    region: tuple[int, int]
    """Offset and size of the shared memory for results."""
    tensors: Mapping[str, NDArray[Any]]
    """Views of the tensors in shared memory."""
    inline: tuple[tuple[TensorForm, int], ...]
    """Tensors in the body, each with its offset."""
    body_bytes: int
    memory: SharedMemory | None
    """Shared memory; ``None`` if all tensors are inline."""
    replies: dict[Hashable, _WrittenReply] = field(default_factory=dict)
    """Prepared replies by the forms of results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenReply:
    """The reply to a run, for results of given forms."""

    header: bytes
    views: tuple[NDArray[Any] | None, ...]
    """Memory that each result is copied to, except unchanged inputs; ``None`` for inline results.
    """


class ServedSlot:
    """A slot, and the connection on which its runs are ordered."""

    def __init__(
        self,
        connection: Connection,
        slot: Slot,
        memory: SharedMemory | None,
        stages: Mapping[int, Stage],
        reached: Reached,
        *,
        device: AbstractContextManager[object],
    ) -> None:
        """Keep the parts; ``device`` is locked while a stage runs, so one slot at a time runs."""
        self._connection = connection
        self._slot = slot
        self._stages = stages
        self._reached = reached
        self._device = device
        self.use(memory)

    def use(self, memory: SharedMemory | None) -> None:
        """Use other memory for tensors from the next run on; ``None`` if all tensors are inline."""
        self._memory = memory
        self._orders: dict[bytes, _ReadOrder] = {}

    def serve(self) -> None:
        """Run ordered stages until the connection ends."""
        try:
            while True:
                frame = self._connection.receive()
                header, body = self._answer(frame)
                self._reached("after-write")
                self._connection.send(header, body)
        except ConnectionLostError:
            self._slot.close()
        finally:
            self._connection.close()

    def _answer(self, frame: Frame) -> tuple[bytes, Arrays]:
        try:
            order = self._orders.get(frame.header)
            if order is None or order.body_bytes != len(frame.body):
                order = self._read(frame)
            self._reached("before-run")
            return self._run(order, frame.body)
        except EngineError as error:
            return encode(Failed(message=str(error))), ()
        except Exception as error:
            _log.exception("a stage could not be run")
            return encode(Failed(message=f"a worker failed: {error!r}")), ()

    def _read(self, frame: Frame) -> _ReadOrder:
        """Parse an order with a new header; FrameError if it is malformed."""
        order, memory = decode(frame.header), self._memory
        if not isinstance(order, RunStage):
            raise FrameError(f"{type(order).__name__} came instead of an order to run a stage")
        tensors, inline = {}, []
        offsets = inline_offsets(order.arrays, len(frame.body))
        for (form, place), offset in zip(order.arrays, offsets, strict=True):
            if place == GIVEN or form.shape[:1] != (order.rows,):
                raise FrameError(
                    f"tensor {form.name!r:.60} of shape {list(form.shape)} at {place} is not a "
                    f"tensor of {order.rows} rows"
                )
            if place == INLINE:
                inline.append((form, offset))
            elif memory is None:
                raise FrameError("an order names shared memory, but there is none")
            else:
                tensors[form.name] = memory.array(form, place)
        found = _ReadOrder(
            stage=order.stage,
            threshold=order.threshold,
            region=order.region,
            tensors=tensors,
            inline=tuple(inline),
            body_bytes=len(frame.body),
            memory=memory,
        )
        keep(self._orders, frame.header, found)
        return found

    def _run(self, order: _ReadOrder, body: bytearray) -> tuple[bytes, Arrays]:
        stage = self._stages.get(order.stage)
        if stage is None:
            raise FrameError(f"no stage has the number {order.stage}")
        tensors = order.tensors
        if order.inline:
            tensors = {**tensors, **{f.name: array_in(body, f, at) for f, at in order.inline}}
        batch = self._slot.upload(tensors)
        with self._device:
            result = self._slot.run(stage, batch, order.threshold)
        carried = None if result.carry is None else _tensors_of(self._slot, result.carry)
        self._reached("after-run")
        return _reply(order, result, carried, tensors)


def _reply(
    order: _ReadOrder,
    result: StageResult,
    carried: Mapping[str, NDArray[Any]] | None,
    given: Mapping[str, NDArray[Any]],
) -> tuple[bytes, Arrays]:
    """Write results to their destinations; return the reply's header and the inline arrays."""
    answer, confidence, _ = result
    arrays = [confidence] if answer is None else [answer, confidence]
    # The key has the names of unchanged inputs, and the forms of all other arrays.
    said: list[Hashable] = [(array.dtype, array.shape) for array in arrays]
    said.append(carried is None)
    if carried is not None:
        for name, array in carried.items():
            if array is given.get(name):
                said.append(name)
            else:
                said.append((name, array.dtype, array.shape))
                arrays.append(array)
    key = tuple(said)
    reply = order.replies.get(key)
    if reply is None:
        reply = _plan_reply(order, result, carried, given)
        keep(order.replies, key, reply)
    inline = []
    for view, array in zip(reply.views, arrays, strict=True):
        if view is None:
            inline.append(np.ascontiguousarray(array))
        else:
            view[...] = array
    return reply.header, inline


def _plan_reply(
    order: _ReadOrder,
    result: StageResult,
    carried: Mapping[str, NDArray[Any]] | None,
    given: Mapping[str, NDArray[Any]],
) -> _WrittenReply:
    """Place results of these forms one after the other; results that do not fit are inline."""
    memory, views = order.memory, list[NDArray[Any] | None]()
    start, end = order.region[0], sum(order.region)

    def place(name: str, array: NDArray[Any]) -> PlacedArray:
        nonlocal start
        form, begins = TensorForm(name, array.dtype, array.shape), aligned(start)
        if memory is None or begins + form.size_bytes > end:
            views.append(None)
            return PlacedArray(form, INLINE)
        views.append(memory.array(form, begins))
        start = begins + form.size_bytes
        return PlacedArray(form, begins)

    answer = None if result.answer is None else place("answer", result.answer)
    confidence = place("confidence", result.confidence)
    placed = None
    if carried is not None:
        placed = tuple(
            PlacedArray(TensorForm(name, array.dtype, array.shape), GIVEN)
            if array is given.get(name)
            else place(name, array)
            for name, array in carried.items()
        )
    header = encode(StageDone(answer, confidence, placed))
    return _WrittenReply(header=header, views=tuple(views))


def _tensors_of(slot: Slot, carry: TensorBatch) -> Mapping[str, NDArray[Any]]:
    """Return the tensors that a stage passes on (carries), on the host; GPU tensors are copied."""
    found: Mapping[str, NDArray[Any]] | None = getattr(carry, "tensors", None)
    if found is not None:
        return found
    if isinstance(slot, DeviceSlot):
        return slot.download(carry)
    raise BackendError("the worker's backend does not keep tensors on the host")
