"""The output that exits imitate."""

from __future__ import annotations

import difflib
import logging

import onnx
from onnx import helper

from offramp.bundle.manifest import Answer, AnswerForm
from offramp.compiler.errors import ModelError
from offramp.compiler.graph import Dataflow
from offramp.compiler.shapes import BATCH, declared_types

_log = logging.getLogger(__name__)

_TRANSPARENT = frozenset({"Identity", "Flatten", "Reshape", "Squeeze", "Cast"})
"""Operators through which a Softmax can still be seen."""


def keep_answer(proto: onnx.ModelProto, answer: str | None) -> None:
    """Reduce the model, in place, to one output, [batch, classes].

    An output [batch, classes, 1, 1], as fully convolutional classifiers have, is flattened.

    Raises:
        ModelError: There are several outputs and ``answer`` does not name one of them.
    """
    outputs = {output.name: output for output in proto.graph.output}
    if answer is None and len(outputs) > 1:
        raise ModelError(
            f"{len(outputs)} outputs ({', '.join(outputs)}); say which one is the answer, for "
            f"instance answer={next(iter(outputs))!r}"
        )
    if answer is not None and answer not in outputs:
        near = difflib.get_close_matches(answer, outputs, cutoff=0.0)
        raise ModelError(f"no output {answer!r}; the model has {', '.join(map(repr, near))}")
    kept = outputs[answer] if answer else proto.graph.output[0]
    shape = kept.type.tensor_type.shape
    del proto.graph.output[:]
    proto.graph.output.append(kept)
    if len(shape.dim) > 2 and all(d.dim_value == 1 for d in shape.dim[2:]):
        _flatten(proto, kept.name)


def _flatten(proto: onnx.ModelProto, name: str) -> None:
    """Flatten the output; the name goes to the flattened one, which is what clients ask for."""
    graph = proto.graph
    inner = f"{name}/unflattened"
    for node in graph.node:
        for names in (node.input, node.output):
            for i, tensor in enumerate(names):
                if tensor == name:
                    names[i] = inner
    graph.node.append(helper.make_node("Flatten", [inner], [name], name=f"{name}/flatten", axis=1))
    del graph.output[0].type.tensor_type.shape.dim[2:]
    _log.info("output %s is flattened to [batch, classes]", name)


def find_answer(proto: onnx.ModelProto) -> Answer:
    """Describe the single output of an annotated model.

    Raises:
        ModelError: It is not a floating-point [batch, classes] with at least two classes.
    """
    name = proto.graph.output[0].name
    tensor = declared_types(proto).get(name)
    shape = tensor.shape if tensor else None
    match shape:
        case (str(batch), int(classes)) if batch == BATCH and classes >= 2:
            if tensor is not None and tensor.is_floating:
                return Answer(output=name, classes=classes, form=_form(proto, name))
    found = "unknown" if shape is None else f"[{', '.join(map(str, shape))}]"
    kind = f" of {tensor.dtype}" if tensor else ""
    raise ModelError(
        f"output {name!r} has shape {found}{kind}, expected floating-point [batch, classes] with "
        "at least 2 classes: only classifiers are supported; end the model at its logits"
    )


def _form(proto: onnx.ModelProto, output: str) -> AnswerForm:
    """Whether a Softmax over the classes is the last thing that computes."""
    graph = Dataflow(proto.graph)
    types = declared_types(proto)
    op = graph.producers.get(output)
    while op is not None and op.kind in _TRANSPARENT:
        op = graph.producers.get(op.proto.input[0])
    if op is None or op.kind != "Softmax":
        return "logits"
    axis = next((a.i for a in op.proto.attribute if a.name == "axis"), -1)
    shape = types[op.writes[0]].shape if op.writes[0] in types else None
    if shape is None:
        return "logits"
    behind = shape[axis % len(shape) + 1 :]
    return "probabilities" if all(size == 1 for size in behind) else "logits"
