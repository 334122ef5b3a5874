"""Device memory and pinned memory: the buffers of a slot, and the pool of buffered batches.

The arena of a slot has, on the device::

    inputs 0, 1   what a stage reads; the stage after it reads from the other one
    outputs       what a stage gives before rows that exit are taken out
    scratch       memory of the executables, between the beginning and the end of a stage
    by_row        counters of the stage end, row numbers

and, pinned on the host: uploads, answers, row numbers, and what the stage end writes. All sizes are
known when a slot opens, and from then on addresses are fixed. Only a stage that is prepared after
the slot was opened, or a sample larger than was foreseen, can make a buffer grow.
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
"""The smallest allocation of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory that stages need of a slot; all 0 for none."""

    input_bytes: int = 0
    """Of a batch before or after a stage."""
    output_bytes: int = 0
    scratch_bytes: int = 0
    upload_bytes: int = 0
    answer_bytes: int = 0
    rows: int = 0

    def most(self, other: Needs) -> Needs:
        """Combine with other needs: what does for both, one after the other."""
        names = (each.name for each in fields(self))
        return Needs(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def device_bytes(self) -> int:
        """Device memory for one slot."""
        sizes = (self.input_bytes, self.input_bytes, self.output_bytes, self.scratch_bytes)
        return sum(map(aligned, sizes)) + RowBuffers.device_bytes(self.rows)

    def describe(self) -> str:
        """Describe the device memory, for messages: ``inputs 2 × 1.0 MiB, …``."""
        return (
            f"inputs 2 × {mib(self.input_bytes)}, outputs {mib(self.output_bytes)}, "
            f"scratch {mib(self.scratch_bytes)}, kernels {mib(RowBuffers.device_bytes(self.rows))}"
        )


def mib(size_bytes: int) -> str:
    """Write a size as ``1.5 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB"


class Region:
    """A piece of device memory that can grow; what it held is lost then."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.address = 0
        """Where kernels see it; 0 while nothing is allocated."""
        self.size_bytes = 0
        self.version = 0
        """Counts how often its content was replaced: what was read from it before is void."""

    def reserve(self, size_bytes: int) -> bool:
        """Have room; says whether the address changed. The host must have waited for its use."""
        if size_bytes <= self.size_bytes:
            return False
        self.free()  # first: both may not fit
        self.address = self._take(size_bytes)
        self.size_bytes = size_bytes
        return True

    def replace(self) -> int:
        """Void what it holds; gives its new version."""
        self.version += 1
        return self.version

    def free(self) -> None:
        """Give it back; may be called again."""
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
    """A piece of pinned host memory that can grow; what it held is lost then."""

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
    """Buffers that depend on nothing but the rows of a batch: the kernels' own, and their results.

    The stage end writes its results to pinned memory, so that no copy is needed to read them.
    """

    def __init__(self, driver: Driver) -> None:
        self._device = Region(driver)
        self._results = HostRegion(driver)
        self.sent_numbers = HostRegion(driver)
        """Row numbers on their way to the device, int32 [rows]."""
        self.rows = 0
        """The largest batch that there is room for."""
        self.scratch_is_clear = False
        """Whether the kernels' scratch is as they take it."""

    @staticmethod
    def device_bytes(rows: int) -> int:
        """Device memory for batches of ``rows``."""
        return aligned(Scratch.bytes_for(rows)) + aligned(4 * rows) if rows else 0

    def reserve(self, rows: int) -> bool:
        """Have room for batches of ``rows``; says whether addresses changed."""
        if rows <= self.rows:
            return False
        self.rows = 0  # until there is memory for all: what failed is tried again
        self.scratch_is_clear = False
        self._device.reserve(self.device_bytes(rows))
        self.sent_numbers.reserve(4 * rows)
        self._results.reserve(3 * aligned(4 * rows))
        self.rows = rows
        return True

    @property
    def scratch(self) -> Scratch:
        """The kernels' scratch block."""
        return Scratch(address=self._device.address, rows=self.rows)

    @property
    def row_numbers(self) -> int:
        """Address of row numbers on the device, int32 [rows]."""
        return self._device.address + aligned(Scratch.bytes_for(self.rows))

    @property
    def results(self) -> Results:
        """Addresses where the stage end shall write."""
        base, step = self._results.address, aligned(4 * self.rows)
        return Results(confidence=base, survivors=base + step, survivor_count=base + 2 * step)

    def views(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
        """View the stage end's results: confidence [rows], survivors [rows], their number [1].

        Only the first survivors are valid, as many as their number says.
        """
        step = aligned(4 * self.rows)
        words = self._results.array[: 3 * step].view(np.float32).reshape(3, -1)
        confidence, survivors, count = words
        return confidence[:rows], survivors[:rows].view(np.int32), count[:1].view(np.int32)

    def free(self) -> None:
        """Give everything back, whatever goes wrong on the way; may be called again."""
        self.rows = 0
        with ExitStack() as releases:
            for region in (self._device, self.sent_numbers, self._results):
                releases.callback(region.free)


class Arena:
    """All buffers of a slot; nothing is allocated before :meth:`open`. The driver is current.

    ``moving`` is called before a buffer moves: must wait for what uses it, and forget addresses.
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
        """How often a buffer was allocated anew after :meth:`open`."""

    def open(self, needs: Needs) -> None:
        """Allocate everything that stages need.

        DeviceMemoryError if there is not so much. What was allocated stays until :meth:`free`.
        """
        for region in self.inputs:
            region.reserve(needs.input_bytes)
        self.outputs.reserve(needs.output_bytes)
        self.scratch.reserve(needs.scratch_bytes)
        self.uploads.reserve(needs.upload_bytes)
        self.answers.reserve(needs.answer_bytes)
        self.by_row.reserve(needs.rows)

    def grow(self, region: Region, size_bytes: int) -> None:
        """Have room in a region whose content is not needed any more."""
        if size_bytes > region.size_bytes:
            self.settle()
            region.reserve(size_bytes)
            self.growths += 1

    def grow_rows(self, rows: int) -> None:
        """Have room for batches of ``rows`` in all that is by row."""
        if rows > self.by_row.rows:
            self.settle()
            self.by_row.reserve(rows)
            self.growths += 1

    @property
    def sizes(self) -> Needs:
        """Sizes that there is room for now."""
        return Needs(
            input_bytes=max(region.size_bytes for region in self.inputs),
            output_bytes=self.outputs.size_bytes,
            scratch_bytes=self.scratch.size_bytes,
            upload_bytes=self.uploads.size_bytes,
            answer_bytes=self.answers.size_bytes,
            rows=self.by_row.rows,
        )

    def free(self) -> None:
        """Give everything back, whatever goes wrong on the way; may be called again."""
        regions = (*self.inputs, self.outputs, self.scratch, self.uploads, self.answers)
        with ExitStack() as releases:
            for each in (*regions, self.by_row):
                releases.callback(each.free)


class PooledMemory:
    """A piece of the memory pool; goes back to it with the last reference."""

    __slots__ = ("_returned", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, returned: deque[tuple[int, int]]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._returned = returned

    def __del__(self) -> None:
        """May run on any thread and amid anything, so it takes no lock and calls no CUDA."""
        self._returned.append((self.size_bytes, self.address))


class MemoryPool:
    """Device memory of buffered batches, in sizes that are powers of two; thread-safe.

    Any slot takes memory. Whoever lets go of it last has waited for the work that uses it.
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
        """Take memory; the driver must be current. DeviceMemoryError if none lies idle either."""
        size_bytes = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
        with self._lock:
            while self._returned:
                returned_bytes, address = self._returned.popleft()
                self._idle[returned_bytes].append(address)
            idle = self._idle[size_bytes]
            address = idle.pop() if idle else self._allocate(size_bytes)
        return PooledMemory(address, size_bytes, self._returned)

    def read(self, memory: PooledMemory, size_bytes: int) -> NDArray[np.uint8]:
        """Copy the beginning of memory that was taken to the host, and wait; on any thread.

        What wrote it is done. BackendError if it cannot be read, DeviceLostError.
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
        """Free everything, buffered batches that are still referred to as well."""
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
        """Give back what nobody uses; says whether there was any."""
        addresses = [address for idle in self._idle.values() for address in idle]
        self._idle.clear()
        for address in addresses:
            self._driver.free(address)
            self._all.discard(address)
        return bool(addresses)
