"""Times of a batch's parts: a driver and a factory that time the calls they forward.

Times on the device are between CUDA events. Each event costs the host some microseconds, so times
of the host are measured without events, in the same rounds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.cuda.driver import Driver, Graph, Kernel, Kernels, Pinned, Stream, StreamEvent
from offramp.engine.cuda.executable import (
    Executable,
    ExecutableFactory,
    PreparedStage,
    Shape,
    SlotResources,
    TensorInfo,
)
from offramp.engine.cuda.pycuda_driver import PyCudaStream
from offramp.engine.kernels.kernel_arguments import GATHER_ROWS, Launch
from offramp.engine.stages.plan import StageSpec
from offramp.testing.cuda_driver import FakeDriver

if TYPE_CHECKING:
    import pycuda.driver as cuda

MODELS, STAGE_ENDS, GATHERS = "models", "exit check and compaction", "gathers"
COPIES_IN, COPIES_OUT, COPIES_WITHIN = "copies in", "copies out", "copies within"
PARTS = (MODELS, STAGE_ENDS, GATHERS, COPIES_IN, COPIES_OUT, COPIES_WITHIN)
"""Parts into which time on the device is divided (PAME, figure 17)."""

Mark: TypeAlias = Any
"""A point in a stream; the timer knows when it was reached."""


class Timer(Protocol):
    """Measures times on a device, between marks in a stream."""

    def mark(self, stream: Stream) -> Mark:
        """Enqueue a mark in a stream."""
        ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two points; the host must have waited for the second."""
        ...

    def release(self, marks: list[Mark]) -> None:
        """Take marks back, so that they can be used again."""
        ...

    def close(self) -> None:
        """Release everything; the context must be current."""
        ...


class PyCudaTimer:
    """Takes times between CUDA events, through PyCUDA."""

    def __init__(self) -> None:
        """Start without events."""
        self._free: list[cuda.Event] = []

    def mark(self, stream: Stream) -> Mark:
        """Record an event with timing enabled."""
        import pycuda.driver as cuda  # noqa: PLC0415

        assert isinstance(stream, PyCudaStream)
        event: cuda.Event = self._free.pop() if self._free else cuda.Event()
        event.record(stream.owned)
        return event

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds that CUDA reports between two events."""
        last: cuda.Event = end
        return float(last.time_since(start))

    def release(self, marks: list[Mark]) -> None:
        """Keep the events, to use them again."""
        self._free += marks

    def close(self) -> None:
        """Release the events: the context must be current."""
        self._free.clear()


class FakeTimer:
    """The host's clock, read in the order of a fake driver's streams; for rehearsals."""

    def __init__(self, driver: FakeDriver) -> None:
        """Use a driver's streams."""
        self._driver = driver

    def mark(self, stream: Stream) -> Mark:
        """Read the clock when the stream reaches this point."""
        reached: list[float] = []
        self._driver.call(stream, lambda: reached.append(time.perf_counter()))
        return reached

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks by the host's clock."""
        return float(end[0] - start[0]) * 1e3

    def release(self, marks: list[Mark]) -> None:
        """Do nothing: marks are not reused."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


class Spans:
    """Work enqueued since the last call of :meth:`take`, by part; used by one thread."""

    def __init__(self, timer: Timer) -> None:
        """Start without recorded work."""
        self._timer = timer
        self._spans: list[tuple[str, Mark, Mark]] = []
        self.capturing = False
        """True while work is captured into a graph, which may not contain marks."""

    @contextmanager
    def of(self, part: str, stream: Stream) -> Iterator[None]:
        """Time the work enqueued within the context."""
        if self.capturing:
            yield
            return
        start = self._timer.mark(stream)
        yield
        self._spans.append((part, start, self._timer.mark(stream)))

    def take(self) -> dict[str, float]:
        """Return milliseconds by part; the host must have waited for all of the work."""
        spans, self._spans = self._spans, []
        found: dict[str, float] = defaultdict(float)
        for part, start, end in spans:
            found[part] += self._timer.elapsed_ms(start, end)
        self._timer.release([mark for _, start, end in spans for mark in (start, end)])
        return dict(found)


class TimedDriver:
    """A driver that times the calls it forwards to another one."""

    def __init__(self, driver: Driver, timer: Timer) -> None:
        """Forward calls to ``driver``."""
        self._driver = driver
        self._timer = timer
        self.spans = Spans(timer)
        """Times of the work on the device."""
        self.waited_s = 0.0
        """Total time that the host waited for the device."""
        self.device = driver.device
        """Name of the device."""
        self.multiprocessors = driver.multiprocessors
        """Number of multiprocessors."""
        self.compute_capability = driver.compute_capability
        """Compute capability, such as (9, 0)."""

    def copy_in(self, target: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Copy to the device through the other driver, and time the copy."""
        with self.spans.of(COPIES_IN, stream):
            self._driver.copy_in(target, source, stream)

    def copy_out(self, target: NDArray[np.uint8], source: int, stream: Stream) -> None:
        """Copy from the device through the other driver, and time the copy."""
        with self.spans.of(COPIES_OUT, stream):
            self._driver.copy_out(target, source, stream)

    def copy_within(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copy within the device through the other driver, and time the copy."""
        with self.spans.of(COPIES_WITHIN, stream):
            self._driver.copy_within(target, source, size_bytes, stream)

    def launch(self, kernel: Kernel, launch: Launch, stream: Stream) -> None:
        """Launch a kernel, timed under the kernel's purpose."""
        part = GATHERS if launch.entry_point == GATHER_ROWS else STAGE_ENDS
        with self.spans.of(part, stream):
            self._driver.launch(kernel, launch, stream)

    def capture(self, stream: Stream, enqueue: Callable[[], None]) -> Graph | None:
        """Capture a graph; its launches are timed, not its capture."""
        self.spans.capturing = True
        try:
            graph = self._driver.capture(stream, enqueue)
        finally:
            self.spans.capturing = False
        return None if graph is None else _TimedGraph(graph, self.spans)

    def synchronize(self, event: StreamEvent) -> None:
        """Wait for an event; the wait is timed on the host."""
        began = time.perf_counter()
        try:
            self._driver.synchronize(event)
        finally:
            self.waited_s += time.perf_counter() - began

    # Forwarded without timing.

    def current(self) -> AbstractContextManager[None]:
        """See :class:`Driver`."""
        return self._driver.current()

    def memory(self) -> tuple[int, int]:
        """See :class:`Driver`."""
        return self._driver.memory()

    def allocate(self, size_bytes: int) -> int:
        """See :class:`Driver`."""
        return self._driver.allocate(size_bytes)

    def free(self, address: int) -> None:
        """See :class:`Driver`."""
        self._driver.free(address)

    def allocate_pinned(self, size_bytes: int) -> Pinned:
        """See :class:`Driver`."""
        return self._driver.allocate_pinned(size_bytes)

    def stream(self) -> Stream:
        """See :class:`Driver`."""
        return self._driver.stream()

    def event(self) -> StreamEvent:
        """See :class:`Driver`."""
        return self._driver.event()

    def clear(self, address: int, size_bytes: int, stream: Stream) -> None:
        """See :class:`Driver`."""
        self._driver.clear(address, size_bytes, stream)

    def record(self, event: StreamEvent, stream: Stream) -> None:
        """See :class:`Driver`."""
        self._driver.record(event, stream)

    def wait_on(self, stream: Stream, event: StreamEvent) -> None:
        """See :class:`Driver`."""
        self._driver.wait_on(stream, event)

    def load(self, cubin: bytes) -> Kernels:
        """See :class:`Driver`."""
        return self._driver.load(cubin)

    def close(self) -> None:
        """See :class:`Driver`."""
        with self._driver.current():
            self._timer.close()
        self._driver.close()


class _TimedGraph:
    def __init__(self, graph: Graph, spans: Spans) -> None:
        self._graph = graph
        self._spans = spans

    def launch(self, stream: Stream) -> None:
        with self._spans.of(MODELS, stream):
            self._graph.launch(stream)

    def close(self) -> None:
        self._graph.close()


class TimedFactory:
    """An executable factory whose stages are timed as :data:`MODELS`."""

    def __init__(self, factory: ExecutableFactory, spans: Spans) -> None:
        """Forward calls to ``factory``."""
        self._factory = factory
        self._spans = spans

    @property
    def name(self) -> str:
        """Name of the wrapped factory."""
        return self._factory.name

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """See :class:`ExecutableFactory`."""
        return self._factory.device_dtype(dtype)

    def as_computed(self, bundle: Bundle) -> Bundle:
        """See :class:`ExecutableFactory`."""
        return self._factory.as_computed(bundle)

    def prepare(self, spec: StageSpec) -> PreparedStage:
        """See :class:`ExecutableFactory`."""
        return _TimedStage(self._factory.prepare(spec), self._spans)

    def close(self) -> None:
        """See :class:`ExecutableFactory`."""
        self._factory.close()


class _TimedStage:
    def __init__(self, stage: PreparedStage, spans: Spans) -> None:
        self._stage = stage
        self._spans = spans
        self.spec: StageSpec = stage.spec
        self.inputs: tuple[TensorInfo, ...] = stage.inputs
        self.outputs: tuple[TensorInfo, ...] = stage.outputs
        self.scratch_bytes: int = stage.scratch_bytes
        self.max_rows: int = stage.max_rows
        self.capturable: bool = stage.capturable
        self.pads: bool = stage.pads
        self.missing = stage.missing

    def padding_limit(self, rows: int) -> int:
        return self._stage.padding_limit(rows)

    def open(self, slot: SlotResources) -> Executable:
        return _TimedExecutable(self._stage.open(slot), self._spans)

    def close(self) -> None:
        self._stage.close()


class _TimedExecutable:
    def __init__(self, executable: Executable, spans: Spans) -> None:
        self._executable = executable
        self._spans = spans

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        return self._executable.output_shapes(inputs)

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,
    ) -> None:
        with self._spans.of(MODELS, stream):
            self._executable.enqueue(inputs, addresses, stream, graph=graph)

    def forget(self, graph: int) -> None:
        self._executable.forget(graph)

    def close(self) -> None:
        self._executable.close()
