"""Executables for the fake driver: stages run on the CPU, in the order of the stream.

With them whole bundles run through the slots of :mod:`offramp.engine.cuda` without a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.backends.sizes import Argument, GraphShapes, dtype_of
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.cuda.driver import Stream
from offramp.engine.cuda.executable import Shape, SlotResources, TensorInfo
from offramp.engine.stages.plan import StageSpec
from offramp.testing.cuda_driver import FakeDriver


@dataclass(kw_only=True)
class FakeExecutables:
    """An executable factory over a fake driver; what tests want to fail is set on it."""

    driver: FakeDriver
    max_rows: int = 64
    """Row limit of every stage."""
    scratch_bytes: Callable[[StageSpec], int] = lambda _: 512
    """Scratch bytes of a stage."""
    foreseen: int = 16
    """Assumed upper limit of symbolic sizes, until a batch has larger ones."""
    narrow: bool = False
    """True if int64 is int32 on the device, as with TensorRT 8.6."""
    capturable: bool = True
    """True if stages ask to be captured."""
    pads: bool = False
    """True if stages ask for batches of few sizes."""
    padding_limit: Callable[[int], int] = lambda _: 1 << 30
    """Up to how many rows a batch of so many may be filled up."""
    refuse_capture: bool = False
    """True if a stage raises during capture, as TensorRT does for some engines."""
    on_enqueue: Callable[[StageSpec, int], None] = lambda _spec, _rows: None
    """Called with every enqueue, with (stage, rows): may raise."""
    on_close: Callable[[StageSpec], None] = lambda _: None
    """Called when an executable is closed: may raise."""
    name: str = "fake-cuda"
    open: Counter[str] = field(default_factory=Counter)
    """Numbers of open ``stages`` and ``executables``."""
    enqueued: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Times that a (stage, rows) was enqueued, also into graphs."""
    forgotten: int = 0
    """Graphs that an executable was prepared for and told to forget."""
    closed: bool = False

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the same type, or a narrower one."""
        return np.dtype(np.int32) if self.narrow and dtype == np.int64 else dtype

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return the bundle itself."""
        return bundle

    def prepare(self, spec: StageSpec) -> FakePrepared:
        """Load a stage."""
        model = spec.load()
        try:
            shapes = GraphShapes(model)
        except BackendError as error:
            raise BackendError(f"stage {spec.index} cannot be loaded: {error}") from error
        self.open["stages"] += 1
        return FakePrepared(self, spec, model, shapes)

    def close(self) -> None:
        """Check that everything was closed before."""
        assert not +self.open, self.open
        self.closed = True


class FakePrepared:
    """A loaded stage."""

    missing = None

    def __init__(
        self, factory: FakeExecutables, spec: StageSpec, model: bytes, shapes: GraphShapes
    ) -> None:
        self.factory = factory
        self.spec = spec
        self.session = make_session(model, 1)
        self.shapes = shapes
        self.lock = threading.Lock()
        self.inputs = tuple(self._info(a) for a in shapes.inputs.values())
        self.outputs = tuple(self._info(a) for a in shapes.outputs.values())
        self.scratch_bytes = factory.scratch_bytes(spec)
        self.max_rows = factory.max_rows
        self.capturable = factory.capturable
        self.pads = factory.pads

    def padding_limit(self, rows: int) -> int:
        """Return the limit of rows, by the factory."""
        return min(self.max_rows, self.factory.padding_limit(rows))

    def open(self, slot: SlotResources) -> FakeExecutable:
        """Open it in a slot."""
        assert slot.scratch_bytes >= self.scratch_bytes
        self.factory.open["executables"] += 1
        return FakeExecutable(self, slot)

    def close(self) -> None:
        """Count."""
        self.factory.open["stages"] -= 1

    def _info(self, argument: Argument) -> TensorInfo:
        sizes = argument.shape[1:]
        shape = tuple(s if isinstance(s, int) else self.factory.foreseen for s in sizes)
        dtype = self.factory.device_dtype(dtype_of(argument))
        return TensorInfo(name=argument.name, dtype=dtype, sample_shape=shape)


class FakeExecutable:
    """A stage in a slot."""

    def __init__(self, prepared: FakePrepared, slot: SlotResources) -> None:
        self._prepared = prepared
        self._slot = slot
        self._dtypes = {t.name: t.dtype for t in (*prepared.inputs, *prepared.outputs)}
        self._closed = False
        self._graphs: set[int] = set()
        """Graphs that it is prepared for, or was captured into."""
        self._running = 0
        """Runs that are enqueued and not done, but for those of graphs."""

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the output shapes of the graph."""
        for name, argument in self._prepared.shapes.inputs.items():
            taken, given = argument.shape[1:], inputs[name][1:]
            if any(isinstance(s, int) and s != n for s, n in zip(taken, given, strict=True)):
                raise BackendError(f"{name} is {list(taken)} a row, not {list(given)}")
        with self._prepared.lock:
            return self._prepared.shapes.of(inputs)

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,
    ) -> None:
        """Enqueue the graph's run on the CPU."""
        prepared, factory = self._prepared, self._prepared.factory
        rows = next(iter(inputs.values()))[0]
        assert not self._closed
        assert stream is self._slot.stream
        factory.enqueued[self._prepared.spec.index, rows] += 1
        captures = threading.get_ident() in factory.driver._capturing
        if captures:
            assert graph in self._graphs, "a graph is captured that was not prepared"
            assert not self._running, "a stage is captured while it still runs"
        elif graph is not None:
            assert prepared.capturable, "it was prepared for a graph that it cannot have"
            self._graphs.add(graph)
        if factory.refuse_capture and captures:
            raise BackendError("this engine cannot be captured")
        factory.on_enqueue(self._prepared.spec, rows)
        shapes, places = dict(inputs), dict(addresses)
        outputs = self.output_shapes(inputs)

        def run() -> None:
            self._run(shapes, outputs, places)

        def run_once() -> None:
            self._running -= 1
            run()

        factory.driver.call(stream, run if captures else run_once)
        self._running += not captures

    def forget(self, graph: int) -> None:
        """Count those that it was prepared for."""
        assert not self._closed
        if graph in self._graphs:
            self._graphs.remove(graph)
            self._prepared.factory.forgotten += 1

    def close(self) -> None:
        """Count."""
        if not self._closed:
            self._closed = True
            factory = self._prepared.factory
            factory.open["executables"] -= 1
            factory.on_close(self._prepared.spec)

    def _run(
        self, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape], places: Mapping[str, int]
    ) -> None:
        prepared, driver = self._prepared, self._prepared.factory.driver
        if prepared.scratch_bytes:  # slots that share scratch memory would be noticed
            driver.write(self._slot.scratch_address, prepared.scratch_bytes)[:] = 0xEE
        feeds = {}
        for tensor in prepared.inputs:
            memory = driver.read(places[tensor.name], self._bytes(tensor.name, inputs))
            values = memory.view(tensor.dtype).reshape(inputs[tensor.name])
            feeds[tensor.name] = values.astype(dtype_of(prepared.shapes.inputs[tensor.name]))
        found: Sequence[NDArray[Any]] = prepared.session.run(list(outputs), feeds)
        for name, values in zip(outputs, found, strict=True):
            memory = driver.write(places[name], self._bytes(name, outputs))
            memory[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _bytes(self, name: str, shapes: Mapping[str, Shape]) -> int:
        return int(np.prod(shapes[name])) * self._dtypes[name].itemsize


def fake_cuda(
    *, seed: int = 0, graphs: bool = True, memory_bytes: int = 1 << 30, **settings: Any
) -> tuple[CudaBackend, FakeExecutables, FakeDriver]:
    """A backend on a fake driver; closing it checks that all was used and released rightly."""
    driver = FakeDriver(seed=seed, memory_bytes=memory_bytes)
    factory = FakeExecutables(driver=driver, **settings)
    return CudaBackend(factory, driver, kernels=b"cubin", graphs=graphs), factory, driver
