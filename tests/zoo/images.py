"""Image models in plain torch, small and with random weights; each takes [n, 3, 32, 32]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

CLASSES = 5


def conv(
    before: int, after: int, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Module:
    """Convolution, normalisation, activation."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def ended(*body: nn.Module, width: int) -> nn.Module:
    """A body, the mean over its map, and a linear layer."""
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


class Residual(nn.Module):
    """Residual block: input plus ``inner``, which keeps the shape."""

    def __init__(self, *inner: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner(x))


def resnet(groups: int = 1) -> nn.Module:
    blocks = [
        Residual(conv(16, 16, groups=groups), nn.Conv2d(16, 16, 3, padding=1), last=nn.ReLU())
        for _ in range(3)
    ]
    return ended(conv(3, 16, stride=2), *blocks, width=16)


def regnet() -> nn.Module:
    return resnet(groups=4)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1)
        )
        self.last = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.last(self.inner(x))


def _inverted(width: int, activation: nn.Module, *, gate: bool) -> nn.Module:
    wide = 2 * width
    inner = [
        nn.Conv2d(width, wide, 1),
        nn.BatchNorm2d(wide),
        activation,
        nn.Conv2d(wide, wide, 3, padding=1, groups=wide),
        nn.BatchNorm2d(wide),
        activation,
    ]
    if gate:
        inner.append(Gate(wide))
    return Residual(*inner, nn.Conv2d(wide, width, 1), nn.BatchNorm2d(width))


def mobilenet_v2() -> nn.Module:
    blocks = [_inverted(8, nn.ReLU6(), gate=False) for _ in range(3)]
    return ended(conv(3, 8, stride=2), *blocks, width=8)


def mobilenet_v3() -> nn.Module:
    blocks = [_inverted(8, nn.Hardswish(), gate=True) for _ in range(3)]
    return ended(conv(3, 8, stride=2), *blocks, width=8)


def efficientnet() -> nn.Module:
    blocks = [_inverted(8, nn.SiLU(), gate=True) for _ in range(3)]
    return ended(conv(3, 8, stride=2), *blocks, width=8)


class Dense(nn.Module):
    """Joined to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = conv(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], 1)


def densenet() -> nn.Module:
    one = [Dense(8), Dense(12), conv(16, 8, kernel=1), nn.AvgPool2d(2)]
    two = [Dense(8), Dense(12), conv(16, 8, kernel=1)]
    return ended(conv(3, 8, stride=2), *one, *two, width=8)


class Branches(nn.Module):
    """Parallel ways that are joined, as in Inception and SqueezeNet."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


def inception() -> nn.Module:
    def module() -> nn.Module:
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(12, 4, kernel=1))
        five = nn.Sequential(conv(12, 4, kernel=1), conv(4, 4, kernel=5))
        return Branches(conv(12, 4, kernel=1), five, pool)

    return ended(conv(3, 12, stride=2), module(), module(), module(), width=12)


def squeezenet() -> nn.Module:
    def fire() -> nn.Module:
        return nn.Sequential(conv(16, 4, kernel=1), Branches(conv(4, 8, kernel=1), conv(4, 8)))

    return ended(conv(3, 16, stride=2), fire(), fire(), nn.Conv2d(16, 16, 1), width=16)


class Shuffle(nn.Module):
    """Half of the channels go on, half through convolutions; then they are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.inner = nn.Sequential(conv(half, half, groups=half), conv(half, half, kernel=1))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.inner(right)], 1)
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shufflenet() -> nn.Module:
    return ended(conv(3, 8, stride=2), Shuffle(8), Shuffle(8), Shuffle(8), width=8)


def group_norm() -> nn.Module:
    blocks = [Residual(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)) for _ in range(3)]
    return ended(nn.Conv2d(3, 8, 3, 2, 1), *blocks, width=8)


class Last(nn.Module):
    """Channels last, normalised, and back: ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.mix(x).permute(0, 2, 3, 1))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return ended(nn.Conv2d(3, 8, 4, 4), Last(8), Last(8), Last(8), width=8)


class Patches(nn.Module):
    """Patches as tokens, with a class token and positions, through layers: a vision transformer."""

    def __init__(self, layers: nn.ModuleList, width: int = 16) -> None:
        super().__init__()
        self.embed, self.layers = nn.Conv2d(3, width, 8, 8), layers
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(n, -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def vit() -> nn.Module:
    layer = {"batch_first": True, "norm_first": True, "dropout": 0.0}
    return Patches(nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **layer) for _ in range(3)))


class Mixer(nn.Module):
    """Layers over tokens, and over channels: MLP-Mixer."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_tokens, self.over_width = nn.Linear(tokens, tokens), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + fn.gelu(self.over_tokens(self.norms[0](x).transpose(1, 2))).transpose(1, 2)
        return x + fn.gelu(self.over_width(self.norms[1](x)))


def mixer() -> nn.Module:
    return Patches(nn.ModuleList(Mixer(17, 16) for _ in range(3)))


class Windows(nn.Module):
    """Attention in windows of 4 x 4, every other time shifted and masked: Swin."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, CLASSES)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for shift in (0, 2, 0):
            x = x + self._attend(x, shift)
        return self.head(x.mean((1, 2)))

    def _attend(self, x: Tensor, shift: int) -> Tensor:
        n, h, w, c = x.shape
        x = torch.roll(x, (-shift, -shift), (1, 2)) if shift else x
        x = x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.inward(x).reshape(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2)
        if shift:
            scores = scores.view(n, 4, 2, 16, 16) + self.mask[None, :, None]
            scores = scores.view(-1, 2, 16, 16)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
        x = self.outward(x).view(n, h // 4, w // 4, 4, 4, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return torch.roll(x, (shift, shift), (1, 2)) if shift else x


class Upsampled(nn.Module):
    """A map that is made larger again, and joined: a small segmenter's body."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = conv(3, 8, stride=2), conv(8, 3)
        self.rest = ended(conv(6, 8), width=8)

    def forward(self, x: Tensor) -> Tensor:
        y = fn.interpolate(self.up(self.down(x)), size=(32, 32), mode="nearest")
        return self.rest(torch.cat([x, y], 1))


IMAGES = {
    "VGG": vgg,
    "ResNet": resnet,
    "RegNet": regnet,
    "MobileNetV2": mobilenet_v2,
    "MobileNetV3": mobilenet_v3,
    "EfficientNet": efficientnet,
    "DenseNet": densenet,
    "Inception": inception,
    "SqueezeNet": squeezenet,
    "ShuffleNet": shufflenet,
    "GroupNorm ResNet": group_norm,
    "ConvNeXt": convnext,
    "ViT": vit,
    "MLP-Mixer": mixer,
    "Swin": Windows,
    "Upsampling": Upsampled,
}
