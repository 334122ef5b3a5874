"""The driver protocol: everything that Offramp asks of CUDA, in some fifteen methods.

Work is *enqueued* on a stream and runs later, in the order of that stream. Streams know nothing of
each other: order between two of them, and between a stream and the host, comes of events only.
Addresses are plain integers and fixed from allocation to release.

A CUDA context is current per thread. So every method but :meth:`Driver.current` and
:meth:`Driver.close`, and every method of what a driver gives out, is called within
``with driver.current():`` on the calling thread.

Errors::

    BackendError              what was asked failed; its batch only
    ├── DeviceMemoryError     there is not so much memory; nothing was allocated
    └── DeviceLostError       the device's context is lost: the process has to start anew
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
    """Round a size up, so that what comes behind is aligned as an allocation is."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


Kernel: TypeAlias = Any
"""A kernel that a driver loaded; opaque."""

Kernels: TypeAlias = Mapping[str, Kernel]
"""By entry point: all of :data:`offramp.engine.kernels.kernel_arguments.ENTRY_POINTS`."""


class DeviceMemoryError(BackendError):
    """Memory was short; what was asked for and what was free are in it and in its message.

    What was free may lie in pieces. ``what`` says whose memory.
    """

    def __init__(self, size_bytes: int, free_bytes: int, what: str = "the GPU") -> None:
        mebibytes, free = size_bytes / 2**20, free_bytes / 2**20
        super().__init__(f"{mebibytes:,.1f} MiB were needed of {what}, {free:,.1f} MiB were free")
        self.size_bytes = size_bytes
        self.free_bytes = free_bytes


class DeviceLostError(BackendError):
    """A kernel or copy went wrong on the device; its context can do nothing more.

    CUDA calls such errors sticky: an illegal address, a hardware fault. Every later call in the
    process fails too, so starting a slot anew does not help.
    """


class Stream(Protocol):
    """A queue of work on the device."""

    @property
    def handle(self) -> int:
        """CUDA's ``CUstream``, for libraries that enqueue work themselves."""

    def close(self) -> None:
        """Release it. The host must have waited for what was enqueued; may be called again."""


class StreamEvent(Protocol):
    """A point in a stream of work, once it is recorded: a CUDA event."""

    def close(self) -> None:
        """Release it; may be called again."""


class Graph(Protocol):
    """Work that was captured once, with all addresses and arguments, to be launched often."""

    def launch(self, stream: Stream) -> None:
        """Enqueue all of it."""

    def close(self) -> None:
        """Release it. The host must have waited for its launches; may be called again."""


class Pinned(Protocol):
    """Host memory that the device can reach: the only kind that is copied asynchronously."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """[size_bytes]: its content; views of it may be copied too. Dead once it is freed."""

    @property
    def address(self) -> int:
        """Where kernels see it. They may write it: a few words at a time, over the bus."""

    def free(self) -> None:
        """Release it. The host must have waited for what uses it; may be called again."""


class Driver(Protocol):
    """One CUDA device through its primary context; thread-safe."""

    @property
    def device(self) -> str:
        """Its name, for instance ``NVIDIA H200``."""

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors it has."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Its compute capability, such as (9, 0)."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device's context the calling thread's, until the end of the block; nests."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def allocate(self, size_bytes: int) -> int:
        """Take device memory of undefined content; DeviceMemoryError if it is short.

        Its address is a multiple of :data:`ALIGNMENT`.
        """

    def free(self, address: int) -> None:
        """Give back what :meth:`allocate` gave; the host must have waited for what uses it."""

    def allocate_pinned(self, size_bytes: int) -> Pinned:
        """Take host memory for copies, of undefined content; DeviceMemoryError if it is short."""

    def stream(self) -> Stream:
        """Make a stream; it never waits for the default stream."""

    def event(self) -> StreamEvent:
        """Make an event; it takes no times."""

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Enqueue a copy from pinned memory, which must not change until it is done."""

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Enqueue a copy to pinned memory; read it after :meth:`synchronize`."""

    def copy_within(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy from device memory to device memory; the two do not overlap."""

    def clear(self, address: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue zeros."""

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Let the event stand for all that is enqueued so far; forgets what it stood for."""

    def wait_on(self, stream: Stream, event: StreamEvent) -> None:
        """Let what is enqueued on the stream from now on wait for what the event stands for now."""

    def synchronize(self, event: StreamEvent) -> None:
        """Wait, with the GIL released, for what the event stands for.

        DeviceLostError if something that was enqueued went wrong on the device.
        """

    def load(self, cubin: bytes) -> Kernels:
        """Load our kernels' machine code; they last until the driver is closed."""

    def launch(self, kernel: Kernel, launch: Launch, stream: Stream) -> None:
        """Enqueue a kernel with its grid, its block and ``launch.arguments``, taken by value."""

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph | None:
        """Make a graph of all that ``enqueue`` enqueues on the stream; none of it runs.

        Within ``enqueue`` this thread must not allocate, free, load, record, wait or synchronise,
        nor use another stream. Enqueue the same work once before without capture: libraries
        allocate and load at the first run. Other threads are not concerned.

        ``None`` where there are no graphs, or ``enqueue`` raised a :class:`BackendError`, as
        TensorRT does for engines that cannot be captured; a line in the log says why, once a
        reason. Any other exception is raised.
        """

    def close(self) -> None:
        """Forget the kernels. All else must have been released before."""
