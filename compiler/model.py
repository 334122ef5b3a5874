"""Reading the user's ONNX file into a model that can be sliced."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import helper, version_converter
from onnx.external_data_helper import load_external_data_for_model

from offramp.bundle.manifest import Answer, AnswerForm, TensorSpec
from offramp.compiler import preparation
from offramp.compiler.anchor import anchor_shapes
from offramp.compiler.errors import ModelError
from offramp.compiler.graph import Dataflow, default_opset, refill
from offramp.compiler.shapes import BATCH, annotate, declared_types

_log = logging.getLogger(__name__)

MIN_OPSET = 13
"""Older models are converted to this one, where ``axes`` are inputs and Softmax is per axis."""
MIN_IR_VERSION = 8
"""Of the file format; since 4 initializers need not be graph inputs."""
MAX_BYTES = 2**31 - 1
"""Limit of one protobuf message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A classifier in the form that slicing needs.

    The batch dimension is symbolic, shapes are inferred, operators have unique names, no shape
    crosses a cut point that could be read off a graph input, and the answer is the one output.
    """

    proto: onnx.ModelProto
    """The whole model, weights included. Treat it as read-only."""
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    original_sha256: str
    """Hash of the file that was read and of its external data."""
    opset: int
    answer: Answer

    @property
    def versions(self) -> dict[str, int]:
        """Of operators and file format, as the graphs of exits take them."""
        return {"opset": self.opset, "ir_version": self.proto.ir_version}


def read_model(
    path: str | os.PathLike[str], *, answer: str | None = None, simplify: bool = True
) -> SourceModel:
    """Read a classifier and bring it into the form that slicing needs.

    External data are looked for beside the file; ``answer`` names the output to keep, where there
    are several; ``simplify`` folds constants and fuses with onnxslim, if that computes the same.

    Raises:
        ModelError: The file is missing, no ONNX model, or has a property that is not supported.
    """
    path = Path(path)
    proto, digest = _load(path)
    try:
        proto = _prepare(proto, answer=answer, simplify=simplify)
        found = find_answer(proto)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return SourceModel(
        proto=proto,
        name=path.stem,
        inputs=_specs(proto, [i.name for i in proto.graph.input]),
        outputs=_specs(proto, [o.name for o in proto.graph.output]),
        original_sha256=digest,
        opset=default_opset(proto),
        answer=found,
    )


def _load(path: Path) -> tuple[onnx.ModelProto, str]:
    """Read and check the file and its external data; return the model and their hash."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(data)
    try:
        proto = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{path}: not an ONNX file; export the model to ONNX first") from error
    if not proto.graph.node:
        raise ModelError(f"{path}: not an ONNX file, or one without operators")
    for file in _external_files(proto, path):
        digest.update(file.read_bytes())
    load_external_data_for_model(proto, str(path.parent))
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path}: the ONNX checker refuses it: {reason}") from error
    return proto, digest.hexdigest()


def _external_files(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """Files with weights beside the model, checked to exist and to fit into one message."""
    entries = (entry for tensor in proto.graph.initializer for entry in tensor.external_data)
    names = {entry.value for entry in entries if entry.key == "location"}
    files = [path.parent / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path}: its external data {file} are missing; put them beside it")
    size = path.stat().st_size + sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ModelError(
            f"{path}: {size / 2**30:.1f} GiB with its external data; models above 2 GiB are not "
            "supported yet, convert the weights to half precision"
        )
    return files


def _prepare(proto: onnx.ModelProto, *, answer: str | None, simplify: bool) -> onnx.ModelProto:
    """Bring a checked model into the form that :class:`SourceModel` describes."""
    proto = _modern(proto)
    preparation.unlist_initializers(proto)
    keep_answer(proto, answer)
    preparation.remove_unused(proto)
    _check_inputs(proto)
    preparation.free_batch(proto)
    if simplify:
        proto = preparation.simplified(proto)
    preparation.name_operators(proto)
    annotate(proto)
    return anchor_shapes(proto)


def _modern(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert to :data:`MIN_OPSET` if the model is older."""
    opset = default_opset(proto)
    if opset < MIN_OPSET:
        try:
            # before the file's IR version is raised: the converter goes by it in finding weights
            proto = version_converter.convert_version(proto, MIN_OPSET)
        except Exception as error:  # the converter raises RuntimeError and its own kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"opset {opset}, expected {MIN_OPSET} or newer, and conversion fails ({reason}); "
                f"export the model again with opset_version={MIN_OPSET} or newer"
            ) from error
        _log.info("converted from opset %d to %d", opset, MIN_OPSET)
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    return proto


def _check_inputs(proto: onnx.ModelProto) -> None:
    """Refuse inputs that are no arrays of numbers; name sizes that have no name."""
    for info in proto.graph.input:
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
            raise ModelError(f"input {info.name!r} is no tensor of known rank; export it as one")
        if tensor.elem_type in {onnx.TensorProto.STRING, onnx.TensorProto.BFLOAT16}:
            kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
            raise ModelError(
                f"input {info.name!r} has elements of type {kind}, expected a number type that "
                "numpy has; move the conversion out of the model"
            )
        for axis, dim in enumerate(tensor.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{info.name}_{axis}"


def _specs(proto: onnx.ModelProto, names: list[str]) -> tuple[TensorSpec, ...]:
    types = declared_types(proto)
    return tuple(
        TensorSpec(name=n, dtype=types[n].dtype, shape=types[n].shape or ()) for n in names
    )


_TRANSPARENT = frozenset({"Identity", "Flatten", "Reshape", "Squeeze", "Cast"})
"""Operators through which a Softmax can still be seen."""


def keep_answer(proto: onnx.ModelProto, answer: str | None) -> None:
    """Reduce the model, in place, to one output, [batch, classes].

    An output [batch, classes, 1, 1], as fully convolutional classifiers have, is flattened.
    ModelError if there are several outputs and ``answer`` does not name one of them.
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
    refill(proto.graph.output, [kept])
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
    """Describe an annotated model's one output: floating-point [batch, classes], two or more."""
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
    last = shape is not None and all(size == 1 for size in shape[axis % len(shape) + 1 :])
    return "probabilities" if last else "logits"
