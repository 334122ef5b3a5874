"""A quantised copy is cut where the source model is, and computes what it did before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.quantised import Rounded, quantised
from tests.sliced import BUILDERS, inputs_of, sliced

from offramp.bundle import Head
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.heads.families import family_of
from offramp.compiler.blueprints.cascade import PREFIX, requantise, slice_cascade, verify_front
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.heads import build_own
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends.onnxruntime import make_session

QUANTISED = ("residual", "vgg", "bert", "mlp", "dense")


def asked(**options: Any) -> CompileOptions:
    path = Path("model.onnx")
    settings = {"candidates": 99, "precision": "int8", **options}
    return CompileOptions.of(model=path, data=path, output=path, **settings)


@cache
def copy_of(name: str) -> bytes:
    pieces = sliced(name)
    samples = inputs_of(pieces, 64)
    return quantised(pieces.model, Dataset(inputs=samples, labels=None, sha256="0"))


def cascade(name: str, **options: Any) -> Sliced:
    return slice_cascade(sliced(name), copy_of(name), asked(**options))


def run(graph: bytes, tensors: dict[str, NDArray[Any]], output: str) -> NDArray[Any]:
    session = make_session(graph, 1)
    feeds = {i.name: tensors[i.name] for i in session.get_inputs()}
    found: NDArray[Any] = session.run([output], feeds)[0]
    return found


@pytest.mark.parametrize("name", QUANTISED)
def test_it_is_cut_at_the_source_models_cut_points(name: str) -> None:
    found, plain = cascade(name), sliced(name)
    assert [cut.name for cut in found.cuts[:-1]] == [PREFIX + cut.name for cut in plain.cuts]
    assert [cut.shape for cut in found.cuts[:-1]] == [cut.shape for cut in plain.cuts]
    assert [cut.mask for cut in found.cuts[:-1]] == [cut.mask for cut in plain.cuts]
    assert len(found.segments) == len(plain.segments) + 1 == len(found.cuts) + 1
    shares = [segment.flops_share for segment in plain.segments]
    assert [segment.flops_share for segment in found.segments] == [*shares, 1.0]


@pytest.mark.parametrize("name", QUANTISED)
def test_the_last_segment_is_the_source_model_and_shares_no_tensor(name: str) -> None:
    found = cascade(name)
    *front, last = found.segments
    assert last.described().file == "source.onnx"
    assert found.graphs[-1] == sliced(name).model.proto.SerializeToString()
    inputs = set(last.inputs)
    assert inputs == {spec.name for spec in found.model.inputs}
    theirs = names_in(last.proto)
    for segment in front:
        assert names_in(segment.proto) & theirs <= inputs
        assert all(n.startswith(PREFIX) for n in names_in(segment.proto) - inputs)


def names_in(proto: onnx.ModelProto) -> set[str]:
    graph = proto.graph
    of_nodes = {t for node in graph.node for t in (*node.input, *node.output, node.name) if t}
    return of_nodes | {t.name for t in graph.initializer} | {i.name for i in graph.input}


@pytest.mark.parametrize("name", QUANTISED)
def test_chained_segments_are_the_copy(name: str) -> None:
    """To the last bit where all between two cuts is integers; transformers are not."""
    found = cascade(name)
    samples = inputs_of(found, 20, seed=5)
    apart = verify_front(found, copy_of(name), samples, tolerance=0.05)
    assert apart == 0.0 or name == "bert"


def test_segments_that_are_not_the_copys_are_refused() -> None:
    found = cascade("mlp")
    other = slice_cascade(sliced("mlp"), Rounded(bits=3)(found.model), asked())
    with pytest.raises(VerificationError, match="--precision fp32"):
        verify_front(other, copy_of("mlp"), inputs_of(found, 8), tolerance=1e-5)


def test_a_copy_that_cannot_be_loaded_or_run_is_refused() -> None:
    found = cascade("mlp")
    samples = inputs_of(found, 8)
    with pytest.raises(ModelError, match="cannot load the copy"):
        verify_front(found, b"no model", samples, tolerance=1.0)
    with pytest.raises(DataError, match="the copy fails on the first samples"):
        verify_front(found, copy_of("mlp"), {"x": samples["x"][:, :3]}, tolerance=1.0)


def test_the_own_answer_needs_no_head() -> None:
    own = cascade("residual").cuts[-1]
    assert (own.name, own.shape) == (f"{PREFIX}probabilities", ("batch", 5))
    assert own.is_answer
    assert family_of(own) == ()


@pytest.mark.parametrize("name", ["residual", "mlp"])  # probabilities, and logits
def test_the_own_exit_gives_the_copys_answer_and_its_confidence(name: str) -> None:
    found = cascade(name)
    answer = found.model.answer
    graph = build_own(found.cuts[-1], answer, "own/", **found.versions)
    said = run(copy_of(name), inputs_of(found, 9), answer.output)
    scores = {found.cuts[-1].name: said}
    np.testing.assert_array_equal(run(graph, scores, f"own/{answer.output}"), said)
    confidence = run(graph, scores, "own/confidence")
    np.testing.assert_allclose(confidence, confidence_of(said, answer.form), rtol=1e-6)


def test_quantised_probabilities_beyond_one_are_a_confidence_of_one() -> None:
    found = cascade("residual")
    graph = build_own(found.cuts[-1], found.model.answer, "own/", **found.versions)
    scores = {found.cuts[-1].name: np.array([[1.004, 0, 0, 0, 0]], np.float32)}
    assert run(graph, scores, "own/confidence").tolist() == [1.0]


def test_cut_points_that_the_copy_lacks_are_dropped() -> None:
    """``hidden1`` is bypassed in the copy, and ``hidden2`` has another name there."""
    model = sliced("mlp").model
    copy = onnx.ModelProto.FromString(model.proto.SerializeToString())
    rename(copy, "hidden2", "another")
    last = copy.graph.node[-1]
    bypass = helper.make_node("Mul", ["hidden0", "nothing"], ["bypass"])
    joined = helper.make_node("Add", [last.input[0], "bypass"], ["joined"])
    last.input[0] = "joined"
    zero = numpy_helper.from_array(np.zeros(1, np.float32), "nothing")
    copy.graph.initializer.append(zero)
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    copy.graph.node.extend([*nodes[:-1], bypass, joined, nodes[-1]])
    found = slice_cascade(sliced("mlp"), copy.SerializeToString(), asked())
    assert [cut.name for cut in found.cuts] == [f"{PREFIX}hidden0", f"{PREFIX}logits"]
    assert [segment.flops_share for segment in found.segments][-1] == 1.0


def test_where_no_cut_is_left_the_copys_own_answer_is() -> None:
    plain = sliced("mlp")
    chosen = replace(plain, cuts=plain.cuts[1:2])
    copy = onnx.ModelProto.FromString(plain.model.proto.SerializeToString())
    rename(copy, chosen.cuts[0].name, "another")
    found = slice_cascade(chosen, copy.SerializeToString(), asked())
    assert [cut.name for cut in found.cuts] == [f"{PREFIX}logits"]
    assert [segment.flops_share for segment in found.segments] == [1.0, 1.0]


def test_only_cuts_that_the_model_was_cut_at_are_cut() -> None:
    plain = sliced("mlp")
    chosen = replace(plain, cuts=plain.cuts[1:2])
    found = slice_cascade(chosen, copy_of("mlp"), asked())
    assert [c.name for c in found.cuts] == [PREFIX + plain.cuts[1].name, f"{PREFIX}logits"]


def rename(proto: onnx.ModelProto, old: str, new: str) -> None:
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new


def changed(model: SourceModel, change: str) -> bytes:
    proto = onnx.ModelProto.FromString(model.proto.SerializeToString())
    if change == "output":
        rename(proto, "logits", "answer")
        proto.graph.output[0].name = "answer"
    elif change == "input":
        rename(proto, "x", "y")
        proto.graph.input[0].name = "y"
    elif change == "opset":
        del proto.opset_import[:]
        proto.opset_import.append(helper.make_opsetid("", 12))
    elif change == "type":
        rename(proto, "logits", "single")
        half = helper.make_node("Cast", ["single"], ["logits"], to=TensorProto.FLOAT16)
        proto.graph.node.append(half)
        proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    else:
        return b"no model"
    return proto.SerializeToString()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("output", r"the outputs \['answer'\].*expected \['x'\], \['logits'\]"),
        ("input", r"has the inputs \['y'\]"),
        ("opset", r"opset 12; expected .* 13 or newer"),
        ("type", "answer is not of type float32"),
        ("bytes", "is not an ONNX model"),
    ],
)
def test_a_copy_of_another_model_is_refused(change: str, told: str) -> None:
    model = sliced("mlp").model
    with pytest.raises(ModelError, match=told):
        slice_cascade(sliced("mlp"), changed(model, change), asked())


def pair_after(tensors: Sequence[str], *, scales: Sequence[float] = (0.05,)) -> onnx.ModelProto:
    """An MLP with a pair before each reader of some tensors, of one scale or several in turn."""
    proto = BUILDERS["mlp"]()
    nodes: list[onnx.NodeProto] = []
    readers = 0
    for node in proto.graph.node:
        for place, name in enumerate(node.input):
            if name in tensors:
                scale = np.float32(scales[readers % len(scales)])
                stem, readers = f"{name}/{readers}", readers + 1
                constants = [f"{stem}/scale", f"{stem}/zero"]
                values = (scale, np.uint8(3))
                proto.graph.initializer.extend(
                    map(numpy_helper.from_array, map(np.asarray, values), constants)
                )
                nodes += [
                    helper.make_node("QuantizeLinear", [name, *constants], [f"{stem}/q"]),
                    helper.make_node("DequantizeLinear", [f"{stem}/q", *constants], [f"{stem}/d"]),
                ]
                node.input[place] = f"{stem}/d"
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    return proto


def test_a_cut_tensor_is_on_the_steps_of_what_quantises_it() -> None:
    proto = pair_after(["hidden0", "hidden1"])
    x = {"x": np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)}
    before = run(proto.SerializeToString(), x, "logits")
    requantise(proto, ["hidden0", "hidden2"])
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run(proto.SerializeToString(), x, "logits"), before)
    proto.graph.output.append(helper.make_tensor_value_info("hidden0", TensorProto.FLOAT, None))
    steps = run(proto.SerializeToString(), x, "hidden0") / np.float32(0.05)
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert len({float(s) for s in np.round(steps).ravel()}) > 10
    pairs = [n.op_type for n in proto.graph.node].count("QuantizeLinear")
    assert pairs == 3, "none where nobody quantises, none where nothing is cut"


def test_readers_that_differ_leave_a_cut_tensor_as_it_is() -> None:
    proto = pair_after(["hidden0"])
    extra = helper.make_node("Gemm", ["hidden0", *proto.graph.node[0].input[1:]], ["unread"])
    proto.graph.node.append(extra)
    before = proto.SerializeToString()
    requantise(proto, ["hidden0"])
    assert proto.SerializeToString() == before
    twice = pair_after(["x"], scales=(0.05, 0.07))
    twice.graph.node.append(
        helper.make_node("QuantizeLinear", ["hidden0", "x/0/scale", "x/0/zero"], ["one"])
    )
    twice.graph.node.append(
        helper.make_node("QuantizeLinear", ["hidden0", "w0", "x/0/zero"], ["two"])
    )
    before = twice.SerializeToString()
    requantise(twice, ["hidden0"])
    assert twice.SerializeToString() == before


def test_rounded_copies_are_cascades_too() -> None:
    """Any graph with the same inputs and answer will do, independent of its kind of reduction."""
    model = sliced("residual").model
    found = slice_cascade(sliced("residual"), Rounded(bits=4)(model), asked())
    assert len(found.cuts) == len(sliced("residual").cuts) + 1
    assert Head(kind="own").describe() == "the copy's own answer"
    assert models.residual_cnn().graph.output[0].name == found.segments[-1].output
