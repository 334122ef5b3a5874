"""The answer of a model: the output that holds it, its task, and its form.

The user names the task, or it is inferred from the end of the graph. With ``--class-map`` the graph
answers with the class of each pixel or token, in one byte, instead of all scores. For 19 classes
and 1024 × 2048 pixels, scores are 159 MB per sample, and classes 2 MB. Agreement is judged by
classes in both cases.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import onnx
from onnx import TensorProto, helper

from offramp.bundle import Answer, AnswerForm, AnswerTask, TaskKind
from offramp.bundle.schema.answers import DENSE
from offramp.compiler.common.errors import ModelError, listed
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.graphs.graph import Dataflow, Operator, integer, refill, rename_tensor
from offramp.compiler.graphs.shapes import (
    BATCH,
    FLOATING,
    TensorType,
    declared_types,
    dtype_name,
    shape_of,
)
from offramp.compiler.graphs.tail import SIGMOIDS, find_activation, keeps_columns, operators_between

_log = logging.getLogger(__name__)

LISTED: Final = 8
"""Largest number of output names that a message lists."""
_TRANSPARENT = frozenset(
    {"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Clip", "Dropout", "ZipMap"}
)
"""Operators that are skipped in the search for the last operator that computes something."""
_LABELS = frozenset({"int32", "int64"})
"""Element types of outputs that hold class numbers."""
_PICKING = frozenset({"ArgMax", "TopK", "Hardmax"})
_MOST_TAGS = 512
"""Largest number of classes of tokens, unless the user named the task; a larger number is probably
a vocabulary."""
_PROJECTIONS = frozenset({"Add", "Gemm", "MatMul", "Mul"})
"""Operators that may compute a decoder's logits."""
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
_FORMS: dict[str, AnswerForm] = {"Softmax": "probabilities", "LogSoftmax": "log-probabilities"}


def settle_output(proto: onnx.ModelProto, answer: str | None) -> str | None:
    """Return the name of the output that is the answer, or ``None``.

    It is the output that the user named. If the user named none, it is the only floating-point
    output of several, provided that all others are integers: labels.
    """
    outputs = {o.name: output_type(o) for o in proto.graph.output}
    scores = [name for name, found in outputs.items() if found in FLOATING]
    labels = [name for name, found in outputs.items() if found in _LABELS]
    if answer is None and len(scores) == 1 and 0 < len(labels) == len(outputs) - 1:
        return scores[0]
    return answer


def output_type(output: onnx.ValueInfoProto) -> str:
    """Return the element type of an output, or its ONNX kind if it is not a tensor."""
    if not output.type.HasField("tensor_type"):
        return str(output.type.WhichOneof("value") or "unknown").removesuffix("_type")
    return dtype_name(output.type.tensor_type.elem_type)


def keep_answer(
    proto: onnx.ModelProto, answer: str | None, note: Callable[[str], None] = lambda _text: None
) -> None:
    """Reduce the model, in place, to one output, [batch, classes].

    An output [batch, classes, 1, 1] of a fully convolutional classifier is flattened. ``note`` is
    called with a sentence on the outputs that are removed. ModelError if there are several outputs
    and ``answer`` does not name one of them.
    """
    outputs = {output.name: output for output in proto.graph.output}
    if not outputs:
        raise ModelError("no outputs, so there is no answer; export the model with its logits")
    if answer is None and len(outputs) > 1:
        graph = Dataflow(proto.graph)
        ends = {name: _last(graph, name) for name in outputs}
        trees = {name: op for name, op in ends.items() if op is not None and op.kind in _TREES}
        if len(trees) == len(outputs):
            raise ModelError(_of_trees(*next(iter(trees.items()))))
    answer = settle_output(proto, answer)
    if answer is None and len(outputs) > 1:
        raise ModelError(
            f"{len(outputs)} outputs ({', '.join(outputs)}); {_likely(outputs.values())}"
        )
    if answer is not None and answer not in outputs:
        near = difflib.get_close_matches(answer, outputs, cutoff=0.0)
        raise ModelError(f"no output {answer!r}; the model has {', '.join(map(repr, near))}")
    kept = outputs[answer] if answer else proto.graph.output[0]
    if not kept.type.HasField("tensor_type"):
        raise ModelError(
            f"output {kept.name!r} is not a tensor, but a {kept.type.WhichOneof('value')}; convert "
            "the model such that it returns an array (skl2onnx: options={'zipmap': False})"
        )
    if removed := [name for name in outputs if name != kept.name]:
        note(
            f"answers have the output {kept.name!r} only: the model's other outputs are not "
            f"served ({listed(removed, LISTED)})"
        )
    shape = kept.type.tensor_type.shape
    refill(proto.graph.output, [kept])
    if len(shape.dim) > 2 and all(d.dim_value == 1 for d in shape.dim[2:]):
        _flatten(proto, kept.name)


def _flatten(proto: onnx.ModelProto, name: str) -> None:
    """Flatten the output; the flattened tensor keeps the name, because clients use the name."""
    graph = proto.graph
    inner = f"{name}/unflattened"
    rename_tensor(graph, name, inner)
    graph.node.append(helper.make_node("Flatten", [inner], [name], name=f"{name}/flatten", axis=1))
    del graph.output[0].type.tensor_type.shape.dim[2:]
    _log.info("output %s is flattened to [batch, classes]", name)


def _likely(outputs: Iterable[onnx.ValueInfoProto]) -> str:
    """Describe which outputs may be the answer: floating-point ones of two to four dimensions."""
    scores = [
        info.name
        for info in outputs
        if info.type.HasField("tensor_type")
        and dtype_name(info.type.tensor_type.elem_type) in FLOATING
        and len(info.type.tensor_type.shape.dim) in (0, 2, 3, 4)
    ]
    if not scores:
        return (
            "none of them is a floating-point tensor [batch, classes]; export the model with "
            "its scores of the classes"
        )
    return f"name the answer, for instance --answer {scores[0]} (from Python answer={scores[0]!r})"


def find_answer(proto: onnx.ModelProto, task_options: TaskOptions = TaskOptions()) -> Answer:  # noqa: B008
    """Describe the one output of an annotated model, for the requested or the inferred task.

    ModelError if the output does not fit the task. Classification needs a floating-point output
    [batch, classes] with at least two classes, of which exactly one is right.
    """
    name = proto.graph.output[0].name
    flow, types = Dataflow(proto.graph), declared_types(proto)
    tensor, last = types.get(name), _last(flow, name)
    shape = tensor.shape if tensor else None
    if last is not None and last.kind in _TREES:
        raise ModelError(_of_trees(name, last))
    labels = _labels_of(proto, flow, name, shape or ())
    kind = find_kind(task_options, shape or (), labels or last, are_labels=labels is not None)
    task = task_options.settle(kind)
    if kind != "classification" and tensor is not None:
        picks = last is not None and last.kind == "ArgMax" and kind in DENSE
        picked = types.get(last.proto.input[0]) if picks and last is not None else None
        form = _form_of(proto, flow, name, kind, picks=picks)
        if kind == "token-classification" and task_options.kind == "auto":
            _check_tags(name, shape)
        if (
            kind == "segmentation"
            and task_options.kind == "auto"
            and not (picks or task_options.class_map)
        ):
            warn_of_heat_maps(name, shape or (), _ends(flow, name))
        return describe_answer(name, tensor, task, form=form, picked=picked)
    in_order = last is not None and last.kind == "TopK"  # columns are ranks, not classes
    match shape:
        case (str(batch), int(classes)) if batch == BATCH and classes >= 2 and not in_order:
            if tensor is not None and tensor.is_floating:
                return Answer(output=name, classes=classes, form=_form(proto, flow, name, classes))
    found = "unknown" if shape is None else f"[{', '.join(map(str, shape))}]"
    of = f" of {tensor.dtype}" if tensor else ""
    raise ModelError(
        f"output {name!r} has shape {found}{of}, expected floating-point [batch, classes] with "
        f"at least 2 classes for --task classification; {_remedy(shape, last)}"
    )


def _check_tags(output: str, shape: tuple[int | str, ...] | None) -> None:
    """Raise ModelError for so many classes of tokens that they are probably a vocabulary."""
    size = shape[2] if shape is not None and len(shape) == 3 else None
    if isinstance(size, int) and size > _MOST_TAGS:
        raise ModelError(
            f"output {output!r} has {size:,} numbers for each token: if it is a decoder [batch, "
            "tokens, vocabulary], name the tokens that it chooses between by --answer-tokens; if "
            "these are classes of each token, add --task token-classification"
        )


def _of_trees(output: str, last: Operator) -> str:
    return (
        f"output {output!r} comes from {last.label}: all trees are one operator, so there is "
        "nothing to cut, and no exit could save anything; serve the model unchanged. Pipelines "
        "that end with a neural network can be cut"
    )


def _remedy(shape: tuple[int | str, ...] | None, last: Operator | None) -> str:
    if last is not None and last.kind in _PICKING:
        return f"it ends with {last.label}: end the model before that, at its scores of classes"
    if shape is not None and len(shape) == 2 and shape[1] == 1:
        return (
            "one column is not a choice between classes; where it is the logit of yes or no, add "
            "--task multi-label, and where it is a value, --task regression"
        )
    if shape is not None and len(shape) == 3 and last is not None and last.kind in _PROJECTIONS:
        return (
            "a decoder [batch, tokens, vocabulary] answers with one of some tokens if "
            "--answer-tokens names them; else pool the positions, or end the model at the logits "
            "of one class a sample"
        )
    if shape is not None and len(shape) > 2:
        return (
            "an answer for each position of a map or sequence is another task: leave --task "
            "out, or pool it to the logits of one class a sample"
        )
    return "end the model at its logits"


def _labels_of(
    proto: onnx.ModelProto, flow: Dataflow, output: str, shape: tuple[int | str, ...]
) -> Operator | None:
    """Return the activation that makes each column of the output a yes or no, if there is one."""
    soft = find_activation(proto, flow, output) if len(shape) == 2 else None
    if soft is None or shape[1] == 1:
        return soft
    as_wide = (shape_of(declared_types(proto), soft.writes[0]) or ())[1:2] == shape[1:]
    by_column = keeps_columns(operators_between(flow, soft.writes[0], output))
    return soft if soft.kind in SIGMOIDS and as_wide and by_column else None


def _form(proto: onnx.ModelProto, flow: Dataflow, output: str, classes: int) -> AnswerForm:
    """Return the form of the scores of classes; ModelError if each score is a separate label."""
    if (labels := _labels_of(proto, flow, output, (BATCH, classes))) is not None:
        raise ModelError(
            f"output {output!r} ends with {labels.label}: each of its {classes} columns is a yes "
            "or no (multi-label), expected one class of several. Leave --task out, or "
            "name it multi-label; if exactly one class is right for each sample, end the model "
            "before the Sigmoid, at its logits"
        )
    last, soft = _last(flow, output), find_activation(proto, flow, output)
    if soft is None:
        return "logits"
    form = _FORMS.get(soft.kind, "probabilities")
    logarithm = last is not None and last.kind == "Log" and form == "probabilities"
    return "log-probabilities" if logarithm else form


def _form_of(
    proto: onnx.ModelProto, flow: Dataflow, output: str, kind: TaskKind, *, picks: bool
) -> AnswerForm:
    """Return the form of an answer for all tasks other than classification."""
    if kind in ("pose", "regression"):
        return "values"
    if picks:
        return "classes"
    last = _last(flow, output)
    if kind == "multi-label":
        return "logits" if find_activation(proto, flow, output) is None else "probabilities"
    if last is None:
        return "logits"
    logarithm = last.kind == "Log"
    soft = _last(flow, last.proto.input[0]) if logarithm else last
    form = _FORMS.get(soft.kind) if soft is not None else None
    if soft is None or form is None or not _along(proto, soft, 2 if "token" in kind else 1):
        return "logits"
    return "log-probabilities" if logarithm and form == "probabilities" else form


def _along(proto: onnx.ModelProto, soft: Operator, wanted: int) -> bool:
    """Return whether a softmax is computed along the wanted axis."""
    axis = integer(soft.proto, "axis", -1)
    shape = shape_of(declared_types(proto), soft.writes[0])
    return shape is not None and axis % len(shape) == wanted


def _last(graph: Dataflow, tensor: str) -> Operator | None:
    """Return the last operator before a tensor that computes something."""
    op = graph.producers.get(tensor)
    while op is not None and op.kind in _TRANSPARENT:
        op = graph.producers.get(op.proto.input[0])
    return op


def _ends(graph: Dataflow, tensor: str) -> Iterator[Operator]:
    """Yield the operators before a tensor, from the last that computes to one with weights."""
    op = _last(graph, tensor)
    while op is not None:
        yield op
        if op.kind in _WEIGHTED:
            return
        op = _last(graph, op.proto.input[0]) if op.proto.input else None


_INTEGERS: Final = frozenset({"int64", "int32", "uint8", "int8", "uint16", "int16", "uint32"})


_HEAT_MAPS: Final = re.compile(
    r"(?i:(?<![a-z])heat|heat_?map|key_?point|landmark)|(?<![A-Za-z])(?i:pose)(?![a-z])|Pose(?![a-z])"
)
"""Pattern of tensor names that suggest heat maps; it does not match Transpose."""


def find_kind(
    task_options: TaskOptions,
    shape: tuple[int | str, ...],
    last: Operator | None,
    *,
    are_labels: bool,
) -> TaskKind:
    """Infer the task from the shape of the answer and its last operator.

    ``are_labels`` is true if ``last`` is an activation that makes each column a yes or no.
    """
    if task_options.kind != "auto":
        return task_options.kind
    kind: TaskKind = "classification"
    if are_labels:
        kind = "multi-label"
    elif len(shape) == 3:
        kind = "segmentation" if last is not None and last.kind == "ArgMax" else kind
        kind = "token-classification" if kind == "classification" else kind
    elif len(shape) == 4:
        kind = "segmentation"
    if kind != "classification":
        heat = "; heat maps are --task pose" if kind == "segmentation" else ""
        how = f" and ends with {last.kind}" if last is not None else ""
        sizes = ", ".join(map(str, shape))
        _log.info("The answer [%s]%s: the task is %s%s.", sizes, how, kind, heat)
    return kind


def warn_of_heat_maps(output: str, shape: tuple[int | str, ...], ends: Iterable[Operator]) -> None:
    """Warn if an answer that is taken for classes of pixels looks like heat maps.

    ``ends`` are the operators before the answer, the last one first. Channels that each end with a
    Sigmoid do not compete for a pixel, as classes do.
    """
    ends = list(ends)
    named = next((n for n in (output, *(op.name for op in ends)) if _HEAT_MAPS.search(n)), None)
    if named is not None:
        why = f"{named!r} is a name of heat maps"
    elif ends and ends[0].kind in SIGMOIDS:
        why = f"it ends with {ends[0].kind}, so that channels do not compete for a pixel"
    else:
        return
    _log.warning(
        "The answer %r [%s] is taken for classes of pixels (segmentation), but %s: if each channel "
        "shows where a key point is, add --task pose; else --task segmentation ends this warning.",
        output,
        ", ".join(map(str, shape)),
        why,
    )


def describe_answer(
    name: str, tensor: TensorType, task: AnswerTask, *, form: AnswerForm, picked: TensorType | None
) -> Answer:
    """Describe an answer of another task than classification; ModelError if it does not fit.

    ``picked`` is the input of a final ArgMax; with an ArgMax, the answer is class numbers.
    """
    kind = task.kind
    axis = 2 if kind == "token-classification" else 1
    shape, dtype = tensor.shape or (), tensor.dtype
    scores = (picked.shape or ()) if picked is not None else shape
    dense = len(scores) == _RANKS[kind]
    fits = dense and bool(shape) and shape[0] == BATCH
    if picked is not None:
        fits = fits and kind in _NUMBERED and shape == (*scores[:axis], *scores[axis + 1 :])
        fits = fits and dtype in _INTEGERS
    else:
        fits = fits and tensor.is_floating
    least = 2 if kind in _NUMBERED else 1
    size = scores[axis] if dense else None
    if not fits or not isinstance(size, int) or size < least:
        sizes = ", ".join(map(str, shape)) if tensor.shape is not None else "unknown"
        raise ModelError(
            f"output {name!r} is {dtype} [{sizes}], expected {_EXPECTED[kind]} for --task {kind}, "
            f"of a fixed number of at least {least}; name another --task, or end the model there"
        )
    return Answer(output=name, classes=size, form=form, task=task)


_RANKS: Final[dict[TaskKind, int]] = {
    "classification": 2,
    "multi-label": 2,
    "regression": 2,
    "token-classification": 3,
    "segmentation": 4,
    "pose": 4,
}
"""Number of dimensions of an answer before its classes are picked."""
_NUMBERED: Final = frozenset({"token-classification", "segmentation"})
_EXPECTED: Final[dict[TaskKind, str]] = {
    "classification": "floating-point [batch, classes]",
    "multi-label": "floating-point [batch, labels]",
    "token-classification": "floating-point [batch, tokens, classes]",
    "segmentation": "floating-point [batch, classes, height, width]",
    "pose": "floating-point heat maps [batch, key points, height, width]",
    "regression": "floating-point [batch, values]",
}


_AXES = {3: 2, 4: 1}
"""Axis of the classes, by the number of dimensions: 3 for tokens, 4 for pixels."""
_MOST_IN_A_BYTE = 256


def answer_with_classes(proto: onnx.ModelProto) -> None:
    """Replace a model's scores of tokens or pixels by their classes, in place.

    The output keeps its name. It becomes uint8, or int32 for more than 256 classes. ModelError if
    it is not floating-point [batch, tokens, classes] or [batch, classes, height, width].
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
