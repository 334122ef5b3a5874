"""Operators that ONNX does not know have shapes and work all the same; reasons tell the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from rich.console import Console
from tests.facts import tells

from offramp.compiler.commands.looking import print_inspection
from offramp.compiler.cuts.cuts import CutAnalysis, find_cuts
from offramp.compiler.cuts.slicing import split, verify
from offramp.compiler.cuts.work import work_of
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import declared_types
from offramp.compiler.graphs.source_model import SourceModel

Read = Callable[..., SourceModel]
_rng = np.random.default_rng(0)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array((_rng.standard_normal(shape) * 0.1).astype(np.float32), name)


def model_of(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], shape: list[object], classes: int
) -> onnx.ModelProto:
    float_, info = onnx.TensorProto.FLOAT, helper.make_tensor_value_info
    inputs, outputs = [info("x", float_, shape)], [info("logits", float_, ["batch", classes])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def fused_cnn() -> onnx.ModelProto:
    """Four convolutions with ReLUs inside, as ONNX Runtime saves an optimised model."""
    nodes = [
        helper.make_node("FusedConv", [x, f"w{i}"], [y], domain="com.microsoft",
                         activation="Relu", pads=[1] * 4, kernel_shape=[3, 3])
        for i, (x, y) in enumerate(zip(["x", "a", "b", "c"], ["a", "b", "c", "d"], strict=True))
    ]  # fmt: skip
    nodes += [
        helper.make_node("GlobalAveragePool", ["d"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "last"], ["logits"]),
    ]
    weights = [weight("w0", 8, 3, 3, 3), *(weight(f"w{i}", 8, 8, 3, 3) for i in (1, 2, 3))]
    return model_of(nodes, [*weights, weight("last", 8, 5)], ["batch", 3, 16, 16], 5)


def fused_tokens() -> onnx.ModelProto:
    """Two blocks of a transformer's feed-forward part, fused."""
    nodes, x = [], "x"
    for i in range(2):
        nodes += [
            helper.make_node("MatMul", [x, f"up{i}"], [f"wide{i}"]),
            helper.make_node("Gelu", [f"wide{i}"], [f"act{i}"], domain="com.microsoft"),
            helper.make_node("MatMul", [f"act{i}", f"down{i}"], [f"thin{i}"]),
            helper.make_node("SkipLayerNormalization", [f"thin{i}", x, "scale"], [f"y{i}"],
                             domain="com.microsoft"),
        ]  # fmt: skip
        x = f"y{i}"
    nodes += [
        helper.make_node("ReduceMean", [x], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "last"], ["logits"]),
    ]
    weights = [weight("scale", 16), weight("last", 16, 4)]
    weights += [weight(f"{name}{i}", *s) for i in (0, 1)
                for name, s in (("up", (16, 64)), ("down", (64, 16)))]  # fmt: skip
    return model_of(nodes, weights, ["batch", "sequence", 16], 4)


def inverting() -> onnx.ModelProto:
    """Return three blocks of an operator with unknown arithmetic."""
    nodes, x = [], "x"
    for i in range(3):
        nodes += [
            helper.make_node("Inverse", [x], [f"inverse{i}"], domain="com.microsoft"),
            helper.make_node("MatMul", [f"inverse{i}", f"w{i}"], [f"y{i}"]),
        ]
        x = f"y{i}"
    nodes += [
        helper.make_node("ReduceMean", [x], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "last"], ["logits"]),
    ]
    weights = [*(weight(f"w{i}", 32, 32) for i in range(3)), weight("last", 32, 4)]
    return model_of(nodes, weights, ["batch", 32, 32], 4)


def test_convolutions_that_were_fused_are_counted_and_cut(read: Read) -> None:
    model = read(fused_cnn())
    analysis = find_cuts(model)
    conv = [2 * 8 * 256 * 9 * channels for channels in (3, 8, 8, 8)]
    assert analysis.unknown_work == ()
    assert analysis.total_flops == sum(conv) + 8 * 256 // 256 + 8 + 2 * 8 * 5
    assert [cut.tensor for cut in analysis.cuts] == ["a", "b", "c"]
    assert analysis.cuts[0].shape == ("batch", 8, 16, 16)
    segments = split(model, analysis.cuts)
    assert verify(model, segments, random_inputs(model.proto, 7)) <= 1e-5


def test_shapes_behind_fused_operators_keep_their_symbols(read: Read) -> None:
    model = read(fused_tokens())
    types = declared_types(model.proto)
    assert types["act0"].shape == ("batch", "sequence", 64)
    assert types["y1"].shape == ("batch", "sequence", 16)
    analysis = find_cuts(model, max_tensors=1)
    assert analysis.unknown_work == ()
    assert [cut.tensor for cut in analysis.cuts] == ["act0", "y0"]
    assert verify(model, split(model, analysis.cuts), random_inputs(model.proto, 7)) <= 1e-5


def test_what_cannot_be_counted_is_measured_and_told(read: Read) -> None:
    model = read(inverting())
    analysis = find_cuts(model)
    assert analysis.unknown_work == ("Inverse",)
    assert analysis.total_flops == 0
    assert analysis.total_s is not None
    assert analysis.total_s > 0
    shares = [cut.flops_share_before for cut in analysis.cuts]
    assert len(shares) >= 5
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    console = Console(record=True, width=200)
    print_inspection(model, analysis, console)
    text = console.export_text()
    assert "ms measured, as the FLOPs of Inverse are not known" in text
    assert "time before" in text


def test_a_place_without_work_after_it_says_how_that_is_known(read: Read) -> None:
    analysis = find_cuts(read(inverting()))
    (last,) = [r for r in analysis.rejected if r.tensor == "logits"]
    tells(last.reason, "0.5%", "time", "`Inverse`")


def test_what_can_be_neither_counted_nor_measured_is_told(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read(inverting())

    def refuse(*_: object) -> dict[str, np.ndarray]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(GraphRunner, "run", refuse)
    analysis = find_cuts(model)
    assert analysis.unknown_work == ("Inverse",)
    assert analysis.total_s is None
    assert analysis.total_flops > 0
    (last,) = [r for r in analysis.rejected if r.reason.startswith("less than")]
    assert last.reason.endswith(
        "; that of `Inverse` is not known, could not be measured, and counts nothing"
    )


def test_known_operators_are_not_measured(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read(fused_tokens())
    monkeypatch.setattr(GraphRunner, "run", lambda *_: pytest.fail("was run"))
    assert not work_of(model.proto, Dataflow(model.proto.graph)).measured


def test_an_int8_model_without_cuts_states_the_reason(read: Read) -> None:
    """The reason is that its tensors are bytes, not that no work is left."""
    scale, zero = (
        numpy_helper.from_array(np.float32(0.1), "s"),
        numpy_helper.from_array(np.int8(0), "z"),
    )
    weights = [
        numpy_helper.from_array(_rng.integers(-9, 9, (16, 16)).astype(np.int8), f"w{i}")
        for i in range(3)
    ]
    nodes, x = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])], "q"
    for i in range(3):
        reads = [x, "s", "z", f"w{i}", "s", "z", "", "s", "z"]
        nodes.append(helper.make_node("QGemm", reads, [f"y{i}"], domain="com.microsoft"))
        x = f"y{i}"
    nodes.append(helper.make_node("DequantizeLinear", [x, "s", "z"], ["logits"]))
    analysis = find_cuts(read(model_of(nodes, [scale, zero, *weights], ["batch", 16], 16)))
    assert analysis.total_flops == 3 * 2 * 16 * 16 + 2 * 16
    reasons = {r.tensor: r.reason for r in analysis.rejected}
    tells(reasons["y0"], "int8", "floating-point")
    assert isinstance(analysis, CutAnalysis)
