"""TensorRT 8.6, 10 and 11: every difference between them, each in one small function.

No other module names anything that one of these versions lacks; a test compares all names with the
bindings of 8.6.0, 10.16 and 11.4. TensorRT 10 and 11 are what users install; 8.6.0 is the newest
version that is complete on PyPI, and so the one that can be tested without another package index.

=================  ============================  ======================  ===========================
matter             8.6                           10                      11
=================  ============================  ======================  ===========================
network            explicit batch: a flag        always                  always
types              chosen by the builder, flags  from the graph: a flag  from the graph, always
                   FP16 and INT8 allow them,
                   layers can be held to one
int64 tensors      none: int32                   yes                     yes
cuBLAS, cuDNN      on unless switched off        off unless asked for    none
build progress     none                          IProgressMonitor        IProgressMonitor
context without    a method of its own,          a strategy,             a strategy,
scratch memory     ``device_memory``             ``set_device_memory``   ``set_device_memory``
its size           ``device_memory_size``        a profile's             a profile's
=================  ============================  ======================  ===========================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.optional_imports import optional_import
from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt.probe import INSTALL

if TYPE_CHECKING:
    import tensorrt as trt

OLDEST = (8, 6)

_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "BF16": np.uint16,
}
"""Arrays' types by names of ``tensorrt.DataType``. numpy has no bfloat16: uint16 holds its bits.
INT64 and BF16 exist since TensorRT 10."""
_BFLOAT16 = "BF16"


def load() -> None:
    """Import TensorRT and PyCUDA; call :func:`offramp.engine.tensorrt.probe.require` before.

    BackendError if one of them is installed but does not load, or is too old.
    """
    remedy = f"{INSTALL} (both must fit the driver's CUDA version)"
    with optional_import("tensorrt", "pycuda", install=remedy, raises=BackendError):
        import pycuda.driver  # noqa: F401, PLC0415
        import tensorrt as trt  # noqa: PLC0415
    if _release(trt.__version__) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"TensorRT {trt.__version__} is too old, expected {oldest} or newer: {INSTALL}"
        )


def version() -> str:
    """Return TensorRT's version, for instance ``10.16.0.72``."""
    import tensorrt as trt  # noqa: PLC0415

    return str(trt.__version__)


def major() -> int:
    """Return TensorRT's major version: 8, 10 or 11 (or later)."""
    return _release(version())[0]


def _release(text: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None:
        raise BackendError(f"TensorRT's version is {text!r}, expected MAJOR.MINOR")
    return int(numbers[1]), int(numbers[2])


# Building


def network_flags() -> int:
    """Return the flags for ``Builder.create_network``.

    TensorRT 8.6 needs a flag to treat the first axis as the batch. Version 10 needs a flag to take
    types from the graph, instead of choosing them. Version 11 always does both.
    """
    import tensorrt as trt  # noqa: PLC0415

    if major() < 10:
        return 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    if major() == 10:
        return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return 0


def allow_precision(config: trt.IBuilderConfig, precision: str) -> None:
    """Allow the arithmetic of ``precision``: ``fp32``, ``tf32``, ``fp16`` or ``int8``.

    TF32 is on by default in all versions, and rounds factors to 10 bits; it is switched off unless
    requested. The graph states the types. Only TensorRT 8.6 needs flags to use these types, and
    refuses a float16 or Q/DQ graph without the flags.
    """
    import tensorrt as trt  # noqa: PLC0415

    if precision != "tf32":
        config.clear_flag(trt.BuilderFlag.TF32)
    if major() >= 10:
        return
    if precision == "fp16":
        config.set_flag(trt.BuilderFlag.FP16)
    if precision == "int8":
        config.set_flag(trt.BuilderFlag.INT8)


def keep_float32(
    config: trt.IBuilderConfig, network: trt.INetworkDefinition, precision: str, half_suffix: str
) -> None:
    """Restrict TensorRT 8.6 to float32 where an fp16 graph has float32: in exits, sums and powers.

    Version 10 and later take all types from the graph. Version 8.6 may compute any layer in float16
    if the flag FP16 is set. Its network reports float32 as the type of a layer's computation, and
    of a cast's output, until the engine is built. So float16 tensors are found by their names in
    the graph, which end with ``half_suffix``. Between two named tensors the parser may add layers
    and name their outputs; such layers are followed from a float16 tensor on. An earlier method
    used the types of the casts; with it, all fp16 engines of ResNet-101 and BERT-base on an H200
    were as slow and as large as fp32 engines. The names have not been tested on a GPU yet.

    An int8 graph needs no restriction: with explicit Q/DQ pairs, 8.6 quantises nothing else, the
    flag FP16 is not set, and outside of the pairs the graph is float32. ``precision`` is the
    argument of :func:`allow_precision`; the network is as the parser made it.
    """
    if major() >= 10 or precision != "fp16":
        return
    import tensorrt as trt  # noqa: PLC0415

    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    halves: set[str] = set()
    for index in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(index)
        floats = _free_outputs(layer)
        if _reads_half(layer, halves, half_suffix):
            halves |= {layer.get_output(number).name for number in floats}
        elif floats:
            if layer.type != trt.LayerType.CONCATENATION:  # it only copies
                layer.precision = trt.DataType.FLOAT
            for number in floats:
                layer.set_output_type(number, trt.DataType.FLOAT)


def _free_outputs(layer: trt.ILayer) -> list[int]:
    """Return the indices of float32 outputs that TensorRT 8.6 might compute in float16."""
    if major() >= 10:
        return []
    import tensorrt as trt  # noqa: PLC0415

    if layer.type in (trt.LayerType.CAST, trt.LayerType.CONSTANT, trt.LayerType.FILL):
        return []
    found = []
    for number in range(layer.num_outputs):
        tensor: trt.ITensor = layer.get_output(number)
        is_float = tensor.dtype == trt.DataType.FLOAT and tensor.is_execution_tensor
        if is_float and not layer.output_type_is_set(number):  # else it is a cast, too
            found.append(number)
    return found


def _reads_half(layer: trt.ILayer, halves: set[str], half_suffix: str) -> bool:
    import tensorrt as trt  # noqa: PLC0415

    for number in range(layer.num_inputs):
        tensor: trt.ITensor | None = layer.get_input(number)
        if tensor is None:  # an omitted optional input
            continue
        if tensor.dtype == trt.DataType.HALF or tensor.name in halves:
            return True
        if tensor.name.endswith(half_suffix):
            return True
    return False


def use_own_kernels_only(config: trt.IBuilderConfig) -> None:
    """Use no kernels of cuBLAS and cuDNN.

    This is the default of TensorRT 10, and always so in 11. Version 8.6 uses these kernels where
    they are faster; its engines then need both libraries at run time, and its package does not
    include them.
    """
    import tensorrt as trt  # noqa: PLC0415

    if major() < 10:
        foreign = (trt.TacticSource.CUBLAS, trt.TacticSource.CUBLAS_LT, trt.TacticSource.CUDNN)
        unwanted = sum(1 << int(source) for source in foreign)
        config.set_tactic_sources(config.get_tactic_sources() & ~unwanted)


def share_profiles(config: trt.IBuilderConfig) -> None:
    """Allow several contexts of an engine to use one profile at the same time.

    TensorRT 10 always allows this. Version 8.6 refuses the second context unless the engine was
    built with this option.
    """
    import tensorrt as trt  # noqa: PLC0415

    if major() < 10:
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)  # noqa: FBT003


def has_progress() -> bool:
    """Return whether builds report progress and can be ended early (TensorRT 10 and later)."""
    return major() >= 10


def watch_progress(
    config: trt.IBuilderConfig,
    *,
    started: Callable[[str, int], None],
    stepped: Callable[[str, int], bool],
    finished: Callable[[str], None],
) -> object:
    """Register callbacks for a build's phases; no effect if :func:`has_progress` is false.

    ``started`` gets the number of steps of a phase, ``stepped`` the index of the finished step; if
    ``stepped`` returns false, the build ends. The returned object must be kept until builder,
    network and config are released.
    """
    if not has_progress():
        return None
    import tensorrt as trt  # noqa: PLC0415

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # tensorrt has no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:  # noqa: ARG002
            started(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return stepped(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            finished(phase_name)

    monitor = Monitor()
    config.progress_monitor = monitor
    return monitor


def parser_errors(parser: trt.OnnxParser, node_of: Callable[[int], str]) -> list[str]:
    """Return the parser's errors, with the name and operator of the node.

    TensorRT 8.6 reports only the node's index; ``node_of`` converts the index to operator and name.
    """
    found = []
    for index in range(parser.num_errors):
        error: trt.ParserError = parser.get_error(index)
        number = int(error.node())
        if number < 0:
            found.append(str(error.desc()))
        elif major() < 10:
            found.append(f"{error.desc()} (node {number}, {node_of(number)})")
        elif error.node_name():
            node = f"{error.node_operator()} {error.node_name()}"
            found.append(f"{error.desc()} (node {number}, {node})")
        else:
            found.append(f"{error.desc()} (node {number})")
    return found


# Running


def context_without_memory(engine: trt.ICudaEngine) -> trt.IExecutionContext:
    """Return an execution context without scratch memory: see :func:`give_memory`.

    TensorRT 8.6 has a method for this, 10 and later an allocation strategy. BackendError if
    TensorRT returns none.
    """
    import tensorrt as trt  # noqa: PLC0415

    context: trt.IExecutionContext | None
    if major() < 10:
        context = engine.create_execution_context_without_device_memory()
    else:
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
    if context is None:
        raise BackendError("TensorRT could not make an execution context")
    return context


def scratch_bytes(engine: trt.ICudaEngine, profile: int) -> int:
    """Return the scratch memory that a context needs with a profile, in bytes.

    TensorRT 10.1 and later report it for each profile. Version 10.0 does, too, by a function that
    11 lacks. Version 8.6 reports only the largest value of all profiles.
    """
    if hasattr(engine, "get_device_memory_size_for_profile_v2"):
        return int(engine.get_device_memory_size_for_profile_v2(profile))
    if hasattr(engine, "get_device_memory_size_for_profile"):
        return int(engine.get_device_memory_size_for_profile(profile))
    return int(engine.device_memory_size)


def give_memory(context: trt.IExecutionContext, address: int, size_bytes: int) -> None:
    """Set a context's scratch memory, which two parallel contexts must not share.

    The context must come from :func:`context_without_memory`, with its profile and shapes set. The
    address must be a multiple of 256, and the size at least :func:`scratch_bytes`: TensorRT 8.6 and
    10.0 do not check the size.
    """
    if hasattr(context, "set_device_memory"):
        context.set_device_memory(address, size_bytes)
    else:
        context.device_memory = address


# Types


def numpy_dtype(dtype: trt.DataType) -> np.dtype[Any]:
    """Return the dtype of arrays with a tensor's bytes (uint16 for bfloat16; FP8, INT4: error)."""
    found = _NUMPY.get(dtype.name)
    if found is None:
        raise BackendError(
            f"an engine has an input or output of type {dtype.name}; known are {', '.join(_NUMPY)}"
        )
    return np.dtype(found)


def to_tensor(array: NDArray[Any], dtype: trt.DataType) -> NDArray[Any]:
    """Return an array as a tensor's bytes, contiguous.

    TensorRT 8.6 has no 64-bit integers: its parser converts such inputs to 32 bits. BackendError if
    the values do not fit the tensor's type, or are of another kind, for instance floats instead of
    integers.
    """
    if dtype.name == _BFLOAT16:
        return _bfloat16_bits(array)
    target = numpy_dtype(dtype)
    if array.dtype.kind in "iu" and target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            raise BackendError(
                f"values {array.min()} to {array.max()} do not fit TensorRT's {target}"
            )
    elif not np.can_cast(array.dtype, target, "same_kind"):
        raise BackendError(f"an array of {array.dtype} cannot be a TensorRT input of {target}")
    return np.ascontiguousarray(array, target)


def from_tensor(array: NDArray[Any], dtype: trt.DataType) -> NDArray[Any]:
    """Convert an array of a tensor's bytes to numbers: only bfloat16 changes, to float32."""
    if dtype.name != _BFLOAT16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_bits(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16: to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)
