"""The reference of a self-check: a bundle's segments, one after the other, in plain ONNX Runtime.

On the CPU, a session a file, as they were written: nothing that backends do to graphs (fusing
stages, blocked layouts, confidences that are added, other precisions) is done to them.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.common.errors import BackendError
from offramp.engine.graphs.onnx_subset import has_half_precision
from offramp.engine.graphs.quantised_borders import carries_steps, give_steps
from offramp.engine.self_check.inputs import Inputs, take

_ROWS = 8
"""Rows that run at once, so that memory stays small."""


class ChainedReference:
    """Runs segments, and the exits that are asked for, on the CPU."""

    def __init__(self, bundle: Bundle, exits: Collection[int], *, threads: int = 1) -> None:
        """Load what is needed; BackendError if ONNX Runtime refuses it."""
        manifest = bundle.manifest
        files = [segment.file for segment in manifest.segments]
        files += [manifest.exits[index].file for index in sorted(exits)]
        self._rows = 1 if manifest.no_batching else _ROWS
        self._sessions = [_session(bundle.read(file), file, threads) for file in files]
        self._integers = {
            before.output: _session(
                give_steps(bundle.read(before.file), before.output), before.file, threads
            )
            for before, after in pairwise(manifest.segments[: manifest.source_begins])
            if carries_steps(bundle.read(before.file), bundle.read(after.file), before.output)
        }
        """By cut tensor that stages carry in integers, what gives these."""

    def run(self, inputs: Inputs, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
        """Give tensors by name, [rows, …]: cut tensors, answers and confidences of exits.

        Cut tensors are as stages carry them: some in integers, channels last.
        """
        rows = len(next(iter(inputs.values())))
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in wanted}
        for start in range(0, rows, self._rows):
            known: dict[str, Any] = take(inputs, slice(start, start + self._rows))
            for session in self._sessions:
                names = [output.name for output in session.get_outputs()]
                feed = {argument.name: known[argument.name] for argument in session.get_inputs()}
                known |= zip(names, session.run(names, feed), strict=True)
            for name in wanted:
                session = self._integers.get(name)
                if session is None:
                    parts[name].append(known[name])
                    continue
                feed = {argument.name: known[argument.name] for argument in session.get_inputs()}
                parts[name].append(session.run([name], feed)[0])
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _session(model: bytes, file: str, threads: int) -> ort.InferenceSession:
    options = session_options()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    if has_half_precision(model):
        # ONNX Runtime 1.30 and 1.31 crashed in their blocked layouts of float16 convolutions.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return load_session(model, options)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        raise BackendError(f"ONNX Runtime cannot load {file}: {error}") from error
