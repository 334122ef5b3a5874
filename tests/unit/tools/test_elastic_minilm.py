"""The elastic MiniLM's own steps, on a tiny encoder whose parts have the same names."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offramp.supernet.training import ElasticModule, extract
from offramp.tools.zoo.elastic_minilm import (
    RATIOS,
    accuracy,
    batches,
    elastic_space,
    sort_hidden_units,
    train,
)
from offramp.tools.zoo.minilm_sentiment import Reviews


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.contract(functional.gelu(self.expand(x + bias)))


class TinyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(6))


class TinyClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = TinyEncoder(), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder.words(input_ids)
        for layer in self.encoder.layers:
            x = layer(x, 0.0 * attention_mask[:, :, None])
        return self.classifier((x * attention_mask[:, :, None]).mean(1))


def reviews(count: int = 64) -> Reviews:
    """The first of six words says the class; the others are any, or padding."""
    random = np.random.default_rng(0)
    label = (np.arange(count) % 2).astype(np.uint8)
    ids = random.integers(4, 20, (count, 6))
    ids[:, 0] = 2 + label
    mask = (np.arange(6) < random.integers(2, 7, (count, 1))).astype(np.int64)
    return Reviews(input_ids=ids * mask, attention_mask=mask, label=label)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return TinyClassifier().eval()


def test_sorting_hidden_units_changes_no_answer_and_puts_the_important_first(
    model: nn.Module,
) -> None:
    ((inputs, labels),) = batches(reviews(), [torch.arange(64)])
    with torch.no_grad():  # a unit that nothing reads, and one that is read more than all others
        layer = model.get_submodule("encoder.layers.1")
        layer.get_parameter("contract.weight")[:, 0] = 0.0
        layer.get_parameter("contract.weight")[:, 9] *= 100.0
        unread, most_read = layer.get_parameter("expand.weight")[[0, 9]]
        before = model(*inputs)
    sort_hidden_units(model, reviews())
    # Sums of the same products in another order.
    torch.testing.assert_close(model(*inputs), before, rtol=1e-5, atol=1e-4)
    weight = layer.get_parameter("expand.weight")
    assert torch.equal(weight[0], most_read)
    assert torch.equal(weight[-1], unread)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(labels) == 64


def test_batches_are_cut_to_their_longest_review() -> None:
    every = reviews()
    lengths = every.attention_mask.sum(1)
    index = torch.from_numpy(np.flatnonzero(lengths == 3))
    (((ids, mask), labels),) = batches(every, [index])
    assert ids.shape == mask.shape == (len(index), 3)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, torch.from_numpy(every.label[index].astype(np.int64)))


def test_half_of_the_layers_may_be_skipped_the_last_but_one_first() -> None:
    space = elastic_space(6)
    skip = space.depth[0].skip
    assert skip == ("encoder.layers.4", "encoder.layers.2", "encoder.layers.0")
    assert space.width[0].ratios == RATIOS
    assert len(list(space.choices())) == 16


def test_all_subnets_learn_from_the_model(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ModuleType("safetensors.torch")  # minilm reads weights with it, which we do not
    vars(reader)["load_file"] = None
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", reader)
    sample = (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    supernet = ElasticModule(model, elastic_space(6), sample)
    before = copy.deepcopy(supernet.state_dict())
    options = Namespace(
        seed=0, elastic_epochs=12, batch_size=16, learning_rate=1e-2, bfloat16=False
    )
    train(supernet, reviews(), options, steps=40)
    changed = [not torch.equal(supernet.state_dict()[name], old) for name, old in before.items()]
    assert all(changed)
    assert accuracy(extract(supernet, supernet.space.largest()), reviews()) > 0.9
