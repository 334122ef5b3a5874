"""The driver of a GPU, through PyCUDA; its graphs are made through ``cuda.bindings``.

It uses the device's primary context, never one of PyCUDA's own, so that memory and streams are
shared with TensorRT and ONNX Runtime. All resources are released explicitly: PyCUDA releases them
only on a thread on which their context is current, and otherwise warns and leaks.

Errors on the device (an illegal address, a hardware fault) are raised at the next wait, and they
are sticky: the context is lost, and every later call in the process fails. A restarted slot then
fails again, and all slots are soon out of service (``engine/serving/stream_health.py``); only a new
process helps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.optional_imports import optional_import
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_graphs import CudaGraph, CudaGraphs
from offramp.engine.cuda.driver import DeviceLostError, DeviceMemoryError, Stream, StreamEvent
from offramp.engine.cuda.primary_context import PrimaryContext, primary_context
from offramp.engine.kernels.kernel_arguments import (
    ENTRY_POINTS,
    GATHER_ROWS,
    GATHER_ROWS_ARGUMENTS,
    STAGE_END_ARGUMENTS,
    Launch,
)

if TYPE_CHECKING:
    import pycuda.driver as cuda

_INSTALL = (
    "pip install --force-reinstall --no-cache-dir pycuda (it must fit the driver's CUDA version)"
)
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, for which PyCUDA has no name: the stream and the default stream, which a
library may use, do not wait for each other."""


def require_pycuda() -> None:
    """Import PyCUDA, which the driver needs; BackendError with the reason if that fails."""
    with optional_import("pycuda", install=_INSTALL, raises=BackendError):
        import pycuda.driver  # noqa: F401, PLC0415


class PyCudaDriver:
    """One GPU through its primary context: a :class:`offramp.engine.cuda.driver.Driver`.

    Call :func:`offramp.engine.tensorrt.probe.require` first. BackendError if CUDA does not provide
    the context.
    """

    def __init__(self, index: int = 0) -> None:
        import pycuda.driver as cuda  # noqa: PLC0415

        self._cuda = cuda
        self._context = _Current(primary_context(index))
        self._errors = _Errors(cuda.Error)
        with self._errors:
            device: cuda.Device = cuda.Device(index)
            self.device = str(device.name())
            major, minor = device.compute_capability()
            self.compute_capability = (int(major), int(minor))
            count = device.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
            self.multiprocessors = int(count)
        self._event_flags = int(cuda.event_flags.DISABLE_TIMING)
        self._memory: dict[int, cuda.DeviceAllocation] = {}
        self._kernels: list[dict[str, cuda.Function]] = []
        self._graphs = CudaGraphs()

    def current(self) -> AbstractContextManager[None]:
        """Make the primary context current on this thread; nested, it costs almost nothing."""
        return self._context

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        with self._errors:
            free_bytes, total_bytes = self._cuda.mem_get_info()
        return int(free_bytes), int(total_bytes)

    def allocate(self, size_bytes: int) -> int:
        """Allocate device memory; PyCUDA collects garbage and tries again before it fails."""
        with self._errors:
            try:
                memory: cuda.DeviceAllocation = self._cuda.mem_alloc(max(size_bytes, 1))
            except self._cuda.MemoryError as error:
                free_bytes, _ = self.memory()
                raise DeviceMemoryError(size_bytes, free_bytes, self.device) from error
        address = int(memory)
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        """Free device memory."""
        memory = self._memory.pop(address, None)
        if memory is None:
            raise BackendError(f"no device memory at {address:#x} to free")
        with self._errors:
            memory.free()

    def allocate_pinned(self, size_bytes: int) -> PyCudaPinned:
        """Allocate pinned memory, which any thread may use and kernels can address."""
        flags = self._cuda.host_alloc_flags
        with self._errors:
            try:
                array: NDArray[np.uint8] = self._cuda.pagelocked_empty(
                    max(size_bytes, 1), np.uint8, mem_flags=flags.PORTABLE | flags.DEVICEMAP
                )
            except self._cuda.MemoryError as error:
                # The free pinned memory is unknown: the host's memory was short.
                raise DeviceMemoryError(size_bytes, 0, "the host's pinned memory") from error
            return PyCudaPinned(array, size_bytes, self._errors)

    def stream(self) -> PyCudaStream:
        """Return a new non-blocking stream."""
        with self._errors:
            return PyCudaStream(self._cuda.Stream(_NON_BLOCKING))

    def event(self) -> PyCudaEvent:
        """Return a new event."""
        with self._errors:
            return PyCudaEvent(self._cuda.Event(self._event_flags))

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Enqueue a copy from pinned memory to the device."""
        with self._errors:
            self._cuda.memcpy_htod_async(target, source, _own(stream))

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Enqueue a copy from the device to pinned memory."""
        with self._errors:
            self._cuda.memcpy_dtoh_async(target, source, _own(stream))

    def copy_within(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy from device memory to device memory."""
        with self._errors:
            self._cuda.memcpy_dtod_async(target, source, size_bytes, _own(stream))

    def clear(self, address: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue that a part of device memory is filled with zeros."""
        with self._errors:
            self._cuda.memset_d8_async(address, 0, size_bytes, _own(stream))

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Record all work enqueued so far in the event."""
        with self._errors:
            _own_event(event).record(_own(stream))

    def wait_on(self, stream: Stream, event: StreamEvent) -> None:
        """Make later work on the stream wait for the event."""
        with self._errors:
            _own(stream).wait_for_event(_own_event(event))

    def synchronize(self, event: StreamEvent) -> None:
        """Wait for the event with the GIL released; any error here happened on the device."""
        waited_for = _own_event(event)
        try:
            waited_for.synchronize()
        except self._cuda.Error as error:
            raise self._errors.lost(error) from error

    def load(self, cubin: bytes) -> MappingProxyType[str, Any]:
        """Load the kernels of a cubin; return them by entry point."""
        with self._errors:
            module: cuda.Module = self._cuda.module_from_buffer(cubin)
            kernels = {name: _prepared(module, name) for name in ENTRY_POINTS}
        self._kernels.append(kernels)
        return MappingProxyType(kernels)

    def launch(self, kernel: cuda.Function, launch: Launch, stream: Stream) -> None:
        """Enqueue a kernel on a stream."""
        grid, block = (launch.grid, 1), (launch.block, 1, 1)
        arguments = launch.arguments.tobytes()
        with self._errors:
            kernel.prepared_async_call(
                grid, block, _own(stream), arguments, shared_size=launch.shared_bytes
            )

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> CudaGraph | None:
        """Capture a graph, if ``cuda.bindings`` is installed."""
        return self._graphs.capture(stream, enqueue)

    def close(self) -> None:
        """Forget the kernels; the primary context stays until the process ends."""
        left = len(self._memory)
        with self.current():
            for memory in self._memory.values():
                memory.free()
            self._memory.clear()
            for kernels in self._kernels:
                kernels.clear()  # while the context is current: the last one unloads a module
        if left:
            raise BackendError(f"{left} pieces of device memory were not freed")


class _PyCudaHandle:
    """A stream or an event of PyCUDA, which is released with this last reference."""

    what: ClassVar[str]

    def __init__(self, owned: Any) -> None:
        self._owned = owned

    @property
    def owned(self) -> Any:
        """PyCUDA's object; BackendError if it was closed before."""
        if self._owned is None:
            raise BackendError(f"a CUDA {self.what} was used after it was closed")
        return self._owned

    def close(self) -> None:
        """Release the object; may be called again."""
        self._owned = None


class PyCudaStream(_PyCudaHandle):
    """A stream: a :class:`offramp.engine.cuda.driver.Stream`."""

    what = "stream"

    def __init__(self, stream: cuda.Stream) -> None:
        super().__init__(stream)
        self.handle = int(stream.handle)


class PyCudaEvent(_PyCudaHandle):
    """An event: a :class:`offramp.engine.cuda.driver.StreamEvent`."""

    what = "event"


class PyCudaPinned:
    """Pinned memory: a :class:`offramp.engine.cuda.driver.Pinned`, on an array of PyCUDA."""

    def __init__(self, array: NDArray[np.uint8], size_bytes: int, errors: _Errors) -> None:
        self._errors = errors
        allocation: cuda.PagelockedHostAllocation = array.base
        self._allocation: cuda.PagelockedHostAllocation | None = allocation
        self.address = int(allocation.get_device_pointer())
        self.array = array[:size_bytes]
        """Content, [size_bytes]; empty after it is freed."""

    def free(self) -> None:
        """Release the memory; remaining views of it are dangling."""
        allocation, self._allocation = self._allocation, None
        self.array = np.empty(0, np.uint8)
        if allocation is not None:
            with self._errors:
                allocation.free()


class _Current(threading.local):
    """Makes the context current on a thread in the outermost of nested blocks.

    PyCUDA takes about 10 µs to push and pop a context, a large part of a stage's Python time: code
    that runs many stages in a row on a thread may keep a block open around them.
    """

    def __init__(self, context: PrimaryContext) -> None:  # called by every thread that uses it
        self._context = context
        self._depth = 0
        self._pushed = ExitStack()

    def __enter__(self) -> None:
        if self._depth == 0:
            self._pushed.enter_context(self._context.current())
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._pushed.close()


class _Errors:
    """Converts PyCUDA's errors to ours; one object serves all calls, because they are frequent."""

    def __init__(self, of_cuda: type[Exception]) -> None:
        self._of_cuda = of_cuda
        self._lost = ""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, self._of_cuda):
            return
        if self._lost:
            raise DeviceLostError(self._lost) from error
        raise BackendError(f"CUDA failed: {error}") from error

    def lost(self, error: Exception) -> DeviceLostError:
        """Record that the context is unusable; return the error to raise."""
        self._lost = self._lost or f"the GPU failed ({error}); the process must be restarted"
        return DeviceLostError(self._lost)


def _prepared(module: cuda.Module, entry_point: str) -> cuda.Function:
    """Return a kernel whose only parameter is a struct by value, as bytes."""
    struct = GATHER_ROWS_ARGUMENTS if entry_point == GATHER_ROWS else STAGE_END_ARGUMENTS
    function: cuda.Function = module.get_function(entry_point)
    function.prepare([f"{struct.itemsize}s"])
    return function


def _own(stream: Stream) -> cuda.Stream:
    assert isinstance(stream, PyCudaStream)
    return stream.owned


def _own_event(event: StreamEvent) -> cuda.Event:
    assert isinstance(event, PyCudaEvent)
    return event.owned
