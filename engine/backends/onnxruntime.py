"""The backend of ONNX Runtime on the CPU: the embedded default.

A batch is a dict of numpy arrays. ``InferenceSession.run`` on numpy was measured faster than IO
binding for small CNNs, so that is what is used. The full optimisation level stays on (blocked
convolution layouts: extended only is 1.6 to 2 times slower on CNNs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.assembly import CONFIDENCE, with_confidence
from offramp.engine.backends.base import Rows, StageResult, TensorBatch
from offramp.engine.errors import BackendError
from offramp.engine.exit_check import confidence_of
from offramp.engine.layouts import enter_blocked
from offramp.engine.onnx_subset import has_half_precision
from offramp.engine.plan import StageSpec

_EMPTY = np.empty(0, np.float32)
_ZERO = np.float32(0)


@dataclass(slots=True)  # not frozen: one is made every stage, and that takes four times as long
class HostBatch:
    """Rows of named arrays of equal first dimension."""

    tensors: Mapping[str, NDArray[Any]]
    rows: int

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class _Session:
    spec: StageSpec
    execute: Callable[[Sequence[str], Mapping[str, NDArray[Any]], None], list[Any]]
    """Takes the names of outputs, and inputs by name."""
    added: bool
    """Whether the graph gives a confidence that was added when it was prepared."""
    inputs: tuple[str, ...]
    fetched: tuple[str, ...]
    """Outputs of the graph: answer and confidence first, if there are any, then ``computed``."""
    computed: tuple[str, ...]
    """Carried tensors that the graph gives."""
    passed: tuple[str, ...]
    """Carried graph inputs, which the graph does not give."""


def make_session(model: bytes, threads: int) -> ort.InferenceSession:
    """Load a graph as Offramp runs it on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if has_half_precision(model):
        # ONNX Runtime 1.30 and 1.31 crashed in their blocked layouts of float16 convolutions.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # Stages share one arena, so that a stage writes where the one before it has just read. With an
    # arena each, every stage starts on cold memory (5 % of a small CNN at a batch of one with three
    # exits; 2.6 % shared), and memory patterns would give each its own block of the arena again.
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.enable_mem_pattern = False
    # Every stage has a pool of its own; pools that spin after a run steal the next one's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Without the second attempt on what there is no other of, which it tells on standard output.
    return ort.InferenceSession(
        enter_blocked(model), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


@functools.cache
def _share_arena() -> None:
    """Register the process's arena for sessions that ask for it; done once, before the first."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)


def _run_of(session: ort.InferenceSession) -> Callable[..., list[Any]]:
    """Get what ``session.run`` calls in the end.

    That looks at the names of all inputs first, at every run; so does the native session itself.
    Between two convolutions, with cold caches, that was 20 µs, 0.6 % of a small CNN a stage.
    """
    native = getattr(session, "_sess", session)
    run: Callable[..., list[Any]] = native.run
    return run


class OnnxRuntimeBackend:
    """Prepares stages as sessions of ``threads`` threads on the CPU: a backend."""

    name = "onnxruntime-cpu"
    on_cpu = True

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads

    @property
    def runtime(self) -> str:
        """Describe what executes: times measured with it hold for nothing else."""
        return f"ONNX Runtime {ort.__version__}, {self._threads} threads"

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Give the bundle itself: it was certified as it is run here."""
        return bundle

    def sizes(self, most: int) -> Sequence[int]:
        """List all sizes: memory is allocated the first time."""
        return range(1, most + 1)

    def prepare(self, spec: StageSpec) -> _Session:
        """Load a stage as a session, which gives a confidence too where that can be added."""
        added = False
        try:
            model = spec.load()
            if spec.answer and not spec.confidence and spec.form != "probabilities":
                with_it = with_confidence(model, spec.answer)
                model, added = with_it or model, with_it is not None
            session = make_session(model, self._threads)
            given = {output.name for output in session.get_outputs()}  # names may be no UTF-8
            read = {tensor.name for tensor in session.get_inputs()}
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            reason = " ".join(str(error).split())
            raise BackendError(f"ONNX Runtime cannot load stage {spec.index}: {reason}") from error
        computed = tuple(name for name in spec.carried if name in given)
        confidence = CONFIDENCE if added else spec.confidence
        answered = tuple(name for name in (spec.answer, confidence) if name)
        fetched = answered + computed
        passed = tuple(name for name in spec.carried if name not in given)
        if not (read <= set(spec.inputs) and set(answered) <= given):
            raise BackendError(
                f"ONNX Runtime cannot load stage {spec.index}: it reads {sorted(read)} and gives "
                f"{sorted(given)}, the manifest says {sorted(spec.inputs)} and {list(answered)}; "
                "compile the model again"
            )
        return _Session(spec, _run_of(session), added, spec.inputs, fetched, computed, passed)

    def open_slot(self) -> OnnxRuntimeSlot:
        """Open a slot; those of a CPU hold nothing."""
        return OnnxRuntimeSlot()

    def close(self) -> None:
        """Sessions are freed with the last reference to them."""


class OnnxRuntimeSlot:
    """Runs stages on the calling thread."""

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> HostBatch:
        """Take the arrays as they are."""
        return HostBatch(tensors, len(next(iter(tensors.values()))))

    def run(
        self,
        stage: _Session,
        batch: TensorBatch,
        threshold: float | None = None,  # noqa: ARG002
    ) -> StageResult:
        """Execute a stage on the calling thread."""
        assert isinstance(batch, HostBatch)
        # What stands here runs with cold caches, between the convolutions of two stages: every
        # call of numpy costs 10 to 30 µs. So no more of them, and no more Python, than it takes.
        spec, tensors = stage.spec, batch.tensors
        try:
            outputs = stage.execute(stage.fetched, {n: tensors[n] for n in stage.inputs}, None)
        except Exception as error:
            where = f"stage {spec.index} failed on {len(batch)} rows"
            raise BackendError(f"{where}: {' '.join(str(error).split())}") from error
        answer, confidence = None, _EMPTY
        if spec.confidence is not None:
            answer, confidence, *outputs = outputs
        elif stage.added:
            answer, confidence, *outputs = outputs
            confidence = np.fmax(confidence, _ZERO)  # in place of NaN
        elif spec.answer is not None:
            answer, *outputs = outputs
            confidence = confidence_of(answer, spec.form)
        if not spec.carried:
            return StageResult(answer, confidence, None)
        carried = dict(zip(stage.computed, outputs))  # noqa: B905, as long as was asked for
        for name in stage.passed:
            carried[name] = tensors[name]
        return StageResult(answer, confidence, HostBatch(carried, batch.rows))

    def select(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        """Copy the given rows, unless they are all there are."""
        assert isinstance(batch, HostBatch)
        if len(rows) == len(batch):
            return batch
        kept = {name: array.take(rows, axis=0) for name, array in batch.tensors.items()}
        return HostBatch(kept, len(rows))

    def buffer(self, batch: TensorBatch, rows: Rows) -> HostBatch:
        """Copy the given rows; host memory is every slot's."""
        return self.select(batch, rows)

    def merge(self, parts: Sequence[tuple[TensorBatch, Rows]]) -> HostBatch:
        """Concatenate rows of the parts, in their order."""
        chosen = [self.select(batch, rows).tensors for batch, rows in parts]
        joined = {name: np.concatenate([tensors[name] for tensors in chosen]) for name in chosen[0]}
        return HostBatch(joined, sum(len(rows) for _, rows in parts))

    def close(self) -> None:
        """Do nothing: a slot of a CPU holds nothing."""
