"""Supernets stored so that what subnets have are first bytes, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx
import pytest
from tests.small_bert import SIZE, sentences
from tests.supernet.elastic_torch import inputs_for
from tests.torch_graphs import difference, in_runtime
from torch import nn

from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.graph import weight_bytes
from offramp.supernet.graphs import Supernet, laid_out
from offramp.supernet.graphs.extract import extract_subnet
from offramp.supernet.graphs.spec_file import parse_spec
from offramp.tools.gpu.berts import bert

SAME = 1e-6
"""Sums in another order."""


@pytest.mark.parametrize("kind", ["bert", "fused", "mixer"])
def test_it_computes_the_same_and_nearly_all_is_shared(
    kind: str, full: Callable[[str], nn.Module], supernet: Callable[[str], Supernet]
) -> None:
    net = supernet(kind)
    stored = laid_out(net)
    inputs = inputs_for(full(kind), 5)
    plain = in_runtime(net.model.proto, inputs)
    assert difference(in_runtime(stored.model.proto, inputs), plain) < SAME
    assert stored.model.proto.graph.output == net.model.proto.graph.output
    for choice in net.spec.choices():
        subnet = extract_subnet(stored, choice)
        own = {name for name, origin in subnet.origins.items() if origin.kind == "own"}
        shapes = {n.input[1] for n in subnet.proto.graph.node if n.op_type == "Reshape"}
        assert own <= shapes, "all weights are views"
    before = extract_subnet(net, net.spec.smallest)
    assert before.own_bytes > 2 * subnet.own_bytes


def test_cut_points_stay(supernet: Callable[[str], Supernet]) -> None:
    net = supernet("bert")
    names = [[cut.tensor for cut in find_cuts(n.model).cuts] for n in (net, laid_out(net))]
    assert names[0] == names[1]
    assert len(names[0]) >= 5


def test_biases_go_into_the_product(supernet: Callable[[str], Supernet]) -> None:
    net = supernet("bert")
    stored = laid_out(net)
    nodes = {node.name: node for node in stored.model.proto.graph.node}
    query = nodes["/layers.0/query/MatMul"]
    assert query.op_type == "Gemm"
    assert query.input[2] == "layers.0.query.bias"
    assert "/layers.0/query/Add" not in nodes
    assert [nodes[f"/layers.0/{name}/MatMul"].input[0] for name in ("key", "value")] == (
        2 * [query.input[0]]
    ), "one reshape for the three"
    assert nodes["/layers.0/out/MatMul"].op_type == "MatMul", "its input channels are first already"
    assert {w.axis for group in stored.weights for w in group} == {0}


def test_what_has_nothing_to_turn_is_the_same(supernet: Callable[[str], Supernet]) -> None:
    net = supernet("cnn")
    assert laid_out(net) is net


def test_weights_that_others_read_stay_for_them(
    full: Callable[[str], nn.Module], of: Callable[..., Supernet]
) -> None:
    """onnxslim ties equal weights; only what is elastic is turned."""
    net = of("bert", width=[{"weights": ["/layers.0/inner/MatMul"], "ratios": [0.5]}])
    proto = onnx.ModelProto()
    proto.CopyFrom(net.model.proto)
    nodes = {node.name: node for node in proto.graph.node}
    nodes["/layers.1/inner/MatMul"].input[1] = nodes["/layers.0/inner/MatMul"].input[1]
    tied = Supernet.of(replace(net.model, proto=proto), net.spec)
    feeds = inputs_for(full("bert"), 3)
    wanted = in_runtime(tied.model.proto, feeds)
    stored = laid_out(tied)
    assert difference(in_runtime(stored.model.proto, feeds), wanted) < SAME
    name = nodes["/layers.0/inner/MatMul"].input[1]
    assert {name, f"{name}/turned"} <= {t.name for t in stored.model.proto.graph.initializer}
    subnet = extract_subnet(tied, tied.spec.smallest)
    other = next(n for n in subnet.proto.graph.node if n.name == "/layers.1/inner/MatMul")
    assert other.input[1] == name
    assert subnet.origins[name].kind == "whole"
    found = in_runtime(subnet.proto, feeds)
    again = in_runtime(extract_subnet(stored, tied.spec.smallest).proto, feeds)
    assert difference(again, found) < SAME


def test_the_small_bert(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A BERT made by hand, whose names have dots and whose GELU is spelt out."""
    folder = tmp_path_factory.mktemp("bert")
    onnx.save(bert(SIZE), folder / "bert.onnx")
    source = read_model(folder / "bert.onnx")
    content = {
        "depth": [{"skip": ["layer1"]}],
        "width": [
            {
                "weights": [f"layer{i}.{part}.weight" for i in range(3) for part in "qkv"],
                "ratios": [0.5],
            },
            {"weights": [f"layer{i}.up.weight" for i in range(3)], "ratios": [0.25, 0.5]},
        ],
    }
    net = Supernet.of(source, parse_spec(content, "s.toml"))
    stored = laid_out(net)
    feeds = sentences(4, tokens=8)
    wanted = in_runtime(net.model.proto, feeds)
    assert difference(in_runtime(stored.model.proto, feeds), wanted) < SAME
    for choice in net.spec.choices():
        one, other = extract_subnet(net, choice), extract_subnet(stored, choice)
        found = in_runtime(other.proto, feeds)
        assert difference(found, in_runtime(one.proto, feeds)) < SAME
        assert other.own_bytes < 0.05 * weight_bytes(other.proto)
