"""TensorRT's runtime on a fake driver: engines that run their ONNX graph when the stream does.

On top of :mod:`tests.unit.tensorrt.fake_tensorrt`, with the names of each version and no others.
What would be undefined on a GPU is an error here: a context that changes after a graph was
captured from it, too little scratch memory, and in 8.6 two contexts with one profile of an engine
that was not built to share them. While a context runs, its scratch memory is overwritten, so that
nothing else may lie there.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from tests.unit.tensorrt.fake_cuda import Cuda
from tests.unit.tensorrt.fake_tensorrt import FakeTensorRT, _only, _Part

from offramp.bundle.engines import ShapeProfile
from offramp.engine.backends.onnxruntime import make_session
from offramp.testing.cuda_driver import FakeDriver

SCRATCH_BYTES = 1000
TYPES = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}
NUMPY = {
    "FLOAT": np.float32, "UINT8": np.uint8, "INT8": np.int8, "INT32": np.int32,
    "INT64": np.int64, "BOOL": np.bool_, "HALF": np.float16,
}  # fmt: skip


class FakeRuntime(FakeTensorRT):
    """TensorRT of a version on the memory and streams of a fake driver."""

    def __init__(self, version: str, driver: FakeDriver) -> None:
        super().__init__(version, Cuda())
        self.device = driver
        self.contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.fails_to_load = False
        self.shares_profiles = True
        """Engines are built so; 10 and later take no notice."""
        self.graph_fails = False
        """Engines cannot be captured."""
        for name, behaviour in (
            ("Runtime", _Runtime), ("ICudaEngine", _Engine), ("IExecutionContext", _Context),
        ):  # fmt: skip
            made = _only(self.bindings, name, behaviour)
            made._fake = self  # type: ignore[attr-defined]
            setattr(self.module, name, made)

    def plan(self, graph: bytes, profiles: list[ShapeProfile]) -> bytes:
        """Return a plan as if it had been built."""
        shapes = [
            {name: [r.least, r.most] for name, r in profile.inputs.items()} for profile in profiles
        ]
        content = {
            "version": self.module.__version__,
            "graph": base64.b64encode(graph).decode(),
            "profiles": shapes,
            "shares_profiles": self.shares_profiles,
        }
        return json.dumps(content).encode()

    @property
    def is_current(self) -> bool:
        return self.device._current[threading.get_ident()] > 0

    @property
    def captures(self) -> bool:
        return threading.get_ident() in self.device._capturing


class _Runtime(_Part):
    _fake: FakeRuntime

    def __init__(self, logger: Any) -> None:
        assert self._fake.is_current, "no CUDA context is current"
        self._fake.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        plan = json.loads(serialized_engine)
        if self._fake.fails_to_load or plan["version"] != self._fake.module.__version__:
            self._fake.report("ERROR", f"the engine is of version {plan['version']}")
            return None
        return self._make("ICudaEngine", plan)


class _Engine(_Part):
    _fake: FakeRuntime

    def __init__(self, plan: dict[str, Any]) -> None:
        graph = base64.b64decode(plan["graph"])
        proto = onnx.load_from_string(graph).graph
        self._session = make_session(graph, threads=1)
        self._profiles = plan["profiles"]
        self._shares_profiles = self._fake.major >= 10 or plan["shares_profiles"]
        weights = {tensor.name for tensor in proto.initializer}
        inputs = [info for info in proto.input if info.name not in weights]
        self._inputs = [info.name for info in inputs]
        self._asked = {i.name: TYPES[i.type.tensor_type.elem_type] for i in inputs}
        self._types = {
            info.name: TYPES[info.type.tensor_type.elem_type] for info in (*inputs, *proto.output)
        }
        if self._fake.major < 10:
            self._types = {
                name: "INT32" if type_ == "INT64" else type_ for name, type_ in self._types.items()
            }
        self._fake.engines.add(self)

    @property
    def num_io_tensors(self) -> int:
        return len(self._types)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._types)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._fake.module.TensorIOMode["INPUT" if name in self._inputs else "OUTPUT"]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._fake.module.DataType[self._types[name]]

    @property
    def device_memory_size(self) -> int:
        return SCRATCH_BYTES

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        return SCRATCH_BYTES - profile_index

    get_device_memory_size_for_profile_v2 = get_device_memory_size_for_profile

    def create_execution_context_without_device_memory(self) -> Any:
        return self._make("IExecutionContext", self)

    def create_execution_context(self, strategy: Any) -> Any:
        assert strategy.name == "USER_MANAGED"
        return self._make("IExecutionContext", self)


class _Context(_Part):
    _fake: FakeRuntime

    def __init__(self, engine: Any) -> None:
        assert self._fake.is_current, "no CUDA context is current"
        self._engine = engine
        self._memory: tuple[int, int] | None = None
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._captured = False
        self._running: list[None] = []
        """One for each run that is enqueued and not done, but for those of graphs."""
        self._flushed = False
        """True if it ran since its shapes changed."""
        self._note("create_execution_context")
        self._fake.contexts.add(self)

    def _change(self) -> None:
        assert self._fake.is_current, "no CUDA context is current"
        assert not self._captured, "the context of a graph was changed: the graph is void"

    def set_device_memory(self, memory: int, size: int) -> None:
        self._change()
        assert size >= SCRATCH_BYTES
        assert memory % 256 == 0
        self._memory = memory, SCRATCH_BYTES

    def _put_memory(self, memory: int) -> None:
        self._change()
        self._memory = memory, SCRATCH_BYTES

    device_memory = property(lambda self: self._memory, _put_memory)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._change()
        stream = _stream_of(self._fake.device, stream_handle)
        self._fake.device.call(stream, lambda: None)
        others = [c for c in self._fake.contexts if c is not self and c._engine is self._engine]
        taken = any(c._profile == profile_index for c in others)
        taken = taken and not self._engine._shares_profiles
        if taken or self._fake.refuses_profiles:
            self._fake.report("ERROR", f"profile {profile_index} is in use")
            return False
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._change()
        assert self._profile is not None, "choose a profile first"
        least, most = self._engine._profiles[self._profile][name]
        if not all(low <= s <= high for low, s, high in zip(least, shape, most, strict=True)):
            self._fake.report("ERROR", f"{name} must have {least} to {most}")
            return False
        self._shapes[name] = tuple(shape)
        self._known, self._flushed = {}, False
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if not self._known:
            zeros = {
                name: np.zeros(shape, NUMPY[self._engine._asked[name]])
                for name, shape in self._shapes.items()
            }
            names = [o.name for o in self._engine._session.get_outputs()]
            outputs = self._engine._session.run(names, zeros)
            self._known = {n: o.shape for n, o in zip(names, outputs, strict=True)} | self._shapes
        return self._known[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._change()
        self._addresses[name] = memory
        return memory % 256 == 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        fake = self._fake
        self._note("execute_async_v3", len(next(iter(self._shapes.values()))))
        assert fake.is_current, "no CUDA context is current"
        assert self._memory is not None, "no scratch memory was given"
        assert set(self._addresses) == set(self._engine._types)
        if fake.fails_to_run or (fake.graph_fails and fake.captures):
            fake.report("ERROR", "enqueue failed")
            return False
        if fake.captures:
            assert self._flushed, "run once with these shapes before a capture"
            assert not self._running, "a context is captured while it still runs"
            self._captured = True
        self._flushed = True
        job = _Job(self)
        if not fake.captures:
            job.done = self._running.pop
            self._running.append(None)
        fake.device.call(_stream_of(fake.device, stream_handle), job.run)
        return True


class _Job:
    """State of a context when it was enqueued."""

    def __init__(self, context: Any) -> None:
        self._device: FakeDriver = context._fake.device
        self._engine = context._engine
        self._memory: tuple[int, int] = context._memory
        self._addresses = dict(context._addresses)
        self._shapes = {name: context.get_tensor_shape(name) for name in self._addresses}
        self.done: Callable[[], None] = lambda: None

    def run(self) -> None:
        engine, device = self._engine, self._device
        self._check_apart()
        device.write(*self._memory)[:] = 0xEE
        inputs = {name: self._read(name) for name in engine._inputs}
        names = [output.name for output in engine._session.get_outputs()]
        for name, value in zip(names, engine._session.run(names, inputs), strict=True):
            data = np.ascontiguousarray(value, NUMPY[engine._types[name]]).view(np.uint8)
            device.write(self._addresses[name], data.nbytes)[:] = data.reshape(-1)
        device.write(*self._memory)[:] = 0xEE
        self.done()

    def _check_apart(self) -> None:
        """Check that buffers of a run do not overlap."""
        sizes = {
            name: int(np.prod(self._shapes[name])) * np.dtype(NUMPY[engine_type]).itemsize
            for name, engine_type in self._engine._types.items()
        }
        ranges = sorted([self._memory, *((self._addresses[n], size) for n, size in sizes.items())])
        for (before, size), (after, _) in itertools.pairwise(ranges):
            assert before + size <= after, "tensors or scratch memory overlap"

    def _read(self, name: str) -> NDArray[Any]:
        dtype = np.dtype(NUMPY[self._engine._types[name]])
        shape = self._shapes[name]
        data = self._device.read(self._addresses[name], int(np.prod(shape)) * dtype.itemsize)
        return data.view(dtype).reshape(shape).astype(NUMPY[self._engine._asked[name]])


def _stream_of(device: FakeDriver, handle: int) -> Any:
    (found,) = [s for s in device._open if getattr(s, "handle", None) == handle]
    return found
