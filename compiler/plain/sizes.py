"""Sizes that a file declares free, but which its graph fixes: found by running it.

Exporters that trace a model bake the length of the example into constants, mostly into those of
Reshape. ONNX Runtime then runs the model at this length alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import onnx
from onnx import numpy_helper

from offramp.compiler.batch import fixed_size, rename_batch
from offramp.compiler.graph import copied
from offramp.compiler.runtime import GraphRunner, random_inputs
from offramp.compiler.shapes import BATCH

_COMMON: Final = (8, 32, 64, 128, 224, 256, 384, 512)
"""Sizes that are tried after those that constants of the graph name."""
_TRIED: Final = 24
_LARGEST: Final = 4096
_SHORT: Final = 8
"""Elements of a constant that may be a shape."""


def fix_baked_sizes(proto: onnx.ModelProto) -> str:
    """Fix the free sizes of the inputs, in place, where the model runs at one size alone.

    Returns what was found, for people; empty where the free sizes are left as they are. All free
    sizes but the batch are tried with the same number.
    """
    trial = copied(proto)
    if fixed_size(trial) is None:
        rename_batch(trial.graph)
    free = _free(trial.graph)
    if not free:
        return ""
    try:
        runner = GraphRunner(trial)
    except RuntimeError:  # whoever loads it next names the reason
        return ""
    if _runs(runner, trial):
        return ""
    found: list[int] = []
    for size in _candidates(trial):
        for dim in free:
            dim.dim_value = size
        if _runs(runner, trial):
            found.append(size)
        if len(found) > 1:  # not fixed: whatever fails has another reason
            return ""
    if not found:
        return ""
    names = dict.fromkeys(dim.dim_param for dim in _free(proto.graph))
    _fix(proto.graph, set(names), found[0])
    sizes = ", ".join(f"{name or 'a size without a name'} = {found[0]}" for name in names)
    return (
        f"the model runs at {sizes} only, although the file declares it free: other sizes are "
        "refused. Export it with another exporter (torch.onnx.export(..., dynamo=True)) to free it"
    )


def _free(graph: onnx.GraphProto) -> list[onnx.TensorShapeProto.Dimension]:
    return [
        dim
        for info in graph.input
        for dim in info.type.tensor_type.shape.dim[1:]
        if not dim.HasField("dim_value") and dim.dim_param != BATCH
    ]


def _fix(graph: onnx.GraphProto, names: set[str], size: int) -> None:
    for dim in _free(graph):
        dim.dim_value = size
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param and dim.dim_param in names:
                dim.dim_value = size


def _runs(runner: GraphRunner, proto: onnx.ModelProto) -> bool:
    try:
        runner.run(random_inputs(proto, 1))
    except RuntimeError:
        return False
    return True


def _candidates(proto: onnx.ModelProto) -> list[int]:
    """Return the sizes to try: what short integer constants hold, the most frequent first."""
    constants = list(proto.graph.initializer)
    constants += [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    counts: Counter[int] = Counter()
    for tensor in constants:
        if tensor.data_type == onnx.TensorProto.INT64 and sum(tensor.dims) <= _SHORT:
            counts.update(numpy_helper.to_array(tensor).ravel().tolist())
    named = [size for size, _ in counts.most_common() if 1 < size <= _LARGEST]
    return list(dict.fromkeys([*named[: _TRIED - len(_COMMON)], *_COMMON]))
