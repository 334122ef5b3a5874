"""Small decoders and encoder-decoders with random weights, exported under optimum's names."""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offramp.generation.bundle.text_model import SkippedLayers, TextCriterion
from offramp.generation.graphs.text_graphs import TextExit, TextGraphs, cut_export, read_export
from offramp.generation.stages.onnx_text import OnnxTextBackend

LAYERS, WIDTH, HEADS, VOCABULARY, PLACES = 4, 16, 2, 40, 48
START = 1
MASKED = -1e9
Pair = tuple[Tensor, Tensor]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.size).transpose(1, 2)

    def of(self, x: Tensor) -> Pair:
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x: Tensor, pair: Pair, bias: Tensor) -> Tensor:
        scores = self.split(self.query(x)) @ pair[0].transpose(2, 3) / math.sqrt(self.size)
        found = functional.softmax(scores + bias, dim=3) @ pair[1]
        return self.mix(found.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class _Layer(nn.Module):
    """Self-attention, attention to the prompt if there is an encoder, and a feed-forward block."""

    def __init__(self, *, crosses: bool, post_norm: bool) -> None:
        super().__init__()
        self.crosses, self.post_norm = crosses, post_norm
        self.attention = _Attention(WIDTH, HEADS)
        self.cross = _Attention(WIDTH, HEADS) if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def before(self, x: Tensor, number: int) -> Tensor:
        return x if self.post_norm else self.norms[number](x)

    def after(self, x: Tensor, number: int) -> Tensor:
        return self.norms[number](x) if self.post_norm else x

    def forward(
        self, x: Tensor, past: Pair | None, bias: Tensor, prompt: Pair | None, prompt_bias: Any
    ) -> tuple[Tensor, Pair]:
        h = self.before(x, 0)
        key, value = self.attention.of(h)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        x = self.after(x + self.attention(h, (key, value), bias), 0)
        if self.cross is not None and prompt is not None:
            x = self.after(x + self.cross(self.before(x, 1), prompt, prompt_bias), 1)
        h = functional.gelu(self.inner(self.before(x, 2)))
        return self.after(x + self.outer(h), 2), (key, value)


class SmallText(nn.Module):
    """A decoder with learnt positions, and an encoder before it if asked for.

    The LM head has the weights of the embedding.
    """

    def __init__(self, *, encodes: bool, post_norm: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.post_norm = post_norm
        self.layers = nn.ModuleList(
            _Layer(crosses=encodes, post_norm=post_norm) for _ in range(LAYERS)
        )
        self.encoder = nn.ModuleList(
            _Layer(crosses=False, post_norm=post_norm) for _ in range(2 if encodes else 0)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.words(ids) + self.places(positions)

    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids, torch.arange(ids.shape[1])[None])
        bias = (1.0 - mask[:, None, None, :].float()) * MASKED
        for layer in self.encoder:
            x, _ = layer(x, None, bias, None, None)
        return x

    def decode(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        past: Sequence[Pair] | None,
        prompt: Sequence[Pair] | None = None,
        prompt_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Pair]]:
        before = past[0][0].shape[2] if past else 0
        total = before + ids.shape[1]
        at = torch.arange(total)
        if positions is None:
            positions = at[None, before:]
        hidden = (at[None, :] > at[before:, None])[None, None]
        if mask is not None:
            hidden = hidden | (mask[:, None, None, :] == 0)
        bias = hidden.float() * MASKED
        prompt_bias = None
        if prompt_mask is not None:
            prompt_bias = (1.0 - prompt_mask[:, None, None, :].float()) * MASKED
        x = self.embed(ids, positions)
        pairs = []
        for n, layer in enumerate(self.layers):
            x, pair = layer(
                x, past[n] if past else None, bias, prompt[n] if prompt else None, prompt_bias
            )
            pairs.append(pair)
        x = x if self.post_norm else self.norm(x)
        return functional.linear(x, self.words.weight), pairs


class _Flat(nn.Module):
    """A model with flat inputs and outputs; ``kind`` says which of its parts is run."""

    def __init__(self, model: SmallText, kind: str, *, mask: bool, positions: bool) -> None:
        super().__init__()
        self.model, self.kind, self.mask, self.positions = model, kind, mask, positions

    def forward(self, ids: Tensor, *rest: Any) -> Any:
        given = list(rest)
        if self.kind == "encoder":
            return self.model.encode(ids, given[0])
        prompt_mask = given.pop(0) if self.kind != "decoder" else None
        mask = given.pop(0) if self.mask else None
        positions = given.pop(0) if self.positions else None
        if self.kind == "first":
            states = given.pop(0)
            prompt = [layer.cross.of(states) for layer in self.model.layers]
            logits, pairs = self.model.decode(ids, mask, positions, None, prompt, prompt_mask)
            both = zip(pairs, prompt, strict=True)
            return (logits, *(t for pair, cross in both for t in (*pair, *cross)))
        step = 2 if self.kind == "decoder" else 4
        groups = [given[i : i + step] for i in range(0, len(given), step)]
        past = [(group[0], group[1]) for group in groups]
        prompt = [(group[2], group[3]) for group in groups] if step == 4 else None
        logits, pairs = self.model.decode(ids, mask, positions, past, prompt, prompt_mask)
        return (logits, *(t for pair in pairs for t in pair))


def _export(module: nn.Module, feeds: dict[str, Tensor], outputs: list[str], path: Path,
            sizes: dict[str, dict[int, str]]) -> None:  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this exporter is not its newest
        torch.onnx.export(
            module.eval(), tuple(feeds.values()), str(path), input_names=list(feeds),
            output_names=outputs, dynamic_axes=sizes, opset_version=17, dynamo=False,
        )  # fmt: skip


def _sides(mask: bool, positions: bool, past: int, tokens: int, prefix: str) -> dict[str, Tensor]:
    sides: dict[str, Tensor] = {}
    if mask:
        sides[f"{prefix}attention_mask"] = torch.ones(2, past + tokens, dtype=torch.int64)
    if positions:
        sides[f"{prefix}position_ids"] = torch.arange(past, past + tokens).repeat(2, 1)
    return sides


def _export_decoder(model: SmallText, folder: Path, *, mask: bool, positions: bool) -> None:
    feeds = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    feeds |= _sides(mask, positions, 4, 3, "")
    sizes = {name: {0: "batch_size", 1: "tokens" if "mask" not in name else "total"}
             for name in feeds}  # fmt: skip
    outputs = ["logits"]
    for n in range(LAYERS):
        for kind in ("key", "value"):
            name = f"past_key_values.{n}.{kind}"
            feeds[name] = torch.zeros(2, HEADS, 4, WIDTH // HEADS)
            outputs.append(f"present.{n}.{kind}")
            sizes[name] = {0: "batch_size", 2: "past_sequence_length"}
    module = _Flat(model, "decoder", mask=mask, positions=positions)
    _export(module, feeds, outputs, folder / "model.onnx", sizes)


def _export_encoder_decoder(
    model: SmallText, folder: Path, *, mask: bool, positions: bool, tokens: int | None
) -> None:
    prompt = {"input_ids": torch.ones(2, 5, dtype=torch.int64),
              "attention_mask": torch.ones(2, 5, dtype=torch.int64)}  # fmt: skip
    axes = {0: "batch_size", 1: "encoder_sequence_length"}
    _export(_Flat(model, "encoder", mask=False, positions=False), prompt, ["last_hidden_state"],
            folder / "encoder_model.onnx", dict.fromkeys(prompt, axes))  # fmt: skip
    sides = ("decoder", "encoder")
    for kind, past in (("first", 0), ("next", 4)):
        count = 3 if kind == "first" or tokens is None else tokens
        feeds = {"input_ids": torch.ones(2, count, dtype=torch.int64)}
        sizes = {"input_ids": {0: "batch_size"} | ({} if count == 1 else {1: "tokens"})}
        feeds["encoder_attention_mask"] = prompt["attention_mask"]
        sizes["encoder_attention_mask"] = axes
        own = _sides(mask, positions, past, count, "decoder_")
        sizes |= {n: {0: "batch_size", 1: "total" if "mask" in n else "tokens"} for n in own}
        feeds |= own
        outputs = ["logits"]
        if kind == "first":
            feeds["encoder_hidden_states"] = torch.zeros(2, 5, WIDTH)
            sizes["encoder_hidden_states"] = axes
        for n in range(LAYERS):
            for side in sides:
                for which in ("key", "value"):
                    name = f"past_key_values.{n}.{side}.{which}"
                    if kind == "next":
                        length = past if side == "decoder" else 5
                        feeds[name] = torch.zeros(2, HEADS, length, WIDTH // HEADS)
                        sizes[name] = {0: "batch_size", 2: f"{side}_length"}
                    if kind == "first" or side == "decoder":
                        outputs.append(f"present.{n}.{side}.{which}")
        name = "decoder_model.onnx" if kind == "first" else "decoder_with_past_model.onnx"
        _export(_Flat(model, kind, mask=mask, positions=positions), feeds, outputs, folder / name,
                sizes)  # fmt: skip


@functools.cache
def made(*, encodes: bool = False, post_norm: bool = False) -> SmallText:
    """Make a model of random weights, the same ones each time."""
    torch.manual_seed(3)
    model = SmallText(encodes=encodes, post_norm=post_norm)
    for name, weights in model.named_parameters():
        # As they are made, all tokens would be nearly as likely.
        if "norm" not in name:
            torch.nn.init.normal_(weights, std=0.4)
    return model.eval()


@torch.no_grad()
def propagated(prompt: NDArray[np.int64], answer: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The decoder in torch, with state propagation: the next token of each token that runs.

    ``ends`` are the layers that each token runs through, ``answer`` what was taken for its answer.
    """
    model = made()
    pairs: list[Pair | None] = [None] * LAYERS
    told = []
    fed = [*prompt.tolist(), *answer[:-1]]
    depths = [LAYERS] * (len(prompt) - 1) + list(ends)
    for place, (token, end) in enumerate(zip(fed, depths, strict=True)):
        x = model.embed(torch.tensor([[token]]), torch.tensor([[place]]))
        for n, layer in enumerate(model.layers):
            past = pairs[n]
            if n < end:
                x, pairs[n] = layer(x, past, torch.zeros(1), None, None)
                continue
            new = layer.attention.of(layer.before(x, 0))
            pairs[n] = (
                new if past is None else tuple(map(torch.cat, zip(past, new, strict=True), (2, 2)))
            )
        told.append(int(functional.linear(model.norm(x), model.words.weight)[0, 0].argmax()))
    return told[len(prompt) - 1 :]


@functools.cache
def exported(
    *, encodes: bool = False, mask: bool = True, positions: bool = True, tokens: int | None = None,
    post_norm: bool = False,
) -> dict[str, bytes]:  # fmt: skip
    """Export a model; its files by name. ``tokens`` 1 fixes one token a step, as optimum does."""
    model = made(encodes=encodes, post_norm=post_norm)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if encodes:
            _export_encoder_decoder(model, folder, mask=mask, positions=positions, tokens=tokens)
        else:
            _export_decoder(model, folder, mask=mask, positions=positions)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(files: dict[str, bytes], folder: Path) -> Path:
    """Write an export; gives what is read: the folder, or the file of a decoder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "model.onnx" if "model.onnx" in files else folder


def cut_at(
    path: Path,
    layers: Sequence[int] = (1, 3),
    *,
    criterion: TextCriterion = "softmax margin",
    adapters: Sequence[onnx.ModelProto | None] = (),
) -> TextGraphs:
    """Cut an export, with exits after some layers."""
    given = list(adapters) or [None] * len(layers)
    exits = [
        TextExit(layer=layer, threshold=0.5, adapter=adapter)
        for layer, adapter in zip(layers, given, strict=True)
    ]
    return cut_export(read_export(path), exits, criterion=criterion, start_token=START)


@functools.cache
def graphs_of(*, skipped: SkippedLayers = "propagation", **made_with: Any) -> TextGraphs:
    """Cut an export after layers 1 and 3."""
    if skipped != "propagation":
        graphs = graphs_of(**made_with)
        return replace(graphs, model=replace(graphs.model, skipped=skipped))
    with tempfile.TemporaryDirectory() as name:
        return cut_at(write(exported(**made_with), Path(name)))


def backend_of(graphs: TextGraphs, *, slots: int = 8, length: int = PLACES) -> OnnxTextBackend:
    """Load a model that holds its weights in its graphs."""
    return OnnxTextBackend(
        graphs.model, graphs.graphs.__getitem__, slots=slots, length=length,
        source_length=PLACES if graphs.model.encoder else 0,
    )  # fmt: skip


def drawn_prompts(count: int, *, most: int = 12, seed: int = 0) -> list[NDArray[np.int64]]:
    """Prompts of 1 to ``most`` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, most + 1)) for _ in range(count)]
