"""Sizes that a bundle says of its parts, held against what its files hold and its segments give."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from offramp.bundle import Bundle
from offramp.engine.backends.onnxruntime import make_session


def check_part_sizes(bundle: Bundle) -> None:
    """The full model's and every variant's segments have the sizes that are found one by one."""
    for shown in bundle.variants():
        segments = shown.manifest.segments
        assert [s.row_bytes for s in segments] == [*_crossing(shown), 0], shown.number
        assert [s.weight_bytes for s in segments] == _weights(shown), shown.number


def _crossing(bundle: Bundle) -> list[int]:
    """Run the segments one by one on a row, and count the bytes read after each."""
    manifest = bundle.manifest
    shapes = manifest.calibration.sample_shapes
    tensors: dict[str, NDArray[Any]] = {
        t.name: np.ones((1, *shapes[t.name]), t.dtype) for t in manifest.inputs
    }
    found = []
    for segment in manifest.segments[:-1]:
        session = make_session(bundle.read(segment.file), 1)
        feeds = {tensor.name: tensors[tensor.name] for tensor in session.get_inputs()}
        names = [tensor.name for tensor in session.get_outputs()]
        tensors |= dict(zip(names, session.run(None, feeds), strict=True))
        behind = manifest.segments[segment.index + 1 :]
        read = {name for later in behind for name in later.inputs}
        deeper = [e for e in manifest.exits if e.after_segment > segment.index]
        read |= {name for exit_ in deeper for name in exit_.inputs}
        found.append(sum(tensors[name].nbytes for name in read & tensors.keys()))
    return found


def _weights(bundle: Bundle) -> list[int]:
    """Count the bytes of all arrays of the graphs, which are read with the weights in them."""
    manifest = bundle.manifest

    def of(file: str) -> int:
        graph = onnx.load_model_from_string(bundle.read(file)).graph
        return sum(numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer)

    found = [of(segment.file) for segment in manifest.segments]
    for exit_ in manifest.exits:
        found[exit_.after_segment] += of(exit_.file)
    return found
