"""How the tensors of a slot get to its worker and back: in memory that both have, or in messages.

In shared memory only the router says what is taken. Tensors that a stage was given there, or gave
there, are not copied again for the next one; parts are free again as soon as no batch needs them.
Where there is no room the slot takes more memory, and until it knows how much a stage gives, the
worker sends that inline. Over a network everything is inline, also what comes back and is carried
on: so the router has what a batch needs, should its worker be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.engine.errors import BackendError
from offramp.engine.remote.transport import Connection, MemoryBlock, Regions, SharedMemory
from offramp.engine.remote.wire import INLINE, FrameError, TensorForm, aligned

FIRST_MEMORY: Final = 1 << 20
"""Bytes of shared memory that a slot begins with."""


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


class TensorPath(Protocol):
    """The way of a slot's tensors to its worker and back; used by one thread."""

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that both have, if they have any."""

    def placed(self, batch: RemoteBatch, room: int, /) -> tuple[RemoteBatch, MemoryBlock | None]:
        """Give a batch whose places a worker can read, and so many bytes for its results."""

    def travelling(self, batch: RemoteBatch, /) -> Sequence[NDArray[Any]]:
        """List what of such a batch travels with the order to run a stage on it."""

    def room(self, forms: Mapping[str, TensorForm]) -> RemoteBatch:
        """Give a batch of these forms where the worker reads it best, still to be filled."""

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """View what a worker wrote; FrameError if it cannot have."""

    def close(self) -> None:
        """Give up what it holds."""


class SlotLink(NamedTuple):
    """What a slot has of its worker."""

    connection: Connection
    """Runs are ordered on it."""
    tensors: TensorPath


class SharedTensors:
    """Tensors in memory that both have; ``give`` has the worker use other memory from then on."""

    def __init__(self, memory: SharedMemory, give: Callable[[SharedMemory], None]) -> None:
        self.memory = memory
        self._give = give
        self._regions = Regions(memory.size_bytes)
        self._given = True
        """Whether the worker has that memory."""

    def travelling(self, _batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """List nothing: all of it is in memory."""
        return ()

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """View an array in it; FrameError if it is not all within."""
        return self.memory.array(form, place)

    def close(self) -> None:
        """Close the descriptor of memory that was never given away."""
        self.memory.close_fd()

    def room(self, forms: Mapping[str, TensorForm]) -> RemoteBatch:
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
            view = tensors[name] = self.memory.array(form, start)
            places[name] = start
            start += aligned(view.nbytes)
        rows = next(iter(forms.values())).shape[0]
        return RemoteBatch(tensors, rows, self.memory, places, (block,))

    def placed(self, batch: RemoteBatch, room: int) -> tuple[RemoteBatch, MemoryBlock | None]:
        """Bring all of a batch into shared memory, and find room for what it leads to.

        BackendError if there is no memory, WorkerLostError.
        """
        tensors = batch.tensors
        while True:
            there = batch.places if batch.memory is self.memory else {}
            lacking = {n: form_of(n, a) for n, a in tensors.items() if n not in there}
            size = sum([aligned(tensors[name].nbytes) for name in lacking])
            block = self._regions.take(size) if lacking else None
            region = self._regions.take(room) if room else None
            if bool(block) >= bool(lacking) and bool(region) >= bool(room):
                break
            block = region = None
            self._grow(room + sum([aligned(array.nbytes) for array in tensors.values()]))
        if not self._given:
            self._give(self.memory)
            self._given = True
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
        size_bytes = 2 * max(size_bytes, self.memory.size_bytes)
        try:
            memory = SharedMemory.create(size_bytes)
        except OSError as error:
            raise BackendError(f"no {size_bytes} bytes to share with a worker: {error}") from error
        self.memory.close_fd()
        self.memory, self._regions, self._given = memory, Regions(size_bytes), False


class InlineTensors:
    """Tensors in messages: nothing is shared."""

    memory = None

    def placed(self, batch: RemoteBatch, _room: int) -> tuple[RemoteBatch, None]:
        """Have all of a batch travel; results need no room."""
        tensors = batch.tensors
        return RemoteBatch(tensors, batch.rows, None, dict.fromkeys(tensors, INLINE)), None

    def travelling(self, batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """List all of it."""
        return list(batch.tensors.values())

    def room(self, forms: Mapping[str, TensorForm]) -> RemoteBatch:
        """Give a batch of these forms, still to be filled."""
        tensors = {name: np.empty(form.shape, form.dtype) for name, form in forms.items()}
        return RemoteBatch(tensors, next(iter(forms.values())).shape[0])

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """Refuse, by a FrameError: no memory is shared."""
        raise FrameError(f"it has array {form.name!r:.60} at {place}, where no memory is shared")

    def close(self) -> None:
        """Do nothing: it holds nothing."""


def form_of(name: str, array: NDArray[Any]) -> TensorForm:
    """Give the form of an array."""
    return TensorForm(name, array.dtype, array.shape)
