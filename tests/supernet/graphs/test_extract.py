"""Subnets are what torch makes of the same parts of the weights, and say what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from tests.supernet.elastic_torch import SPECS, answers, by_hand, inputs_for, read
from tests.torch_graphs import difference, in_runtime
from torch import nn

from offramp.compiler.graphs.graph import weight_bytes
from offramp.supernet.graphs import Supernet, laid_out
from offramp.supernet.graphs.elastic_spec import SubnetChoice
from offramp.supernet.graphs.extract import Subnet, extract_subnet
from offramp.supernet.graphs.spec_file import parse_spec

KINDS = sorted(SPECS)
ROUNDING = 1e-5
"""Sums of float32 in another order, of three blocks."""


def compare(kind: str, full: nn.Module, subnet: Subnet, *, rows: int = 4, seed: int = 1) -> None:
    inputs = inputs_for(full, rows, seed)
    wanted = answers(by_hand(kind, full, subnet.choice), inputs)
    assert difference(in_runtime(subnet.proto, inputs), {"scores": wanted}) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_every_subnet_is_what_torch_makes_by_hand(
    kind: str, full: Callable[[str], nn.Module], supernet: Callable[[str], Supernet]
) -> None:
    net = supernet(kind)
    for choice in net.spec.choices():
        compare(kind, full(kind), extract_subnet(net, choice))


@settings(max_examples=40)
@given(data=st.data())
def test_random_subnets_before_and_after_they_are_laid_out(
    data: st.DataObject, full: Callable[[str], nn.Module], supernet: Callable[[str], Supernet]
) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    net = supernet(kind)
    if data.draw(st.booleans()):
        net = laid_out(net)
    choice = data.draw(st.sampled_from(net.spec.choices()))
    rows, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99))
    compare(kind, full(kind), extract_subnet(net, choice), rows=rows, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "fused"])
def test_the_newer_exporter_has_no_scopes_so_blocks_are_named_by_tensors(
    kind: str, full: Callable[[str], nn.Module], tmp_path: Path
) -> None:
    source = read(full(kind), tmp_path, dynamo=True)
    nodes = source.proto.graph.node
    weights = {t.name for t in source.proto.graph.initializer}
    products = [n for n in nodes if n.op_type == "MatMul" and n.input[1] in weights]
    norms = [n.output[0] for n in nodes if n.op_type == "LayerNormalization"]
    heads = [n.name for i in range(3) for n in products[6 * i : 6 * i + 3]]
    content = {
        "depth": [{"skip": [{"from": norms[2 * i - 1], "to": norms[2 * i + 1]} for i in (1, 2)]}],
        "width": [
            {"weights": heads, "ratios": [0.5]},
            # initializers may be named, too
            {"weights": [products[6 * i + 4].input[1] for i in range(3)], "ratios": [0.25]},
        ],
    }
    net = Supernet.of(source, parse_spec(content, "s.toml"))
    for made in (net, laid_out(net)):
        for choice in net.spec.choices():
            compare(kind, full(kind), extract_subnet(made, choice))


def test_names_are_those_of_the_supernet(supernet: Callable[[str], Supernet]) -> None:
    net = supernet("cnn")
    whole = net.model.proto.graph
    tensors = {t for node in whole.node for t in node.output}
    weights = {t.name for t in whole.initializer}
    for choice in net.spec.choices():
        proto = extract_subnet(net, choice).proto
        assert {t for node in proto.graph.node for t in node.output} <= tensors
        assert {t.name for t in proto.graph.initializer} <= weights
        assert [i.name for i in proto.graph.input] == [i.name for i in whole.input]
        assert proto.graph.output == whole.output
        onnx.checker.check_model(proto, full_check=True)


def test_the_full_subnet_is_the_model(supernet: Callable[[str], Supernet]) -> None:
    net = supernet("bert")
    subnet = extract_subnet(net, net.spec.full)
    assert {o.kind for o in subnet.origins.values()} == {"whole"}
    assert subnet.own_bytes == 0
    assert subnet.shared_bytes == weight_bytes(net.model.proto)
    feeds = inputs_for_bert(6)
    wanted, found = in_runtime(net.model.proto, feeds), in_runtime(subnet.proto, feeds)
    assert np.array_equal(found["scores"], wanted["scores"])


def inputs_for_bert(rows: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {
        "input_ids": np.arange(rows * 7).reshape(rows, 7) % 30,
        "attention_mask": np.ones((rows, 7), np.int64),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_origins_are_true_byte_for_byte(kind: str, supernet: Callable[[str], Supernet]) -> None:
    for net in (supernet(kind), laid_out(supernet(kind))):
        whole = {t.name: content(t) for t in net.model.proto.graph.initializer}
        arrays = {t.name: numpy_helper.to_array(t) for t in net.model.proto.graph.initializer}
        for choice in net.spec.choices():
            subnet = extract_subnet(net, choice)
            mine = {t.name: content(t) for t in subnet.proto.graph.initializer}
            own = {t.name: numpy_helper.to_array(t) for t in subnet.proto.graph.initializer}
            assert mine.keys() == subnet.origins.keys()
            for name, origin in subnet.origins.items():
                assert origin.size_bytes == len(mine[name])
                if origin.kind == "prefix":
                    assert len(mine[name]) < len(whole[origin.source])
                if origin.kind in ("whole", "prefix"):
                    assert whole[origin.source][: len(mine[name])] == mine[name]
                if origin.kind == "channels":
                    part, source = own[name], arrays[origin.source]
                    outputs, inputs = part.shape[:2]
                    assert np.array_equal(source[:outputs, :inputs], part)
                    assert inputs < source.shape[1]
            assert subnet.shared_bytes + subnet.own_bytes == sum(map(len, mine.values()))


def content(tensor: onnx.TensorProto) -> bytes:
    return numpy_helper.to_array(tensor).tobytes()


def test_of_convolutions_output_channels_are_first_bytes_and_input_channels_are_parts(
    supernet: Callable[[str], Supernet],
) -> None:
    net = supernet("cnn")
    weights = {
        node.name: node.input[1] for node in net.model.proto.graph.node if "conv" in node.name
    }
    subnet = extract_subnet(net, SubnetChoice(skipped=(0,), ratios=(0.5,)))
    kinds = [subnet.origins[weights[f"/blocks.0/conv{j}/Conv"]].kind for j in (1, 2, 3)]
    assert kinds == ["prefix", "channels", "channels"]
    depthwise = extract_subnet(supernet("depthwise"), SubnetChoice(skipped=(0,), ratios=(0.5,)))
    names = [n.input[1] for n in depthwise.proto.graph.node if "/conv2/" in n.name]
    assert [depthwise.origins[name].kind for name in names] == ["prefix"] * 3


def test_constants_that_others_read_whole_stay_as_they_are(
    full: Callable[[str], nn.Module], supernet: Callable[[str], Supernet]
) -> None:
    """The shape that splits heads is one constant for all layers; one layer alone is sliced."""
    net = supernet("bert")
    heads = [f"/layers.1/{name}/MatMul" for name in ("query", "key", "value")]
    content = {"width": [{"weights": heads, "ratios": [0.5]}]}
    one = Supernet.of(net.model, parse_spec(content, "s.toml"))
    subnet = extract_subnet(one, one.spec.smallest)
    splits = [n for n in subnet.proto.graph.node if n.op_type == "Reshape"]
    values = {t.name: numpy_helper.to_array(t).tolist() for t in subnet.proto.graph.initializer}
    shapes = [values[n.input[1]] for n in splits if len(values[n.input[1]]) == 4]
    assert [shape[2] for shape in shapes] == [4, 4, 4, 2, 2, 2, 4, 4, 4]
    assert len({n.input[1] for n in splits if n.name.startswith("/layers.0")} - set(values)) == 0
