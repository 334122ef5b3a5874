"""The backend of ONNX Runtime on the CPU: the embedded default.

A batch is a dict of numpy arrays. ``InferenceSession.run`` on numpy was measured faster than IO
binding for small CNNs, so that is what is used. The full optimisation level stays on (blocked
convolution layouts: extended only is 1.6 to 2 times slower on CNNs), unless weights are shared.

Stages of one graph are one session, whoever asks for them: behind each variant of a bundle stands
the same unmodified model.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime as ort

from offramp.bundle.graph_weights import WEIGHTS
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.backends.host import HostBackend, LoadedGraph
from offramp.engine.graphs.assembly import has_half_precision
from offramp.engine.graphs.blocked_layout import enter_blocked
from offramp.engine.graphs.external_weights import WeightForm, run_on_file

ONE_NODE: Final = (
    b'\x08\x08:6\n\x0b\n\x01x\x12\x01y"\x03Abs\x12\x05probe'
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""An ONNX model, y = Abs(x) of one float32; the package onnx is not there to make it."""
_ONE_NUMBER: Final = {"x": np.zeros(1, np.float32)}
_USES_IT: Final = ("session.use_env_allocators", "1")
"""Configures a session to use the process's arena."""


_Key: TypeAlias = tuple[str, str, str, tuple[int, ...]]
"""Of a session: its graph's hash, the form and the folder of its weights, and which file is there,
as a bundle may be replaced by another at the same place."""


def make_session(
    model: bytes,
    threads: int,
    weights: Path | None = None,
    form: WeightForm = WeightForm.PACKED,
) -> ort.InferenceSession:
    """Load a graph as Offramp runs it on the CPU; weights that it names are in a folder."""
    options = session_options(weights=weights)
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # failures are raised, and logged by whoever runs a stage
    if form is WeightForm.SHARED:
        run_on_file(options)
    if has_half_precision(model) or form is WeightForm.SHARED:
        # ONNX Runtime 1.30 and 1.31 crashed in their blocked layouts of float16 convolutions.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # Stages share one arena, so that a stage writes where the one before it has just read. With an
    # arena each, every stage starts on cold memory (5 % of a small CNN at a batch of one with three
    # exits; 2.6 % shared), and memory patterns would give each its own block of the arena again.
    _share_arena()
    options.add_session_config_entry(*_USES_IT)
    options.enable_mem_pattern = False
    # Every stage has a pool of its own; pools that spin after a run steal the next one's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return load_session(model if form is WeightForm.SHARED else enter_blocked(model), options)


def shrink_arena() -> None:
    """Give the system the memory that the shared arena keeps and no session uses.

    Else it keeps what the largest batch of any session took, for as long as the process lives.
    """
    run = ort.RunOptions()
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _share_arena().run(None, _ONE_NUMBER, run)


@functools.cache
def _share_arena() -> ort.InferenceSession:
    """Register the process's arena for sessions that ask for it; done once, before the first.

    Gives a session that has it and does next to nothing: arenas shrink at the end of a run. They
    keep their first piece for ever, so that session is the first to run, and the piece is small.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)
    options = session_options()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry(*_USES_IT)
    session = load_session(ONE_NODE, options)
    session.run(None, _ONE_NUMBER)
    return session


def _native(session: ort.InferenceSession) -> Any:
    """Get the native session, whose ``run`` ``session.run`` calls in the end.

    That looks at the names of all inputs first, at every run; so does the native session itself.
    Between two convolutions, with cold caches, that was 20 µs, 0.6 % of a small CNN a stage.
    """
    return session._sess  # noqa: SLF001 - there is no other way to it


def _key(model: bytes, weights: Path | None, form: WeightForm) -> _Key:
    identity: tuple[int, ...] = ()
    if weights is not None:
        found = (weights / WEIGHTS).stat()
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return hashlib.sha256(model).hexdigest(), str(form), str(weights), identity


class OnnxRuntimeBackend(HostBackend):
    """Prepares stages as sessions of ``threads`` threads on the CPU: a backend."""

    name = "onnxruntime-cpu"
    runtime_name = "ONNX Runtime"
    maps_weights = True

    def __init__(self, *, threads: int = 1) -> None:
        super().__init__(version=ort.__version__, threads=threads)
        self._sessions: weakref.WeakValueDictionary[_Key, Any] = weakref.WeakValueDictionary()
        """Native sessions that some stage still has; that two threads load one twice is no harm."""

    def load(
        self,
        model: bytes,
        weights: Path | None = None,
        form: WeightForm = WeightForm.PACKED,
    ) -> LoadedGraph:
        """Load a serialised graph as a session; raises ONNX Runtime's own exceptions."""
        key = _key(model, weights, form)
        session = self._sessions.get(key)
        if session is None:
            made = make_session(model, self._threads, weights, form)
            session = self._sessions[key] = _native(made)
        return LoadedGraph(
            read={tensor.name for tensor in session.inputs_meta},
            given={output.name for output in session.outputs_meta},  # names may be no UTF-8
            execute=session.run,
        )
