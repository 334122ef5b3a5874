"""Families of models: how each is made, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod, sqrt

import torch
from torch import Tensor, nn

from tests.zoo import images, pretrained, published, sequences

TOKENS, OTHER_TOKENS = 16, 9
Inputs = Callable[[int, int], dict[str, Tensor]]
"""Function from a number of rows and, where possible, a length to inputs by name."""


@dataclass(frozen=True)
class Family:
    """A topology: how it is made, and inputs for it."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    package: str | None = None
    """Package that it needs."""
    lengths: tuple[int, int] = (TOKENS, OTHER_TOKENS)
    """The one that is exported, and another that is tried where it is dynamic."""
    dynamic: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the length, by input, if it may be dynamic."""


def ids(rows: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(1, 50, (rows, length))}


def masked_ids(rows: int, length: int) -> dict[str, Tensor]:
    """Sequences of all lengths, the longest in front, so that traced models see one without
    padding."""
    counts = torch.randint(2, length + 1, (rows, 1))
    counts[0] = length
    mask = (torch.arange(length)[None] < counts).long()
    return {"ids": ids(rows, length)["ids"] * mask, "mask": mask}


def normal(*sizes: int, names: tuple[str, ...] = ("x",)) -> Inputs:
    return lambda rows, _: {name: torch.randn(rows, *sizes) for name in names}


def signal(rows: int, length: int) -> dict[str, Tensor]:
    return {"signal": torch.randn(rows, length)}


def randomised(model: nn.Module) -> nn.Module:
    """Draw all weights at random: some models initialise heads with zeros, or blocks with tiny
    values, and then all samples have the same answer.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, sqrt(1.5 / max(1, prod(weight.shape[1:]))))
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
            else:
                weight.uniform_(0.5, 1.5)
    return model


def _plain() -> Iterator[Family]:
    for name, make in images.IMAGES.items():
        yield Family(name, make, normal(3, 32, 32))
    for name, make in sequences.MASKED_TEXTS.items():
        yield Family(name, make, masked_ids, dynamic={"ids": 1, "mask": 1})
    for name, make in sequences.TEXTS.items():
        yield Family(name, make, ids, dynamic={"ids": 1})
    for name, (make, sizes) in sequences.OTHERS.items():
        yield Family(name, make, normal(*sizes))
    for name, make in sequences.PAIRS.items():
        yield Family(name, make, normal(sequences.WIDTH, names=("left", "right")))


def _installed() -> Iterator[Family]:
    for name, (package, make, side) in published.IMAGES.items():
        yield Family(name, _random(make), normal(3, side, side), package)
    for name, (kind, settings) in pretrained.IMAGES.items():
        size = settings.get("image_size", 32)
        make = pretrained.image(kind, settings)
        yield Family(name, _random(make), normal(3, size, size), "transformers")
    for name, make in pretrained.texts().items():
        dynamic = {"ids": 1, "mask": 1}
        yield Family(name, _random(make), masked_ids, "transformers", dynamic=dynamic)
    for name, (make, given) in pretrained.AUDIO.items():
        if isinstance(given, int):
            yield Family(
                name, _random(make), signal, "transformers", (given, given // 2), {"signal": 1}
            )
        else:
            yield Family(name, _random(make), normal(*given), "transformers")


def _random(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: randomised(make())


FAMILIES = {family.name: family for family in (*_plain(), *_installed())}
