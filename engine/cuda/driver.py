"""The driver protocol: all of CUDA that Offramp uses, in about fifteen methods.

Work is *enqueued* on a stream and runs later, in the order of that stream. Streams are independent:
only events order work between two of them, and between a stream and the host. Addresses are plain
integers, fixed from allocation to release.

A CUDA context is current per thread. So every method except :meth:`Driver.current` and
:meth:`Driver.close`, and every method of a driver's objects, is called within ``with
driver.current():`` on the calling thread.

Errors::

    BackendError              the operation failed; only its batch is affected
    ├── DeviceMemoryError     memory is short; nothing was allocated
    └── DeviceLostError       the device's context is lost: the process must restart
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.kernels.kernel_arguments import Launch

ALIGNMENT = 256
"""Bytes: every address that a driver allocates is a multiple of it."""


def aligned(size_bytes: int) -> int:
    """Round a size up, so that the next item is aligned like an allocation."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


Kernel: TypeAlias = Any
"""A kernel that a driver loaded; opaque."""

Kernels: TypeAlias = Mapping[str, Kernel]
"""Kernels by entry point: all of :data:`offramp.engine.kernels.kernel_arguments.ENTRY_POINTS`."""


class DeviceMemoryError(BackendError):
    """Memory was short; attributes and message have the requested and the free bytes.

    The free memory may be fragmented. ``what`` names the memory.
    """

    def __init__(self, size_bytes: int, free_bytes: int, what: str = "the GPU") -> None:
        mebibytes, free = size_bytes / 2**20, free_bytes / 2**20
        super().__init__(f"{mebibytes:,.1f} MiB were needed of {what}, {free:,.1f} MiB were free")
        self.size_bytes = size_bytes
        self.free_bytes = free_bytes


class DeviceLostError(BackendError):
    """A kernel or copy failed on the device; its context is unusable.

    CUDA calls such errors sticky: an illegal address, a hardware fault. Every later call in the
    process fails, too, so a new slot does not help.
    """


class Stream(Protocol):
    """A queue of work on the device."""

    @property
    def handle(self) -> int:
        """The stream's ``CUstream``, for libraries that enqueue work themselves."""

    def close(self) -> None:
        """Release the stream. The host must have waited for its work; may be called again."""


class StreamEvent(Protocol):
    """A point in a stream of work, after it is recorded: a CUDA event."""

    def close(self) -> None:
        """Release the event; may be called again."""


class Graph(Protocol):
    """Work that was captured once, with all addresses and arguments, to be launched often."""

    def launch(self, stream: Stream) -> None:
        """Enqueue the captured work on a stream."""

    def close(self) -> None:
        """Release the graph. The host must have waited for its launches; may be called again."""


class Pinned(Protocol):
    """Host memory that the device can access: the only kind that is copied asynchronously."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """Content, [size_bytes]; views of it may be copied, too. Invalid after :meth:`free`."""

    @property
    def address(self) -> int:
        """Address for kernels, which may write a few words at a time, over the bus."""

    def free(self) -> None:
        """Release the memory. The host must have waited for its users; may be called again."""


class Driver(Protocol):
    """One CUDA device through its primary context; thread-safe."""

    @property
    def device(self) -> str:
        """Name of the device, for instance ``NVIDIA H200``."""

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors of the device."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device's context current on this thread until the block ends; may be nested."""

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""

    def allocate(self, size_bytes: int) -> int:
        """Allocate device memory with undefined content; return its address.

        The address is a multiple of :data:`ALIGNMENT`. DeviceMemoryError if memory is short.
        """

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`; the host must have waited for its users."""

    def allocate_pinned(self, size_bytes: int) -> Pinned:
        """Allocate host memory for copies, with undefined content; DeviceMemoryError if short."""

    def stream(self) -> Stream:
        """Return a new stream; it never waits for the default stream."""

    def event(self) -> StreamEvent:
        """Return a new event, without timing."""

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Enqueue a copy from pinned memory, which must not change until the copy is done."""

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Enqueue a copy to pinned memory; read it after :meth:`synchronize`."""

    def copy_within(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy between two parts of device memory that do not overlap."""

    def clear(self, address: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue that a part of device memory is filled with zeros."""

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Record all work enqueued so far in the event, replacing its former content."""

    def wait_on(self, stream: Stream, event: StreamEvent) -> None:
        """Make later work on the stream wait for the event's current content."""

    def synchronize(self, event: StreamEvent) -> None:
        """Wait, with the GIL released, for the event's content.

        DeviceLostError if enqueued work failed on the device.
        """

    def load(self, cubin: bytes) -> Kernels:
        """Load our kernels' machine code; the kernels exist until the driver is closed."""

    def launch(self, kernel: Kernel, launch: Launch, stream: Stream) -> None:
        """Enqueue a kernel with its grid, its block and ``launch.arguments``, passed by value."""

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph | None:
        """Make a graph of the work that ``enqueue`` enqueues on the stream; none of it runs.

        Within ``enqueue`` this thread must not allocate, free, load, record, wait or synchronise,
        nor use another stream. Enqueue the same work once before without capture, because libraries
        allocate and load at the first run. Other threads are not affected.

        ``None`` if there are no graphs, or ``enqueue`` raised a :class:`BackendError`, as TensorRT
        does for engines that cannot be captured; a log line has the reason, once for each reason.
        Any other exception is raised.
        """

    def close(self) -> None:
        """Forget the kernels. All other resources must be released before."""
