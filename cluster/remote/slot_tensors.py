"""Transfer of a slot's tensors to its worker and back: in shared memory, or in messages.

Only the router allocates shared memory. Tensors that are in shared memory already, as inputs or
results of a stage, are not copied again for the next stage; blocks are free as soon as no batch
needs them. If there is not enough memory, the slot allocates more. While the slot does not know the
size of a stage's results, the worker sends them inline. Over a network all tensors are inline, also
those for the next stage: so the router has all that a batch needs if its worker is lost.
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
"""Initial bytes of a slot's shared memory."""


@dataclass(slots=True)
class RemoteBatch:
    """A batch of named arrays; with a ``layout`` they are in shared memory, in ``blocks``."""

    tensors: Mapping[str, NDArray[Any]]
    rows: int
    forms: FormSet
    layout: TensorLayout | None = None
    """Layout in shared memory; ``None`` if a worker cannot read all tensors without a copy."""
    blocks: tuple[MemoryBlock, ...] = ()
    """Memory blocks with tensors of the batch, reserved while this batch exists."""

    def __len__(self) -> int:
        return self.rows


class TensorPath(Protocol):
    """Transfer of a slot's tensors to its worker and back; used by one thread."""

    def placed(
        self, batch: RemoteBatch, room: int, /
    ) -> tuple[RemoteBatch, TensorLayout, MemoryBlock | None]:
        """Return a batch that a worker can read, its layout, and ``room`` bytes for results."""

    def inline_arrays(self, batch: RemoteBatch, /) -> Sequence[NDArray[Any]]:
        """Return the arrays of a placed batch that are sent with the order to run a stage."""

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Return an unfilled batch of these forms, in the memory that the worker reads fastest."""

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """Return a view of an array that a worker wrote; FrameError if it is out of bounds."""

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Return the layout of tensors at these offsets; FrameError if they are out of bounds."""

    def close(self) -> None:
        """Release the shared memory and the cached layouts."""


class SlotLink(NamedTuple):
    """A slot's link to its worker."""

    connection: Connection
    """Connection on which the slot orders the runs of stages."""
    tensors: TensorPath


class SharedTensors:
    """Tensors in shared memory; ``give`` makes the worker use other memory from then on."""

    def __init__(self, memory: SharedMemory, give: Callable[[SharedMemory], None]) -> None:
        self._memory = memory
        self._give = give
        self._regions = Regions(memory.size_bytes)
        self._layouts: dict[tuple[FormSet, tuple[int, ...]], TensorLayout] = {}
        self._in_blocks: dict[tuple[FormSet, int], TensorLayout] = {}
        """Layouts of consecutive tensors, by the offset of the first."""
        self._given = True
        """``True`` if the worker has received the current memory."""

    def inline_arrays(self, _batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """Return an empty sequence: all tensors are in shared memory, none in the message."""
        return ()

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """Return a view of an array in shared memory; FrameError if it is out of bounds."""
        return self._memory.array(form, place)

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Return the layout of tensors in shared memory; FrameError if they are out of bounds."""
        found = self._layouts.get((forms, places))
        if found is None:
            by_name = {f.name: place for f, place in zip(forms.forms, places, strict=True)}
            views = {f.name: self._memory.array(f, by_name[f.name]) for f in forms.forms}
            found = TensorLayout(forms=forms, places=by_name, memory=self._memory, tensors=views)
            keep(self._layouts, (forms, places), found)
        return found

    def close(self) -> None:
        """Close the descriptor of memory that was never given to the worker."""
        self._forget()
        self._memory.close_fd()

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Return an unfilled batch of these forms in shared memory."""
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
        """Copy all tensors of a batch into shared memory, and reserve memory for results.

        BackendError if there is no memory, or WorkerLostError.
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
        """Allocate new memory, twice the needed size; the next run gives it to the worker.

        Tensors in the old memory are copied when they are needed. The old memory exists as long as
        batches use it.
        """
        size_bytes = 2 * max(size_bytes, self._memory.size_bytes)
        try:
            memory = SharedMemory.create(size_bytes)
        except OSError as error:
            raise BackendError(
                f"{size_bytes} bytes cannot be shared with a worker: {error}"
            ) from error
        self._memory.close_fd()
        self._forget()
        self._memory, self._regions, self._given = memory, Regions(size_bytes), False

    def _forget(self) -> None:
        """Clear the caches, whose reference cycles would keep the old memory."""
        for layout in self._layouts.values():
            layout.orders.clear()
        self._layouts.clear()
        self._in_blocks.clear()


class InlineTensors:
    """Tensors in messages: nothing is shared."""

    def __init__(self) -> None:
        self._layouts: dict[FormSet, TensorLayout] = {}

    def placed(self, batch: RemoteBatch, _room: int) -> tuple[RemoteBatch, TensorLayout, None]:
        """Return the batch itself: all of it is sent, and results need no memory block."""
        forms = batch.forms
        found = self._layouts.get(forms)
        if found is None:
            places = {form.name: INLINE for form in forms.forms}
            found = TensorLayout(forms=forms, places=places, memory=None, tensors={})
            keep(self._layouts, forms, found)
        return batch, found, None

    def inline_arrays(self, batch: RemoteBatch) -> Sequence[NDArray[Any]]:
        """Return all arrays of the batch: every tensor is sent in the message."""
        return list(batch.tensors.values())

    def room(self, forms: FormSet, rows: int) -> RemoteBatch:
        """Return an unfilled batch of these forms."""
        tensors = {form.name: np.empty(form.shape, form.dtype) for form in forms.forms}
        return RemoteBatch(tensors, rows, forms)

    def array(self, form: TensorForm, place: int) -> NDArray[Any]:
        """Raise FrameError: no memory is shared."""
        raise FrameError(
            f"the reply puts array {form.name!r:.60} at offset {place} of shared memory, but no "
            "memory is shared with this worker"
        )

    def layout(self, forms: FormSet, places: tuple[int, ...]) -> TensorLayout:
        """Raise FrameError: no memory is shared."""
        raise FrameError(
            f"the reply puts {len(forms.forms)} arrays at offsets {places} of shared memory, but "
            "no memory is shared with this worker"
        )

    def close(self) -> None:
        """Clear the cached layouts."""
        for layout in self._layouts.values():
            layout.orders.clear()
        self._layouts.clear()
