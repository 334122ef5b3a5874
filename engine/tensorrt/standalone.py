"""An engine that is run alone, to verify it after its build, or to time it (``tools/gpu``).

Serving works differently: with persistent buffers and contexts, and without unnecessary copies.
This module is the simplest way from host arrays to host arrays. All functions use the calling
thread's CUDA context: see :mod:`offramp.engine.cuda.primary_context`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import compat
from offramp.engine.tensorrt.loading import deserialize, refused, tensor_names
from offramp.engine.tensorrt.tensorrt_messages import errors_of_tensorrt

if TYPE_CHECKING:
    import pycuda.driver as cuda
    import tensorrt as trt


def run_plan(
    plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int = 0
) -> dict[str, NDArray[Any]]:
    """Load an engine, run it once, and release it; return all outputs (bfloat16 as float32).

    ``plan`` must be built for this GPU and this version of TensorRT; ``profile`` is the index of a
    profile that allows the inputs' shapes. Additional inputs are allowed, because TensorRT may drop
    inputs that no layer reads. 64-bit integers are converted if the engine has 32-bit integers.
    BackendError if the engine cannot be loaded or run, or if an input is missing or does not fit.
    """
    with StandaloneEngine(plan) as engine:
        return engine.run(inputs, profile)


def time_plans(
    plans: Sequence[tuple[bytes, Mapping[str, NDArray[Any]], int]], *, rounds: int
) -> list[float]:
    """Time engines in turns; return the median seconds on the device for each engine.

    Each engine is passed as a plan, its inputs, and the index of a profile that allows these
    inputs. All engines are loaded and run once before, and each round runs every engine, so that
    other work of the GPU affects all equally. Copies are not counted. BackendError if an engine
    cannot be loaded or run.
    """
    with ExitStack() as stack:
        ready = []
        for plan, inputs, profile in plans:
            engine = stack.enter_context(StandaloneEngine(plan))
            shapes = {name: inputs[name].shape for name in engine.inputs}
            ready.append(stack.enter_context(engine.prepare(profile, shapes)))
            ready[-1].run(inputs)
        with _cuda_errors():
            times = [[prepared.time_s() for prepared in ready] for _ in range(rounds)]
        ready.clear()
    medians: list[float] = np.median(times, axis=0).tolist()
    return medians


class StandaloneEngine:
    """An engine that stays loaded in the current CUDA context, to be run alone."""

    def __init__(self, plan: bytes) -> None:
        started = time.perf_counter()
        runtime, engine = deserialize(plan, "the engine")
        self.load_s = time.perf_counter() - started
        """Time that loading the engine took, in seconds."""
        self._runtime: trt.Runtime | None = runtime
        self._engine: trt.ICudaEngine | None = engine
        self.inputs, self.outputs = tensor_names(engine)
        self.profiles = int(engine.num_optimization_profiles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine; the CUDA context in which it was loaded must be current."""
        self._engine = None  # before its runtime
        self._runtime = None

    def run(self, inputs: Mapping[str, NDArray[Any]], profile: int = 0) -> dict[str, NDArray[Any]]:
        """Run the engine once; see :func:`run_plan`."""
        lacking = [name for name in self.inputs if name not in inputs]
        if lacking:
            raise BackendError(f"the engine needs {lacking}, but it was given {sorted(inputs)}")
        shapes = {name: inputs[name].shape for name in self.inputs}
        with self.prepare(profile, shapes) as prepared:
            return prepared.run(inputs)

    @contextmanager
    def prepare(
        self, profile: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[PreparedEngine]:
        """Yield a context and buffers for inputs of certain shapes; all is released at the end.

        Several contexts may be open at the same time, with different profiles: in TensorRT 8.6 only
        one context at a time can use a profile. BackendError if the profile does not allow the
        shapes, or memory is short.
        """
        import pycuda.driver as cuda  # noqa: PLC0415

        engine = self._engine
        if engine is None:
            raise BackendError("the engine has been released")
        if not 0 <= profile < self.profiles:
            raise BackendError(f"there is no profile {profile}, the engine has {self.profiles}")
        with _cuda_errors(), ExitStack() as releases:
            stream: cuda.Stream = cuda.Stream()
            with errors_of_tensorrt() as errors:
                context = compat.context_without_memory(engine)
                taken = {name: shapes[name] for name in self.inputs}
                _choose(context, profile, taken, stream, errors)
                scratch_bytes = compat.scratch_bytes(engine, profile)
                scratch = _allocate(scratch_bytes, releases)
                compat.give_memory(context, int(scratch), scratch_bytes)
            tensors = {
                name: _bind(engine, context, name, releases)
                for name in (*self.inputs, *self.outputs)
            }
            prepared = PreparedEngine(self, context, stream, tensors)
            # Last in, first out: wait for running work, then release the context, then the memory.
            releases.callback(prepared.close)
            releases.callback(_wait, stream)
            del context, stream
            yield prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTensor:
    """An input or output of an engine, in device memory of its own."""

    shape: tuple[int, ...]
    dtype: trt.DataType
    memory: cuda.DeviceAllocation
    size_bytes: int


class PreparedEngine:
    """An engine with a context and buffers for one set of shapes."""

    def __init__(
        self,
        engine: StandaloneEngine,
        context: trt.IExecutionContext,
        stream: cuda.Stream,
        tensors: Mapping[str, DeviceTensor],
    ) -> None:
        self.engine = engine
        self._stream: cuda.Stream | None = stream
        self.tensors = tensors
        """Inputs and outputs on the device, by name."""
        self._context: trt.IExecutionContext | None = context

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run the engine once; see :func:`run_plan`."""
        import pycuda.driver as cuda  # noqa: PLC0415

        self._live_context()  # before copying to freed memory
        stream = self.stream
        sent = {name: self._as_tensor(name, inputs[name]) for name in self.engine.inputs}
        for name, array in sent.items():
            cuda.memcpy_htod_async(self.tensors[name].memory, array, stream)
        with errors_of_tensorrt() as errors:
            self.enqueue(errors)
        raw = {}
        for name in self.engine.outputs:
            tensor = self.tensors[name]
            raw[name] = np.empty(tensor.shape, compat.numpy_dtype(tensor.dtype))
            cuda.memcpy_dtoh_async(raw[name], tensor.memory, stream)
        stream.synchronize()
        return {name: compat.from_tensor(raw[name], self.tensors[name].dtype) for name in raw}

    def enqueue(self, errors: list[str]) -> None:
        """Enqueue one run on the buffers' content; ``errors`` are TensorRT's current errors."""
        if not self._live_context().execute_async_v3(self.stream.handle):
            raise refused("run the engine", errors)

    def time_s(self) -> float:
        """Run once on the buffers' content, and wait; return the seconds between CUDA events."""
        import pycuda.driver as cuda  # noqa: PLC0415

        start: cuda.Event = cuda.Event()
        end: cuda.Event = cuda.Event()
        with errors_of_tensorrt() as errors:
            start.record(self.stream)
            self.enqueue(errors)
            end.record(self.stream)
        end.synchronize()
        return float(end.time_since(start)) / 1e3

    @property
    def stream(self) -> cuda.Stream:
        """CUDA stream of the engine; BackendError after it was released."""
        if self._stream is None:
            raise _released()
        return self._stream

    def close(self) -> None:
        """Release context and stream; the engine cannot run afterwards.

        PyCUDA releases a stream with its last reference, and only while the stream's CUDA context
        is current.
        """
        self._context = self._stream = None

    def _live_context(self) -> trt.IExecutionContext:
        if self._context is None:
            raise _released()
        return self._context

    def _as_tensor(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        tensor = self.tensors[name]
        if array.shape != tensor.shape:
            raise BackendError(
                f"input {name} has shape {array.shape}, but {tensor.shape} was prepared"
            )
        try:
            return compat.to_tensor(array, tensor.dtype)
        except BackendError as error:
            raise BackendError(f"input {name}: {error}") from error


def _released() -> BackendError:
    return BackendError("the engine's context and buffers have been released")


def _choose(
    context: trt.IExecutionContext,
    profile: int,
    shapes: Mapping[str, tuple[int, ...]],
    stream: cuda.Stream,
    errors: list[str],
) -> None:
    """Set a context's profile, and the shapes of its inputs."""
    if not context.set_optimization_profile_async(profile, stream.handle):
        raise refused(f"take optimisation profile {profile}", errors)
    stream.synchronize()
    for name, shape in shapes.items():
        if not context.set_input_shape(name, shape):
            raise refused(f"take {shape} as the shape of {name}", errors)
    unknown = context.infer_shapes()
    if unknown:
        raise refused(f"infer shapes without {', '.join(unknown)}", errors)


def _bind(
    engine: trt.ICudaEngine, context: trt.IExecutionContext, name: str, releases: ExitStack
) -> DeviceTensor:
    shape = tuple(context.get_tensor_shape(name))
    if any(size < 0 for size in shape):
        raise BackendError(f"the shape {shape} of {name} depends on data: not supported")
    dtype: trt.DataType = engine.get_tensor_dtype(name)
    size_bytes = int(np.prod(shape, dtype=np.int64)) * compat.numpy_dtype(dtype).itemsize
    memory = _allocate(size_bytes, releases)
    if not context.set_tensor_address(name, int(memory)):
        raise BackendError(f"TensorRT could not take the memory of {name}")
    return DeviceTensor(shape=shape, dtype=dtype, memory=memory, size_bytes=size_bytes)


def _allocate(size_bytes: int, releases: ExitStack) -> cuda.DeviceAllocation:
    import pycuda.driver as cuda  # noqa: PLC0415

    memory: cuda.DeviceAllocation = cuda.mem_alloc(max(size_bytes, 1))
    releases.callback(memory.free)
    return memory


def _wait(stream: cuda.Stream) -> None:
    """Wait until the device is done; errors are ignored, because failures have been raised."""
    import pycuda.driver as cuda  # noqa: PLC0415

    with suppress(cuda.Error):
        stream.synchronize()


@contextmanager
def _cuda_errors() -> Iterator[None]:
    import pycuda.driver as cuda  # noqa: PLC0415

    try:
        yield
    except cuda.Error as error:
        raise BackendError(f"CUDA failed: {error}") from error
