"""Engines that are loaded for serving: one copy of the weights, one context per slot and profile.

All functions must be called in the device's CUDA context, within ``with driver.current():``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from offramp.bundle.engines import EngineEntry
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import Driver, Stream
from offramp.engine.cuda.executable import Shape
from offramp.engine.tensorrt import compat
from offramp.engine.tensorrt.lookup import StoredEngine
from offramp.engine.tensorrt.tensorrt_messages import errors_of_tensorrt, logger

if TYPE_CHECKING:
    import tensorrt as trt

Shapes = Mapping[str, Shape]
"""Shapes of an engine's tensors, by name."""


class EngineLibrary:
    """Engines of one device, each loaded once for all stages; thread-safe."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = Lock()
        self._taken: dict[str, SharedEngine] = {}
        """Engines by the hash of their plan (the serialised engine)."""

    def take(self, found: StoredEngine) -> SharedEngine:
        """Load an engine, or use the loaded one; the caller must give it back.

        BackendError if its file is missing or altered, or TensorRT cannot load it.
        """
        digest = found.entry.sha256
        with self._lock:
            shared = self._taken.get(digest)
            if shared is None:
                shared = SharedEngine(found, self._driver, lambda: self._give_back(digest))
                self._taken[digest] = shared
            shared.users += 1
            return shared

    def close(self) -> None:
        """Check that all engines were given back."""
        if self._taken:
            raise BackendError(f"{len(self._taken)} engines are still in use")

    def _give_back(self, digest: str) -> None:
        with self._lock:
            shared = self._taken[digest]
            shared.users -= 1
            if shared.users:
                return
            del self._taken[digest]
        shared.engine.close()


class SharedEngine:
    """An engine that stages and slots share; each of them has its own contexts.

    The engine is loaded immediately; ``give_back`` is called when a stage does not need it any
    more.
    """

    def __init__(self, found: StoredEngine, driver: Driver, give_back: Callable[[], None]) -> None:
        self.give_back = give_back
        self.users = 0
        self.engine = LoadedEngine(found.read(), found.entry, driver)


class LoadedEngine:
    """An engine in device memory, with its inputs and outputs; thread-safe.

    The hash of its plan was checked before. BackendError if TensorRT refuses the engine, or the
    engine differs from its entry in the store.
    """

    def __init__(self, plan: bytes, entry: EngineEntry, driver: Driver) -> None:
        runtime, engine = deserialize(plan, f"engine {entry.unit}")
        self.entry = entry
        self._lock = Lock()
        self._runtime: trt.Runtime | None = runtime
        self._engine: trt.ICudaEngine | None = engine
        self.inputs, self.outputs = tensor_names(engine)
        """Names of the engine's input tensors, and of its output tensors."""
        self.dtypes: dict[str, np.dtype[Any]] = {
            name: compat.numpy_dtype(engine.get_tensor_dtype(name))
            for name in (*self.inputs, *self.outputs)
        }
        """Types of all inputs and outputs on the device, by name."""
        profiles = range(int(engine.num_optimization_profiles))
        if len(profiles) != len(entry.profiles) or set(self.inputs) - set(entry.profiles[0].inputs):
            self.close()
            raise BackendError(f"engine {entry.unit} differs from its entry in the store")
        self.scratch_bytes = max(compat.scratch_bytes(engine, index) for index in profiles)
        """Scratch memory that a context needs for any profile, in bytes."""
        self.max_rows = max(profile.last_batch for profile in entry.profiles)
        try:
            self.largest = tuple(self._largest(index, driver) for index in profiles)
        except BaseException:
            self.close()
            raise
        self.size_bytes = {
            name: max(math.prod(shapes[name]) for shapes in self.largest) * dtype.itemsize
            for name, dtype in self.dtypes.items()
        }
        """Largest size of each tensor over all profiles, in bytes, by name."""

    def sample_shape(self, name: str) -> Shape:
        """Return the shape of one row of a tensor, in the profile with the largest row."""
        shapes = [shapes[name][1:] for shapes in self.largest]
        return max(shapes, key=math.prod)

    def context(self, profile: int, driver: Driver, stream: Stream) -> EngineContext:
        """Make a context for a profile, without scratch memory, whose work runs on ``stream``.

        BackendError if TensorRT refuses this, for instance for lack of memory.
        """
        if self._engine is None:
            raise BackendError(f"engine {self.entry.unit} was released")
        with errors_of_tensorrt() as errors, self._lock:
            context = compat.context_without_memory(self._engine)
            taken = context.set_optimization_profile_async(profile, stream.handle)
            wait_for(driver, stream)
            if not taken:
                raise refused(f"take profile {profile} of engine {self.entry.unit}", errors)
        made = EngineContext(self, context)
        made.take_shapes({n: r.most for n, r in self.entry.profiles[profile].inputs.items()})
        return made

    def close(self) -> None:
        """Release the engine; its contexts must be closed before."""
        self._engine = None  # before its runtime
        self._runtime = None

    def _largest(self, profile: int, driver: Driver) -> Shapes:
        """Return the shapes of all tensors at the largest inputs of a profile."""
        with _stream(driver) as stream:
            context = self.context(profile, driver, stream)
            try:
                return dict(context.shapes)
            finally:
                context.close()


class EngineContext:
    """An execution context of an engine, for one profile and one slot.

    Made by :meth:`LoadedEngine.context`; used by one thread at a time.
    """

    def __init__(self, engine: LoadedEngine, context: trt.IExecutionContext) -> None:
        self._loaded = engine
        self._context: trt.IExecutionContext | None = context
        self._addresses: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        """Shapes of all inputs and outputs, as last set by :meth:`take_shapes`."""

    def give_memory(self, address: int, size_bytes: int) -> None:
        """Set the context's scratch memory; its content is not needed between runs."""
        compat.give_memory(self._live(), address, size_bytes)

    def take_shapes(self, inputs: Shapes) -> Shapes:
        """Set the shapes of the inputs, if they have changed; return the shapes of the outputs.

        The shapes must be within the context's profile. BackendError if TensorRT refuses them, or
        an output's shape depends on data.
        """
        engine, known = self._loaded, self.shapes
        if known and all(inputs[name] == known[name] for name in engine.inputs):
            return known
        context = self._live()
        # A failure leaves shapes partly set: the next batch must not rely on them.
        self.shapes = {}
        unit = engine.entry.unit
        shapes = {}
        with errors_of_tensorrt() as errors:
            for name in engine.inputs:
                shapes[name] = inputs[name]
                if not context.set_input_shape(name, inputs[name]):
                    raise refused(f"take {inputs[name]} as {name} of engine {unit}", errors)
            unknown = context.infer_shapes()
            if unknown:
                raise refused(
                    f"infer the shapes of engine {unit}: the shapes or values of "
                    f"{', '.join(unknown)} are not set",
                    errors,
                )
        for name in engine.outputs:
            shapes[name] = tuple(context.get_tensor_shape(name))
            if any(size < 0 for size in shapes[name]):
                raise BackendError(
                    f"the shape {shapes[name]} of {name}, of engine {unit}, depends on data: "
                    "not supported"
                )
        self.shapes = shapes
        return shapes

    def enqueue(self, addresses: Mapping[str, int], stream: Stream) -> None:
        """Enqueue one run with the last shapes, on the stream for which the context was made."""
        context, known = self._live(), self._addresses
        with errors_of_tensorrt() as errors:
            for name in self._loaded.dtypes:
                address = addresses[name]
                if known.get(name) != address:
                    known.pop(name, None)
                    if not context.set_tensor_address(name, address):
                        raise refused(f"take the memory of {name}", errors)
                    known[name] = address
            if not context.execute_async_v3(stream.handle):
                raise refused(f"run engine {self._loaded.entry.unit}", errors)

    def close(self) -> None:
        """Release the context; the host must have waited for its work. May be called again."""
        self._context = None

    def _live(self) -> trt.IExecutionContext:
        if self._context is None:
            raise BackendError(
                f"a context of engine {self._loaded.entry.unit} was used after its release"
            )
        return self._context


def deserialize(plan: bytes, what: str) -> tuple[trt.Runtime, trt.ICudaEngine]:
    """Load a serialised engine into the current CUDA context; the runtime must outlive it.

    ``what`` names the engine in errors.
    """
    import tensorrt as trt  # noqa: PLC0415

    with errors_of_tensorrt() as errors:
        runtime: trt.Runtime = trt.Runtime(logger())
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise refused(f"load {what}", errors)
    return runtime, engine


def tensor_names(engine: trt.ICudaEngine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of an engine's inputs, and of its outputs."""
    import tensorrt as trt  # noqa: PLC0415

    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = tuple(n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT)
    return inputs, tuple(name for name in names if name not in inputs)


def wait_for(driver: Driver, stream: Stream) -> None:
    """Wait for all work enqueued on a stream."""
    event = driver.event()
    try:
        driver.record(event, stream)
        driver.synchronize(event)
    finally:
        event.close()


def refused(what: str, errors: list[str]) -> BackendError:
    """Return the error of a failed TensorRT operation, with TensorRT's messages."""
    return BackendError(f"TensorRT could not {what}: {'; '.join(errors) or 'no reason reported'}")


@contextmanager
def _stream(driver: Driver) -> Iterator[Stream]:
    stream = driver.stream()
    try:
        yield stream
    finally:
        stream.close()
