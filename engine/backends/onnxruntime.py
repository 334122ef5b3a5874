"""The backend of ONNX Runtime on the CPU, the default.

A batch is a dict of numpy arrays. ``InferenceSession.run`` on numpy was faster than IO binding for
small CNNs. The full optimisation level stays on (blocked convolution layouts; extended only is 1.6
to 2 times slower on CNNs), unless weights are shared.

Stages with the same graph share one session: for instance, all variants of a bundle contain the
same unmodified model.
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
"""An ONNX model, y = Abs(x) of one float32; the package onnx may not be installed."""
_ONE_NUMBER: Final = {"x": np.zeros(1, np.float32)}
_USES_IT: Final = ("session.use_env_allocators", "1")
"""Session setting to use the process's arena."""


_Key: TypeAlias = tuple[str, str, str, tuple[int, ...]]
"""Key of a session: hash of its graph, form and folder of its weights, and identity of the weight
file, because the bundle at a path may be replaced."""


def make_session(
    model: bytes,
    threads: int,
    weights: Path | None = None,
    form: WeightForm = WeightForm.PACKED,
) -> ort.InferenceSession:
    """Make a session on the CPU; ``weights`` is the folder of weights that the graph names."""
    options = session_options(weights=weights)
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # failures are raised, and logged where stages are run
    if form is WeightForm.SHARED:
        run_on_file(options)
    if has_half_precision(model) or form is WeightForm.SHARED:
        # ONNX Runtime 1.30 and 1.31 crashed in their blocked layouts of float16 convolutions.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # Stages share one arena, so that a stage writes where the previous one has just read. With one
    # arena each, every stage starts on cold memory (costs 5 % of a small CNN's time at a batch of
    # one with three exits; 2.6 % when shared). Memory patterns would separate the memory of stages
    # again.
    _share_arena()
    options.add_session_config_entry(*_USES_IT)
    options.enable_mem_pattern = False
    # Every stage has its own thread pool; pools that spin after a run would take the next one's
    # cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return load_session(model if form is WeightForm.SHARED else enter_blocked(model), options)


def shrink_arena() -> None:
    """Release the memory that the shared arena keeps and no session uses.

    Otherwise it keeps the memory of the largest batch of any session until the process ends.
    """
    run = ort.RunOptions()
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _share_arena().run(None, _ONE_NUMBER, run)


@functools.cache
def _share_arena() -> ort.InferenceSession:
    """Register the process's arena for sessions that use it; done once, before any session.

    Returns a session of one node on this arena, because an arena can only shrink at the end of a
    run. An arena never releases its first block, so this session runs first, and that block is
    small.
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
    """Return the native session, which does less work for a run than ``session.run``.

    ``session.run`` first checks the names of all inputs, which the native session does again. With
    cold caches this check took 20 µs a stage, 0.6 % of a small CNN.
    """
    return session._sess  # noqa: SLF001 - there is no public access


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
        """Native sessions that a stage still uses; two threads may load the same session twice."""

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
            given={output.name for output in session.outputs_meta},  # names are not always UTF-8
            execute=session.run,
        )
