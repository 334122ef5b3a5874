"""Four small classifiers in plain torch, which train in minutes on one or two cores.

Three take the images of the shipped example, uint8 [batch, 1, 28, 28], one takes token ids;
``benchmarks/trained_models.py`` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
"""Number of classes of the images."""
_PIXELS, _SIDE = 28 * 28, 28
_MASKED = -10_000.0
"""Value added to the scores of padding; finite in every float type."""


def normalised(image: Tensor) -> Tensor:
    """Return pixels scaled to about mean 0 and deviation 1, float32, of the same shape."""
    return (image.float() - 72.94) / 90.02


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward block, each with a norm before it and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output of both blocks for x [batch, tokens, width]; scores get ``bias``."""
        x = x + self.attend(self.attention_norm(x), bias)
        return x + self.contract(functional.gelu(self.expand(self.norm(x))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the projected attention of all heads: [batch, tokens, width]."""
        batch, tokens, width = x.shape
        size = width // self.heads

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, self.heads, size).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = query @ key.transpose(2, 3) / math.sqrt(size)
        if bias is not None:
            scores = scores + bias
        attended = functional.softmax(scores, dim=3) @ value
        mixed: Tensor = self.mix(attended.transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class VisionTransformer(nn.Module):
    """A ViT (Dosovitskiy et al. 2021): patches and a class token, from which it answers."""

    def __init__(self, *, width: int = 96, depth: int = 8, heads: int = 4, patch: int = 7) -> None:
        super().__init__()
        tokens = (_SIDE // patch) ** 2 + 1
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        patches = self.patches(normalised(image)).flatten(2).transpose(1, 2)
        first = self.first.expand(patches.shape[0], -1, -1)
        x = torch.cat([first, patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classifier(self.norm(x[:, 0]))
        return logits


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, linear projection, and a shortcut where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * inputs
        self.shortcut = stride == 1 and inputs == outputs
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, outputs, height / stride, width / stride]."""
        y: Tensor = self.inner(x)
        return x + y if self.shortcut else y


class MobileNet(nn.Module):
    """A MobileNetV2 (Sandler et al. 2018) for small images.

    ``stages`` has, for each stage, its channels, number of blocks, and stride of the first block.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, int, int]] = ((16, 2, 1), (24, 3, 1), (40, 4, 2), (64, 3, 1)),
        *,
        stem: int = 16,
        last: int = 256,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.ReLU6()
        )
        blocks: list[nn.Module] = []
        inputs = stem
        for outputs, count, stride in stages:
            for position in range(count):
                once = stride if position == 0 else 1
                blocks.append(InvertedResidual(inputs, outputs, once, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(
            nn.Conv2d(inputs, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6()
        )
        self.classifier = nn.Linear(last, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        features = self.last(self.blocks(self.stem(normalised(image))))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class ResidualMlp(nn.Module):
    """A ResNet for tables (Gorishniy et al. 2021); the pixels are used as columns."""

    def __init__(self, *, width: int = 256, hidden: int = 512, depth: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(_PIXELS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width),
                nn.Linear(width, hidden),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(hidden, width),
            )
            for _ in range(depth)
        )
        self.norm = nn.BatchNorm1d(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 10] of uint8 images [batch, 1, 28, 28]."""
        x = self.stem(normalised(image).flatten(1))
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.classifier(functional.relu(self.norm(x)))
        return logits


class TextTransformer(nn.Module):
    """An encoder over words, which answers from the mean over all words except padding."""

    def __init__(
        self, *, words: int, tokens: int, width: int = 64, depth: int = 6, heads: int = 4
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits [batch, 2] of int64 [batch, tokens]; mask: 1 for words, 0 for padding."""
        mask = attention_mask.float()
        bias = (1.0 - mask[:, None, None, :]) * _MASKED
        x = self.dropout(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x, bias)
        counted = (self.norm(x) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.classifier(self.dropout(counted))
        return logits
