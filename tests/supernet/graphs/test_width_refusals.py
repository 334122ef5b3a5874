"""Layers that cannot have fewer channels are refused in one line: name, reason and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.facts import Told, facts, tells
from tests.supernet.graphs.made import a_model

from offramp.compiler.graphs.shapes import annotate
from offramp.supernet.graphs import Supernet
from offramp.supernet.graphs.errors import ElasticSpecError, NotElasticError
from offramp.supernet.graphs.spec_file import parse_spec

Weights = dict[str, NDArray[Any]]
NORM_REMEDY = (
    "statistics over fewer channels differ; keep the channels whole here and slice inside the block"
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


REFUSED: dict[str, tuple[onnx.ModelProto, Told]] = {
    "layer norm": (
        after("LayerNormalization", "a", "g", weights={"g": np.ones(8, np.float32)}),
        ("LayerNormalization op", "dimension 2", "4 of 8", NORM_REMEDY),
    ),
    "softmax": (
        after("Softmax"),
        ("Softmax op", "dimension 2", "4 of 8", NORM_REMEDY),
    ),
    "mean": (
        after("ReduceMean", "a", "axes", weights={"axes": ints(-1)}),
        ("ReduceMean op", "dimension 2", "4 of 8", NORM_REMEDY),
    ),
    "all": (
        after("ReduceMean", keepdims=0),
        ("ReduceMean op", "dimension 2", "4 of 8", NORM_REMEDY),
    ),
    "residual": (
        after("Add", "a", "x"),
        ("Add op", "'x' has 8 in dimension 2", "4 of 8", "keep its channels whole"),
    ),
    "other branch": (
        after("Add", "b", "a"),
        ("Add op", "'b' has 8 in dimension 2", "4 of 8", "name other in the same [[width]]"),
    ),
    "concat": (
        after("Concat", "a", "b", axis=-1),
        ("Concat op", "dimension 2", "4 of 8", "whole, or slice after it"),
    ),
    "concat beside": (
        after("Concat", "a", "b", axis=1),
        ("Concat op", "'a' has 4 of 8 in dimension 2", "'b'", "other in the same [[width]]"),
    ),
    "slice": (
        after("Slice", "a", "s", "e", "axes",
              weights={"s": ints(4), "e": ints(8), "axes": ints(2)}),
        ("Slice op", "dimension 2", "4 of 8", "parts = N in the [[width]]"),
    ),
    "slice with steps": (
        after("Slice", "a", "s", "e", "axes", "steps",
              weights={"s": ints(0), "e": ints(8), "axes": ints(2), "steps": ints(2)}),
        ("Slice op", "not a fixed range of dimension 2", "4 of 8", "input whole"),
    ),
    "gather": (
        after("Gather", "a", "i", axis=2, weights={"i": ints(1)}),
        ("Gather op", "single elements of dimension 2", "4 of 8", "input whole"),
    ),
    "mixing": (
        after("Reshape", "a", "s", weights={"s": ints(-1, 5)}),
        ("Reshape op", "[batch, 5, 8] → [8*batch, 5]", "4 of 8", "input whole"),
    ),
    "pad": (
        after("Pad", "a", "p", weights={"p": ints(0, 0, 1, 0, 0, 0)}),
        ("Pad op", "dimension 2", "4 of 8", "input whole"),
    ),
    "einsum": (
        after("Einsum", equation="abc->acb"),
        ("Einsum op", "unknown", "input whole", "standard operators"),
    ),
    "sum along": (
        after("CumSum", "a", "k", weights={"k": np.array(2)}),
        ("CumSum op", "unknown", "input whole", "standard operators"),
    ),
    "norm of maps": (
        after("LpNormalization", shape=MAPS, axis=1),
        ("LpNormalization op", "dimension 1", "4 of 8", NORM_REMEDY),
    ),
    "channels last": (
        after("Transpose", shape=MAPS, perm=[0, 2, 3, 1]),
        ("'c'", "4 of 8 elements in dimension 3", "keep the weights of its operator whole"),
    ),
    "groups": (
        after("Conv", "a", "d", shape=MAPS, group=2,
              weights={"d": np.ones((8, 4, 1, 1), np.float32)}),
        ("'c'", "4 of 8 elements in dimension 1", "keep the weights of its operator whole"),
    ),
    "a weight": (
        after("Conv", "x", "a", shape=[8, 8, 1, 1]),
        ("Conv op", "as its weight", "whole"),
    ),
    "shuffle": (
        after("DepthToSpace", shape=MAPS, blocksize=2),
        ("DepthToSpace op", "unknown", "input whole", "standard operators"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_operators_that_cannot_do_with_less(case: str) -> None:
    proto, message = REFUSED[case]
    with pytest.raises(NotElasticError, match=facts("width:", *message)):
        sliced(proto, "named")


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
    tells(str(caught.value), "Conv grouped", "2 groups of 4", "2 of 8", "multiples of 4")
    with pytest.raises(NotElasticError, match=facts("width: Conv grouped", "2 groups", "'a'")):
        sliced(grouped(2), "grouped")
    content = {
        "width": [
            {"weights": ["named"], "ratios": [0.5]},
            {"weights": ["grouped"], "ratios": [0.25]},
        ]
    }
    with pytest.raises(NotElasticError, match="name the operator that computes 'a' instead"):
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
    with pytest.raises(
        NotElasticError,
        match=facts("width: MatMul op", "4 of 8 of 'a'", "'bt'", "other in the same [[width]]"),
    ):
        sliced(proto, "named")
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
    with pytest.raises(NotElasticError, match=facts("Add op", "'b' has 8 in dimension 2")):
        Supernet.of(a_model(proto), net)


OUT = "8 output channels of named"


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["named"], {"ratio": 0.3}, ("0.3", OUT, "2.4", "0.25 (2 of 8)", "0.375 (3 of 8)")),
        (["named"], {"ratio": 0.01}, ("0.01", OUT, "0.08", "0.125 (1 of 8)")),
        (
            ["named"],
            {"ratio": 0.375, "parts": 2},
            ("0.375", "8 output", "2 equal parts of named", "1.5", "0.25 (1 of 4) or 0.5 (2 of 4)"),
        ),
        (["named"], {"parts": 3}, ("named", "8 output", "3 equal parts", "set parts to")),
        (
            ["named"],
            {"axis": 0},
            ("s.toml: width.axis = 0", "MatMul named", "dimension 1", "[8, 8]", "omit axis"),
        ),
        (["nomed"], {}, ("s.toml: width.weights", "'nomed'", "'named'", "`eecompile inspect`")),
        (["zzz"], {}, ("none is similar",)),
        (
            ["op"],
            {},
            ("s.toml: width.weights", "'op'", "Relu op", "Conv, ConvTranspose, MatMul, Gemm"),
        ),
        (["named", "w"], {}, ("s.toml: width.weights", "named twice", "[[width]]", "keep one")),
    ],
)
def test_weights_and_ratios_that_mean_nothing(
    names: list[str], more: dict[str, Any], message: Told
) -> None:
    with pytest.raises(ElasticSpecError) as caught:
        sliced(after("Relu"), *names, **more)
    tells(str(caught.value), *message)
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
    tells(str(caught.value), "MatMul_1", "Transpose_1_output_0", "4 in dimension 1", "2 of 4")
    tells(str(caught.value), "name /layers.0/value/MatMul in the same [[width]]")
