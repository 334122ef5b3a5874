"""Small torch models whose exports once had no cut points, or cut points without heads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, TOKENS, LAYERS, CLASSES = 16, 12, 3, 3


class SelfAttention(nn.Module):
    """One head of attention with an additive bias and, perhaps, rotary embeddings."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        query, key, value = self.into(x).chunk(3, dim=-1)
        if turns is not None:
            query, key = (_rotated(tensor, *turns) for tensor in (query, key))
        scores = query @ key.transpose(-1, -2) / x.shape[-1] ** 0.5 + bias
        mixed: Tensor = self.out(scores.softmax(-1) @ value)
        return mixed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Layer(nn.Module):
    """A transformer's layer, with the norms in front."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = SelfAttention(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(
        self, x: Tensor, bias: Tensor, turns: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        x = x + self.attention(self.norms[0](x), bias, turns)
        added: Tensor = x + self.inner(self.norms[1](x))
        return added


class Decoder(nn.Module):
    """A GPT-2, or a Llama: causal, reads the ids again for padding and for the last token."""

    def __init__(self, *, rotary: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(200, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.rotary = rotary
        self.register_buffer("speeds", 10 ** -torch.arange(0, 2, 4 / WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x, turns = self.words(ids), None
        if self.rotary:
            angles = places[:, None].float() @ self.speeds[None]
            angles = torch.cat([angles, angles], dim=-1)
            turns = angles.cos(), angles.sin()
        else:
            x = x + self.places(places)
        kept = (places[None] <= places[:, None])[None] & (ids != 0)[:, None]
        bias = torch.where(kept, 0.0, -1e4)
        for layer in self.layers:
            x = layer(x, bias, turns)
        last = ((ids != 0).long() * places).argmax(-1)
        answer: Tensor = self.head(x)[torch.arange(ids.shape[0]), last]
        return answer


class BatchSecond(nn.Module):
    """``nn.TransformerEncoder`` as it is by default, on [sequence, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(0, 1)
        answer: Tensor = self.head(self.encoder(x, src_key_padding_mask=ids == 0).mean(0))
        return answer


class Recurrent(nn.Module):
    """Stacked LSTMs or GRUs on [sequence, batch, width]."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(200, WIDTH)
        self.states = kind(WIDTH, WIDTH, num_layers=LAYERS, **options)
        self.head = nn.Linear(WIDTH * (1 + self.states.bidirectional), CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.states(self.words(ids).transpose(0, 1))[0][-1])
        return answer


class WindowBlock(nn.Module):
    """A Swin's block: windows of 4 by 4 over a map with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        rows, high, wide, width = x.shape
        windows = x.view(rows, high // 4, 4, wide // 4, 4, width).transpose(2, 3)
        y = self.layer(windows.reshape(-1, 16, width), torch.zeros(1))
        y = y.view(rows, high // 4, wide // 4, 4, 4, width).transpose(2, 3)
        added: Tensor = x + y.reshape(rows, high, wide, width)
        return added


class ChannelsLast(nn.Module):
    """Windows after a convolution that cuts the image into patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, WIDTH, 2, 2), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(WindowBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.patches(image).permute(0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.head(x.mean((1, 2)))
        return answer


def convolutions(convolution: Any, norm: Any, pool: Any) -> nn.Module:
    """A plain chain over a signal or a video."""
    blocks = [
        nn.Sequential(convolution(before, 8, 3, padding=1), norm(8), nn.ReLU())
        for before in (4, 8, 8)
    ]
    return nn.Sequential(*blocks, pool(1), nn.Flatten(), nn.Linear(8, CLASSES))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, an input, and what is expected of its cuts."""

    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    cuts: int
    form: str
    dynamic: tuple[int, ...] = ()
    """Dimensions of the input, in addition to the batch, that may be dynamic."""
    written_in: bool = False
    """True if torch's newer exporter still writes these sizes into the graph."""


def _ids() -> Tensor:
    return torch.randint(1, 200, (2, TOKENS))


def _text(make: Callable[[], nn.Module], cuts: int, **options: Any) -> Family:
    options = {"dynamic": (1,), **options}
    return Family(make=make, sample=_ids, cuts=cuts, form="tokens", **options)


def _recurrent(kind: Any, **options: Any) -> Family:
    return _text(lambda: Recurrent(kind, **options), LAYERS - 1, written_in=True)


FAMILIES = {
    "GPT-2": _text(lambda: Decoder(rotary=False), 2 * LAYERS - 1),
    "Llama": _text(lambda: Decoder(rotary=True), 2 * LAYERS - 1),
    # whatever is said to be dynamic, torch writes this one's length into the graph
    "TransformerEncoder": _text(BatchSecond, 2 * LAYERS - 1, dynamic=()),
    "LSTM": _recurrent(nn.LSTM),
    "GRU": _recurrent(nn.GRU),
    "bidirectional LSTM": _recurrent(nn.LSTM, bidirectional=True),
    "Swin": Family(
        make=ChannelsLast, sample=lambda: torch.randn(2, 3, 16, 16), cuts=LAYERS, form="map"
    ),
    "signal": Family(
        make=lambda: convolutions(nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d),
        sample=lambda: torch.randn(2, 4, 32),
        cuts=2,
        form="map",
        dynamic=(2,),
    ),
    "video": Family(
        make=lambda: convolutions(nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d),
        sample=lambda: torch.randn(2, 4, 4, 8, 8),
        cuts=2,
        form="map",
    ),
}


def export(name: str, path: Path, *, dynamic: bool, dynamo: bool) -> None:
    """Export a family's model with a dynamic batch, and other sizes if ``dynamic``."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model, sample = family.make().eval(), family.sample()
    axes = (0, *(family.dynamic if dynamic else ()))
    dims = torch.export.Dim
    how: dict[str, Any] = {"dynamic_axes": {"x": {axis: f"size{axis}" for axis in axes}}}
    how["opset_version"] = 17
    if dynamo:
        sizes = {axis: dims.AUTO if axis else dims.DYNAMIC for axis in axes}
        how = {"dynamic_shapes": (sizes,), "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's about its own ways
        torch.onnx.export(
            model,
            (sample,),
            str(path),
            dynamo=dynamo,
            input_names=["x"],
            output_names=["logits"],
            **how,
        )
