"""What cannot do with fewer channels is refused in one line: name, reason and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.supernet.graphs.made import a_model

from offramp.compiler.graphs.shapes import annotate
from offramp.supernet.graphs import Supernet
from offramp.supernet.graphs.errors import ElasticSpecError, NotElasticError
from offramp.supernet.graphs.spec_file import parse_spec

Weights = dict[str, NDArray[Any]]
NORM_REMEDY = (
    "statistics over fewer channels are others; keep the channels whole here and slice inside the "
    "block"
)
FLAT, MAPS = ["batch", 5, 8], ["batch", 8, 6, 6]
MATRIX = {"w": np.ones((8, 8), np.float32)}
KERNEL = {"w": np.ones((8, 8, 1, 1), np.float32)}


def after(
    kind: str,
    *more: str,
    shape: list[Any] = FLAT,
    weights: Weights | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """A named product (or convolution), then an operator ``op`` that reads what it gives, ``a``.

    ``b`` is the same of weights that are not named; the answer is what the operator gives.
    """
    first, base = ("MatMul", MATRIX) if shape == FLAT else ("Conv", KERNEL)
    constants = {"w": base["w"], "v": base["w"], **(weights or {})}
    nodes = [
        helper.make_node(first, ["x", "w"], ["a"], name="named"),
        helper.make_node(first, ["x", "v"], ["b"], name="other"),
        helper.make_node(kind, list(more) or ["a"], ["c"], name="op", **attributes),
    ]
    return model_of(nodes, constants, shape, output="c")


def model_of(
    nodes: list[onnx.NodeProto], constants: Weights, shape: list[Any], output: str
) -> onnx.ModelProto:
    read = {name for node in nodes for name in node.input} | {output}
    graph = helper.make_graph(
        [node for node in nodes if read & set(node.output)],
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, name) for name, a in constants.items() if name in read],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    annotate(proto)
    return proto


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "layer norm": (
        after("LayerNormalization", "a", "g", weights={"g": np.ones(8, np.float32)}),
        (
            "LayerNormalization op: normalises over dimension 2, of which 4 of 8 are kept; "
            + NORM_REMEDY
        ),
    ),
    "softmax": (
        after("Softmax"),
        f"Softmax op: normalises over dimension 2, of which 4 of 8 are kept; {NORM_REMEDY}",
    ),
    "mean": (
        after("ReduceMean", "a", "axes", weights={"axes": ints(-1)}),
        f"ReduceMean op: reduces dimension 2, of which 4 of 8 are kept; {NORM_REMEDY}",
    ),
    "all": (
        after("ReduceMean", keepdims=0),
        f"ReduceMean op: reduces dimension 2, of which 4 of 8 are kept; {NORM_REMEDY}",
    ),
    "residual": (
        after("Add", "a", "x"),
        ("Add op: 'x' has 8 in dimension 2, and the other operand 4 of 8 of them; leave its "
        "channels whole"),
    ),
    "other branch": (
        after("Add", "b", "a"),
        ("Add op: 'b' has 8 in dimension 2, and the other operand 4 of 8 of them; name other in "
        "the same [[width]], or neither"),
    ),
    "concat": (
        after("Concat", "a", "b", axis=-1),
        ("Concat op: joins along dimension 2, of which 4 of 8 are kept; keep what is joined whole, "
        "or slice behind it"),
    ),
    "concat beside": (
        after("Concat", "a", "b", axis=1),
        ("Concat op: 'a' has 4 of 8 in dimension 2 and 'b' all; name other in the same [[width]], "
        "or neither"),
    ),
    "slice": (
        after("Slice", "a", "s", "e", "axes",
              weights={"s": ints(4), "e": ints(8), "axes": ints(2)}),
        ("Slice op: takes a part of dimension 2, of which 4 of 8 are kept; say parts = N in the "
        "[[width]], or keep it whole"),
    ),
    "slice with steps": (
        after("Slice", "a", "s", "e", "axes", "steps",
              weights={"s": ints(0), "e": ints(8), "axes": ints(2), "steps": ints(2)}),
        ("Slice op: takes a part that is no fixed range of dimension 2, of which 4 of 8 are kept; "
        "keep its input whole"),
    ),
    "gather": (
        after("Gather", "a", "i", axis=2, weights={"i": ints(1)}),
        ("Gather op: takes single elements of dimension 2, of which 4 of 8 are kept; keep its "
        "input whole"),
    ),
    "mixing": (
        after("Reshape", "a", "s", weights={"s": ints(-1, 5)}),
        (
            "Reshape op: splits it as [batch, 5, 8] → [8*batch, 5], which 4 of 8 do not fit; keep "
            "its input whole"
        ),
    ),
    "pad": (
        after("Pad", "a", "p", weights={"p": ints(0, 0, 1, 0, 0, 0)}),
        "Pad op: pads dimension 2, of which 4 of 8 are kept; keep its input whole",
    ),
    "einsum": (
        after("Einsum", equation="abc->acb"),
        ("Einsum op: what it does with fewer channels is not known; keep its input whole, or "
        "export it as standard operators"),
    ),
    "sum along": (
        after("CumSum", "a", "k", weights={"k": np.array(2)}),
        ("CumSum op: what it does with fewer channels is not known; keep its input whole, or "
        "export it as standard operators"),
    ),
    "norm of maps": (
        after("LpNormalization", shape=MAPS, axis=1),
        f"LpNormalization op: normalises over dimension 1, of which 4 of 8 are kept; {NORM_REMEDY}",
    ),
    "channels last": (
        after("Transpose", shape=MAPS, perm=[0, 2, 3, 1]),
        ("the output 'c' would have 4 of 8 elements in dimension 3; answers keep their shape, so "
        "leave the weights of its operator whole"),
    ),
    "groups": (
        after("Conv", "a", "d", shape=MAPS, group=2,
              weights={"d": np.ones((8, 4, 1, 1), np.float32)}),
        ("the output 'c' would have 4 of 8 elements in dimension 1; answers keep their shape, so "
        "leave the weights of its operator whole"),
    ),
    "a weight": (
        after("Conv", "x", "a", shape=[8, 8, 1, 1]),
        "Conv op: fewer channels enter as its weight; keep them whole",
    ),
    "shuffle": (
        after("DepthToSpace", shape=MAPS, blocksize=2),
        ("DepthToSpace op: what it does with fewer channels is not known; keep its input whole, or "
        "export it as standard operators"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_operators_that_cannot_do_with_less(case: str) -> None:
    proto, message = REFUSED[case]
    with pytest.raises(NotElasticError) as caught:
        sliced(proto, "named")
    assert str(caught.value) == f"width: {message}"


def sliced(proto: onnx.ModelProto, *names: str, ratio: float = 0.5, **more: Any) -> Supernet:
    group = {"weights": list(names), "ratios": [ratio], **more}
    return Supernet.of(a_model(proto), parse_spec({"width": [group]}, "s.toml"))


def grouped(groups: int) -> onnx.ModelProto:
    return model_of(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], name="named"),
            helper.make_node("Conv", ["a", "d"], ["b"], name="grouped", group=groups),
            helper.make_node("Conv", ["b", "w"], ["y"], name="last"),
        ],
        {**KERNEL, "d": np.ones((8, 8 // groups, 1, 1), np.float32)},
        MAPS,
        output="y",
    )


def test_groups_stay_whole() -> None:
    with pytest.raises(NotElasticError) as caught:
        sliced(grouped(2), "named", ratio=0.25)
    assert str(caught.value) == (
        "width: Conv grouped: has 2 groups of 4 channels, which 2 of 8 do not fit; keep multiples "
        "of 4"
    )
    with pytest.raises(NotElasticError) as caught:
        sliced(grouped(2), "grouped")
    assert str(caught.value) == (
        "width: Conv grouped: has 2 groups, whose channels are those of its input; name the "
        "operator that gives 'a' instead"
    )
    content = {
        "width": [
            {"weights": ["named"], "ratios": [0.5]},
            {"weights": ["grouped"], "ratios": [0.25]},
        ]
    }
    with pytest.raises(NotElasticError, match="name the operator that gives 'a' instead"):
        Supernet.of(a_model(grouped(8)), parse_spec(content, "s.toml"))


def test_two_groups_that_meet() -> None:
    proto = model_of(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="named"),
            helper.make_node("MatMul", ["x", "v"], ["b"], name="other"),
            helper.make_node("Transpose", ["b"], ["bt"], name="turned", perm=[0, 2, 1]),
            helper.make_node("MatMul", ["a", "bt"], ["y"], name="op"),
        ],
        {"w": MATRIX["w"], "v": MATRIX["w"]},
        FLAT,
        output="y",
    )
    with pytest.raises(NotElasticError) as caught:
        sliced(proto, "named")
    assert str(caught.value) == (
        "width: MatMul op: sums over 4 of 8 of 'a' and over all of 'bt'; name other in the same "
        "[[width]], or neither"
    )
    assert sliced(proto, "named", "other").spec.count == 2


def test_halves_of_different_sizes_are_not_added() -> None:
    content = {
        "width": [
            {"weights": ["named"], "ratios": [0.5]},
            {"weights": ["other"], "ratios": [0.25]},
        ]
    }
    proto = after("Add", "a", "b")
    net = parse_spec(content, "s.toml")
    with pytest.raises(NotElasticError, match=r"Add op: 'b' has 8 in dimension 2"):
        Supernet.of(a_model(proto), net)


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["named"], {"ratio": 0.3}, ("0.3 of the 8 output channels of named is 2.4, which is no "
         "whole number; ratios that divide are 0.25 (2 of 8) or 0.375 (3 of 8)")),
        (["named"], {"ratio": 0.01}, ("0.01 of the 8 output channels of named is 0.08, which is no "
         "whole number; ratios that divide are 0.125 (1 of 8)")),
        (["named"], {"ratio": 0.375, "parts": 2}, ("0.375 of the 8 output channels of 2 equal "
         "parts of named's is 1.5, which is no whole number; ratios that divide are 0.25 (1 of 4) "
         "or 0.5 (2 of 4)")),
        (["named"], {"parts": 3}, ("named has 8 output channels, which are not 3 equal parts; say "
         "parts = N with N that divides 8")),
        (["named"], {"axis": 0}, ("s.toml: width.axis = 0, but the output channels of MatMul named "
         "are dimension 1 of its weight [8, 8]; leave axis out")),
        (["nomed"], {}, ("s.toml: width.weights names 'nomed', which is no operator and no "
         "initializer of the model as it is read; the nearest are 'named'; `eecompile inspect` "
         "shows tensors, and a viewer such as Netron names of operators (fused ones keep the "
         "convolution's)")),
        (["zzz"], {}, "none is like it"),
        (["op"], {}, ("s.toml: width.weights names 'op', but Relu op has no output channels of a "
         "constant weight; name a Conv, ConvTranspose, MatMul, Gemm with one")),
        (["named", "w"], {}, ("s.toml: width.weights names the weight of named twice, by the "
         "operator and by the initializer, or in two [[width]]; keep one")),
    ],
)  # fmt: skip
def test_weights_and_ratios_that_mean_nothing(
    names: list[str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ElasticSpecError) as caught:
        sliced(after("Relu"), *names, **more)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_stay_whole(of: Callable[..., Supernet]) -> None:
    names = [f"/layers.0/{name}/MatMul" for name in ("query", "key", "value")]
    with pytest.raises(NotElasticError) as caught:
        of("bert", width=[{"weights": names, "ratios": [0.375]}])
    # The operator's name is onnxslim's, which changed with its versions.
    assert re.fullmatch(
        r"width: Reshape /layers\.0/Reshape\w*: splits it as \[batch, 7, 8\] → "
        r"\[batch, 7, 4, 2\], which 3 of 8 do not fit; keep multiples of 2",
        str(caught.value),
    )
    with pytest.raises(NotElasticError) as caught:
        of("bert", width=[{"weights": names[:2], "ratios": [0.5]}])
    assert str(caught.value) == (
        "width: MatMul /layers.0/MatMul_1: '/layers.0/Transpose_1_output_0' has 4 in dimension 1, "
        "and the other operand 2 of 4; name /layers.0/value/MatMul in the same [[width]], or "
        "neither"
    )
