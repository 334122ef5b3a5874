"""Models of well-known sizes in torch, with random weights, to measure time and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[str, ...]]
"""A model, and the names of its inputs."""


class Bert(nn.Module):
    """BERT-base: 12 layers, 768 wide, 12 heads, 30,522 words (Devlin et al., arXiv 1810.04805)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        width = 768
        self.words, self.places = nn.Embedding(30_522, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(_Layer(width, heads=12) for _ in range(12))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, classes)

        self.apply(_as_bert_begins)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits [batch, classes] of ids and mask [batch, tokens]."""
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        bias = (1.0 - mask[:, None, None].float()) * -1e4
        for layer in self.layers:
            x = layer(x, bias)
        logits: Tensor = self.head(self.pooler(x[:, 0]).tanh())
        return logits


def _as_bert_begins(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        tokens, width = x.shape[1:]

        def split(y: Tensor) -> Tensor:
            return y.reshape(-1, tokens, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5 + bias
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, tokens, width)
        x = self.norms[0](x + self.out(mixed))
        result: Tensor = self.norms[1](x + self.down(nn.functional.gelu(self.up(x))))
        return result


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_normed(before, width, 1), nn.ReLU(), *_normed(width, width, 3, stride), nn.ReLU(),
            *_normed(width, after, 1),
        )  # fmt: skip
        same = before == after and stride == 1
        self.short = nn.Identity() if same else nn.Sequential(*_normed(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.body(x) + self.short(x)).relu()
        return result


def _normed(before: int, after: int, side: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(before, after, side, stride, side // 2, bias=False)
    return conv, nn.BatchNorm2d(after)


def _resnet50(classes: int) -> Made:
    """ResNet-50 (He et al., arXiv 1512.03385): 25.6 million weights with 1,000 classes."""
    blocks: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for index, count in enumerate((3, 4, 6, 3)):
        width = 64 << index
        for block in range(count):
            blocks.append(_Bottleneck(before, width, 2 if index and not block else 1))
            before = 4 * width
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return nn.Sequential(*blocks, *tail), ("image",)


def _convolutions(classes: int) -> Made:
    """Return a small network of four convolutions."""
    widths = (3, 16, 16, 32, 32)
    body = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, 2, 1), nn.ReLU())
    ]
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    return nn.Sequential(*body, *tail), ("image",)


MAKERS: dict[str, Callable[[int], Made]] = {
    "bert": lambda classes: (Bert(classes), ("input_ids", "attention_mask")),
    "resnet50": _resnet50,
    "convolutions": _convolutions,
}
"""Functions from the number of classes to a model, by name."""
