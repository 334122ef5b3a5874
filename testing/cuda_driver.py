"""A CUDA driver without a GPU, for tests of all code above the driver.

Device memory is memory of the host. Enqueued work runs only when something waits for it, in a
random order that streams and events allow. Misuse that CUDA would not detect, or that would end the
process, raises :class:`MisuseError`, and :meth:`FakeDriver.close` raises all these errors again:

- a call on a thread without the current context, or on a closed object;
- memory that is used after it was freed, beyond its end, or by two streams without an event;
- memory, streams or graphs that are released before the host waited for their work;
- a copy to or from memory that is not pinned; a source that changed before it was copied;
- a stage end whose scratch was never cleared;
- in a capture: allocating, waiting, recording, another stream;
- at the end: resources that were not released, and writes outside of allocated memory.

Results that are read too early do not raise an error: the memory has a pattern, which is not a
plausible result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import (
    DeviceLostError,
    DeviceMemoryError,
    Kernel,
    Stream,
    StreamEvent,
)
from offramp.engine.kernels.kernel_arguments import ENTRY_POINTS, Launch
from offramp.testing import cuda_kernels
from offramp.testing.cuda_calls import CheckedCalls
from offramp.testing.cuda_handles import FakeEvent, FakeGraph, FakePinned, FakeStream
from offramp.testing.cuda_memory import ByteRange, FakeMemory, MisuseError
from offramp.testing.cuda_queues import PENDING, Operation, Queues, Run, Work, merge

__all__ = ["PENDING", "FakeDriver", "MisuseError"]


class FakeDriver(CheckedCalls):
    """A device on the host: a :class:`offramp.engine.cuda.driver.Driver`.

    The order of streams is random, determined by the seed. At most as much memory can be pinned as
    the device has. ``run_kernel`` runs a kernel on real addresses; if ``None``, kernels run in
    numpy. In both cases, accesses to the memory that the numpy kernel would use are checked first.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        memory_bytes: int = 1 << 30,
        graphs: bool = True,
        run_kernel: Callable[[Launch], None] | None = None,
    ) -> None:
        super().__init__()
        self.device = "Fake GPU"
        self.multiprocessors = 4
        self.compute_capability = (9, 0)
        self.memory_bytes = memory_bytes
        """Bytes of device memory; tests may change it."""
        self.graphs = graphs
        self.bytes_in = 0
        """Total bytes copied to the device."""
        self.bytes_out = 0
        """Total bytes copied to the host."""
        self._run_kernel = run_kernel
        self._memory = FakeMemory()
        self._queues = Queues(self._memory, seed)
        self._open: list[FakeStream | FakeEvent | FakeGraph] = []

    def lose(self) -> None:
        """Lose the context, as CUDA does after an illegal address: enqueued work never runs."""
        with self._lock:
            self._lose("an illegal memory access was encountered")

    def call(self, stream: Stream, function: Callable[[], None]) -> None:
        """Enqueue host work, such as a whole model on the CPU.

        ``function`` accesses device memory through :meth:`read` and :meth:`write`. If it raises
        :class:`BackendError`, this counts as an error on the device: the context is lost.
        """
        with self._called("call"):
            self._enqueue(stream, Work(label="call", enqueued=lambda: function))

    def read(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return memory that the running :meth:`call` reads, as a read-only array."""
        with self._lock, self._noting():
            return self._queues.use(ByteRange(address, size_bytes, writes=False))

    def write(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return memory that the running :meth:`call` writes."""
        with self._lock, self._noting():
            return self._queues.use(ByteRange(address, size_bytes, writes=True))

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        with self._called("memory"):
            return self._free_bytes(), self.memory_bytes

    def allocate(self, size_bytes: int) -> int:
        """Allocate device memory, filled with a pattern."""
        with self._called("allocate"):
            if size_bytes > self._free_bytes():
                raise DeviceMemoryError(size_bytes, self._free_bytes(), self.device)
            return self._memory.allocate(max(size_bytes, 1), "device").address

    def free(self, address: int) -> None:
        """Free device memory; MisuseError if enqueued work still uses it."""
        with self._called("free"):
            block = self._memory.owned(address)
            if not self._lost:
                self._queues.check_unused(block)
            self._memory.free(block)

    def allocate_pinned(self, size_bytes: int) -> FakePinned:
        """Allocate pinned memory, filled with a pattern."""
        with self._called("allocate_pinned"):
            free_bytes = self.memory_bytes - self._memory.used_bytes("pinned")
            if size_bytes > free_bytes:
                raise DeviceMemoryError(size_bytes, free_bytes, "the host's pinned memory")
            block = self._memory.allocate(max(size_bytes, 1), "pinned")
            return FakePinned(self._free_pinned, block, block.content[:size_bytes])

    def stream(self) -> FakeStream:
        """Return a new fake stream."""
        with self._called("stream"):
            stream = FakeStream(self._close_stream, self._queues.open())
            self._open.append(stream)
            return stream

    def event(self) -> FakeEvent:
        """Return a new fake event."""
        with self._called("event"):
            event = FakeEvent(self._close_event)
            self._open.append(event)
            return event

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Enqueue a copy from pinned memory to the device; do not change its source until then."""
        with self._called("copy_in"):
            reads = self._pinned(source, writes=False)
            writes = self._on_device(target, source.nbytes, writes=True)

            def enqueued() -> Run:
                before = source.copy()

                def run() -> None:
                    content = self._queues.use(reads)
                    if (source != before).any():
                        raise MisuseError("the source of copy_in changed before it was copied")
                    self._queues.use(writes)[:] = content
                    self.bytes_in += reads.size_bytes

                return run

            self._enqueue(stream, Work(label="copy_in", enqueued=enqueued, ranges=(reads, writes)))

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Enqueue a copy from the device to pinned memory, which has a pattern until then."""
        with self._called("copy_out"):
            writes = self._pinned(target, writes=True)
            reads = self._on_device(source, target.nbytes, writes=False)

            def run() -> None:
                self._queues.use(writes)[:] = self._queues.use(reads)
                self.bytes_out += reads.size_bytes

            self._enqueue_run(stream, "copy_out", run, reads, writes)

    def copy_within(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy from device memory to device memory; MisuseError if they overlap."""
        with self._called("copy_within"):
            reads = self._on_device(source, size_bytes, writes=False)
            writes = self._on_device(target, size_bytes, writes=True)
            if reads.conflicts(writes):
                raise MisuseError(f"copy_within from {source:#x} to {target:#x}: they overlap")

            def run() -> None:
                self._queues.use(writes)[:] = self._queues.use(reads)

            self._enqueue_run(stream, "copy_within", run, reads, writes)

    def clear(self, address: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue filling of device memory with zeros."""
        with self._called("clear"):
            writes = self._on_device(address, size_bytes, writes=True)

            def run() -> None:
                self._queues.use(writes)[:] = 0

            self._enqueue_run(stream, "clear", run, writes)

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """Record in the event all work that was enqueued on the stream so far."""
        with self._called("record"):
            assert isinstance(event, FakeEvent)
            event.live().recorded = self._queues.mark(_own(stream).handle)

    def wait_on(self, stream: Stream, event: StreamEvent) -> None:
        """Make later work on the stream wait for the event."""
        with self._called("wait_on"):
            self._queues.hold(_own(stream).handle, self._recorded(event))

    def synchronize(self, event: StreamEvent) -> None:
        """Run the work that the event waits for, and perhaps more."""
        with self._called("synchronize"):
            recorded = self._recorded(event)
            while not recorded.done and not self._lost:
                self._step()
            if self._lost:
                raise DeviceLostError(self._lost)
            merge(self._queues.host, recorded.clock)

    def load(self, cubin: bytes) -> MappingProxyType[str, str]:  # noqa: ARG002
        """Return the kernels by name, regardless of the cubin."""
        with self._called("load"):
            return MappingProxyType({name: name for name in ENTRY_POINTS})

    def launch(self, kernel: Kernel, launch: Launch, stream: Stream) -> None:
        """Check a launch, and enqueue a kernel that numpy computes."""
        with self._called("launch"):
            if kernel != launch.entry_point:
                raise MisuseError(f"{launch.entry_point} was launched as {kernel}")
            if launch.grid < 1 or launch.block % 32 or not 32 <= launch.block <= 1024:
                raise MisuseError(f"{kernel} with {launch.grid} blocks of {launch.block} threads")
            ranges = cuda_kernels.ranges_of(launch)

            def run() -> None:
                if self._run_kernel is None:
                    cuda_kernels.run(launch, self._queues.use)
                else:
                    cuda_kernels.touch(launch, self._queues.use)
                    self._run_kernel(launch)

            self._enqueue_run(stream, launch.entry_point, run, *ranges)

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> FakeGraph | None:
        """Return the work that ``enqueue`` enqueues, as a graph; ``None`` if capturing fails."""
        thread = threading.get_ident()
        works: list[Work] = []
        with self._called("capture"):
            if not self.graphs:
                return None
            self._capturing[thread] = (_own(stream), works)
        try:
            enqueue()
        except BackendError:
            return None
        finally:
            with self._lock:
                del self._capturing[thread]
        with self._lock:
            graph = FakeGraph(self._close_graph, tuple(works), self._launch_graph)
            self._open.append(graph)
            return graph

    def close(self) -> None:
        """Run all remaining work; MisuseError if there was misuse or a resource is still open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(Exception), self._noting():  # recorded in misuses, raised below
                while not self._queues.are_empty:
                    self._step()
                self._memory.check()
            said = [str(error) or repr(error) for error in self.misuses]
            said += [f"{block} was not freed" for block in self._memory.blocks]
            said += [f"{each} was not closed" for each in self._open]
            said += [
                f"thread {thread} left the context current"
                for thread, depth in self._current.items()
                if depth
            ]
            if said:
                raise MisuseError("; ".join(said))

    def _enqueue_run(self, stream: Stream, label: str, run: Run, *ranges: ByteRange) -> None:
        self._enqueue(stream, Work(label=label, enqueued=lambda: run, ranges=ranges))

    def _enqueue(self, stream: Stream, work: Work) -> Operation | None:
        """Enqueue work on a stream, or add it to the graph if this thread captures one."""
        own, thread = _own(stream), threading.get_ident()
        for used in work.ranges:
            if used.size_bytes:
                self._memory.block_of(used, work.label)
        for by, (captured, works) in self._capturing.items():
            if by == thread and captured is own:
                works.append(work)
                return None
            if by == thread or captured is own:
                raise MisuseError(f"{work.label} on {own} while {captured} is captured")
        return self._queues.push(own.handle, work)

    def _step(self) -> None:
        try:
            self._queues.step()
        except BackendError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self._lost = f"the GPU failed ({why}); the process must be restarted"
        self._queues.drop()

    def _launch_graph(self, graph: FakeGraph, stream: Stream) -> None:
        with self._called("launch_graph"):
            for work in graph.live().works:
                graph.last = self._enqueue(stream, work) or graph.last

    def _close_stream(self, stream: FakeStream) -> None:
        with self._called("close_stream"):
            self._check_over(stream, stream.handle)
            self._queues.close(stream.handle)
            self._open.remove(stream)

    def _close_event(self, event: FakeEvent) -> None:
        with self._called("close_event"):
            self._open.remove(event)

    def _close_graph(self, graph: FakeGraph) -> None:
        with self._called("close_graph"):
            if graph.last is not None:
                self._check_over(graph, graph.last.stream, graph.last.number)
            self._open.remove(graph)

    def _free_pinned(self, pinned: FakePinned) -> None:
        with self._called("free_pinned"):
            if not self._lost:
                self._queues.check_unused(pinned.block)
            self._memory.free(pinned.block)

    def _check_over(self, what: object, stream: int, number: int | None = None) -> None:
        if not self._lost and not self._queues.is_over(stream, number):
            raise MisuseError(f"{what} was closed before the host waited for its work")

    def _pinned(self, array: NDArray[np.uint8], *, writes: bool) -> ByteRange:
        """Return the range of an array in pinned memory; MisuseError for other memory."""
        if not array.flags.c_contiguous or array.dtype != np.uint8:
            raise MisuseError(f"a copy of {array.dtype} with strides {array.strides}: not of bytes")
        return self._memory.of_kind(
            "pinned", ByteRange(int(array.ctypes.data), array.nbytes, writes)
        )

    def _on_device(self, address: int, size_bytes: int, *, writes: bool) -> ByteRange:
        return self._memory.of_kind("device", ByteRange(address, size_bytes, writes))

    def _recorded(self, event: StreamEvent) -> Operation:
        assert isinstance(event, FakeEvent)
        recorded = event.live().recorded
        if recorded is None:
            raise MisuseError(f"{event} was waited for, but never recorded")
        return recorded

    def _free_bytes(self) -> int:
        return max(self.memory_bytes - self._memory.used_bytes("device"), 0)


def _own(stream: Stream) -> FakeStream:
    assert isinstance(stream, FakeStream)
    return stream.live()
