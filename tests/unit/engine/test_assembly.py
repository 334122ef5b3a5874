"""Stages joined from segments and exits compute what the source model and the exits compute."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.sliced import BUILDERS, Sliced, inputs_of, sliced

from offramp.bundle import Answer, Head
from offramp.bundle.schema.parts import outputs_after
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.families import joined_width, masks_of
from offramp.compiler.exits.heads import build_exit
from offramp.engine.answers.differences import relative_difference
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.graphs.assembly import CONFIDENCE, assemble, with_confidence

TOLERANCE = 1e-5
"""Float32 sums in another order, as layouts and fusions differ at borders (the compiler's own)."""


def run(model: bytes, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = make_session(model, 1)
    names = [output.name for output in session.get_outputs()]
    feed = {i.name: tensors[i.name] for i in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


@functools.cache
def source_answer(name: str, samples: int) -> np.ndarray:
    pieces = sliced(name)
    model = pieces.model.proto.SerializeToString()
    return run(model, inputs_of(pieces, samples))[pieces.model.answer.output]


def stages(pieces: Sliced, borders: list[int]) -> list[bytes]:
    """The segments between borders, each span joined."""
    ends = [*borders, len(pieces.graphs)]
    starts = [0, *borders]
    segments = [segment.described() for segment in pieces.segments]
    return [
        assemble(pieces.graphs[start:end], outputs_after(segments, start, end - 1))
        for start, end in zip(starts, ends, strict=True)
    ]


def exit_of(cut: CutTensor, index: int, classes: int) -> tuple[bytes, str]:
    """An exit with random weights, and the name of its answer."""
    rng = np.random.default_rng(index)
    head = {4: Head(kind="grid", grid=2), 3: Head(kind="mean"), 2: Head(kind="vector")}[cut.rank]
    features = cut.width * max(head.grid, 1) ** 2
    if cut.beside:
        head, features = Head(kind="joined"), joined_width(cut)
    weights = {
        "weight": rng.standard_normal((features, classes)).astype(np.float32),
        "bias": rng.standard_normal(classes).astype(np.float32),
    }
    answer = Answer(output="answer", classes=classes, form="probabilities")
    prefix = f"exit_{index}/"
    model = build_exit(
        cut, head, weights, answer, prefix, answer_dtype="float32", opset=17, ir_version=8
    )
    return model, f"{prefix}answer"


@pytest.mark.parametrize("name", BUILDERS)
def test_all_segments_in_one_graph_are_the_source_bit_for_bit(name: str) -> None:
    pieces = sliced(name)
    joined = assemble(pieces.graphs, [pieces.model.answer.output])
    onnx.checker.check_model(onnx.load_from_string(joined), full_check=True)
    for samples in (1, 5):
        answer = run(joined, inputs_of(pieces, samples))[pieces.model.answer.output]
        np.testing.assert_array_equal(answer, source_answer(name, samples))


@given(st.sampled_from(sorted(BUILDERS)), st.data(), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_any_stages_in_a_chain_are_the_source(name: str, data: st.DataObject, samples: int) -> None:
    pieces = sliced(name)
    possible = range(1, len(pieces.graphs))
    borders = sorted(data.draw(st.sets(st.sampled_from(possible)))) if possible else []
    tensors = inputs_of(pieces, samples)
    for stage in stages(pieces, borders):
        tensors |= run(stage, tensors)
    answer = tensors[pieces.model.answer.output]
    assert relative_difference(answer, source_answer(name, samples)) <= TOLERANCE


@given(st.sampled_from(sorted(BUILDERS)), st.data())
@settings(max_examples=30, deadline=None)
def test_an_exit_fused_in_answers_as_alone(name: str, data: st.DataObject) -> None:
    pieces = sliced(name)
    last = data.draw(st.integers(0, len(pieces.cuts) - 1))
    first = data.draw(st.integers(0, last))
    cut, classes = pieces.cuts[last], pieces.model.answer.classes
    exit_, answer = exit_of(cut, last, classes)
    tensors = inputs_of(pieces, 4)
    for graph in pieces.graphs[:first]:
        tensors |= run(graph, tensors)
    given_to_stage = dict(tensors)
    for graph in pieces.graphs[first : last + 1]:
        tensors |= run(graph, tensors)
    alone = run(exit_, tensors)[answer]

    fused = assemble([*pieces.graphs[first : last + 1], exit_], [answer, cut.name])
    onnx.checker.check_model(onnx.load_from_string(fused), full_check=True)
    together = run(fused, given_to_stage)
    assert list(together) == [answer, cut.name]
    assert relative_difference(together[answer], alone) <= TOLERANCE
    assert relative_difference(together[cut.name], tensors[cut.name]) <= TOLERANCE


@pytest.mark.parametrize("name", BUILDERS)
def test_side_operators_and_weights_are_there_once(name: str) -> None:
    pieces = sliced(name)
    graph = onnx.load_from_string(assemble(pieces.graphs, [pieces.model.answer.output])).graph
    source = pieces.model.proto.graph
    written = [tensor for node in graph.node for tensor in node.output]
    weights = [weight.name for weight in graph.initializer]
    assert len(written) == len(set(written))
    assert len(weights) == len(set(weights))
    assert set(written) == {tensor for node in source.node for tensor in node.output}
    assert {i.name for i in graph.input} == {i.name for i in source.input}
    described = [v.name for v in (*graph.value_info, *graph.output, *graph.input)]
    assert len(described) == len(set(described))


def test_segments_that_recompute_the_mask_share_it() -> None:
    pieces = sliced("bert")
    casts = [
        sum(node.op_type == "Cast" for node in onnx.load_from_string(graph).graph.node)
        for graph in pieces.graphs
    ]
    assert sum(casts) > 1  # else this shows nothing
    joined = onnx.load_from_string(assemble(pieces.graphs, ["logits"]))
    assert sum(node.op_type == "Cast" for node in joined.graph.node) == 1


def test_a_mask_is_read_by_exits_and_segments_through_one_input() -> None:
    pieces = sliced("bert")
    cut = pieces.cuts[0]
    exit_, answer = exit_of(cut, 0, 3)
    assert masks_of(cut, Head(kind="mean")) == ("attention_mask",)
    joined = onnx.load_from_string(assemble([pieces.graphs[0], exit_], [answer, cut.name]))
    assert [i.name for i in joined.graph.input].count("attention_mask") == 1


def test_opset_and_ir_version_are_kept() -> None:
    pieces = sliced("vgg")
    joined = onnx.load_from_string(assemble(pieces.graphs, ["logits"]))
    assert joined.ir_version == pieces.model.proto.ir_version
    assert joined.opset_import == onnx.load_from_string(pieces.graphs[0]).opset_import


def test_the_same_parts_give_the_same_bytes() -> None:
    pieces = sliced("residual")
    outputs = [pieces.model.answer.output]
    assert assemble(pieces.graphs, outputs) == assemble(pieces.graphs, outputs)


def test_an_output_that_nobody_gives() -> None:
    pieces = sliced("mlp")
    with pytest.raises(
        ValueError, match=r"no part computes \['nothing'\]; their outputs are .*'hidden0'"
    ):
        assemble(pieces.graphs[:2], ["hidden0", "nothing"])


def answering(*, opset: int, dtype: int = TensorProto.FLOAT) -> bytes:
    """Return a graph whose answer is its input."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["answer"])],
        "identity",
        [helper.make_tensor_value_info("x", dtype, ["batch", 3])],
        [helper.make_tensor_value_info("answer", dtype, ["batch", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("opset", [13, 17, 18, 22])
def test_the_confidence_in_the_graph_is_that_of_the_exit_check(opset: int) -> None:
    """Up to the rounding of the exponential; where there is none it is NaN, not 0."""
    model = with_confidence(answering(opset=opset), "answer")
    assert model is not None
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    nan, inf = np.nan, np.inf
    rows = [[2, 5, 3], [nan, 0.5, 0.5], [0.5, 0.5, nan], [inf, 0, 0], [-inf, 0, -inf], [-inf] * 3]
    x = np.array(rows, np.float32)
    found = run(model, {"x": x})
    np.testing.assert_array_equal(found["answer"], x)
    nothing = np.array([False, True, True, True, False, True])
    assert np.isnan(found[CONFIDENCE]).tolist() == nothing.tolist()
    expected = confidence_of(x, "logits")
    np.testing.assert_allclose(np.fmax(found[CONFIDENCE], 0), expected, rtol=1e-6)
    assert run(model, {"x": x[:0]})[CONFIDENCE].shape == (0,)


def test_confidence_is_left_to_numpy_where_a_graph_is_not_understood() -> None:
    assert with_confidence(answering(opset=12), "answer") is None
    assert with_confidence(answering(opset=17, dtype=TensorProto.FLOAT16), "answer") is None
