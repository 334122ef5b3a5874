"""A slot's stream: what is enqueued on it, waiting for it, and copies of rows on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from offramp.engine.backends.base import Rows
from offramp.engine.cuda.arena import Arena
from offramp.engine.cuda.driver import Driver, Event, Stream
from offramp.engine.cuda.kernels import DeviceKernels
from offramp.engine.cuda.layout import Layout
from offramp.engine.errors import BackendError
from offramp.engine.kernels.arguments import RowCopy


class Queue:
    """A stream, and what the host has not waited for yet."""

    def __init__(self, driver: Driver, stream: Stream, event: Event) -> None:
        """Take over a stream and an event."""
        self.stream = stream
        self.pending = False
        """Whether work is enqueued that the host has not waited for."""
        self.sending = False
        """Whether some of it reads the pinned row numbers."""
        self.held: list[object] = []
        """What enqueued work uses, and nobody else may refer to any more."""
        self._driver = driver
        self._event = event

    def record(self) -> None:
        """Mark what is enqueued so far, to be waited for by :meth:`wait`."""
        self._driver.record(self._event, self.stream)

    def wait(self) -> None:
        """Wait for what was recorded last, which is all there is."""
        self._driver.synchronize(self._event)
        self.pending = self.sending = False
        self.held.clear()

    def settle(self) -> None:
        """Wait for all that is enqueued."""
        if self.pending:
            self.record()
            self.wait()

    def settle_quietly(self) -> None:
        """Wait; what goes wrong was said, or will be."""
        with suppress(BackendError):
            self.settle()
        self.held.clear()


class Moves:
    """Copies rows of all tensors of a batch."""

    def __init__(self, driver: Driver, kernels: DeviceKernels, arena: Arena, queue: Queue) -> None:
        """Use the buffers and the stream of a slot."""
        self._driver = driver
        self._kernels = kernels
        self._arena = arena
        self._queue = queue

    def copy(
        self, layout: Layout, sources: Sequence[int], targets: Sequence[int], rows: int
    ) -> None:
        """Enqueue copies of the first rows.

        Args:
            layout: Says how large a row of each tensor is.
            sources: Addresses, by tensor of the layout.
            targets: The same.
            rows: How many.
        """
        self._queue.pending = True
        for tensor, source, target in zip(layout.tensors, sources, targets, strict=True):
            if size_bytes := rows * tensor.row_bytes:
                self._driver.copy_within(target, source, size_bytes, self._queue.stream)

    def gather(
        self,
        layout: Layout,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        source_rows: int,
        rows: Rows,
        numbers: int = 0,
    ) -> None:
        """Enqueue copies of some rows.

        Args:
            layout: As of :meth:`copy`, like the next two.
            sources: The same.
            targets: The same.
            source_rows: Rows that the sources have.
            rows: Row numbers, rising.
            numbers: Their address on the device, if :meth:`send` was there before.

        Raises:
            BackendError: There is no such row.
        """
        if not len(rows):
            return
        if rows[-1] >= source_rows:
            raise BackendError(f"row {rows[-1]} was asked for, there are {source_rows}")
        tensors = [
            RowCopy(source=source, target=target, row_bytes=tensor.row_bytes)
            for tensor, source, target in zip(layout.tensors, sources, targets, strict=True)
        ]
        self._kernels.gather(
            tensors,
            self._queue.stream,
            rows=numbers or self.send([rows]),
            count=len(rows),
            source_rows=source_rows,
        )

    def send(self, lists: Sequence[Rows]) -> int:
        """Enqueue the way of row numbers to the device; gives their address there, or 0."""
        count = sum(map(len, lists))
        if not count:
            return 0
        self._arena.grow_rows(count)
        if self._queue.sending:
            self._queue.settle()
        pinned = self._arena.row_numbers.array[: 4 * count]
        np.concatenate(lists, out=pinned.view(np.int32), casting="same_kind")
        self._queue.pending = self._queue.sending = True
        address = self._arena.kernels.row_numbers
        self._driver.copy_in(address, pinned, self._queue.stream)
        return address
