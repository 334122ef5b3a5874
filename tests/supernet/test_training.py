"""Supernets in torch: choosing subnets, copying them out, training, norms, export."""

from __future__ import annotations

import copy
import tomllib
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tests.facts import Told, facts
from torch import Tensor, nn
from torch.nn import functional

from offramp.supernet.training import (
    ElasticBatchNorm2d,
    ElasticChoice,
    ElasticConv2d,
    ElasticDepth,
    ElasticLinear,
    ElasticModule,
    ElasticSpace,
    ElasticWidth,
    calibrate_norms,
    export_supernet,
    extract,
    sandwich_step,
)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, depthwise: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8) if depthwise else nn.Identity()
        self.conv2 = nn.Conv2d(8, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(functional.relu(self.norm1(self.conv1(x))))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class TinyResNet(nn.Module):
    def __init__(self, *, depthwise: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        widths = [(4, 4), (4, 4), (4, 6), (6, 6)]
        self.blocks = nn.Sequential(*(Block(*width, depthwise=depthwise) for width in widths))
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return self.classifier(features)


class Layer(nn.Module):
    """A pre-norm transformer's layer whose heads are counted from the width of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.mix = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            part(y).unflatten(2, (-1, 2)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = (query @ key.transpose(2, 3) + bias).softmax(3) @ value
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class TinyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return self.classifier(x.mean(1))


RATIOS = (0.25, 0.5)
ELASTIC = {ElasticConv2d, ElasticLinear, ElasticBatchNorm2d}


def cnn_space() -> ElasticSpace:
    return ElasticSpace(
        depth=(ElasticDepth(skip=("blocks.1", "blocks.0")), ElasticDepth(skip=("blocks.3",))),
        width=(
            ElasticWidth(layers=("blocks.0.conv1", "blocks.1.conv1"), ratios=RATIOS),
            ElasticWidth(layers=("blocks.2.conv1", "blocks.3.conv1"), ratios=RATIOS),
        ),
    )


def transformer_space() -> ElasticSpace:
    heads = tuple(f"layers.{i}.{name}" for i in range(3) for name in ("query", "key", "value"))
    return ElasticSpace(
        depth=(ElasticDepth(skip=("layers.1",)),),
        width=(
            ElasticWidth(layers=heads, ratios=RATIOS),
            ElasticWidth(layers=tuple(f"layers.{i}.mlp.0" for i in range(3)), ratios=RATIOS),
        ),
    )


def shaken(module: nn.Module) -> nn.Module:
    """With random parameters and statistics: what is equal at first, biases say, differs."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data += 0.3 * torch.rand(tensor.shape, generator=generator)
    return module


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def tokens() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(4, 5, 8, generator=random), torch.randn(4, 1, 1, 5, generator=random)


def make_cnn(*, depthwise: bool = False) -> ElasticModule:
    torch.manual_seed(0)
    network = shaken(TinyResNet(depthwise=depthwise))
    return ElasticModule(network, cnn_space(), (images(2),)).eval()


def make_transformer() -> ElasticModule:
    torch.manual_seed(0)
    return ElasticModule(shaken(TinyTransformer()), transformer_space(), tokens()).eval()


MAKERS: dict[str, tuple[Callable[[], ElasticModule], Sequence[Tensor]]] = {
    "cnn": (make_cnn, (images(),)),
    "depthwise": (lambda: make_cnn(depthwise=True), (images(),)),
    "transformer": (make_transformer, tokens()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_extracted_subnet_answers_as_the_supernet_does(name: str) -> None:
    make, given = MAKERS[name]
    supernet, answers = make(), []
    for choice in supernet.space.choices():
        supernet.choose(choice)
        subnet = extract(supernet, choice)
        with torch.no_grad():
            answers.append(supernet(*given))
            # The same products, summed in another order at most.
            torch.testing.assert_close(subnet(*given), answers[-1], rtol=1e-6, atol=1e-6)
        assert {type(part) for part in subnet.modules()}.isdisjoint(ELASTIC)
    distances = [(a - b).abs().max() for a, b in pairwise(answers)]
    assert min(distances) > 1e-4, "two subnets answer alike"


def test_the_largest_subnet_is_the_module_as_it_was() -> None:
    network = shaken(TinyResNet()).eval()
    before = network(images())
    supernet = ElasticModule(copy.deepcopy(network), cnn_space(), (images(2),))
    assert not supernet.training
    assert torch.equal(supernet(images()), before)
    subnet = extract(supernet, supernet.space.largest())
    assert subnet.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(subnet(images()), before)


def test_a_subnet_is_made_of_prefixes_without_its_skipped_blocks() -> None:
    supernet = make_cnn()
    subnet = extract(supernet, ElasticChoice(skipped=(1, 0), ratios=(0.25, 0.5)))
    weights, all_weights = subnet.state_dict(), supernet.state_dict()
    assert not any(name.startswith("blocks.1.") for name in weights)
    theirs = all_weights["module.blocks.0.block.conv1.weight"]
    assert torch.equal(weights["blocks.0.conv1.weight"], theirs[:2])
    assert weights["blocks.0.norm1.running_mean"].shape == (2,)
    assert weights["blocks.0.conv2.weight"].shape == (4, 2, 3, 3)
    assert weights["blocks.2.conv1.weight"].shape == (4, 4, 3, 3)


def test_choices_run_from_the_largest_to_the_smallest() -> None:
    space = cnn_space()
    choices = list(space.choices())
    assert len(choices) == len(set(choices)) == 3 * 2 * 3 * 3
    assert (choices[0], choices[-1]) == (space.largest(), space.smallest())
    assert space.smallest() == ElasticChoice(skipped=(2, 1), ratios=(0.25, 0.25))
    assert space.skipped_blocks(ElasticChoice(skipped=(1, 0), ratios=(1.0, 1.0))) == {"blocks.1"}


def test_random_choices_follow_the_seed_and_reach_every_number() -> None:
    space = cnn_space()
    drawn = [space.random(torch.Generator().manual_seed(seed)) for seed in range(60)]
    assert drawn == [space.random(torch.Generator().manual_seed(seed)) for seed in range(60)]
    assert {choice.skipped for choice in drawn} == {(a, b) for a in range(3) for b in range(2)}
    assert {ratio for choice in drawn for ratio in choice.ratios} == {0.25, 0.5, 1.0}


def test_a_sandwich_step_trains_every_parameter_and_follows_its_seed() -> None:
    def step(seed: int) -> tuple[ElasticModule, object]:
        supernet = make_cnn().train()
        optimiser = torch.optim.SGD(supernet.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed)
        labels = torch.tensor([0, 1, 2, 0])
        return supernet, sandwich_step(supernet, (images(),), labels, optimiser, generator)

    before = dict(make_cnn().named_parameters())
    (supernet, losses), (again, same), (_, other) = step(0), step(0), step(1)
    for name, weights in supernet.named_parameters():
        assert not torch.equal(weights, before[name]), name
        assert torch.equal(weights, again.get_parameter(name)), name
    assert losses == same != other
    buffers = dict(make_cnn().named_buffers())
    for name, statistics in supernet.named_buffers():
        assert torch.equal(statistics, buffers[name]), "training changed running statistics"


def test_gradients_of_a_sandwich_step_are_those_of_its_subnets_added_up() -> None:
    supernet, labels = make_cnn().train(), torch.tensor([0, 1, 2, 0])
    expected = copy.deepcopy(supernet)
    optimiser = torch.optim.SGD(supernet.parameters(), lr=0.0)
    losses = sandwich_step(
        supernet, (images(),), labels, optimiser, torch.Generator().manual_seed(3), drawn=1
    )
    logits = expected(images())
    functional.cross_entropy(logits, labels).backward()
    drawn = expected.space.random(torch.Generator().manual_seed(3))
    found = []
    for choice in (expected.space.smallest(), drawn):
        expected.choose(choice)
        loss = functional.cross_entropy(expected(images()), logits.detach().softmax(1))
        loss.backward()
        found.append(loss.item())
    assert (losses.smallest, *losses.random) == pytest.approx(found, rel=1e-5)
    for name, weights in supernet.named_parameters():
        # Sums of some hundred products in float32.
        torch.testing.assert_close(weights.grad, expected.get_parameter(name).grad)


def test_others_learn_the_answers_of_a_teacher_where_there_is_one() -> None:
    supernet = make_cnn().train()
    optimiser = torch.optim.SGD(supernet.parameters(), lr=0.0)
    teacher = torch.tensor([[9.0, 0.0, 0.0]]).repeat(4, 1)
    given: list[Tensor] = []

    def distillation(answers: Tensor, wanted: Tensor) -> Tensor:
        given.append(wanted)
        return answers.sum()

    sandwich_step(
        supernet,
        (images(),),
        torch.zeros(4, dtype=torch.int64),
        optimiser,
        torch.Generator(),
        targets=teacher,
        distillation=distillation,
    )
    assert len(given) == 3
    assert all(torch.equal(wanted, teacher) for wanted in given)


def test_a_supernet_learns_in_some_steps() -> None:
    supernet = make_cnn().train()
    labels = torch.arange(48) % 3
    bright = images(48) + labels[:, None, None, None].float()
    optimiser = torch.optim.SGD(supernet.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        sandwich_step(supernet, (bright,), labels, optimiser, generator, clip=1.0)
    for choice in (supernet.space.largest(), supernet.space.smallest()):
        norms = calibrate_norms(supernet, choice, [(bright,)])
        found = extract(supernet, choice, norms)(bright).argmax(1)
        assert (found == labels).float().mean() > 0.9


def test_statistics_of_the_first_norm_are_means_and_variances_of_all_its_inputs() -> None:
    supernet = make_cnn()
    choice = supernet.space.smallest()
    batches = [(images(3, seed=5),), (images(7, seed=6) + 2,)]
    norms = calibrate_norms(supernet, choice, batches)
    subnet = extract(supernet, choice)
    with torch.no_grad():
        stem = subnet.get_submodule("stem")(torch.cat([batch for (batch,) in batches]))
        values = subnet.get_submodule("blocks.2.conv1")(stem).transpose(0, 1).flatten(1)
    mean, variance = norms["blocks.2.norm1"]
    torch.testing.assert_close(mean, values.mean(1))
    torch.testing.assert_close(variance, values.var(1, correction=0))
    assert set(norms) == {"blocks.2.norm1", "blocks.2.norm2"}


def test_subnets_have_statistics_of_their_own() -> None:
    supernet, space = make_cnn(), cnn_space()
    largest = calibrate_norms(supernet, space.largest(), [(images(32),)])
    supernet.record_norms(largest)
    smallest = calibrate_norms(supernet, space.smallest(), [(images(32),)])
    name = "blocks.2.norm1"
    kept = supernet.get_buffer("module.blocks.2.norm1.running_mean")
    assert torch.equal(kept, largest[name].mean)
    assert (smallest[name].mean - largest[name].mean[:2]).abs().min() > 1e-3
    subnet = extract(supernet, space.smallest(), smallest)
    assert torch.equal(subnet.get_buffer(f"{name}.running_var"), smallest[name].variance)
    # With its own statistics the subnet answers what it answered in training on this one batch.
    supernet.choose(space.smallest())
    torch.testing.assert_close(
        subnet(images(32)), supernet.train()(images(32)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_the_export_is_the_largest_subnet_and_its_specification_names_its_nodes(
    name: str, tmp_path: Path
) -> None:
    make, given = MAKERS[name]
    supernet = make()
    inputs = ["x", "bias"][: len(given)]
    path = tmp_path / "made" / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        written = export_supernet(supernet, path, inputs=inputs, outputs=["logits"], keep=4)
    assert written == tmp_path / "made" / "spec.toml"

    model = onnx.load(path)
    assert model.opset_import[0].version == 17
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {node.op_type for node in model.graph.node}.isdisjoint({"If", "BatchNormalization"})
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {key: value.numpy() for key, value in zip(inputs, given, strict=True)}
    with torch.no_grad():
        expected = supernet(*given).numpy()
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-4, atol=1e-5)

    spec = tomllib.loads(written.read_text())
    assert set(spec) == {"depth", "width", "norm", "points"}
    assert (spec["norm"], spec["points"]) == ({"layers": "auto"}, {"keep": 4})
    nodes = {node.name: node for node in model.graph.node}
    sizes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for table, group in zip(spec["depth"], supernet.space.depth, strict=True):
        assert set(table) == {"skip"}
        assert len(table["skip"]) == len(group.skip)
        for scope in table["skip"]:
            assert any(node.startswith(f"{scope}/") for node in nodes)
    for table, width in zip(spec["width"], supernet.space.width, strict=True):
        assert tuple(table["ratios"]) == width.ratios
        for node, layer in zip(table["weights"], width.layers, strict=True):
            weight = extract(supernet, supernet.space.largest()).get_parameter(f"{layer}.weight")
            assert sizes[nodes[node].input[1]][table["axis"]] == len(weight)


def test_scopes_in_the_specification_are_those_of_the_exporter(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = export_supernet(
            make_cnn(),
            tmp_path / "model.onnx",
            inputs=["x"],
            outputs=["y"],
            specification=tmp_path / "other.toml",
            norm_layers=["/blocks/blocks.0/"],
        )
    assert (
        spec.read_text()
        == """[[depth]]
skip = ["/blocks/blocks.1", "/blocks/blocks.0"]

[[depth]]
skip = ["/blocks/blocks.3"]

[[width]]
weights = ["/blocks/blocks.0/conv1/Conv", "/blocks/blocks.1/conv1/Conv"]
axis = 0
ratios = [0.25, 0.5]

[[width]]
weights = ["/blocks/blocks.2/conv1/Conv", "/blocks/blocks.3/conv1/Conv"]
axis = 0
ratios = [0.25, 0.5]

[norm]
layers = ["/blocks/blocks.0/"]

[points]
keep = 6
"""
    )


def space_of(
    *, skip: str = "blocks.1", layer: str = "blocks.0.conv1", ratio: float = 0.5
) -> ElasticSpace:
    return ElasticSpace(
        depth=(ElasticDepth(skip=(skip,)),), width=(ElasticWidth(layers=(layer,), ratios=(ratio,)),)
    )


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (space_of(skip="blocks.7"), ("blocks.7", "blocks.")),
        (space_of(skip="blocks.2"), ("[2, 6, 6, 6]", "[2, 4, 6, 6]", "name blocks")),
        (space_of(layer="blocks.0.conv9"), ("blocks.0.conv9", "blocks.0.conv")),
        (space_of(layer="blocks.0.norm1"), ("blocks.0.norm1 (ElasticBatchNorm2d)",)),
        (space_of(ratio=0.3), ("0.3", "8 channels of blocks.0.conv1", "2.4", "use ratios")),
        (space_of(layer="blocks.0.conv2"), ("smallest subnet", "inner widths")),
        (
            ElasticSpace(width=(ElasticWidth(layers=("classifier",), ratios=(1 / 3,)),)),
            ("[2, 1]", "[2, 3]", "remove the last layer"),
        ),
    ],
)
def test_spaces_that_a_module_does_not_have(space: ElasticSpace, words: Told) -> None:
    with pytest.raises(ValueError, match=facts(*words)):
        ElasticModule(TinyResNet(), space, (images(2),))


def test_convolutions_in_groups_are_not_elastic() -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1))
    space = ElasticSpace(width=(ElasticWidth(layers=("0",), ratios=(0.5,)),))
    with pytest.raises(ValueError, match=facts("0 (Conv2d)", "such as 1")):
        ElasticModule(network, space, (torch.zeros(2, 4, 1, 1),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ElasticDepth(skip=()), ("name one block or more",)),
        (lambda: ElasticWidth(layers=("a", "a"), ratios=(0.5,)), ("name one layer or more",)),
        (lambda: ElasticWidth(layers=("a",), ratios=(0.5, 1.0)), ("rising numbers in (0, 1)",)),
        (lambda: ElasticWidth(layers=("a",), ratios=(0.5, 0.25)), ("rising numbers in (0, 1)",)),
        (ElasticSpace, ("has one subnet",)),
        (
            lambda: ElasticSpace(depth=(ElasticDepth(skip=("a",)),) * 2),
            ("block a is in two groups",),
        ),
        (
            lambda: cnn_space().check(ElasticChoice(skipped=(0,), ratios=(1.0, 1.0))),
            ("2 depths and 2 widths",),
        ),
        (
            lambda: cnn_space().check(ElasticChoice(skipped=(3, 0), ratios=(1.0, 1.0))),
            ("skip 0 to 2",),
        ),
        (
            lambda: make_cnn().choose(ElasticChoice(skipped=(0, 0), ratios=(0.3, 1.0))),
            ("ratio 0.3", "(0.25, 0.5, 1.0)"),
        ),
        (lambda: calibrate_norms(make_cnn(), cnn_space().largest(), []), ("no batches",)),
        (
            lambda: make_cnn().record_norms(
                calibrate_norms(make_cnn(), cnn_space().smallest(), [(images(),)])
            ),
            ("2 channels", "batch norm of 8"),
        ),
        (
            lambda: export_supernet(make_cnn(), Path("m"), inputs=["x"], outputs=["y"], keep=0),
            ("keep is 0: keep 1",),
        ),
    ],
)
def test_errors_teach(make: Callable[[], object], words: Told) -> None:
    with pytest.raises(ValueError, match=facts(*words)):
        make()
