"""A stand-in for ``tensorrt``, in three versions, each with exactly the names of the real one.

Every class lets only those members be used that ``api.json`` gives it in that version; a property
that cannot be set there cannot be set here. What members do is scripted, as little as it takes:

A *graph* is JSON: ``{"inputs": {name: [type, shape]}, "outputs": {…}, "layers": […]}``. An engine
doubles its first input; dimensions of -1 are those of that input. A layer is ``[type, names of what
it reads, {name: type of what it gives}]``; ``null`` is an optional input that is not given.
"""

from __future__ import annotations

import enum
import json
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
from tests.unit.tensorrt.bindings import FOLDER, Bindings, tensorrt
from tests.unit.tensorrt.fake_cuda import Cuda

FULL_VERSIONS = {"8.6.0": "8.6.0", "10.16": "10.16.0.72", "11.4": "11.4.0.106"}
NUMPY = {
    "FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8, "INT32": np.int32,
    "INT64": np.int64, "BOOL": np.bool_, "UINT8": np.uint8, "BF16": np.uint16, "FP8": np.uint8,
}  # fmt: skip
SCRATCH_BYTES = {0: 1024, 1: 4096}
"""Scratch bytes by profile."""


class FakeTensorRT:
    """The module to put into ``sys.modules``, what is done with it, and what it shall do."""

    def __init__(self, version: str, cuda: Cuda) -> None:
        self.cuda = cuda
        self.bindings: Bindings = tensorrt(version)
        self.major = self.bindings.release[0]
        self.calls: list[tuple[Any, ...]] = []
        self.build_errors: list[str] = []
        """Reported by the next build, which then gives nothing."""
        self.phases: list[tuple[str, str | None, int]] = [
            ("Building", None, 3),
            ("Tactics", "Building", 2),
        ]
        """Phases of a build: name, parent, steps."""
        self.during_step: Any = lambda: None
        self.stopped_after: int | None = None
        """Steps after which the progress monitor ended the build."""
        self.refuses_timing_cache = False
        self.refuses_profiles = False
        self.fails_to_start = False
        self.fails_to_run = False
        self.logger: Any = None
        self.module = _module(self, FULL_VERSIONS[version])

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of a member, in order."""
        return [call[1:] for call in self.calls if call[0] == name]

    def report(self, severity: str, text: str) -> None:
        self.logger.log(self.module.ILogger.Severity[severity], text)


def _only(bindings: Bindings, name: str, behaviour: type) -> type:
    """A class with no other public members than the real one."""
    members = bindings.classes[name]

    def check(attribute: str) -> None:
        if not attribute.startswith("_") and attribute not in members:
            raise AttributeError(f"{name} of {bindings} has no {attribute}")

    def get(self: Any, attribute: str) -> Any:
        check(attribute)
        return object.__getattribute__(self, attribute)

    def put(self: Any, attribute: str, value: Any) -> None:
        check(attribute)
        if members.get(attribute) == "prop (ro)":
            raise AttributeError(f"{name}.{attribute} of {bindings} cannot be set")
        object.__setattr__(self, attribute, value)

    return type(name, (behaviour,), {"__getattribute__": get, "__setattr__": put})


def _module(fake: FakeTensorRT, version: str) -> ModuleType:
    module: Any = ModuleType("tensorrt")
    module.__spec__ = ModuleSpec("tensorrt", None)
    module.__version__ = version
    for name, numbers in _numbers(fake.bindings).items():
        setattr(module, name, enum.IntEnum(name, numbers))

    class ILogger:
        Severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")

    module.ILogger = ILogger
    if "IProgressMonitor" in fake.bindings.names:
        module.IProgressMonitor = type("IProgressMonitor", (), {})
    behaviours = {
        "Builder": _Builder, "IBuilderConfig": _Config, "INetworkDefinition": _Network,
        "ITensor": _NetworkTensor, "ILayer": _Layer, "IOptimizationProfile": _Profile,
        "ITimingCache": _Cache,
        "OnnxParser": _Parser, "ParserError": _ParserError, "Runtime": _Runtime,
        "ICudaEngine": _Engine, "IExecutionContext": _Context,
    }  # fmt: skip
    for name, behaviour in behaviours.items():
        made = _only(fake.bindings, name, behaviour)
        made._fake = fake  # type: ignore[attr-defined]
        setattr(module, name, made)
    return module


def _numbers(bindings: Bindings) -> dict[str, dict[str, int]]:
    """The numbers of enums, which the other fixtures leave out; any will do for layers."""
    found = json.loads((FOLDER / "api.json").read_text())[bindings.version]
    numbers = {name: m["enum"] for name, m in found.items() if m is not None and "enum" in m}
    layers = [name for name in bindings.classes["LayerType"] if name.isupper()]
    return {**numbers, "LayerType": {name: n for n, name in enumerate(layers)}}


class _Part:
    _fake: FakeTensorRT

    def _note(self, *call: Any) -> None:
        self._fake.calls.append(call)

    def _make(self, name: str, *arguments: Any) -> Any:
        return getattr(self._fake.module, name)(*arguments)


class _Builder(_Part):
    def __init__(self, logger: Any) -> None:
        assert self._fake.cuda.depth, "no CUDA context is current"
        if self._fake.fails_to_start:
            logger.log(self._fake.module.ILogger.Severity.ERROR, "CUDA initialization failure")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._fake.logger = logger
        self._note("Builder")

    def create_network(self, flags: int = 0) -> Any:
        self._note("create_network", flags)
        return self._make("INetworkDefinition")

    def create_builder_config(self) -> Any:
        return self._make("IBuilderConfig")

    def create_optimization_profile(self) -> Any:
        return self._make("IOptimizationProfile")

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        self._note("build_serialized_network")
        self._caches = [*getattr(self, "_caches", []), weakref.ref(config._cache)]
        assert all(cache() is not None for cache in self._caches), (
            "they have to outlive the builder"
        )
        assert self._fake.cuda.depth, "no CUDA context is current"
        if self._fake.build_errors:
            for error in self._fake.build_errors:
                self._fake.report("ERROR", error)
            return None
        if not self._watched(config):
            self._fake.report("ERROR", "the build was cancelled")
            return None
        config._cache._measured += b"+measured"
        return json.dumps(
            {
                "version": self._fake.module.__version__,
                "graph": network._graph,
                "profiles": [profile._shapes for profile in config._profiles],
            }
        ).encode()

    def _watched(self, config: Any) -> bool:
        """Report phases as TensorRT does, inner ones within the first."""
        monitor = config._set.get("progress_monitor")
        if monitor is None:
            return True
        for name, parent, steps in self._fake.phases:
            monitor.phase_start(name, parent, steps)
        done = 0
        for name, _, steps in reversed(self._fake.phases):
            for step in range(steps):
                self._fake.during_step()
                done += 1
                if not monitor.step_complete(name, step):
                    self._fake.stopped_after = done
                    monitor.phase_finish(name)
                    return False
            monitor.phase_finish(name)
        return True


class _Config(_Part):
    def __init__(self) -> None:
        self._set: dict[str, Any] = {}
        self._profiles: list[Any] = []
        self._cache: Any = None

    def _property(name: str) -> property:  # type: ignore[misc]  # noqa: N805
        def put(self: Any, value: Any) -> None:
            self._set[name] = value
            self._note(name, value)

        return property(lambda self: self._set[name], put)

    builder_optimization_level = _property("builder_optimization_level")
    max_aux_streams = _property("max_aux_streams")
    progress_monitor = _property("progress_monitor")

    def set_flag(self, flag: Any) -> None:
        self._note("set_flag", flag.name)

    def clear_flag(self, flag: Any) -> None:
        self._note("clear_flag", flag.name)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self._note("set_preview_feature", feature.name, enable)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._note("set_memory_pool_limit", pool.name, pool_size)

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        self._note("set_tactic_sources", tactic_sources)
        return True

    def get_tactic_sources(self) -> int:
        return 0b11111

    def add_optimization_profile(self, profile: Any) -> int:
        self._note("add_optimization_profile", profile._shapes)
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        return self._make("ITimingCache", bytes(serialized_timing_cache))

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self._note("set_timing_cache", cache._measured)
        if self._fake.refuses_timing_cache and cache._measured:
            return False
        self._cache = cache
        cache._config = weakref.ref(self)
        return True


class _Cache(_Part):
    def __init__(self, data: bytes) -> None:
        self._measured = data

    def serialize(self) -> bytes:
        assert self._config() is not None, "its config is gone"
        return self._measured


class _Network(_Part):
    def __init__(self) -> None:
        self._graph: dict[str, Any] = {"inputs": {}, "outputs": {}}
        self._layers: list[Any] = []

    @property
    def num_inputs(self) -> int:
        return len(self._graph["inputs"])

    def get_input(self, index: int) -> Any:
        name, (type_, shape) = list(self._graph["inputs"].items())[index]
        return self._make("ITensor", name, shape, type_)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def get_layer(self, index: int) -> Any:
        return self._layers[index]

    def _add_layers(self, described: list[Any]) -> None:
        types = {name: type_ for name, (type_, _) in self._graph["inputs"].items()}
        for kind, reads, gives in described:
            types |= gives
            inputs = [n and self._make("ITensor", n, [], types[n]) for n in reads]
            outputs = [self._make("ITensor", n, [], type_) for n, type_ in gives.items()]
            self._layers.append(self._make("ILayer", kind, inputs, outputs))


class _Layer(_Part):
    """Notes what its precision and the types of its outputs are set to."""

    def __init__(self, kind: str, inputs: list[Any], outputs: list[Any]) -> None:
        self._kind, self._inputs, self._outputs = kind, inputs, outputs
        self._named = outputs[0]._name
        self._set_types: set[int] = set()

    @property
    def type(self) -> Any:
        return self._fake.module.LayerType[self._kind]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    def output_type_is_set(self, index: int) -> bool:
        return index in self._set_types

    def set_output_type(self, index: int, dtype: Any) -> None:
        self._note("set_output_type", self._outputs[index]._name, dtype.name)

    def _put_precision(self, dtype: Any) -> None:
        self._note("precision", self._named, dtype.name)

    precision = property(None, _put_precision)


class _NetworkTensor(_Part):
    def __init__(self, name: str, shape: list[int], type_: str) -> None:
        self._name, self._shape, self._type = name, shape, type_

    @property
    def dtype(self) -> Any:
        return self._fake.module.DataType[self._type]

    @property
    def is_execution_tensor(self) -> bool:
        return not self._name.startswith("shape")

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._shape)


class _Profile(_Part):
    def __init__(self) -> None:
        self._shapes: dict[str, Any] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002
        self._shapes[input] = [list(min), list(opt), list(max)]


class _Parser(_Part):
    def __init__(self, network: Any, logger: Any) -> None:
        self._network, self._errors = network, []

    def parse(self, model: bytes, path: str | None = None) -> bool:
        self._note("parse", len(model))
        graph = json.loads(model)
        self._errors = graph.get("errors", [])
        narrowed = {} if self._fake.major >= 10 else {"INT64": "INT32"}
        for name, (type_, shape) in graph.get("inputs", {}).items():
            self._network._graph["inputs"][name] = [narrowed.get(type_, type_), shape]
        self._network._graph["outputs"] = graph.get("outputs", {})
        self._network._add_layers(graph.get("layers", []))
        return not self._errors

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._make("ParserError", *self._errors[index])


class _ParserError(_Part):
    def __init__(self, node: int, name: str, operator: str, text: str) -> None:
        self._node, self._name, self._operator, self._text = node, name, operator, text

    def node(self) -> int:
        return self._node

    def node_name(self) -> str:
        return self._name

    def node_operator(self) -> str:
        return self._operator

    def desc(self) -> str:
        return self._text


class _Runtime(_Part):
    def __init__(self, logger: Any) -> None:
        assert self._fake.cuda.depth, "no CUDA context is current"
        self._fake.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        plan = json.loads(serialized_engine)
        if plan["version"] != self._fake.module.__version__:
            self._fake.report("ERROR", f"the engine is of version {plan['version']}")
            return None
        return self._make("ICudaEngine", plan)


class _Engine(_Part):
    def __init__(self, plan: dict[str, Any]) -> None:
        self._profiles = plan["profiles"]
        graph = plan["graph"]
        self._tensors = {**graph["inputs"], **graph["outputs"]}
        self._inputs = list(graph["inputs"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._fake.module.TensorIOMode["INPUT" if name in self._inputs else "OUTPUT"]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._fake.module.DataType[self._tensors[name][0]]

    @property
    def device_memory_size(self) -> int:
        return max(SCRATCH_BYTES.values())

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        return SCRATCH_BYTES[profile_index]

    get_device_memory_size_for_profile_v2 = get_device_memory_size_for_profile

    def create_execution_context_without_device_memory(self) -> Any:
        return self._context("without_device_memory")

    def create_execution_context(self, strategy: Any) -> Any:
        return self._context(strategy.name)

    def _context(self, how: str) -> Any:
        self._note("create_execution_context", how)
        return self._make("IExecutionContext", self)


class _Context(_Part):
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._memory: tuple[int, int | None] | None = None
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        self._note("set_device_memory", size)
        assert self._profile is not None, "how much depends on the profile"
        assert size >= SCRATCH_BYTES[self._profile]
        self._memory = memory, size

    def _put_memory(self, memory: int) -> None:
        self._note("device_memory")
        self._memory = memory, None

    device_memory = property(lambda self: self._memory, _put_memory)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._note("set_optimization_profile_async", profile_index)
        if self._fake.refuses_profiles:
            self._fake.report("ERROR", f"profile {profile_index} is in use")
            return False
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None, "choose a profile first"
        least, _, most = self._engine._profiles[self._profile][name]
        fits = all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))
        if not fits:
            self._fake.report("ERROR", f"{name} must have {least} to {most}")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        like = self._shapes[self._engine._inputs[0]]
        shape = self._engine._tensors[name][1]
        return tuple(like[i] if size == -1 else size for i, size in enumerate(shape))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory in self._fake.cuda.memory

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._note("execute_async_v3", stream_handle)
        assert stream_handle, "never the default stream"
        self._fake.cuda.pending = True
        assert self._memory is not None, "no scratch memory was given"
        assert self._memory[0] % 256 == 0
        needed = SCRATCH_BYTES[self._profile or 0]
        assert len(self._fake.cuda.at(self._memory[0])) >= needed
        assert set(self._addresses) == set(self._engine._tensors)
        if self._fake.fails_to_run:
            self._fake.report("ERROR", "enqueue failed")
            return False
        first = self._engine._inputs[0]
        values = self._array(first)
        for name in set(self._addresses) - set(self._engine._inputs):
            doubled = np.broadcast_to(values * 2, self.get_tensor_shape(name))
            data = _encode(doubled, self._engine._tensors[name][0])
            self._fake.cuda.write(self._addresses[name], data)
        return True

    def _array(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        dtype = np.dtype(NUMPY[self._engine._tensors[name][0]])
        size = int(np.prod(shape)) * dtype.itemsize
        data = bytes(self._fake.cuda.at(self._addresses[name])[:size])
        array = np.frombuffer(data, dtype).reshape(shape)
        if self._engine._tensors[name][0] == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array


def _encode(array: np.ndarray, type_: str) -> bytes:
    if type_ == "BF16":  # cut off, which is exact for the numbers of the tests
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.astype(NUMPY[type_]).tobytes()
