"""A cascade: a copy of the model, cut into segments, followed by the unmodified model.

Exits follow the copy's segments, and the copy's own answer is the last exit. Samples below every
threshold go on to the source model, as do audited samples. So the promise, the certificate and
audits are about agreement with the source model, for any kind of copy.

The copy may be any graph with the source's inputs and output. The cascade is cut where both the
source model and the copy have a cut point with the same tensor name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import helper

from offramp.calibration.data.dataset import DataError
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.tensors import array_of
from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint, GraphAnalysis, find_cuts
from offramp.compiler.cuts.slicing import (
    Cascade,
    CopyKind,
    SegmentModel,
    Sliced,
    cut_tensors,
    split,
)
from offramp.compiler.frontend.preparation import MIN_OPSET, name_operators, remove_unused
from offramp.compiler.graphs.graph import default_opset, refill, rename_graph, written_names
from offramp.compiler.graphs.shapes import annotate, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.tail import giving
from offramp.engine.answers.differences import compare
from offramp.engine.backends.onnxruntime import make_session

PREFIX = "offramp_front/"
"""Prefix of all names of a copy except graph inputs."""
_AGAIN = "/again"
_FLOAT = frozenset({"LayerNormalization", "BatchNormalization", "Tanh", "Erf", "Gelu"})
"""Operators without an int8 kernel. Their outputs are quantised only by the operator that reads
them."""


def slice_cascade(plain: Sliced, copy: bytes, options: CompileOptions) -> Cascade:
    """Cut a quantised copy where its source model was cut, and append the source model.

    ``plain`` is the source model in pieces. If the copy lacks one of the cuts, the two segments
    next to that cut become one segment. ModelError if the copy has other inputs or another answer.
    """
    front = _front_of(plain.model, copy)
    analysis = _surviving(plain.analysis, front)
    chosen = {cut.name for cut in plain.cuts}
    points = [cut for cut in analysis.cuts if cut.tensor in chosen]
    cuts = tuple(map(_in_front, cut_tensors(plain.model, analysis, points, options)))
    requantise(front.proto, [cut.name for cut in cuts])
    replaced = replace(plain, cuts=cuts, analysis=analysis)
    return _before_source(replaced, front, "quantised", list(map(_moved, points)))


def slice_twin(plain: Sliced, copy: bytes) -> Cascade:
    """Cut a copy that differs from its source only in weights, and append the source model.

    The cuts are those of the source model. ModelError if the copy has other inputs or another
    answer.
    """
    front = _front_of(plain.model, copy)
    chosen = {cut.name for cut in plain.cuts}
    points = [point for point in plain.analysis.cuts if point.tensor in chosen]
    replaced = replace(plain, cuts=tuple(map(_in_front, plain.cuts)))
    return _before_source(replaced, front, "trained", list(map(_moved, points)))


def slice_subnet(plain: Sliced, subnet: bytes, options: CompileOptions) -> Cascade:
    """Cut a subnet of the source model where the model was cut, and append the model.

    A subnet has some of the model's operators and parts of the model's weights. So the cut points
    of the subnet are searched, and kept if the model has cut points of the same names. The work of
    the subnet's segments is a share of the model's work. ModelError if the subnet has other inputs
    or another answer.
    """
    front = _front_of(plain.model, subnet)
    analysis = find_cuts(front, max_tensors=options.reading.max_cut_tensors)
    chosen = {PREFIX + cut.name for cut in plain.cuts}
    points = [cut for cut in analysis.cuts if cut.tensor in chosen]
    cuts = cut_tensors(front, analysis, points, options)
    work = 1.0
    if analysis.total_flops and plain.analysis.total_flops:
        work = min(analysis.total_flops / plain.analysis.total_flops, 1.0)
    sliced = _before_source(replace(plain, cuts=cuts), front, "subnet", points)
    *own, source = sliced.segments
    shared = tuple(replace(s, flops_share=work * s.flops_share) for s in own)
    return replace(sliced, segments=(*shared, source))


def _moved(point: CutPoint) -> CutPoint:
    """Return a cut point of the source model with the names that the copy uses."""
    return replace(point, tensor=PREFIX + point.tensor, beside=tuple(map(_in_front, point.beside)))


def _in_front(cut: CutTensor) -> CutTensor:
    """Return a cut tensor of the source model with the name that the copy uses."""
    return replace(cut, name=PREFIX + cut.name, beside=tuple(map(_in_front, cut.beside)))


def _before_source(
    sliced: Sliced, front: SourceModel, kind: CopyKind, points: Sequence[CutPoint]
) -> Cascade:
    """Split the copy at some of its cut points, and put the source model after it."""
    model = sliced.model
    own = CutTensor(
        name=front.answer.output,
        dtype=front.outputs[0].dtype,
        shape=front.outputs[0].shape,
        is_answer=True,
    )
    segments = split(front, points)
    if front.tail is not None:
        segments = (*segments[:-1], _with_scores(segments[-1], front))
    source = SegmentModel(
        index=len(segments),
        proto=model.proto,
        inputs=tuple(spec.name for spec in model.inputs),
        output=model.answer.output,
        flops_share=1.0,
        is_source=True,
    )
    every = (*segments, source)
    return Cascade(
        model=model,
        cuts=(*sliced.cuts, own),
        segments=every,
        graphs=tuple(s.proto.SerializeToString() for s in every),
        analysis=sliced.analysis,
        weights=sliced.weights,
        copy=front,
        kind=kind,
    )


def _with_scores(segment: SegmentModel, front: SourceModel) -> SegmentModel:
    """Add the scores to the last segment's outputs, because confidence is computed from scores."""
    scores = front.taught.output
    if scores == front.answer.output:
        return segment
    proto = onnx.ModelProto.FromString(giving(segment.proto.SerializeToString(), scores))
    proto.graph.output[-1].CopyFrom(
        next(info for info in front.proto.graph.value_info if info.name == scores)
    )
    return replace(segment, proto=proto, also=(*segment.also, scores))


def _front_of(model: SourceModel, copy: bytes) -> SourceModel:
    """Convert a copy to the form that slicing needs, with prefixed names."""
    try:
        proto = onnx.ModelProto.FromString(copy)
        onnx.checker.check_model(proto)
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise ModelError(f"the copy is not an ONNX model: {error}") from error
    inputs = {spec.name for spec in model.inputs}
    found = {i.name for i in proto.graph.input}, [o.name for o in proto.graph.output]
    if found != (inputs, [model.answer.output]) or default_opset(proto) < MIN_OPSET:
        raise ModelError(
            f"the copy has the inputs {sorted(found[0])}, the outputs {found[1]} and "
            f"opset {default_opset(proto)}; expected {sorted(inputs)}, [{model.answer.output!r}] "
            f"and {MIN_OPSET} or newer: copy the model that was read, under the same names"
        )
    wanted, (given,) = declared_types(model.proto)[model.answer.output], proto.graph.output
    if given.type.tensor_type.elem_type != wanted.elem_type:
        raise ModelError(
            f"the copy's answer is not of type {wanted.dtype}; end it with a conversion to that"
        )
    remove_unused(proto)
    name_operators(proto)
    _describe(proto, model)
    annotate(proto)
    rename_graph(proto.graph, lambda name: name if name in inputs else PREFIX + name)
    tail = model.tail
    if tail is not None:
        scores = PREFIX + tail.taught.output
        if scores not in written_names(proto.graph):
            raise ModelError(
                f"the copy has no tensor {tail.taught.output!r}, which holds the scores that the "
                "model computes its answer from; compile without the copy (--precision fp32, "
                "--train frozen)"
            )
        tail = replace(tail, taught=replace(tail.taught, output=scores))
    return replace(
        model,
        proto=proto,
        tail=tail,
        outputs=tuple(replace(spec, name=PREFIX + spec.name) for spec in model.outputs),
        opset=default_opset(proto),
        answer=replace(model.answer, output=PREFIX + model.answer.output),
    )


def _describe(proto: onnx.ModelProto, model: SourceModel) -> None:
    """Copy types of tensors from the source model: inference may not find them in the copy.

    Type inference stops at custom operators.
    """
    made = written_names(proto.graph)
    infos = [info for info in model.proto.graph.value_info if info.name in made]
    refill(proto.graph.value_info, infos)
    refill(proto.graph.output, model.proto.graph.output)


def _surviving(analysis: CutAnalysis, front: SourceModel) -> CutAnalysis:
    """Drop cut points that are sets of tensors, and those that the quantised copy does not have."""
    looked_at = GraphAnalysis.of(front.proto)
    flow = looked_at.trace(analysis.main_inputs, rereads=analysis.rereads)
    gates = {gate.tensor: gate for gate in flow.gates}
    kept = [
        cut
        for cut in analysis.cuts
        if not cut.beside
        and (gate := gates.get(PREFIX + cut.tensor)) is not None
        and gate.side_inputs <= set(cut.side_inputs)
        and (found := looked_at.types.get(gate.tensor)) is not None
        and found.dtype == cut.dtype
    ]
    cuts = tuple(replace(cut, index=index) for index, cut in enumerate(kept))
    return replace(analysis, cuts=cuts)


def requantise(proto: onnx.ModelProto, tensors: Sequence[str]) -> None:
    """Quantise and dequantise cut tensors on both sides of the cut, in place.

    ONNX Runtime computes an operator in int8 if its inputs come from ``DequantizeLinear`` and its
    output goes to ``QuantizeLinear`` in the same graph. A cut between an operator and its
    ``QuantizeLinear`` would leave the operator in float32. So if all readers of a cut tensor
    quantise it with the same constants, a pair of both operators with these constants is put before
    the cut. The values after the pair are steps of the scale, so quantising them again changes
    nothing. If the model is not cut there, ONNX Runtime removes one of the two pairs.
    """
    graph = proto.graph
    constants = {t.name: array_of(t).tobytes() for t in graph.initializer}
    for tensor in tensors:
        readers = [node for node in graph.node if tensor in node.input]
        (writer,) = (i for i, node in enumerate(graph.node) if tensor in node.output)
        node = graph.node[writer]
        if not readers or any(n.op_type != "QuantizeLinear" for n in readers):
            continue
        if node.op_type in _FLOAT:
            continue
        scales = {tuple(constants.get(name) for name in node.input[1:]) for node in readers}
        attributes = {node.SerializeToString() for node in map(_without_names, readers)}
        if len(scales) > 1 or len(attributes) > 1 or None in next(iter(scales)):
            continue
        plain, steps = f"{tensor}{_AGAIN}/plain", f"{tensor}{_AGAIN}/steps"
        node.output[list(node.output).index(tensor)] = plain
        arguments = readers[0].input[1:]
        down = helper.make_node("QuantizeLinear", [plain, *arguments], [steps], name=steps)
        up = helper.make_node("DequantizeLinear", [steps, *arguments], [tensor], name=tensor)
        down.attribute.extend(readers[0].attribute)
        up.attribute.extend(a for a in readers[0].attribute if a.name in ("axis", "block_size"))
        nodes = list(graph.node)
        refill(graph.node, [*nodes[: writer + 1], down, up, *nodes[writer + 1 :]])


def _without_names(node: onnx.NodeProto) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=node.op_type, domain=node.domain, attribute=node.attribute)


def verify_front(
    sliced: Cascade,
    copy: bytes,
    samples: Mapping[str, NDArray[Any]],
    *,
    tolerance: float,
    batch_sizes: Sequence[int] = (1, 7),
) -> float:
    """Run the copy's segments in a chain, as they are served, and compare them with the whole copy.

    ``samples`` are arrays by graph input, and are repeated to fill a batch. ``tolerance`` is
    relative to the scale of each value (:mod:`~offramp.engine.answers.differences`). Returns the
    largest difference. VerificationError if it is above ``tolerance``, or a value is NaN;
    ModelError if ONNX Runtime cannot load a part, DataError if a part fails on a sample.
    """
    answer = sliced.copy.answer.output
    whole, *chain = map(_loaded, (copy, *sliced.graphs[:-1]))
    worst = 0.0
    for size in batch_sizes:
        feeds = {k: v[np.arange(size) % len(v)] for k, v in samples.items()}
        (wanted,) = _run(whole, [sliced.model.answer.output], feeds)
        tensors = dict(feeds)
        for session, segment in zip(chain, sliced.segments, strict=False):
            found = _run(session, segment.outputs, tensors)
            tensors |= dict(zip(segment.outputs, found, strict=True))
        difference = compare(tensors[answer], wanted)
        if not difference.share <= tolerance:
            raise VerificationError(
                f"chained segments of the {sliced.kind} copy differ from it at batch {size}, by "
                f"{difference.describe()}; allowed are {tolerance:.1e}. Compile without it "
                "(--precision fp32, --train frozen)"
            )
        worst = max(worst, difference.share)
    return worst


def _loaded(graph: bytes) -> Any:
    try:
        return make_session(graph, 1)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"ONNX Runtime cannot load the copy: {reason}; compile with --precision fp32"
        ) from error


def _run(
    session: Any, outputs: Sequence[str], tensors: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    feeds = {tensor.name: tensors[tensor.name] for tensor in session.get_inputs()}
    try:
        found: list[NDArray[Any]] = session.run(list(outputs), feeds)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"the copy fails on the first samples: {reason}") from error
    return found
