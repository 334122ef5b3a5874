"""Models of text, sequences, points and tables in plain torch, small and with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

CLASSES = 5
WIDTH = 16


def _heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


class Attention(nn.Module):
    """Self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (_heads(part) for part in self.inward(x).split(WIDTH, 2))
        return self.outward(_merged(self._attend(q, k, v, bias)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return fn.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Written(Attention):
    """The same written out, which torch exports to opsets before 14 too."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / 8**0.5
        return (scores + bias).softmax(-1) @ v


class Encoder(nn.Module):
    """Tokens with a mask: BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.register_buffer("ids", torch.arange(64).unsqueeze(0))
        self.attend = nn.ModuleList(Written() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.feed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(self.ids[:, : ids.shape[1]])
        bias = (1.0 - mask[:, None, None, :].float()) * -1e4
        for attend, norm, feed in zip(self.attend, self.norms, self.feed, strict=True):
            x = norm(x + attend(x, bias))
            x = x + fn.gelu(feed(x))
        return self.head(torch.tanh(x[:, 0]))


class Decoder(nn.Module):
    """Causal attention, answered at the last token that is no padding: GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.attend = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("causal", torch.tril(torch.ones(64, 64)).bool().view(1, 1, 64, 64))

    def forward(self, ids: Tensor) -> Tensor:
        n, tokens = ids.shape
        at = torch.arange(tokens).unsqueeze(0).expand(n, tokens)
        x = self.words(ids) + self.positions(at)
        for attend in self.attend:
            x = x + attend(x, self.causal[:, :, :tokens, :tokens])
        last = ((ids != 0).sum(1) - 1).clamp(min=0)
        return self.head(x[torch.arange(n), last])


class Rotary(nn.Module):
    """Rotary positions, RMS norms, gated layers, the mean over tokens: Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.inward = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        angles = torch.arange(64)[:, None] / 100 ** (torch.arange(4) / 4)[None]
        self.register_buffer("cos", torch.cos(torch.cat([angles, angles], 1)))
        self.register_buffer("sin", torch.sin(torch.cat([angles, angles], 1)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for inward, gates in zip(self.inward, self.gates, strict=True):
            q, k, v = (_heads(part) for part in inward(self._norm(x)).split(WIDTH, 2))
            x = x + _merged(fn.scaled_dot_product_attention(self._turn(q), self._turn(k), v))
            gate, up = gates(self._norm(x)).chunk(2, -1)
            x = x + fn.silu(gate) * up
        return self.head(x.mean(1))

    def _norm(self, x: Tensor) -> Tensor:
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def _turn(self, x: Tensor) -> Tensor:
        tokens = x.shape[2]
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * self.cos[:tokens] + turned * self.sin[:tokens]


class Recurrent(nn.Module):
    """The last state of an LSTM or GRU of two layers."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids))[0][:, -1])


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class Parallel(nn.Module):
    """Parallel convolutions of several widths: TextCNN."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.ways = nn.ModuleList(nn.Conv1d(WIDTH, 8, size) for size in (2, 3, 4))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        return self.head(torch.cat([fn.relu(way(x)).amax(2) for way in self.ways], 1))


class Temporal(nn.Module):
    """Dilated causal convolutions: TCN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(4, WIDTH, 1), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = x + fn.relu(layer(fn.pad(x, (2 * 2**i, 0))))
        return self.head(x.mean(2))


class Points(nn.Module):
    """Layers for each point, and their maximum: PointNet."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16), (16, 16), (16, 32))
        self.layers = nn.ModuleList(nn.Conv1d(*size, 1) for size in sizes)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = fn.relu(layer(x))
        return self.head(x.amax(2))


def volumes() -> nn.Module:
    layers: list[nn.Module] = []
    for before in (2, 8, 8):
        layers += [nn.Conv3d(before, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU()]
    end = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers, *end)


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES), nn.LogSoftmax(-1))


class TableBlock(nn.Module):
    """Normalised, through a layer, and added."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def table_resnet() -> nn.Module:
    return nn.Sequential(*(TableBlock() for _ in range(4)), nn.Linear(WIDTH, CLASSES))


class Features(nn.Module):
    """Every feature is a token, joined to a class token: FT-Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.token = (
            nn.Parameter(torch.randn(16, WIDTH)),
            nn.Parameter(torch.randn(1, 1, WIDTH)),
        )
        self.attend = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None] * self.weight
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        for attend in self.attend:
            x = x + attend(x)
        return self.head(x[:, 0])


class Towers(nn.Module):
    """Two towers that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(2)
        )
        self.rest = nn.Sequential(
            nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.rest(torch.cat([self.left(left), self.right(right)], 1))


TEXTS = {
    "GPT-2": Decoder,
    "Llama": Rotary,
    "LSTM": lstm,
    "GRU": gru,
    "TextCNN": Parallel,
}
MASKED_TEXTS = {"BERT": Encoder}
OTHERS = {
    "TCN": (Temporal, (4, 24)),
    "PointNet": (Points, (20, 3)),
    "3-D CNN": (volumes, (2, 6, 8, 8)),
    "MLP with LogSoftmax": (mlp, (WIDTH,)),
    "Tabular ResNet": (table_resnet, (WIDTH,)),
    "FT-Transformer": (Features, (WIDTH,)),
}
PAIRS = {"Two towers": Towers}
