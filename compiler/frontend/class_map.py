"""Answers reduced to classes in the graph: one byte a pixel or token, where there were all scores.

Scores of 19 classes in 1024 × 2048 pixels are 159 MB a sample, their classes 2 MB, and the classes
are all that agreement is judged by. What is reduced is the source model of the bundle.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import rename_tensor

_AXES = {3: 2, 4: 1}
"""Where the classes are, by the number of dimensions: of tokens, and of pixels."""
_MOST_IN_A_BYTE = 256


def answer_with_classes(proto: onnx.ModelProto) -> None:
    """Let a model of one output answer with the classes of its tokens or pixels, in place.

    The output keeps its name; it becomes uint8, or int32 of more than 256 classes. ModelError if it
    is not [batch, tokens, classes] or [batch, classes, height, width] of floating-point numbers.
    """
    graph = proto.graph
    (output,) = graph.output
    tensor = output.type.tensor_type
    sizes = [dim.dim_value or dim.dim_param or "?" for dim in tensor.shape.dim]
    axis = _AXES.get(len(sizes))
    floating = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
    if axis is None or tensor.elem_type not in floating:
        raise ModelError(
            f"--class-map: output {output.name!r} is [{', '.join(map(str, sizes))}], expected "
            "floating-point scores [batch, tokens, classes] or [batch, classes, height, width]; "
            "leave it out"
        )
    name, scores = output.name, f"{output.name}/scores"
    rename_tensor(graph, name, scores)
    classes = tensor.shape.dim[axis].dim_value
    small = 0 < classes <= _MOST_IN_A_BYTE
    kind = TensorProto.UINT8 if small else TensorProto.INT32
    picked = f"{name}/picked"
    graph.node.extend(
        [
            helper.make_node("ArgMax", [scores], [picked], name=picked, axis=axis, keepdims=0),
            helper.make_node("Cast", [picked], [name], name=f"{name}/narrowed", to=kind),
        ]
    )
    tensor.elem_type = kind
    del tensor.shape.dim[axis]
