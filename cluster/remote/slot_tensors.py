"""How the tensors of a slot get to its worker and back: in memory that both have, or in messages.

In shared memory only the router says what is taken. Tensors that a stage was given there, or gave
there, are not copied again for the next one; parts are free again as soon as no batch needs them.
Where there is no room the slot takes more memory, and until it knows how much a stage gives, the
worker sends that inline. Over a network everything is inline, also what comes back and is carried
on: so the router has what a batch needs, should its worker be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.run_layouts import FormSet, TensorLayout, keep
from offramp.cluster.remote.transport import Connection, MemoryBlock, Regions, SharedMemory
from offramp.cluster.remote.worker_messages import INLINE, FrameError, TensorForm
from offramp.engine.common.errors import BackendError

FIRST_MEMORY: Final = 1 << 20
"""Bytes of shared memory that a slot begins with."""


@dataclass(slots=True)
class RemoteBatch:
    """Rows of named arrays; those of a ``layout`` are in memory, in parts that are held."""

    tensors: Mapping[str, NDArray[Any]]
    rows: int
    forms: FormSet
    layout: TensorLayout | None = None
    """``None`` if a worker cannot read all of them where they are."""
    blocks: tuple[MemoryBlock, ...] = ()
    """Parts of memory with some of them, not taken by others as long as this lasts."""

    def __len__(self) -> int:
        return self.rows


class TensorPath(Protocol):
    """The way of a slot's tensors to its worker and back; used by one thread."""

    def placed(
        self, batch: RemoteBatch, room: int, /
    ) -> tuple[RemoteBatch, TensorLayout, MemoryBlock | None]:
        """Give a batch that a worker can read, its layout, and so many bytes for its results."""

    def travelling(self, batch: RemoteBatch, /) -> Sequence[NDArray[Any]]:
        """List what of such a batch travels with the order to run a stage on it."""

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Give a batch of these forms where the worker reads it best, still to be filled."""

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """View what a worker wrote; FrameError if it cannot have."""

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Give the layout of such tensors at such places; FrameError if they cannot be there."""

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
        self._memory = memory
        self._give = give
        self._regions = Regions(memory.size_bytes)
        self._layouts: dict[tuple[FormSet, tuple[int, ...]], TensorLayout] = {}
        self._in_blocks: dict[tuple[FormSet, int], TensorLayout] = {}
        """Of those, the ones of tensors one after the other, by where they begin."""
        self._given = True
        """Whether the worker has that memory."""

    def travelling(self, _batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """List nothing: all of it is in memory."""
        return ()

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """View an array in it; FrameError if it is not all within."""
        return self._memory.array(form, place)

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Give the layout of such tensors in memory; FrameError if they are not all within."""
        found = self._layouts.get((forms, places))
        if found is None:
            by_name = {f.name: place for f, place in zip(forms.forms, places, strict=True)}
            views = {f.name: self._memory.array(f, by_name[f.name]) for f in forms.forms}
            found = TensorLayout(forms=forms, places=by_name, memory=self._memory, tensors=views)
            keep(self._layouts, (forms, places), found)
        return found

    def close(self) -> None:
        """Close the descriptor of memory that was never given away."""
        self._forget()
        self._memory.close_fd()

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Give a batch of these forms in shared memory, still to be filled."""
        block = self._regions.take(forms.part_bytes)
        if block is None:
            self._grow(forms.part_bytes)
            block = self._regions.take(forms.part_bytes)
        assert block is not None
        layout = self._in_block(forms, block.start)
        return RemoteBatch(layout.tensors, rows, forms, layout, (block,))

    def _in_block(self, forms: FormSet, start: int) -> TensorLayout:
        found = self._in_blocks.get((forms, start))
        if found is None:
            found = self.layout(forms, tuple([start + offset for offset in forms.offsets]))
            keep(self._in_blocks, (forms, start), found)
        return found

    def placed(
        self, batch: RemoteBatch, room: int
    ) -> tuple[RemoteBatch, TensorLayout, MemoryBlock | None]:
        """Bring all of a batch into shared memory, and find room for what it leads to.

        BackendError if there is no memory, WorkerLostError.
        """
        there, forms = batch.layout, batch.forms
        while True:
            if there is not None and there.memory is not self._memory:
                there = None
            block = None if there else self._regions.take(forms.part_bytes)
            region = self._regions.take(room) if room else None
            if (there or block) and (region or not room):
                break
            block = region = None
            self._grow(room + forms.part_bytes)
        if not self._given:
            self._give(self._memory)
            self._given = True
        if block is None:
            assert there is not None
            return batch, there, region
        layout = self._in_block(forms, block.start)
        for name, array in batch.tensors.items():
            layout.tensors[name][...] = array
        batch = RemoteBatch(layout.tensors, batch.rows, forms, layout, (block,))
        return batch, layout, region

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
        self._forget()
        self._memory, self._regions, self._given = memory, Regions(size_bytes), False

    def _forget(self) -> None:
        """Take apart what was kept: its cycles would keep the memory, too."""
        for layout in self._layouts.values():
            layout.orders.clear()
        self._layouts.clear()
        self._in_blocks.clear()


class InlineTensors:
    """Tensors in messages: nothing is shared."""

    def __init__(self) -> None:
        self._layouts: dict[FormSet, TensorLayout] = {}

    def placed(self, batch: RemoteBatch, _room: int) -> tuple[RemoteBatch, TensorLayout, None]:
        """Have all of a batch travel; results need no room."""
        forms = batch.forms
        found = self._layouts.get(forms)
        if found is None:
            places = {form.name: INLINE for form in forms.forms}
            found = TensorLayout(forms=forms, places=places, memory=None, tensors={})
            keep(self._layouts, forms, found)
        return batch, found, None

    def travelling(self, batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """List all of it."""
        return list(batch.tensors.values())

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Give a batch of these forms, still to be filled."""
        tensors = {form.name: np.empty(form.shape, form.dtype) for form in forms.forms}
        return RemoteBatch(tensors, rows, forms)

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """Refuse, by a FrameError: no memory is shared."""
        raise FrameError(f"it has array {form.name!r:.60} at {place}, where no memory is shared")

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Refuse, by a FrameError: no memory is shared."""
        raise FrameError(f"it has {len(forms.forms)} arrays at {places}, where none is shared")

    def close(self) -> None:
        """Forget what was kept."""
        for layout in self._layouts.values():
            layout.orders.clear()
        self._layouts.clear()
