"""Tiny supernets in torch, and their subnets made there by hand: the reference that slices meet.

Each module takes its sizes as arguments; a subnet is a module of smaller sizes whose parameters are
the first parts of the supernet's (:func:`sliced_from`), with blocks left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs import SubnetChoice

CLASSES = 5
_Module = TypeVar("_Module", bound=nn.Module)


class Bottleneck(nn.Module):
    """OFA's block: 1x1 to the inner channels, 3x3 among them, 1x1 back, and the input added."""

    def __init__(self, width: int, inner: int, *, grouped: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        groups = inner if grouped else 1
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False, groups=groups)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(x + self.bn3(self.conv3(y)))


class ElasticCnn(nn.Module):
    """A stem, three bottlenecks at 8 x 8, a pool and a classifier."""

    def __init__(
        self, inner: Sequence[int] = (8, 8, 8), *, width: int = 6, grouped: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Bottleneck(width, i, grouped=grouped) for i in inner)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class MixerBlock(nn.Module):
    """Block of an MLP-Mixer: over tokens, then over channels."""

    def __init__(self, tokens: int, width: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(
            nn.Linear(tokens, inner), nn.GELU(), nn.Linear(inner, tokens)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class ElasticMixer(nn.Module):
    """Two mixer blocks over 6 tokens of width 8."""

    def __init__(self, inner: Sequence[int] = (12, 12)) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(MixerBlock(6, 8, i) for i in inner)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class EncoderLayer(nn.Module):
    """Layer of BERT: attention over heads of fixed size, then two linear layers, post-norm."""

    def __init__(self, width: int, heads: int, size: int, inner: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.size, self.fused = heads, size, fused
        self.query = nn.Linear(width, heads * size)
        self.key = nn.Linear(width, heads * size)
        self.value = nn.Linear(width, heads * size)
        self.out = nn.Linear(heads * size, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        if self.fused:
            context = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            context = context.transpose(1, 2).flatten(2)
        else:
            scores = q @ k.transpose(-1, -2) / self.size**0.5 + mask
            context = (torch.softmax(scores, -1) @ v).transpose(1, 2)
            context = context.reshape(x.shape[0], x.shape[1], self.heads * self.size)
        x = self.norm1(x + self.out(context))
        y = torch.nn.functional.gelu(self.inner(x))
        return self.norm2(x + self.outer(y))


class ElasticBert(nn.Module):
    """DynaBERT's (Hou et al. 2020): heads and inner widths elastic, and the number of layers."""

    def __init__(
        self,
        heads: Sequence[int] = (4, 4, 4),
        inner: Sequence[int] = (16, 16, 16),
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(
            EncoderLayer(8, h, 2, i, fused=fused) for h, i in zip(heads, inner, strict=True)
        )
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Set parameters and statistics to values that show every mistake; in evaluation mode."""
    maker = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=maker)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            elif tensor.ndim > 1:
                tensor.copy_(noise / (tensor[0].numel() ** 0.5))
            else:
                tensor.add_(0.3 * noise)
    return module.eval()


def sliced_from(full: nn.Module, small: _Module) -> _Module:
    """Fill a module with the first parts of the parameters of a larger one, by name."""
    state = full.state_dict()
    with torch.no_grad():
        for name, tensor in small.state_dict().items():
            tensor.copy_(state[name][tuple(slice(0, n) for n in tensor.shape)])
    return small.eval()


def without(blocks: nn.ModuleList, *dropped: int) -> nn.ModuleList:
    """The blocks but some."""
    return nn.ModuleList(b for i, b in enumerate(blocks) if i not in dropped)


def inputs_for(module: nn.Module, rows: int, seed: int = 1) -> dict[str, NDArray[np.generic]]:
    """Random inputs by name."""
    rng = np.random.default_rng(seed)
    if isinstance(module, ElasticCnn):
        return {"image": rng.standard_normal((rows, 3, 8, 8)).astype(np.float32)}
    if isinstance(module, ElasticMixer):
        return {"patches": rng.standard_normal((rows, 6, 4)).astype(np.float32)}
    mask = (np.arange(7) < rng.integers(2, 8, (rows, 1))).astype(np.int64)
    return {"input_ids": rng.integers(0, 30, (rows, 7)), "attention_mask": mask}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: for little work, more threads only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def answers(module: nn.Module, inputs: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
    """Return torch's outputs."""
    with torch.no_grad(), one_thread():
        found: NDArray[np.float32] = module(
            **{name: torch.from_numpy(array) for name, array in inputs.items()}
        ).numpy()
    return found


def exported(
    module: nn.Module, *, dynamo: bool = False, free_length: bool = False
) -> onnx.ModelProto:
    """The module as one of torch's two exporters writes it, with any batch size."""
    inputs = {name: torch.from_numpy(a) for name, a in inputs_for(module, 3).items()}
    buffer = io.BytesIO()
    free = {0: "batch", 1: "tokens"} if free_length else {0: "batch"}
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(
                module, tuple(inputs.values()), dynamo=True, verbose=False,
                input_names=list(inputs), output_names=["scores"],
                dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in inputs),
            )  # fmt: skip
            return program.model_proto
        torch.onnx.export(
            module, tuple(inputs.values()), buffer, dynamo=False, input_names=list(inputs),
            output_names=["scores"],
            dynamic_axes={**dict.fromkeys(inputs, free), "scores": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def read(module: nn.Module, folder: Path, *, dynamo: bool = False) -> SourceModel:
    """The module exported, and read as a user's file is."""
    path = folder / f"{type(module).__name__.lower()}.onnx"
    onnx.save(exported(module, dynamo=dynamo), path)
    return read_model(path)


SUPERNETS: dict[str, Callable[[], nn.Module]] = {
    "cnn": ElasticCnn,
    "depthwise": lambda: ElasticCnn(grouped=True),
    "mixer": ElasticMixer,
    "bert": ElasticBert,
    "fused": lambda: ElasticBert(fused=True),
}
_CONVOLUTIONS = [f"/blocks.{i}/conv{j}/Conv" for i in range(3) for j in (1, 2)]
_HEADS = [f"/layers.{i}/{name}/MatMul" for i in range(3) for name in ("query", "key", "value")]
_OF_CNN: dict[str, Any] = {
    "depth": [{"skip": ["/blocks.2", "/blocks.1"]}],
    "width": [{"weights": _CONVOLUTIONS, "ratios": [0.25, 0.5, 0.75]}],
}
_OF_BERT: dict[str, Any] = {
    "depth": [{"skip": ["/layers.1", "/layers.2"]}],
    "width": [
        {"weights": _HEADS, "ratios": [0.25, 0.5]},
        {"weights": [f"/layers.{i}/inner/MatMul" for i in range(3)], "ratios": [0.25, 0.5]},
    ],
}
_OF_MIXER: dict[str, Any] = {
    "depth": [{"skip": ["/blocks.1"]}],
    "width": [
        {
            "weights": [
                f"/blocks.{i}/over_{of}/over_{of}.0/MatMul"
                for i in range(2)
                for of in ("tokens", "channels")
            ],
            "ratios": [0.25, 0.5],
        }
    ],
}
SPECS: dict[str, dict[str, Any]] = {
    "cnn": _OF_CNN,
    "depthwise": _OF_CNN,
    "mixer": _OF_MIXER,
    "bert": _OF_BERT,
    "fused": _OF_BERT,
}
"""Elastic parts of each model."""


def by_hand(kind: str, full: nn.Module, choice: SubnetChoice) -> nn.Module:
    """The subnet that a choice of SPECS means, made in torch."""
    skipped, shares = choice.skipped[0], choice.ratios
    small: nn.Module
    if kind in ("cnn", "depthwise"):
        made = sliced_from(full, ElasticCnn((int(8 * shares[0]),) * 3, grouped=kind != "cnn"))
        made.blocks = without(made.blocks, *[2, 1][:skipped])
        small = made
    elif kind == "mixer":
        mixer = sliced_from(full, ElasticMixer((int(12 * shares[0]),) * 2))
        mixer.blocks = without(mixer.blocks, *[1][:skipped])
        small = mixer
    else:
        heads, inner = (int(4 * shares[0]),) * 3, (int(16 * shares[1]),) * 3
        bert = sliced_from(full, ElasticBert(heads, inner, fused=kind == "fused"))
        bert.layers = without(bert.layers, *[1, 2][:skipped])
        small = bert
    return small
