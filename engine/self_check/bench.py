"""Device memory and a stream of a check, separate from those of the slots."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends import Backend, Slot, TensorBatch
from offramp.engine.backends.host import HostBatch
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.device_batch import BufferedRows, CudaBatch
from offramp.engine.cuda.driver import Driver
from offramp.engine.cuda.memory import RowBuffers
from offramp.engine.cuda.slot import CudaSlot
from offramp.engine.cuda.stream import DeviceKernels
from offramp.engine.kernels.kernel_arguments import Launch

UNTOUCHED = 0xC3
"""Byte that fills memory before kernels write to it."""


class DeviceBench:
    """Places arrays on a device, launches our kernels there, and copies results back.

    It is a context manager: the driver is current inside, and all memory is freed at its end.
    """

    def __init__(self, driver: Driver, kernels: DeviceKernels) -> None:
        self.kernels = kernels
        self._driver = driver
        self._releases = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as failed:
            failed.enter_context(self._driver.current())
            self._stream = self._driver.stream()
            failed.callback(self._stream.close)
            self._event = self._driver.event()
            failed.callback(self._event.close)
            self._releases = failed.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._releases.close()

    def place(self, array: NDArray[Any]) -> int:
        """Copy an array to device memory; return its address."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self._driver.allocate(max(raw.size, 1))
        self._releases.callback(self._driver.free, address)
        if raw.size:
            pinned = self._driver.allocate_pinned(raw.size)
            try:
                pinned.array[: raw.size] = raw
                self._driver.copy_in(address, pinned.array[: raw.size], self._stream)
                self._wait()
            finally:
                pinned.free()
        return address

    def allocate_filled(self, size_bytes: int) -> int:
        """Allocate memory filled with :data:`UNTOUCHED`; return its address."""
        return self.place(np.full(size_bytes, UNTOUCHED, np.uint8))

    def fetch(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Copy device memory to an array; work that writes it must be finished."""
        if not size_bytes:
            return np.empty(0, np.uint8)
        pinned = self._driver.allocate_pinned(size_bytes)
        try:
            self._driver.copy_out(pinned.array[:size_bytes], address, self._stream)
            self._wait()
            return pinned.array[:size_bytes].copy()
        finally:
            pinned.free()

    def row_buffers(self, rows: int) -> RowBuffers:
        """Return the kernels' scratch and results for batches of ``rows``, as in a slot."""
        buffers = RowBuffers(self._driver)
        self._releases.callback(buffers.free)
        buffers.reserve(rows)
        scratch = buffers.scratch
        self._driver.clear(scratch.address, scratch.bytes_for(rows), self._stream)
        self._wait()
        return buffers

    def launch(self, launch: Launch) -> None:
        """Run a kernel to its end."""
        self.kernels.launch(launch, self._stream)
        self._wait()

    def _wait(self) -> None:
        self._driver.record(self._event, self._stream)
        self._driver.synchronize(self._event)


def bench_of(backend: Backend) -> DeviceBench | None:
    """Return a bench for a backend on a GPU; ``None`` for others."""
    return (
        DeviceBench(backend.driver, backend.kernels) if isinstance(backend, CudaBackend) else None
    )


def read_tensors(
    backend: Backend, slot: Slot, batch: TensorBatch
) -> dict[str, NDArray[Any]] | None:
    """Copy a batch's tensors to the host, by name; ``None`` if the backend does not expose them."""
    if isinstance(batch, HostBatch):
        return {name: array.copy() for name, array in batch.tensors.items()}
    if isinstance(backend, CudaBackend) and isinstance(slot, CudaSlot):
        if isinstance(batch, CudaBatch):
            slot.wait()
            return _fetched(backend, batch, batch.addresses)
        if isinstance(batch, BufferedRows):
            return _fetched(backend, batch, batch.layout.addresses(batch.memory.address))
    return None


def _fetched(
    backend: CudaBackend, batch: CudaBatch | BufferedRows, addresses: tuple[int, ...]
) -> dict[str, NDArray[Any]]:
    found = {}
    with DeviceBench(backend.driver, backend.kernels) as bench:
        for tensor, address in zip(batch.layout.tensors, addresses, strict=True):
            raw = bench.fetch(address, batch.rows * tensor.row_bytes)
            found[tensor.name] = raw.view(tensor.dtype).reshape(batch.rows, *tensor.sample_shape)
    return found
