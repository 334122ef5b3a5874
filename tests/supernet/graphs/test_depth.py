"""Blocks that are skipped: which are, and why others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.facts import Told, facts, tells
from tests.torch_graphs import in_runtime

from offramp.compiler.graphs.graph import Dataflow
from offramp.compiler.graphs.shapes import annotate, declared_types
from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs import Supernet
from offramp.supernet.graphs.depth import DepthBlock, find_block, skip_blocks
from offramp.supernet.graphs.elastic_spec import Skip
from offramp.supernet.graphs.errors import ElasticSpecError, NotElasticError

ROW: Any = ["batch", 4]


def chain(
    *nodes: tuple[str, str, list[str], str], outputs: tuple[str, ...] = ("y",), **shapes: list[Any]
) -> onnx.ModelProto:
    """A model of float rows; each node is (name, kind, inputs, output)."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ROW)]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    made = [helper.make_node(kind, ins, [out], name=name) for name, kind, ins, out in nodes]
    given = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
    graph = helper.make_graph(made, "chain", inputs, given)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    annotate(proto)
    return proto


def block_of(proto: onnx.ModelProto, skip: Skip) -> DepthBlock:
    return find_block(skip, "s.toml", Dataflow(proto.graph), declared_types(proto))


RESIDUAL = chain(
    ("/a/Relu", "Relu", ["x"], "a"),
    ("/b/Exp", "Exp", ["a"], "e"),
    ("/b/Add", "Add", ["e", "a"], "b"),
    ("/bb/Neg", "Neg", ["b"], "y"),
)


def test_a_scope_ends_at_a_slash_or_a_dot() -> None:
    assert block_of(RESIDUAL, Skip(scope="/b")) == DepthBlock(start="a", end="b")
    assert block_of(RESIDUAL, Skip(scope="/a")) == DepthBlock(start="x", end="a")
    dotted = chain(("b1.exp", "Exp", ["x"], "a"), ("b11.neg", "Neg", ["a"], "y"))
    assert block_of(dotted, Skip(scope="b1")) == DepthBlock(start="x", end="a")


def test_tensors_around_a_block_mean_the_same() -> None:
    assert block_of(RESIDUAL, Skip(start="a", end="b")) == DepthBlock(start="a", end="b")


def test_readers_of_the_end_read_the_start() -> None:
    x = np.array([[-1.0, 0.0, 0.5, 2.0]], np.float32)
    proto = onnx.ModelProto.FromString(RESIDUAL.SerializeToString())
    skip_blocks(proto, [DepthBlock(start="a", end="b")])
    assert [node.name for node in proto.graph.node] == ["/a/Relu", "/bb/Neg"]
    assert np.array_equal(in_runtime(proto, {"x": x})["y"], -np.maximum(x, 0))


def test_neighbouring_blocks_may_all_be_skipped_and_the_answer_keeps_its_name() -> None:
    x = np.array([[-1.0, 0.0, 0.5, 2.0]], np.float32)
    proto = onnx.ModelProto.FromString(RESIDUAL.SerializeToString())
    blocks = [block_of(proto, Skip(scope=scope)) for scope in ("/bb", "/a", "/b")]
    skip_blocks(proto, blocks)
    assert [node.op_type for node in proto.graph.node] == ["Identity"]
    assert np.array_equal(in_runtime(proto, {"x": x})["y"], x)


def test_bodies_read_the_start_too() -> None:
    branch = [
        helper.make_graph(
            [helper.make_node(kind, ["b"], [f"t{kind}"])],
            kind,
            [],
            [helper.make_tensor_value_info(f"t{kind}", TensorProto.FLOAT, ROW)],
        )
        for kind in ("Neg", "Abs")
    ]
    proto = chain(
        ("/a/Relu", "Relu", ["x"], "a"),
        ("/b/Exp", "Exp", ["a"], "b"),
        ("/c/Identity", "Identity", ["b"], "y"),
    )
    condition = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    proto.graph.initializer.append(condition)
    choice = helper.make_node(
        "If", ["yes"], ["y"], name="/c/If", then_branch=branch[0], else_branch=branch[1]
    )
    proto.graph.node[2].CopyFrom(choice)
    skip_blocks(proto, [DepthBlock(start="a", end="b")])
    x = np.array([[-1.0, 0.0, 0.5, 2.0]], np.float32)
    assert np.array_equal(in_runtime(proto, {"x": x})["y"], -np.maximum(x, 0))


def test_a_side_tensor_that_all_blocks_read_is_not_taken_for_the_main_one() -> None:
    proto = chain(
        ("/p/Abs", "Abs", ["x"], "p"),
        ("/0/Add", "Add", ["x", "p"], "a"),
        ("/1/Add", "Add", ["a", "p"], "b"),
        ("/2/Add", "Add", ["b", "p"], "y"),
    )
    assert block_of(proto, Skip(scope="/1")) == DepthBlock(start="a", end="b")


def test_masks_enter_blocks_as_additional_inputs(
    model: Callable[[str], SourceModel], of: Callable[..., Supernet]
) -> None:
    net = of("bert", depth=[{"skip": ["/layers.1"]}])
    ((block,),) = net.blocks
    assert block.start == "/layers.0/norm2/LayerNormalization_output_0"
    assert block.end == "/layers.1/norm2/LayerNormalization_output_0"


@pytest.mark.parametrize(
    ("proto", "skip", "message"),
    [
        (
            chain(
                ("/b/Exp", "Exp", ["x"], "e"),
                ("/b/Neg", "Neg", ["e"], "n"),
                ("/c/Add", "Add", ["e", "n"], "y"),
            ),
            Skip(scope="/b"),
            ("depth.skip", "2 tensors of '/b'", "('e', 'n')", "expected 1", "scope that one"),
        ),
        (
            chain(("/b/Exp", "ReduceSum", ["x"], "e"), ("/c/Neg", "Neg", ["e"], "y")),
            Skip(scope="/b"),
            (
                "depth.skip",
                "0 tensors",
                "'/b'",
                "'x' float32 [batch, 4]",
                "'e' float32 [1, 1]",
                "expected 1",
                "{ from = TENSOR, to = TENSOR }",
            ),
        ),
        (
            chain(
                ("/a/Exp", "Exp", ["x"], "a"),
                ("/a/Neg", "Neg", ["x"], "n"),
                ("/b/Add", "Add", ["a", "n"], "b"),
                ("/c/Add", "Add", ["a", "b"], "c"),
                ("/c/Sub", "Sub", ["c", "n"], "y"),
            ),
            Skip(scope="/b"),
            (
                "depth.skip",
                "2 tensors",
                "'/b'",
                "'a' float32 [batch, 4], 'n' float32 [batch, 4]",
                "'b' float32 [batch, 4]",
                "expected 1",
                "skip blocks",
            ),
        ),
        (RESIDUAL, Skip(start="b", end="a"), ("depth.skip", "between 'b' and 'a'", "swap")),
        (RESIDUAL, Skip(start="a", end="a"), ("depth.skip", "between 'a' and 'a'")),
        (
            chain(
                ("/b/Exp", "Exp", ["x"], "e"),
                ("/b/Neg", "Neg", ["e"], "n"),
                ("/c/Add", "Add", ["e", "n"], "y"),
            ),
            Skip(start="x", end="n"),
            ("depth.skip", "'e'", "'x' and 'n'", "read outside", "end the block"),
        ),
        (
            chain(("/b/Exp", "ReduceSum", ["x"], "e"), ("/c/Neg", "Neg", ["e"], "y")),
            Skip(start="x", end="e"),
            (
                "depth.skip",
                "'x' and 'e' differ",
                "'x' float32 [batch, 4]",
                "'e' float32 [1, 1]",
                "keep shape",
            ),
        ),
    ],
)
def test_blocks_that_cannot_be_skipped(proto: onnx.ModelProto, skip: Skip, message: Told) -> None:
    with pytest.raises(NotElasticError, match=facts(*message)) as caught:
        block_of(proto, skip)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_there_teach(of: Callable[..., Supernet]) -> None:
    with pytest.raises(ElasticSpecError) as caught:
        of("cnn", depth=[{"skip": ["/block.1"]}])
    tells(str(caught.value), "s.toml: depth.skip", "'/block.1'", "nearest are '/blocks.1'")
    with pytest.raises(ElasticSpecError) as caught:
        of("cnn", depth=[{"skip": [{"from": "image", "to": "/blocks.1/Relu_2_output"}]}])
    told = str(caught.value)
    tells(told, "s.toml: depth.skip", "'/blocks.1/Relu_2_output'")
    assert "'/blocks.1/Relu_2_output_0'" in told
    assert "`eecompile inspect` shows tensors" in told


def test_models_without_scopes_say_so() -> None:
    proto = chain(("node_exp", "Exp", ["x"], "a"), ("node_neg", "Neg", ["a"], "y"))
    with pytest.raises(ElasticSpecError, match=facts("no scopes", "dynamo=True")):
        block_of(proto, Skip(scope="/blocks.1"))
