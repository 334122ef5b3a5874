"""The channel dimension of a tensor, as determined from the operators around it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from tests.facts import tells
from tests.models import Builder

from offramp.calibration.heads.families import family_of
from offramp.compiler.cuts.cuts import CutPoint, find_cuts
from offramp.compiler.graphs.channel_axes import ChannelFinder
from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.shapes import declared_types


def cuts_of(read: Callable[..., object], proto: onnx.ModelProto) -> list[CutPoint]:
    found = list(find_cuts(read(proto)).cuts)  # type: ignore[arg-type]
    assert found
    assert all(family_of(cut.head_input()) for cut in found)
    return found


def convolutions(*sides: int | str, norm: bool = False) -> onnx.ModelProto:
    """Three convolutions over a signal, an image or a video."""
    b = Builder()
    x = b.input("x", ["batch", 4, *sides])
    for i in range(3):
        kernel = b.constant(np.ones((8, 8 if i else 4, *[3] * len(sides)), np.float32) / 50)
        x = b.node("Conv", x, kernel, pads=[1] * 2 * len(sides))
        x = b.node("Mul", b.node("Relu", x), b.constant(1.5, np.float32), out=f"out{i}")
    x = b.node("Flatten", b.node("GlobalAveragePool", x), axis=1)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def channels_last() -> onnx.ModelProto:
    """Return tf2onnx's layout: maps are [batch, height, width, channels] except for
    convolutions.
    """
    b = Builder()
    x = b.input("image", ["batch", 12, 12, 3])
    for i in range(3):
        x = b.conv(b.node("Transpose", x, perm=[0, 3, 1, 2]), (8 if i else 3, 8))
        x = b.node("Transpose", x, perm=[0, 2, 3, 1])
        x = b.node("Mul", b.node("Relu", x), b.constant(1.5, np.float32), out=f"out{i}")
    x = b.node("ReduceMean", x, axes=[1, 2], keepdims=0)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def normalised(*, fused: bool) -> onnx.ModelProto:
    """A Swin without its windows: layer norms and products over the last dimension of a map."""
    b = Builder()
    x = b.input("image", ["batch", 4, 12, 8])
    for i in range(3):
        y = b.norm(x, 8) if fused else _normed(b, x)
        x = b.node("Add", x, b.matmul(b.node("Relu", b.matmul(y, 8, 8)), 8, 8), out=f"out{i}")
    x = b.node("ReduceMean", x, axes=[1, 2], keepdims=0)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def _normed(b: Builder, x: str) -> str:
    centred = b.node("Sub", x, b.node("ReduceMean", x, axes=[-1]))
    variance = b.node("ReduceMean", b.node("Mul", centred, centred), axes=[-1])
    return b.node("Div", centred, b.node("Sqrt", b.node("Add", variance, b.constant([1e-5]))))


@pytest.mark.parametrize("sides", [(16,), ("length",), (8, 8), (4, 8, 8)])
def test_convolutions_have_channels_first(read, sides):
    cuts = cuts_of(read, convolutions(*sides))

    assert [(cut.tensor, cut.channels) for cut in cuts] == [("out0", 1), ("out1", 1)]
    assert {cut.head_input().form for cut in cuts} == {"map"}


def test_transposes_around_convolutions_are_seen_through(read):
    cuts = cuts_of(read, channels_last())

    assert [(cut.tensor, cut.channels) for cut in cuts] == [("out0", 3), ("out1", 3)]
    assert {cut.head_input().width for cut in cuts} == {8}


@pytest.mark.parametrize("fused", [True, False])
def test_norms_and_products_have_channels_last(read, fused):
    cuts = cuts_of(read, normalised(fused=fused))

    assert {cut.tensor: cut.channels for cut in cuts if cut.tensor[:3] == "out"} == {
        "out0": 3,
        "out1": 3,
    }


def test_a_mean_over_the_positions_of_a_signal_spares_its_channels(read):
    """[batch, channels, length] in the middle, told by nothing but the mean at the end."""
    b = Builder()
    x = b.input("x", ["batch", 6, 16])
    for i in range(3):
        weight = b.constant(np.eye(6, dtype=np.float32)[None])
        x = b.node("Relu", b.node("MatMul", weight, x), out=f"out{i}")
    x = b.node("ReduceMean", x, axes=[2], keepdims=0)
    b.linear(x, 6, 3, out="logits")
    b.output("logits", ["batch", 3])

    proto = read(b.build()).proto
    layouts = ChannelFinder.of(proto, Dataflow(proto.graph), declared_types(proto))

    assert layouts.channels_of("out2") == 1
    assert layouts.channels_of("out1") is None


def test_places_without_a_head_are_rejected_with_the_reason(read):
    """The width of the tokens is not known before the model runs."""
    b = Builder()
    x = b.input("x", ["batch", 4, "width"])
    for i in range(3):
        y = b.node("MatMul", x, b.node("Transpose", x, perm=[0, 2, 1]))
        x = b.node("Relu", b.node("MatMul", y, x), out=f"out{i}")
    x = b.node("ReduceMean", x, axes=[2], keepdims=0)
    b.linear(x, 4, 3, out="logits")
    b.output("logits", ["batch", 3])

    found = find_cuts(read(b.build()))

    assert "out0" not in [cut.tensor for cut in found.cuts]
    assert "out1" not in [cut.tensor for cut in found.cuts]
    said = "\n".join(place.reason for place in found.rejected)
    tells(said, "dimension 2", "channels", "no fixed size", "export")


def test_files_that_contradict_themselves_tell_nothing_and_break_nothing(read):
    """A permutation of other dimensions, a product without its weight, a mean of a scalar."""
    proto = read(convolutions(8, 8)).proto
    for kind, inputs in (("Transpose", ["out0"]), ("MatMul", ["out0"]), ("ReduceMean", ["out0"])):
        attributes = {"perm": [0, 7]} if kind == "Transpose" else {}
        node = onnx.helper.make_node(kind, inputs, [f"{kind}/out"], name=kind, **attributes)
        proto.graph.node.append(node)
        proto.graph.node.append(
            onnx.helper.make_node("ReduceMean", [f"{kind}/out"], [f"{kind}/end"], axes=[-1])
        )
    finder = ChannelFinder.of(proto, Dataflow(proto.graph), declared_types(proto))

    assert finder.channels_of("out0") == 1
    for name in ("Transpose/out", "MatMul/out", "ReduceMean/out"):
        assert finder.channels_of(name) is None
