"""Small networks that answer with more than one class: pixels, key points, words, labels, values.

``tools/zoo/task_models.py`` trains them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from offramp.tools.zoo.architectures import EncoderBlock
from offramp.tools.zoo.fashion_resnet import ResidualBlock
from offramp.tools.zoo.garments import CANVAS, KEY_POINTS, KINDS, MEASURES
from offramp.tools.zoo.sentences import CLASSES, LONGEST, WORDS

_MASKED = -10_000.0
"""Value added to the scores of padding; finite in every float type."""

Regions = Sequence[tuple[int, int]]
"""Channels and number of residual blocks of each region; the first region has half the canvas's
side, each further one half the side of the previous."""
REGIONS: Regions = ((16, 1), (48, 12))
"""Regions with nearly all blocks at one resolution, as in common networks: ResNet-101 has 23 of
33."""
THREE_REGIONS: Regions = ((16, 2), (32, 5), (64, 3))
"""Regions as in classifiers, where the last map is small."""


def encoder(regions: Regions) -> nn.Sequential:
    """Make a residual CNN: [batch, 1, s, s] to [batch, channels, s / 2**n, s / 2**n]."""
    channels = regions[0][0]
    layers: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(1, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
    ]
    for number, (width, count) in enumerate(regions):
        for place in range(count):
            layers.append(ResidualBlock(channels, width, 2 if number and not place else 1))
            channels = width
    return nn.Sequential(*layers)


def normalised(image: Tensor) -> Tensor:
    """Return pixels of scenes scaled to a deviation of about 1, float32, of the same shape."""
    return (image.float() - 30.0) / 60.0


class Segmenter(nn.Module):
    """A fully convolutional network (Long et al. 2015), whose class map is enlarged by Resize."""

    def __init__(self, regions: Regions = REGIONS) -> None:
        super().__init__()
        width = regions[-1][0]
        self.encoder = encoder(regions)
        self.mixed = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.classifier = nn.Conv2d(width, KINDS + 1, 1)
        self.factor = 2 ** len(regions)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 11, 56, 56] of uint8 images [batch, 1, 56, 56]."""
        cells = self.classifier(self.mixed(self.encoder(normalised(image))))
        return functional.interpolate(cells, scale_factor=float(self.factor), mode="bilinear")


class KeyPointNet(nn.Module):
    """A simple baseline for poses (Xiao et al. 2018): heat maps from a transposed convolution."""

    def __init__(self, regions: Regions = REGIONS, *, width: int = 24) -> None:
        super().__init__()
        self.encoder = encoder(regions)
        self.larger = nn.Sequential(
            nn.ConvTranspose2d(regions[-1][0], width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.maps = nn.Conv2d(width, KEY_POINTS, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return heat maps [batch, 5, 28, 28], about 0 to 1, of uint8 images [batch, 1, 56, 56]."""
        maps: Tensor = self.maps(self.larger(self.encoder(normalised(image))))
        return maps


def heat_maps(points: Tensor, side: int, *, deviation: float = 1.5) -> Tensor:
    """Draw a bell [batch, points, side, side] around rows and columns [batch, points, 2].

    Points are in pixels of the canvas; the deviation is in cells of the map.
    """
    centres = (points.float() + 0.5) * (side / CANVAS) - 0.5
    cells = torch.arange(side, dtype=torch.float32)
    bells = torch.exp(-((cells - centres[..., None]) ** 2) / (2 * deviation**2))
    return bells[:, :, 0, :, None] * bells[:, :, 1, None, :]


class Labeller(nn.Module):
    """A residual CNN that decides for each label separately."""

    def __init__(self, regions: Regions = THREE_REGIONS) -> None:
        super().__init__()
        self.encoder = encoder(regions)
        self.classifier = nn.Linear(regions[-1][0], KINDS)

    def forward(self, image: Tensor) -> Tensor:
        """Return probabilities [batch, 10] of uint8 images [batch, 1, 56, 56]."""
        logits: Tensor = self.classifier(self.encoder(normalised(image)).mean((2, 3)))
        return logits.sigmoid()


class Measurer(nn.Module):
    """A residual CNN that answers with values; its last map is not averaged: positions matter."""

    def __init__(self, regions: Regions = THREE_REGIONS, *, width: int = 8) -> None:
        super().__init__()
        self.encoder = encoder(regions)
        self.narrowed = nn.Conv2d(regions[-1][0], width, 1)
        side = CANVAS // 2 ** len(regions)
        self.values = nn.Linear(width * side**2, MEASURES)

    def forward(self, image: Tensor) -> Tensor:
        """Return values [batch, 3] of uint8 images [batch, 1, 56, 56]."""
        cells = functional.relu(self.narrowed(self.encoder(normalised(image))))
        values: Tensor = self.values(cells.flatten(1))
        return values


class WordTagger(nn.Module):
    """A transformer encoder over words, which answers for each word."""

    def __init__(self, *, width: int = 128, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits [batch, words, 7] of int64 [batch, words]; the mask is 0 for padding."""
        bias = (1.0 - attention_mask.float()[:, None, None, :]) * _MASKED
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, bias)
        logits: Tensor = self.classifier(self.norm(x))
        return logits
