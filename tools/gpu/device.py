"""Our kernels on a GPU, launched through PyCUDA: for tests/gpu and for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.kernels.kernel_arguments import Launch
from offramp.engine.kernels.kernel_compilation import load_kernels
from offramp.engine.tensorrt import probe
from offramp.engine.tensorrt.standalone import PreparedEngine
from offramp.engine.tensorrt.tensorrt_messages import errors_of_tensorrt

if TYPE_CHECKING:
    import pycuda.driver as cuda

_WARM_UP = 3
"""Untimed runs before the timed ones: the first loads kernels, clocks rise during the next."""

_BUSY_BYTES = 1 << 30
"""Size of the copies that keep the GPU busy while launches are queued: about half a millisecond
each on an H200, more on others."""


class Memory(Protocol):
    """Memory that tests transfer to the device: some bytes, with guards around them."""

    whole: NDArray[np.uint8]
    """Payload and guards."""
    offset: int
    """Offset of the payload in ``whole``, in bytes."""


class Allocation(Protocol):
    """Device memory; ``int`` returns its address."""

    def __int__(self) -> int:
        """Return the address on the device."""
        ...

    def free(self) -> None:
        """Free the memory early."""
        ...


class Gpu:
    """One stream of a GPU, and our kernels; made by :func:`open_gpu`, used by one thread."""

    def __init__(self, cubin: bytes) -> None:
        """Load the kernels into the thread's current context."""
        import pycuda.driver as cuda  # noqa: PLC0415

        self._stream: cuda.Stream | None = cuda.Stream()
        self._module: cuda.Module | None = cuda.module_from_buffer(cubin)
        self._functions: dict[str, cuda.Function] = {}
        device: cuda.Device = cuda.Context.get_device()
        self.multiprocessors = int(device.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT))
        """Number of multiprocessors of the GPU."""
        self.l2_bytes = int(device.get_attribute(cuda.device_attribute.L2_CACHE_SIZE))
        """Size of the GPU's L2 cache."""
        self._placed: dict[int, tuple[Memory, Allocation]] = {}
        self._launched = False
        self._busy: tuple[Allocation, Allocation] | None = None

    @property
    def stream(self) -> cuda.Stream:
        """Stream of all work; BackendError after the end."""
        if self._stream is None:
            raise BackendError("the GPU was closed")
        return self._stream

    def close(self) -> None:
        """Release everything while the context is current: PyCUDA cannot do so afterwards."""
        self.forget()
        self._busy = None
        self._functions.clear()
        self._module = self._stream = None

    def allocate(self, size_bytes: int) -> Allocation:
        """Allocate device memory, aligned to 256; freed with the last reference, or by ``free``."""
        import pycuda.driver as cuda  # noqa: PLC0415

        memory: Allocation = cuda.mem_alloc(max(size_bytes, 1))
        return memory

    def zeros(self, size_bytes: int) -> Allocation:
        """Allocate device memory of zeros."""
        import pycuda.driver as cuda  # noqa: PLC0415

        memory = self.allocate(size_bytes)
        cuda.memset_d8_async(int(memory), 0, max(size_bytes, 1), self.stream)
        return memory

    def upload(self, array: NDArray[Any]) -> Allocation:
        """Return a copy of an array in device memory."""
        import pycuda.driver as cuda  # noqa: PLC0415

        memory = self.allocate(array.nbytes)
        if array.nbytes:
            cuda.memcpy_htod(int(memory), np.ascontiguousarray(array))
        return memory

    def download(self, memory: Allocation, array: NDArray[Any]) -> None:
        """Fill an array from device memory, when the stream has done its work."""
        import pycuda.driver as cuda  # noqa: PLC0415

        self.stream.synchronize()
        cuda.memcpy_dtoh(array, int(memory))

    def pinned(self, content: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
        """Return a copy in pinned host memory, and the address at which kernels may access it."""
        import pycuda.driver as cuda  # noqa: PLC0415

        array = cuda.pagelocked_empty(
            content.shape, np.uint8, mem_flags=cuda.host_alloc_flags.DEVICEMAP
        )
        array[:] = content
        host: cuda.PagelockedHostAllocation = array.base
        return array, int(host.get_device_pointer())

    def enqueue(self, launch: Launch) -> None:
        """Launch on the stream, without waiting."""
        function = self._function(launch.entry_point)
        function(
            launch.arguments,
            grid=(launch.grid, 1),
            block=(launch.block, 1, 1),
            shared=launch.shared_bytes,
            stream=self.stream,
        )

    def time_ms(self, work: Callable[[int], object], repeats: int) -> float:
        """Time work on the device: ``work(0)``, ``work(1)``, … queued one after the other.

        Work is queued after copies, so that it does not wait for the host: only the device is
        timed, including launch gaps.

        Args:
            work: Function that queues work on the stream; its argument is the number of the
            repetition.
            repeats: Number of repetitions.

        Returns:
            Milliseconds per repetition, between CUDA events around all of them.
        """
        import pycuda.driver as cuda  # noqa: PLC0415

        start: cuda.Event = cuda.Event()
        end: cuda.Event = cuda.Event()
        self._keep_busy(copies=4 + repeats // 10)
        start.record(self.stream)
        for index in range(repeats):
            work(index)
        end.record(self.stream)
        end.synchronize()
        return float(end.time_since(start)) / repeats

    def _keep_busy(self, copies: int) -> None:
        import pycuda.driver as cuda  # noqa: PLC0415

        if self._busy is None:
            self._busy = self.allocate(_BUSY_BYTES), self.allocate(_BUSY_BYTES)
        source, target = map(int, self._busy)
        for _ in range(copies):
            cuda.memcpy_dtod_async(target, source, _BUSY_BYTES, self.stream)

    # The interface of devices in tests/unit/kernels, which test the same cases on the CPU.

    def place(self, memory: Memory) -> int:
        """Copy a memory to the device; return the address of its payload."""
        if self._launched:
            self.forget()
        allocation = self.upload(memory.whole)
        self._placed[id(memory)] = memory, allocation
        return int(allocation) + memory.offset

    def launch(self, launch: Launch, *, seed: int = 0, resident: int = 4) -> None:  # noqa: ARG002
        """Run a kernel to its end; the hardware orders threads and blocks as it likes."""
        self.enqueue(launch)
        self.stream.synchronize()
        self._launched = True

    def fetch(self, memory: Memory) -> None:
        """Copy memory back that :meth:`place` copied to the device."""
        import pycuda.driver as cuda  # noqa: PLC0415

        _, allocation = self._placed[id(memory)]
        cuda.memcpy_dtoh(memory.whole, int(allocation))

    def forget(self) -> None:
        """Free all memory of :meth:`place`."""
        for _, allocation in self._placed.values():
            allocation.free()
        self._placed.clear()
        self._launched = False

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy from device memory to device memory."""
        import pycuda.driver as cuda  # noqa: PLC0415

        cuda.memcpy_dtod_async(target, source, size_bytes, self.stream)

    def _function(self, name: str) -> cuda.Function:
        if name not in self._functions:
            if self._module is None:
                raise BackendError("the GPU was closed")
            self._functions[name] = self._module.get_function(name)
        return self._functions[name]


@contextmanager
def open_gpu(index: int = 0) -> Iterator[Gpu]:
    """Yield a stream of a GPU with our kernels; the context is current on this thread.

    Raises:
        BackendError: There is no GPU, or the kernels cannot be compiled for it.
    """
    found = probe.find_device(index)
    cubin = load_kernels(found.compute_capability, driver_version=found.driver_version)
    with primary_context(index).current():
        gpu = Gpu(cubin)
        try:
            yield gpu
        finally:
            gpu.close()


def time_ms(prepared: PreparedEngine, rounds: int) -> list[float]:
    """Time runs on zeros.

    Returns:
        Milliseconds of each round on the device, between CUDA events; without copies.
    """
    import pycuda.driver as cuda  # noqa: PLC0415

    stream: cuda.Stream = prepared.stream
    for name in prepared.engine.inputs:
        tensor = prepared.tensors[name]
        cuda.memset_d8_async(tensor.memory, 0, tensor.size_bytes, stream)
    start: cuda.Event = cuda.Event()
    end: cuda.Event = cuda.Event()
    times = []
    with errors_of_tensorrt() as errors:
        for _ in range(_WARM_UP):
            prepared.enqueue(errors)
        for _ in range(rounds):
            start.record(stream)
            prepared.enqueue(errors)
            end.record(stream)
            end.synchronize()
            times.append(float(end.time_since(start)))
    return times
