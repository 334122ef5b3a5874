"""Tolerances by precision: half precision is compiled as it is, and messages name the flag."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests import models
from tests.facts import tells

from offramp.bundle import CpuFeatures
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.rounding import (
    BFLOAT,
    HALF,
    SINGLE,
    STEPS,
    rounding_of,
    warn_of_overflow,
)
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.slicing import choose_candidates, slice_model, split, verify
from offramp.compiler.graphs.graph import refill
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs


def halved(proto: onnx.ModelProto, *, keep_io: bool = False) -> onnx.ModelProto:
    """In float16 throughout; with ``keep_io`` float32 outside, and casts at the wrong places."""
    half = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = half.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for info in (*graph.input, *graph.output):
        if not keep_io:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    if keep_io:
        image, answer = graph.input[0].name, graph.output[0].name
        for node in graph.node:
            refill(node.input, [f"{t}/half" if t == image else t for t in node.input])
            refill(node.output, [f"{t}/half" if t == answer else t for t in node.output])
        # ONNX Runtime's converter appends them, wherever they are read
        for given, made, kind in (
            (image, f"{image}/half", TensorProto.FLOAT16),
            (f"{answer}/half", answer, TensorProto.FLOAT),
        ):
            graph.node.append(helper.make_node("Cast", [given], [made], name=made, to=kind))
    return half


def options(tmp_path, **given) -> CompileOptions:
    return CompileOptions.of(model=tmp_path, data=tmp_path, output=tmp_path, **given)


@pytest.mark.parametrize("keep_io", [False, True])
def test_half_precision_is_verified_with_its_own_tolerance(read, tmp_path, keep_io):
    model = read(halved(models.residual_cnn(blocks=4), keep_io=keep_io))

    sliced = slice_model(model, options(tmp_path))
    assert sliced.tolerance(options(tmp_path)) == HALF.chained == 1e-2
    assert sliced.tolerance(options(tmp_path, tolerance=0.5)) == 0.5
    samples = random_inputs(model.proto, 64)
    worst = verify(model, sliced.segments, samples, tolerance=HALF.chained, batch_sizes=(1, 7, 64))
    assert 0 < worst <= HALF.chained
    assert model.inputs[0].dtype == ("float32" if keep_io else "float16")


def test_operators_in_any_order_are_sorted_as_onnx_runtime_runs_them(read):
    proto = models.mlp()
    refill(proto.graph.node, list(proto.graph.node)[::-1])
    with pytest.raises(onnx.checker.ValidationError, match="topologically sorted"):
        onnx.checker.check_model(proto)

    model = read(proto)

    x = random_inputs(model.proto, 5)
    np.testing.assert_allclose(
        GraphRunner(model.proto).run(x)["logits"],
        GraphRunner(models.mlp()).run(x)["logits"],
        atol=1e-6,
    )


def test_operators_in_a_circle_stay_refused(read):
    proto = models.mlp()
    refill(proto.graph.node[0].input, ["hidden1", *list(proto.graph.node[0].input)[1:]])
    with pytest.raises(ModelError, match="reads 'hidden1', which only later operators"):
        read(proto)


def test_more_than_rounding_names_precision_and_flag(read):
    model = read(models.residual_cnn())
    segments = split(model, choose_candidates(find_cuts(model), limit=3))
    weights = next(t for t in segments[1].proto.graph.initializer if len(t.dims) == 4)
    value = numpy_helper.to_array(weights) * np.float32(1.01)
    weights.CopyFrom(numpy_helper.from_array(value, weights.name))

    with pytest.raises(VerificationError) as caught:
        verify(model, segments, random_inputs(model.proto, 8), tolerance=SINGLE.chained)

    message = str(caught.value)
    tells(message, "1.0e-05", "single precision")
    assert "the first that diverges is segment 1" in message
    tells(message, "--tolerance")


def test_the_coarsest_precision_counts():
    proto = halved(models.mlp())
    assert rounding_of(models.mlp()) is SINGLE
    assert rounding_of(proto) is HALF
    assert rounding_of(models.dynamically_quantised()) is STEPS
    proto.graph.initializer[0].data_type = TensorProto.BFLOAT16
    assert rounding_of(proto) is BFLOAT


@pytest.mark.parametrize(
    ("largest", "instructions", "warned"),
    [(127, ("AVX2",), True), (64, ("AVX2",), False), (127, ("AVX2", "AVX512_VNNI"), False)],
)
def test_weights_whose_sums_overflow_here_are_warned_of(
    largest: int, instructions: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    proto = models.residual_cnn()
    warn_of_overflow(proto, CpuFeatures(machine="x86_64", names=("AVX2",)))
    assert not caplog.messages, "of float32"
    weight = np.array([[-largest, 3]], np.int8)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "steps"))
    proto.graph.node.append(helper.make_node("QuantizeLinear", ["image", "scale"], ["unread"]))
    warn_of_overflow(proto, CpuFeatures(machine="x86_64", names=instructions))
    assert bool(caplog.messages) == warned
    assert all("reduce_range=True" in message for message in caplog.messages)
