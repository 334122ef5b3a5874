"""Device memory and pinned memory: the buffers of a slot, and the pool of buffered batches.

The arena of a slot has, on the device::

    inputs 0, 1   inputs of a stage; the next stage reads from the other one
    outputs       outputs of a stage, still with the rows that leave
    scratch       memory of the executables, between the beginning and the end of a stage
    by_row        counters of the stage end, row numbers

and, pinned on the host: uploads, answers, row numbers, and the results of the stage end. All sizes
are known when a slot opens, and from then on addresses are fixed. A buffer grows only for a stage
that is prepared after the slot was opened, or for a sample larger than expected.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.driver import DeviceMemoryError, Driver, Pinned, aligned
from offramp.engine.kernels.kernel_arguments import Results, Scratch

_LEAST_BYTES = 1 << 16
"""Bytes of the smallest allocation of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory that stages need of a slot, in bytes; all 0 for none."""

    input_bytes: int = 0
    """Largest size of a batch before or after a stage."""
    output_bytes: int = 0
    scratch_bytes: int = 0
    upload_bytes: int = 0
    answer_bytes: int = 0
    rows: int = 0

    def most(self, other: Needs) -> Needs:
        """Return the needs that satisfy both, one after the other."""
        names = (each.name for each in fields(self))
        return Needs(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def device_bytes(self) -> int:
        """Device memory that one slot needs, in bytes."""
        sizes = (self.input_bytes, self.input_bytes, self.output_bytes, self.scratch_bytes)
        return sum(map(aligned, sizes)) + RowBuffers.device_bytes(self.rows)

    def describe(self) -> str:
        """Describe the device memory, for messages: ``inputs 2 × 1.0 MiB, …``."""
        return (
            f"inputs 2 × {mib(self.input_bytes)}, outputs {mib(self.output_bytes)}, "
            f"scratch {mib(self.scratch_bytes)}, kernels {mib(RowBuffers.device_bytes(self.rows))}"
        )


def mib(size_bytes: int) -> str:
    """Format a size as ``1.5 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB"


class Region:
    """A piece of device memory that can grow, which discards its content."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.address = 0
        """Address for kernels; 0 while nothing is allocated."""
        self.size_bytes = 0
        self.version = 0
        """Number of replacements of the region's content; each makes earlier reads invalid."""

    def reserve(self, size_bytes: int) -> bool:
        """Ensure a size; return whether the address changed.

        The host must have waited for all work that uses the region.
        """
        if size_bytes <= self.size_bytes:
            return False
        self.free()  # free first: both may not fit
        self.address = self._take(size_bytes)
        self.size_bytes = size_bytes
        return True

    def replace(self) -> int:
        """Invalidate the region's content; return its new version."""
        self.version += 1
        return self.version

    def free(self) -> None:
        """Free the region; may be called again."""
        address, size_bytes = self.address, self.size_bytes
        self.address = self.size_bytes = 0
        self.version += 1
        if size_bytes:
            self._give_back(address)

    def _take(self, size_bytes: int) -> int:
        return self._driver.allocate(size_bytes)

    def _give_back(self, address: int) -> None:
        self._driver.free(address)


class HostRegion(Region):
    """A piece of pinned host memory that can grow, which discards its content."""

    array: NDArray[np.uint8] = np.empty(0, np.uint8)
    _pinned: Pinned

    def _take(self, size_bytes: int) -> int:
        self._pinned = self._driver.allocate_pinned(size_bytes)
        self.array = self._pinned.array
        return self._pinned.address

    def _give_back(self, address: int) -> None:  # noqa: ARG002 - freed by its handle
        self.array = np.empty(0, np.uint8)
        self._pinned.free()


class RowBuffers:
    """Buffers that depend only on the number of rows: the kernels' scratch, and their results.

    The stage end writes its results to pinned memory, so that they are read without a copy.
    """

    def __init__(self, driver: Driver) -> None:
        self._device = Region(driver)
        self._results = HostRegion(driver)
        self.sent_numbers = HostRegion(driver)
        """Row numbers to be copied to the device, int32 [rows]."""
        self.rows = 0
        """Number of rows of the largest batch that the buffers hold."""
        self.scratch_is_clear = False
        """``True`` if the kernels' scratch has the state that they require."""

    @staticmethod
    def device_bytes(rows: int) -> int:
        """Return the device memory for batches of ``rows``."""
        return aligned(Scratch.bytes_for(rows)) + aligned(4 * rows) if rows else 0

    def reserve(self, rows: int) -> bool:
        """Ensure buffers for batches of ``rows``; return whether addresses changed."""
        if rows <= self.rows:
            return False
        self.rows = 0  # until all is allocated: a failure is tried again
        self.scratch_is_clear = False
        self._device.reserve(self.device_bytes(rows))
        self.sent_numbers.reserve(4 * rows)
        self._results.reserve(3 * aligned(4 * rows))
        self.rows = rows
        return True

    @property
    def scratch(self) -> Scratch:
        """Scratch memory of the kernels at a stage's end."""
        return Scratch(address=self._device.address, rows=self.rows)

    @property
    def row_numbers(self) -> int:
        """Address of row numbers on the device, int32 [rows]."""
        return self._device.address + aligned(Scratch.bytes_for(self.rows))

    @property
    def results(self) -> Results:
        """Addresses for the results of the stage end."""
        base, step = self._results.address, aligned(4 * self.rows)
        return Results(confidence=base, survivors=base + step, survivor_count=base + 2 * step)

    def views(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
        """Return views of the results: confidence [rows], survivors [rows], their number [1].

        Of the survivors, only the first elements are valid; the third result counts them.
        """
        step = aligned(4 * self.rows)
        words = self._results.array[: 3 * step].view(np.float32).reshape(3, -1)
        confidence, survivors, count = words
        return confidence[:rows], survivors[:rows].view(np.int32), count[:1].view(np.int32)

    def free(self) -> None:
        """Free everything, even if an error occurs; may be called again."""
        self.rows = 0
        with ExitStack() as releases:
            for region in (self._device, self.sent_numbers, self._results):
                releases.callback(region.free)


class Arena:
    """All buffers of a slot; nothing is allocated before :meth:`open`. The driver is current.

    ``moving`` is called before a buffer moves: the function must wait for all work, and forget
    addresses.
    """

    def __init__(self, driver: Driver, moving: Callable[[], None]) -> None:
        self.settle = moving
        self.inputs = (Region(driver), Region(driver))
        self.outputs = Region(driver)
        self.scratch = Region(driver)
        self.uploads = HostRegion(driver)
        self.answers = HostRegion(driver)
        self.by_row = RowBuffers(driver)
        self.growths = 0
        """Number of reallocations of buffers after :meth:`open`."""

    def open(self, needs: Needs) -> None:
        """Allocate everything that stages need.

        DeviceMemoryError if memory is short. Allocated buffers stay until :meth:`free`.
        """
        for region in self.inputs:
            region.reserve(needs.input_bytes)
        self.outputs.reserve(needs.output_bytes)
        self.scratch.reserve(needs.scratch_bytes)
        self.uploads.reserve(needs.upload_bytes)
        self.answers.reserve(needs.answer_bytes)
        self.by_row.reserve(needs.rows)

    def grow(self, region: Region, size_bytes: int) -> None:
        """Ensure the size of a region whose content is not needed any more."""
        if size_bytes > region.size_bytes:
            self.settle()
            region.reserve(size_bytes)
            self.growths += 1

    def grow_rows(self, rows: int) -> None:
        """Ensure that all buffers that depend on rows hold batches of ``rows``."""
        if rows > self.by_row.rows:
            self.settle()
            self.by_row.reserve(rows)
            self.growths += 1

    @property
    def sizes(self) -> Needs:
        """Sizes that the buffers have now."""
        return Needs(
            input_bytes=max(region.size_bytes for region in self.inputs),
            output_bytes=self.outputs.size_bytes,
            scratch_bytes=self.scratch.size_bytes,
            upload_bytes=self.uploads.size_bytes,
            answer_bytes=self.answers.size_bytes,
            rows=self.by_row.rows,
        )

    def free(self) -> None:
        """Free everything, even if an error occurs; may be called again."""
        regions = (*self.inputs, self.outputs, self.scratch, self.uploads, self.answers)
        with ExitStack() as releases:
            for each in (*regions, self.by_row):
                releases.callback(each.free)


class PooledMemory:
    """A piece of the memory pool; the pool gets it back when the last reference is gone."""

    __slots__ = ("_returned", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, returned: deque[tuple[int, int]]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._returned = returned

    def __del__(self) -> None:
        """Return the piece to the pool.

        This runs on any thread at any point, so it takes no lock and makes no CUDA call.
        """
        self._returned.append((self.size_bytes, self.address))


class MemoryPool:
    """Device memory of buffered batches, in sizes that are powers of two; thread-safe.

    Any slot may take memory. Before the last reference to it is dropped, its owner must have waited
    for the work that uses it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._read = HostRegion(driver)
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        self._all: set[int] = set()
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, size_bytes: int) -> PooledMemory:
        """Allocate memory; the driver must be current. DeviceMemoryError if it is short."""
        size_bytes = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
        with self._lock:
            while self._returned:
                returned_bytes, address = self._returned.popleft()
                self._idle[returned_bytes].append(address)
            idle = self._idle[size_bytes]
            address = idle.pop() if idle else self._allocate(size_bytes)
        return PooledMemory(address, size_bytes, self._returned)

    def read(self, memory: PooledMemory, size_bytes: int) -> NDArray[np.uint8]:
        """Copy the beginning of allocated memory to the host, and wait; on any thread.

        The work that wrote it is done. BackendError if it cannot be read, DeviceLostError.
        """
        driver = self._driver
        with self._reading, driver.current(), ExitStack() as releases:
            self._read.reserve(size_bytes)
            content = self._read.array[:size_bytes]
            stream, event = driver.stream(), driver.event()
            releases.callback(stream.close)
            releases.callback(event.close)
            driver.copy_out(content, memory.address, stream)
            driver.record(event, stream)
            driver.synchronize(event)
            return content.copy()

    def close(self) -> None:
        """Free everything, including buffered batches that are still referenced."""
        with self._lock:
            for address in self._all:
                self._driver.free(address)
            self._all.clear()
            self._idle.clear()
        self._read.free()

    def _allocate(self, size_bytes: int) -> int:
        try:
            address = self._driver.allocate(size_bytes)
        except DeviceMemoryError:
            if not self._free_idle():
                raise
            address = self._driver.allocate(size_bytes)
        self._all.add(address)
        return address

    def _free_idle(self) -> bool:
        """Free unused memory; return whether there was any."""
        addresses = [address for idle in self._idle.values() for address in idle]
        self._idle.clear()
        for address in addresses:
            self._driver.free(address)
            self._all.discard(address)
        return bool(addresses)
