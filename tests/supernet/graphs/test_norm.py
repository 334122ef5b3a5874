"""Statistics of subnets: equal to those of torch's batch norms when recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tests.facts import tells
from tests.supernet.elastic_torch import (
    SPECS,
    Bottleneck,
    ElasticCnn,
    answers,
    by_hand,
    inputs_for,
    read,
    shaken,
    sliced_from,
)
from tests.supernet.graphs.test_width import Excited
from tests.supernet.graphs.test_width import read as read_one
from tests.torch_graphs import difference, in_runtime, with_outputs
from torch import Tensor, nn

from offramp.calibration.data.dataset import DataError, Dataset
from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs import Supernet, moments
from offramp.supernet.graphs.elastic_spec import SubnetChoice
from offramp.supernet.graphs.errors import ElasticSpecError
from offramp.supernet.graphs.extract import Subnet, extract_subnet
from offramp.supernet.graphs.norm import SubnetNorm
from offramp.supernet.graphs.norm_layers import find_layers
from offramp.supernet.graphs.spec_file import parse_spec

SAMPLES = 300
SMALL = 1e-9
"""Epsilon of batch norms here: what is under the root is lost when they are folded."""
EXACT = 2e-5
"""Float32 through nine layers."""


def recompute(module: nn.Module, inputs: dict[str, NDArray[Any]]) -> nn.Module:
    """Set batch norms to the statistics of some samples, layer by layer: the reference."""

    def collect(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        values = given[0].double()
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.copy_(values.mean((0, 2, 3)))
        norm.running_var.copy_(values.var((0, 2, 3), unbiased=False))

    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(collect) for norm in norms]
    answers(module, inputs)
    for hook in hooks:
        hook.remove()
    return module


def with_epsilon(module: nn.Module, epsilon: float = SMALL) -> nn.Module:
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = epsilon
    return module


SEEN = inputs_for(ElasticCnn(), SAMPLES, seed=7)
NEW = inputs_for(ElasticCnn(), 20, seed=8)
DATA = Dataset(inputs=SEEN, labels=None, sha256="")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[nn.Module, Supernet]]:
    """A supernet in torch whose full model has the samples' statistics, and the same as read."""

    def make(kind: str) -> tuple[nn.Module, Supernet]:
        module = with_epsilon(shaken(ElasticCnn(grouped=kind == "depthwise")))
        recompute(module, SEEN)
        source = read(module, tmp_path_factory.mktemp(kind))
        return module, Supernet.of(source, parse_spec(SPECS[kind], "s.toml"))

    return cache(make)


def wanted_of(kind: str, module: nn.Module, choice: SubnetChoice) -> NDArray[np.float32]:
    small = recompute(with_epsilon(by_hand(kind, module, choice)), SEEN)
    return answers(small, NEW)


@pytest.mark.parametrize("kind", ["cnn", "depthwise"])
def test_folded_batch_norms_get_the_statistics_of_the_subnet(
    kind: str, trained: Callable[[str], tuple[nn.Module, Supernet]]
) -> None:
    module, net = trained(kind)
    norm = SubnetNorm.of(net, DATA)
    for choice in net.spec.choices():
        wanted = wanted_of(kind, module, choice)
        found = in_runtime(extract_subnet(net, choice, norm).proto, NEW)
        assert difference(found, {"scores": wanted}) < EXACT, choice
        if choice.ratios[0] < 1:
            plain = in_runtime(extract_subnet(net, choice).proto, NEW)
            assert difference(plain, {"scores": wanted}) > 0.1, "without it answers are others"


def test_several_batches_are_nearly_exact(
    trained: Callable[[str], tuple[nn.Module, Supernet]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, net = trained("cnn")
    choice = SubnetChoice(skipped=(0,), ratios=(0.5,))
    wanted = {"scores": wanted_of("cnn", module, choice)}
    monkeypatch.setattr(moments, "MOST_ROWS", 32)

    proto = extract_subnet(net, choice, SubnetNorm.of(net, DATA)).proto
    assert EXACT < difference(in_runtime(proto, NEW), wanted) < 5e-3


def test_what_did_not_change_keeps_what_it_has(
    trained: Callable[[str], tuple[nn.Module, Supernet]],
) -> None:
    _, net = trained("cnn")
    subnet = extract_subnet(
        net, SubnetChoice(skipped=(1,), ratios=(1.0,)), SubnetNorm.of(net, DATA)
    )
    assert corrected(subnet) == set(), "the last block is skipped, and no convolution is behind it"
    subnet = extract_subnet(
        net, SubnetChoice(skipped=(1,), ratios=(0.5,)), SubnetNorm.of(net, DATA)
    )
    assert corrected(subnet) == {
        "/blocks.0/conv2/Conv",  # the first has fewer outputs, but those that are have no others
        "/blocks.0/conv3/Conv",
        *(f"/blocks.1/conv{j}/Conv" for j in (1, 2, 3)),
    }
    added = [o for name, o in subnet.origins.items() if name.endswith(("/scale", "/shift"))]
    assert {o.kind for o in added} == {"own"}
    assert sum(o.size_bytes for o in added) == 4 * 2 * (4 + 6 + 4 + 4 + 6)


def corrected(subnet: Subnet) -> set[str]:
    names = (t.name for t in subnet.proto.graph.initializer)
    return {name.removesuffix("/scale") for name in names if name.endswith("/scale")}


def test_corrected_tensors_have_the_name_of_what_was_folded(
    trained: Callable[[str], tuple[nn.Module, Supernet]],
) -> None:
    _, net = trained("cnn")
    choice = net.spec.smallest
    proto = extract_subnet(net, choice, SubnetNorm.of(net, DATA)).proto
    before = {t for n in extract_subnet(net, choice).proto.graph.node for t in n.output}
    assert before < {t for n in proto.graph.node for t in n.output}
    by_output = {n.output[0]: n for n in proto.graph.node}
    last = by_output["/blocks.0/conv3/Conv_output_0"]
    assert last.op_type == "Add"
    assert by_output[last.input[0]].op_type == "Mul"
    assert by_output[by_output[last.input[0]].input[0]].name == "/blocks.0/conv3/Conv"


def test_the_full_model_stays_as_it_is(
    trained: Callable[[str], tuple[nn.Module, Supernet]],
) -> None:
    _, net = trained("cnn")
    subnet = extract_subnet(net, net.spec.full, SubnetNorm.of(net, DATA))
    assert subnet.own_bytes == 0


class PreActivated(nn.Module):
    """Batch norms in front of what they are for cannot be folded."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.norm, self.conv = nn.BatchNorm2d(6), nn.Conv2d(6, inner, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 6, 3, bias=False)
        self.norm3, self.head = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).relu()
        y = self.conv2(self.norm2(self.conv(self.norm(x)).relu()).relu())
        return self.head(self.norm3(y + x[:, :, 1:-1, 1:-1]).relu().mean((2, 3)))


def test_batch_norms_that_are_there_are_exact_with_any_epsilon(tmp_path: Path) -> None:

    full = recompute(shaken(PreActivated(8)), SEEN)
    image = SEEN["image"]
    source = read_one(full, image[:3], tmp_path)
    kinds = [node.op_type for node in source.proto.graph.node]
    assert kinds.count("BatchNormalization") == 3
    content = {
        "width": [{"weights": ["/conv/Conv"], "ratios": [0.25, 0.5]}],
        "norm": {"layers": ["/norm", "/norm2", "/norm3"]},
    }
    net = Supernet.of(source, parse_spec(content, "s.toml"))
    norm = SubnetNorm.of(net, Dataset(inputs={"x": image}, labels=None, sha256=""))
    assert norm.full == {}
    for choice in net.spec.choices():
        small = PreActivated(int(8 * choice.ratios[0]))
        wanted = answers(recompute(sliced_from(full, small), SEEN), NEW)
        found = in_runtime(extract_subnet(net, choice, norm).proto, {"x": NEW["image"]})
        assert difference(found, {"y": wanted}) < EXACT


def test_channels_that_do_not_vary_are_not_blown_up(tmp_path: Path) -> None:
    """A channel that is dead in the subnet has the full model's mean, as beta in torch."""
    module = with_epsilon(shaken(ElasticCnn()))
    recompute(module, SEEN)
    with torch.no_grad():  # the second convolution reads only what the subnet has not
        block = module.blocks[0]
        assert isinstance(block, Bottleneck)
        block.conv2.weight[1, :4] = 0
    recompute(module, SEEN)
    net = Supernet.of(read(module, tmp_path), parse_spec(SPECS["cnn"], "s.toml"))
    choice = SubnetChoice(skipped=(2,), ratios=(0.5,))
    subnet = extract_subnet(net, choice, SubnetNorm.of(net, DATA))
    found = in_runtime(subnet.proto, NEW)["scores"]
    assert np.isfinite(found).all()
    assert difference({"scores": found}, {"scores": wanted_of("cnn", module, choice)}) < 1e-3
    scale = next(
        numpy_helper.to_array(t)
        for t in subnet.proto.graph.initializer
        if t.name == "/blocks.0/conv2/Conv/scale"
    )
    assert scale.shape == (1, 4, 1, 1)
    assert scale.max() <= 1e4


def test_which_layers_normalise(
    model: Callable[[str], SourceModel], of: Callable[..., Supernet]
) -> None:
    def named(kind: str, layers: Any) -> list[str]:
        depth = [{"skip": ["/blocks.1" if kind == "cnn" else "/layers.1"]}]
        return [layer.node for layer in find_layers(of(kind, depth=depth, norm={"layers": layers}))]

    every = ["/stem/Conv", *(f"/blocks.{i}/conv{j}/Conv" for i in range(3) for j in (1, 2, 3))]
    assert named("cnn", "auto") == every
    assert named("cnn", "none") == []
    assert named("cnn", ["/blocks.1", "/head"]) == [*every[4:7], "/head/Gemm"]
    assert named("bert", "auto") == []
    with pytest.raises(ElasticSpecError) as caught:
        named("cnn", ["/blocks.1", "/block.2"])
    tells(str(caught.value), "s.toml: norm.layers", "'/block.2'", "nearest are")


def test_convolutions_behind_a_global_pool_have_no_norm(tmp_path: Path) -> None:

    x = np.zeros((2, 4, 5, 5), np.float32)
    source = read_one(shaken(Excited(8)), x, tmp_path)
    group = {"weights": ["/a/Conv", "/excite/Conv"], "ratios": [0.5]}
    net = Supernet.of(source, parse_spec({"width": [group]}, "s.toml"))
    assert [layer.node for layer in find_layers(net)] == ["/a/Conv", "/dw/Conv", "/b/Conv"]


def test_products_may_be_normalised_too(of: Callable[..., Supernet]) -> None:
    """Moments of the full model are given to a product's last dimension."""
    content = SPECS["mixer"]
    net = of("mixer", **content, norm={"layers": ["/blocks.0/over_channels/over_channels.2"]})
    seen = {"patches": np.random.default_rng(0).standard_normal((64, 6, 4)).astype(np.float32)}
    data = Dataset(inputs=seen, labels=None, sha256="")
    norm = SubnetNorm.of(net, data)
    (layer,) = norm.layers
    subnet = extract_subnet(net, net.spec.smallest, norm)
    found = moments.measure(
        subnet.proto, [layer], data, threads=1
    )  # of what is before the correction
    assert not np.allclose(found[layer.node].mean, norm.full[layer.node].mean, atol=0.1)
    after = {**vars_of(subnet, layer.tensor, seen)}
    assert np.allclose(after["mean"], norm.full[layer.node].mean, atol=1e-5)
    assert np.allclose(after["variance"], norm.full[layer.node].variance, rtol=1e-4)


def vars_of(subnet: Subnet, tensor: str, inputs: dict[str, NDArray[Any]]) -> dict[str, Any]:
    values = in_runtime(with_outputs(subnet.proto, [tensor]), inputs)[tensor].reshape(-1, 8)
    return {"mean": values.mean(0), "variance": values.var(0)}


def test_samples_that_the_model_fails_on_are_named(
    trained: Callable[[str], tuple[nn.Module, Supernet]],
) -> None:
    _, net = trained("cnn")
    bad = Dataset(inputs={"image": np.zeros((2, 5, 8, 8), np.float32)}, labels=None, sha256="")
    with pytest.raises(DataError, match="the model fails on calibration sample 0"):
        SubnetNorm.of(net, bad)
