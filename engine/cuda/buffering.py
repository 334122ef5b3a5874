"""Device memory of buffered batches: taken by any slot, given back by whoever lets go last."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from offramp.engine.cuda.driver import DeviceMemoryError, Driver

_LEAST_BYTES = 1 << 16


class BufferedMemory:
    """A piece of the pool; goes back to it with the last reference."""

    __slots__ = ("_returned", "address", "size_bytes")

    def __init__(self, address: int, size_bytes: int, returned: deque[tuple[int, int]]) -> None:
        """Stand for memory of the pool."""
        self.address = address
        self.size_bytes = size_bytes
        self._returned = returned

    def __del__(self) -> None:
        """May run on any thread and amid anything, so it takes no lock and calls no CUDA."""
        self._returned.append((self.size_bytes, self.address))


class ParkingPool:
    """Keeps what was allocated, in sizes that are powers of two; thread-safe.

    Whoever lets go of memory has waited for the work that uses it.
    """

    def __init__(self, driver: Driver) -> None:
        """Allocate nothing yet."""
        self._driver = driver
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        """Addresses by size."""
        self._all: set[int] = set()
        self._returned: deque[tuple[int, int]] = deque()
        self.allocations = 0
        """From the driver, so far."""

    def take(self, size_bytes: int) -> BufferedMemory:
        """Take memory; the driver must be current.

        Raises:
            DeviceMemoryError: There is none, even without what lies idle.
        """
        size_bytes = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
        with self._lock:
            self._collect()
            idle = self._idle[size_bytes]
            address = idle.pop() if idle else self._allocate(size_bytes)
        return BufferedMemory(address, size_bytes, self._returned)

    def close(self) -> None:
        """Free everything, buffered batches that are still referred to as well."""
        with self._lock:
            for address in self._all:
                self._driver.free(address)
            self._all.clear()
            self._idle.clear()

    def _collect(self) -> None:
        while self._returned:
            size_bytes, address = self._returned.popleft()
            self._idle[size_bytes].append(address)

    def _allocate(self, size_bytes: int) -> int:
        try:
            address = self._driver.allocate(size_bytes)
        except DeviceMemoryError:
            if not self._free_idle():
                raise
            address = self._driver.allocate(size_bytes)
        self._all.add(address)
        self.allocations += 1
        return address

    def _free_idle(self) -> bool:
        """Give back what nobody uses; says whether there was any."""
        addresses = [address for idle in self._idle.values() for address in idle]
        self._idle.clear()
        for address in addresses:
            self._driver.free(address)
            self._all.discard(address)
        return bool(addresses)
