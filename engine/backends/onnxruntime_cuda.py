"""The backend of ONNX Runtime's CUDA provider, for GPUs without TensorRT.

Every slot has its own sessions for each stage. They work on the slot's stream, read and write the
slot's buffers in place, and do not wait for the device. ONNX Runtime manages the memory between
operators; it grows with the first run of each size. A stage with convolutions has a session, with a
copy of its weights, for each of the few sizes that its batches are padded to
(:mod:`offramp.engine.cuda.batch_sizes`); any other stage has one session.

ONNX Runtime runs operators that the provider lacks, and arithmetic on shapes, on the CPU. A
fallback of the whole graph to the CPU, as when its CUDA libraries do not load, is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort

from offramp.bundle import Bundle
from offramp.engine.backends.onnxruntime import ONE_NODE
from offramp.engine.backends.sizes import BundleSizes, GraphShapes, dtype_of
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import Stream, StreamEvent
from offramp.engine.cuda.executable import Shape, SlotResources, TensorInfo
from offramp.engine.graphs.assembly import ModelProto
from offramp.engine.stages.plan import StageSpec

_LOG = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"
_CUDA_MEMORY = "Cuda"
"""ONNX Runtime's name of a GPU's memory."""
_ERRORS = 3
"""ONNX Runtime's number of the lowest severity that is logged."""
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv"})
_INSTALL = "pip uninstall -y onnxruntime && pip install onnxruntime-gpu"


def require_provider() -> None:
    """Check that this ONNX Runtime can use GPUs, and load the CUDA libraries that it needs.

    The loader does not search the folders of pip packages. BackendError if GPUs cannot be used.
    """
    if PROVIDER not in ort.get_available_providers():
        raise BackendError(
            f"ONNX Runtime {ort.__version__} has no {PROVIDER}; onnxruntime-gpu has it: {_INSTALL}"
        )
    ort.set_default_logger_severity(_ERRORS)  # it warns about a missing plug-in at every session
    said = StringIO()
    with redirect_stdout(said):  # it prints to standard output, which programs may parse
        getattr(ort, "preload_dlls", lambda: None)()
    for line in said.getvalue().splitlines():
        _LOG.warning("ONNX Runtime: %s", line)


def try_provider(device: int) -> None:
    """Run a graph of one node on a GPU, to check that the provider works there."""
    try:
        make_cuda_session(ONE_NODE, device).run(None, {"x": np.zeros(1, np.float32)})
    except BackendError as error:
        raise BackendError(f"ONNX Runtime cannot use cuda:{device}: {error}") from error
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        raise BackendError(
            f"ONNX Runtime {ort.__version__} cannot use cuda:{device}: {error}"
        ) from error


class OnnxRuntimeCudaFactory:
    """Prepares stages: an :class:`offramp.engine.cuda.executable.ExecutableFactory`.

    Slots have memory for batches of up to ``max_rows``.
    """

    name = "onnxruntime-cuda"

    def __init__(self, *, device: int = 0, max_rows: int = 32) -> None:
        self._device = device
        self._max_rows = max_rows
        self._sizes = BundleSizes()

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the same type: tensors keep their type on the device."""
        return dtype

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return the bundle itself: graphs are run unchanged."""
        return bundle

    def prepare(self, spec: StageSpec) -> OnnxRuntimeCudaStage:
        """Analyse a stage's graph; device memory is allocated when the stage is opened."""
        model = spec.load()
        try:
            shapes = GraphShapes(model)
            largest = self._sizes.of(spec.bundle) if spec.bundle else _fixed_sizes(shapes)
            inputs = {name: (1, *largest[name]) for name in shapes.inputs}
            outputs = shapes.of(inputs)
        except BackendError as error:
            raise BackendError(f"stage {spec.index}: {error}") from error
        wanted = [n for n in (spec.answer, spec.confidence, *spec.carried) if n in shapes.outputs]
        return OnnxRuntimeCudaStage(
            spec=spec,
            model=model,
            shapes=shapes,
            inputs=tuple(
                TensorInfo(name=n, dtype=dtype_of(a), sample_shape=inputs[n][1:])
                for n, a in shapes.inputs.items()
            ),
            outputs=tuple(
                TensorInfo(name=n, dtype=dtype_of(shapes.outputs[n]), sample_shape=outputs[n][1:])
                for n in wanted
            ),
            max_rows=self._max_rows,
            device=self._device,
            pads=_has_convolutions(model),
        )

    def close(self) -> None:
        """Do nothing: the factory holds nothing."""


def _has_convolutions(model: bytes) -> bool:
    graph = ModelProto.FromString(model).graph
    return any(node.op_type in _CONVOLUTIONS for node in graph.node)


def _fixed_sizes(shapes: GraphShapes) -> dict[str, Shape]:
    """Return the shapes of one row for a graph without a bundle; BackendError if any is unknown."""
    fixed: dict[str, Shape] = {}
    for name, argument in shapes.inputs.items():
        sizes = tuple(size for size in argument.shape[1:] if isinstance(size, int))
        if len(sizes) < len(argument.shape) - 1:
            raise BackendError(f"it belongs to no bundle, so the sizes of {name} are not known")
        fixed[name] = sizes
    return fixed


@dataclass(kw_only=True)
class OnnxRuntimeCudaStage:
    """A stage's graph: a :class:`offramp.engine.cuda.executable.PreparedStage`."""

    capturable: ClassVar = False
    """ONNX Runtime allocates memory and waits during a run."""
    scratch_bytes: ClassVar = 0
    """Sessions allocate their own memory."""
    missing: ClassVar = None
    """``None``: no engine has to be built."""

    spec: StageSpec
    model: bytes
    shapes: GraphShapes
    """Shapes of the graph; used by one thread at a time."""
    inputs: tuple[TensorInfo, ...]
    """Inputs that the graph reads."""
    outputs: tuple[TensorInfo, ...]
    """Outputs of the graph that the stage needs."""
    max_rows: int
    device: int
    pads: bool
    """``True`` for graphs with convolutions: ONNX Runtime plans these again when the batch size
    changes."""
    _lock: Lock = field(default_factory=Lock)

    def padding_limit(self, rows: int) -> int:  # noqa: ARG002 - it takes any size
        """Return the rows that slots have memory for."""
        return self.max_rows

    def open(self, slot: SlotResources) -> OnnxRuntimeCudaRun:
        """Make the executable of a slot."""
        return OnnxRuntimeCudaRun(self, self.session(slot), slot)

    def session(self, slot: SlotResources) -> ort.InferenceSession:
        """Make a session on a slot's stream; BackendError if ONNX Runtime cannot."""
        try:
            return make_cuda_session(self.model, self.device, slot.stream)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            raise BackendError(
                f"ONNX Runtime cannot load stage {self.spec.index} on cuda:{self.device}: {error}"
            ) from error

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the shapes of the outputs; thread-safe."""
        with self._lock:
            found = self.shapes.of(inputs)
        return {info.name: found[info.name] for info in self.outputs}

    def close(self) -> None:
        """Do nothing: sessions belong to the slots that opened them."""


class OnnxRuntimeCudaRun:
    """A stage in a slot: an :class:`offramp.engine.cuda.executable.Executable`.

    ``first`` is its first session. A stage that pads has one session for every size, because a
    session plans all its convolutions again when the size changes.
    """

    def __init__(
        self, stage: OnnxRuntimeCudaStage, first: ort.InferenceSession, slot: SlotResources
    ) -> None:
        self._stage = stage
        self._slot = slot
        self._copied = _copied_when_bound(first)
        self._uploaded: StreamEvent | None = slot.driver.event() if self._copied else None
        self._spare: ort.InferenceSession | None = first
        self._sessions: dict[int, _BoundSession] = {}
        """Sessions by rows; the key is 0 where one session serves all sizes."""
        self._closed = False
        self._options = ort.RunOptions()
        # The slot waits for its stream by an event; without this setting every run would wait, too.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the shapes of the outputs; the first call for a size may run the graph."""
        return self._stage.output_shapes(inputs)

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,  # noqa: ARG002 - no graphs here
    ) -> None:
        """Run the session; its work on the device is enqueued on the slot's stream."""
        if self._closed:
            raise BackendError(f"stage {self._stage.spec.index} was closed before")
        rows = next((inputs[info.name][0] for info in self._stage.inputs), 0)
        session = self._session(rows)
        self._wait_for_copied(session, stream)
        try:
            session.bind(self._stage, inputs, self.output_shapes(inputs), addresses)
            session.session.run_with_iobinding(session.binding, self._options)
        except Exception as error:
            session.bound.clear()
            raise BackendError(
                f"stage {self._stage.spec.index} failed on {rows} rows: {error}"
            ) from error

    def forget(self, graph: int) -> None:
        """Do nothing: there are no CUDA graphs."""

    def close(self) -> None:
        """Release the sessions."""
        self._closed = True
        self._sessions.clear()
        self._spare = None
        if self._uploaded is not None:
            self._uploaded.close()

    def _session(self, rows: int) -> _BoundSession:
        key = rows if self._stage.pads else 0
        found = self._sessions.get(key)
        if found is None:
            session, self._spare = self._spare or self._stage.session(self._slot), None
            found = self._sessions[key] = _BoundSession(session)
        return found

    def _wait_for_copied(self, session: _BoundSession, stream: Stream) -> None:
        """Wait for inputs that are copied when they are bound, and bind them again for this run.

        The copy does not run on the slot's stream, so the host waits for the work that writes these
        inputs.
        """
        if self._uploaded is not None:
            self._slot.driver.record(self._uploaded, stream)
            self._slot.driver.synchronize(self._uploaded)
            for name in self._copied:
                session.bound.pop(name, None)


class _BoundSession:
    """A session, and the device memory that its inputs and outputs are bound to."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.binding: Any = session.io_binding()
        self.bound: dict[str, tuple[Shape, int]] = {}
        """Shape and address by name."""

    def bind(
        self,
        stage: OnnxRuntimeCudaStage,
        inputs: Mapping[str, Shape],
        outputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
    ) -> None:
        """Bind tensors whose shape or address has changed."""
        for tensors, shapes, bind in (
            (stage.inputs, inputs, self.binding.bind_input),
            (stage.outputs, outputs, self.binding.bind_output),
        ):
            for info in tensors:
                shape, address = shapes[info.name], addresses[info.name]
                if self.bound.get(info.name) != (shape, address):
                    bind(info.name, "cuda", stage.device, info.dtype.type, shape, address)
                    self.bound[info.name] = shape, address


def _copied_when_bound(session: ort.InferenceSession) -> frozenset[str]:
    """Return the inputs that a graph reads from CPU memory; binding copies them at once."""
    names = [argument.name for argument in session.get_inputs()]
    memories = getattr(session, "get_input_memory_infos", None)
    if memories is None:  # an older ONNX Runtime: each may be one
        return frozenset(names)
    places = [memory.name for memory in memories()]
    return frozenset(n for n, p in zip(names, places, strict=True) if p != _CUDA_MEMORY)


def make_cuda_session(
    model: bytes, device: int, stream: Stream | None = None
) -> ort.InferenceSession:
    """Load a graph onto a GPU, to be run on a stream, or on one of ONNX Runtime's own.

    BackendError if ONNX Runtime would run it on the CPU.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # for the operators left on the CPU: shape arithmetic
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS
    settings = {
        "device_id": str(device),
        # The default search tries all algorithms at every new batch size, while serving.
        "cudnn_conv_algo_search": "HEURISTIC",
        # There is a session per size: none may allocate twice the memory that it needs.
        "arena_extend_strategy": "kSameAsRequested",
        # Thresholds were found in float32; TF32 multiplies with 10 bits.
        "use_tf32": "0",
    }
    if stream is not None:
        settings["user_compute_stream"] = str(stream.handle)
    session = ort.InferenceSession(
        model, options, providers=[(PROVIDER, settings)], enable_fallback=0
    )
    if PROVIDER not in session.get_providers():
        raise BackendError(
            f"its CUDA provider does not load; it needs CUDA and cuDNN of the version that "
            f"onnxruntime-gpu {ort.__version__} was built with; ORT's log says what is missing"
        )
    return session
