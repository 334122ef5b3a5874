"""The stream of a slot, on which kernels and copies of rows are enqueued, and waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.device_batch import Layout
from offramp.engine.cuda.driver import Driver, Stream, StreamEvent
from offramp.engine.cuda.memory import Arena
from offramp.engine.kernels.kernel_arguments import MOST_TENSORS, Launch, RowCopy, gather_rows
from offramp.engine.stages.backend_protocol import Rows


class DeviceKernels:
    """Our kernels, loaded once for all slots while the driver is current."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        self._driver = driver
        self._kernels = driver.load(cubin)
        self.multiprocessors = driver.multiprocessors

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Enqueue one of the kernels on a stream."""
        self._driver.launch(self._kernels[launch.entry_point], launch, stream)


def row_copies(
    layout: Layout, sources: Sequence[int], targets: Sequence[int]
) -> tuple[RowCopy, ...]:
    """Return descriptions of row copies for the kernels, one for every tensor of a layout."""
    return tuple(
        RowCopy(source=source, target=target, row_bytes=tensor.row_bytes)
        for tensor, source, target in zip(layout.tensors, sources, targets, strict=True)
    )


class SlotStream:
    """A stream with its enqueued work, and a record of what the host still has to wait for."""

    def __init__(
        self,
        driver: Driver,
        kernels: DeviceKernels,
        arena: Arena,
        stream: Stream,
        event: StreamEvent,
    ) -> None:
        self.stream = stream
        self.pending = False
        """``True`` if there is work that the host has not waited for."""
        self.held: list[object] = []
        """Objects that enqueued work uses, kept alive until it is done."""
        self._sending = False
        """``True`` if enqueued work reads the pinned row numbers."""
        self._driver = driver
        self._kernels = kernels
        self._arena = arena
        self._event = event

    def wait(self) -> None:
        """Wait for all enqueued work, if there is any."""
        if self.pending:
            self._driver.record(self._event, self.stream)
            self._driver.synchronize(self._event)
            self.pending = self._sending = False
            self.held.clear()

    def wait_quietly(self) -> None:
        """Wait, ignoring errors, which were or will be reported."""
        with suppress(BackendError):
            self.wait()
        self.held.clear()

    def copy(
        self, layout: Layout, sources: Sequence[int], targets: Sequence[int], rows: int
    ) -> None:
        """Enqueue copies of the first rows; each tensor of the layout has a source and a target."""
        self.pending = True
        for tensor, source, target in zip(layout.tensors, sources, targets, strict=True):
            if size_bytes := rows * tensor.row_bytes:
                self._driver.copy_within(target, source, size_bytes, self.stream)

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
        """Enqueue copies of some of ``source_rows`` rows; ``rows`` ascend.

        ``numbers`` is the address of the row numbers on the device, if :meth:`send` was called
        before. BackendError if there is no such row.
        """
        if not len(rows):
            return
        if rows[-1] >= source_rows:
            raise BackendError(f"row {rows[-1]} was requested, but there are {source_rows}")
        numbers = numbers or self.send([rows])
        left = iter(row_copies(layout, sources, targets))
        while some := tuple(islice(left, MOST_TENSORS)):
            launch = gather_rows(
                some,
                rows=numbers,
                count=len(rows),
                source_rows=source_rows,
                multiprocessors=self._kernels.multiprocessors,
            )
            self._kernels.launch(launch, self.stream)

    def send(self, lists: Sequence[Rows]) -> int:
        """Enqueue the copy of row numbers to the device; return their address there, or 0."""
        count = sum(map(len, lists))
        if not count:
            return 0
        self._arena.grow_rows(count)
        if self._sending:
            self.wait()
        pinned = self._arena.by_row.sent_numbers.array[: 4 * count]
        np.concatenate(lists, out=pinned.view(np.int32), casting="same_kind")
        self.pending = self._sending = True
        address = self._arena.by_row.row_numbers
        self._driver.copy_in(address, pinned, self.stream)
        return address
