"""Making a fixed batch dimension symbolic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offramp.compiler.errors import ModelError
from offramp.compiler.repairs import repair
from offramp.compiler.runtime import Runner, random_inputs, relative_difference
from offramp.compiler.shapes import BATCH, annotate, forget_shapes

if TYPE_CHECKING:
    import onnx

_TOLERANCE = 1e-4
"""Between a row alone and in a batch: kernels differ by batch size, in the last bits."""
_ROWS = 3


def free_batch(proto: onnx.ModelProto) -> None:
    """Name dimension 0 of every graph input ``batch``, in place, and repair what was fixed to it.

    After the repair (:mod:`offramp.compiler.repairs`) the model is run at batch 1 and 3, which
    have to agree row by row.

    Raises:
        ModelError: An input has no batch dimension, or the model cannot be made to work at
            another batch size.
    """
    old = _old_batch(proto)
    if old is not None:
        repair(proto, old)
        forget_shapes(proto.graph)
    _rename_batch(proto.graph)
    annotate(proto)  # ONNX Runtime folds by the shapes that a model states, stale ones too
    if old is not None:
        _check_rows(proto, old)


def _old_batch(proto: onnx.ModelProto) -> int | None:
    """The fixed batch size, or None if it is symbolic already."""
    sizes: dict[str, int] = {}
    for info in proto.graph.input:
        dims = info.type.tensor_type.shape.dim
        if not dims:
            raise ModelError(
                f"input {info.name!r} has no dimensions: the first dimension of every input has "
                "to be the batch; make the input a constant of the model, or export it with one "
                "value per sample"
            )
        if dims[0].HasField("dim_value"):
            sizes[info.name] = dims[0].dim_value
    if len(set(sizes.values())) > 1:
        raise ModelError(
            f"the inputs disagree about the batch size: {sizes}; the first dimension of every "
            "input has to be the batch; export the model with that dimension dynamic"
        )
    return next(iter(sizes.values()), None)


def _rename_batch(graph: onnx.GraphProto) -> None:
    """Give the batch dimension its name, wherever the model states it."""
    fronts = [info.type.tensor_type.shape.dim[0] for info in graph.input]
    old_names = {front.dim_param for front in fronts} - {""}
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in old_names:
                dim.dim_param = BATCH
    for front in fronts:
        front.dim_param = BATCH


def _check_rows(proto: onnx.ModelProto, old: int) -> None:
    """Run at batch 1 and 3 and compare row by row."""
    remedy = (
        f"the batch size was fixed at {old} and cannot be made dynamic; export the model with a "
        "dynamic first dimension (torch.onnx.export: dynamic_axes or dynamic_shapes)"
    )
    feeds = random_inputs(proto, _ROWS)
    try:
        runner = Runner(proto)
        together = runner.run(feeds)
        alone = [runner.run({k: v[i : i + 1] for k, v in feeds.items()}) for i in range(_ROWS)]
    except RuntimeError as error:
        raise ModelError(f"{remedy}. ONNX Runtime says at another size: {error}") from error
    for name, rows in together.items():
        apart = [row[name] for row in alone]
        same = all(len(row) == 1 for row in apart) and len(rows) == _ROWS
        if not same or not relative_difference(rows, np.concatenate(apart)) <= _TOLERANCE:
            raise ModelError(f"{remedy}. Output {name!r} of a sample depends on its batch")
