"""A small encoder-decoder in plain torch, its greedy decoding, and its export as three ONNX files.

Norms come before attention and feed-forward, as in T5 (Raffel et al. 2020); positions are learned.
The hidden state after any decoder layer can be passed to the final norm and the LM head, which is
what an early exit does (CALM).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

PADDING, START, END, UNKNOWN = range(4)
"""Special tokens: padding, before the first output token, after the last, and unknown text."""
_MASKED = -10_000.0

KeysValues: TypeAlias = "tuple[Tensor, Tensor]"
"""Keys and values of one attention, each [batch, heads, tokens, size]."""


def waves(places: int, width: int) -> Tensor:
    """Return sines and cosines [places, width], initial position embeddings (Vaswani et al. 2017).

    If positions started as noise, the model would take far longer to learn to copy.
    """
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(places)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Attention(nn.Module):
    """Multi-head attention with keys and values that are computed outside."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.mix = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def keys_values(self, source: Tensor) -> KeysValues:
        """Return keys and values of a source [batch, tokens, width]."""
        return self._split(self.key(source)), self._split(self.value(source))

    def forward(self, x: Tensor, kept: KeysValues, bias: Tensor) -> Tensor:
        """Return the attention output of x [batch, tokens, width]; all scores get the bias."""
        query, (key, value) = self._split(self.query(x)), kept
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]) + bias
        read = functional.softmax(scores, dim=3) @ value
        found: Tensor = self.mix(read.transpose(1, 2).flatten(2))
        return found

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)


class FeedForward(nn.Module):
    """A norm and two layers with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return an array like x, to be added to it."""
        found: Tensor = self.contract(functional.gelu(self.expand(self.norm(x))))
        return found


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the layer's output, like x [batch, tokens, width]."""
        normed = self.norm(x)
        x = x + self.attention(normed, self.attention.keys_values(normed), bias)
        found: Tensor = x + self.feed_forward(x)
        return found


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.cross_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.cross = Attention(width, heads), Attention(width, heads)
        self.feed_forward = FeedForward(width)

    def keys_values(self, x: Tensor) -> KeysValues:
        """Return the keys and values of self-attention, from the layer's input."""
        return self.attention.keys_values(self.norm(x))

    def forward(
        self, x: Tensor, own: KeysValues, bias: Tensor, encoded: KeysValues, encoded_bias: Tensor
    ) -> Tensor:
        """Return the layer's output, like x [batch, tokens, width].

        ``own`` has the keys and values of earlier tokens and of the tokens of ``x``; ``encoded``
        has the keys and values of the encoder's output.
        """
        x = x + self.attention(self.norm(x), own, bias)
        x = x + self.cross(self.cross_norm(x), encoded, encoded_bias)
        found: Tensor = x + self.feed_forward(x)
        return found


class EncoderDecoder(nn.Module):
    """The model: encoder, decoder and LM head share the tokens' embedding, as in T5 and BART."""

    def __init__(
        self,
        *,
        vocabulary: int,
        places: int = 128,
        width: int = 128,
        heads: int = 4,
        encoder_depth: int = 3,
        depth: int = 8,
    ) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.places = nn.Embedding(places, width)
        self.places.weight.data.copy_(waves(places, width))
        self.encoder = nn.ModuleList(EncoderLayer(width, heads) for _ in range(encoder_depth))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the encoder's output [batch, tokens, width] for int64 [batch, tokens]."""
        x = self.embed(input_ids, torch.arange(input_ids.shape[1], device=input_ids.device))
        bias = self.bias(attention_mask)
        for layer in self.encoder:
            x = layer(x, bias)
        found: Tensor = self.encoder_norm(x)
        return found

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the first layer's input [batch, tokens, width]."""
        scale = math.sqrt(self.tokens.embedding_dim)
        found: Tensor = self.tokens(input_ids) * scale + self.places(position_ids)
        return found

    def bias(self, mask: Tensor) -> Tensor:
        """Return the bias of scores [batch, 1, 1, tokens], which hides tokens with mask 0."""
        return (mask[:, None, None, :] == 0).to(self.norm.weight.dtype) * _MASKED

    def cross(self, encoded: Tensor) -> list[KeysValues]:
        """Return each decoder layer's keys and values of the encoder's output."""
        return [layer.cross.keys_values(encoded) for layer in self._layers()]

    def decode(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        encoded_mask: Tensor,
        encoded: Sequence[KeysValues],
        *,
        past: Sequence[KeysValues] | None = None,
    ) -> tuple[list[Tensor], list[KeysValues]]:
        """Return the states after each layer [batch, tokens, width], and keys and values.

        Args:
            input_ids: int64 [batch, tokens].
            position_ids: int64 [batch, tokens]; the first output token has 0.
            attention_mask: int64 [batch, past + tokens], 0 for padding in the past or in these
                tokens. Rows may differ in length.
            encoded_mask: int64 [batch, encoder tokens].
            encoded: Keys and values by layer, from :meth:`cross`.
            past: Keys and values of earlier tokens by layer; the results are appended to these.
        """
        total = torch.arange(attention_mask.shape[1], device=input_ids.device)
        later = total[None, :] > total[attention_mask.shape[1] - input_ids.shape[1] :, None]
        bias = later.to(self.norm.weight.dtype) * _MASKED + self.bias(attention_mask)
        encoded_bias = self.bias(encoded_mask)
        x = self.embed(input_ids, position_ids)
        states, kept = list[Tensor](), list[KeysValues]()
        for number, layer in enumerate(self._layers()):
            key, value = layer.keys_values(x)
            if past is not None:
                key = torch.cat([past[number][0], key], 2)
                value = torch.cat([past[number][1], value], 2)
            x = layer(x, (key, value), bias, encoded[number], encoded_bias)
            states.append(x)
            kept.append((key, value))
        return states, kept

    def _layers(self) -> list[DecoderLayer]:
        return [cast("DecoderLayer", layer) for layer in self.decoder]

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [..., vocabulary] of states [..., width] after any decoder layer."""
        return functional.linear(self.norm(state), self.tokens.weight)


@torch.no_grad()
def greedy(model: EncoderDecoder, input_ids: Tensor, mask: Tensor, *, most: int) -> Tensor:
    """Return the output tokens int64 [batch, up to most], padded after :data:`END`."""
    encoded = model.cross(model.encode(input_ids, mask))
    tokens = torch.full((len(input_ids), 1), START)
    past: list[KeysValues] | None = None
    found: list[Tensor] = []
    ended = torch.zeros(len(input_ids), dtype=torch.bool)
    while len(found) < most and not ended.all():
        places = torch.full_like(tokens, len(found))
        seen = torch.ones(len(tokens), len(found) + 1, dtype=torch.int64)
        states, past = model.decode(tokens, places, seen, mask, encoded, past=past)
        tokens = model.logits(states[-1]).argmax(2).masked_fill(ended[:, None], PADDING)
        ended |= tokens[:, 0] == END
        found.append(tokens)
    return torch.cat(found, 1)


# The three files of an encoder-decoder, with the names of transformers' exports.
FILES = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
_BATCH, _SOURCE = "batch_size", "encoder_sequence_length"
_TOKENS, _PAST = "decoder_sequence_length", "past_decoder_sequence_length"
_TOTAL = f"{_PAST} + {_TOKENS}"


class ExportedEncoder(nn.Module):
    """The encoder as a separate module."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return ``last_hidden_state``."""
        return self.model.encode(input_ids, attention_mask)


class FirstDecoder(nn.Module):
    """The decoder without a past, which also computes keys and values of the encoder's output."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        encoder_attention_mask: Tensor,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        mask: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return logits, and by layer the decoder's and the encoder's keys and values."""
        encoded = self.model.cross(encoder_hidden_states)
        states, own = self.model.decode(input_ids, positions, mask, encoder_attention_mask, encoded)
        pairs = [pair for both in zip(own, encoded, strict=True) for pair in both]
        return self.model.logits(states[-1]), *(tensor for pair in pairs for tensor in pair)


class NextDecoder(nn.Module):
    """The decoder with a past: one token or several more."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        encoder_attention_mask: Tensor,
        input_ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return logits, and by layer the decoder's keys and values."""
        pairs = list(zip(past[::2], past[1::2], strict=True))
        states, own = self.model.decode(
            input_ids, positions, mask, encoder_attention_mask, pairs[1::2], past=pairs[::2]
        )
        return self.model.logits(states[-1]), *(tensor for pair in own for tensor in pair)


def export(model: EncoderDecoder, folder: Path) -> None:
    """Write :data:`FILES` with symbolic batch and lengths, opset 17.

    Names are those of transformers' exports. The decoders also take ``decoder_attention_mask``
    int64 [batch, past + tokens] and ``decoder_position_ids`` int64 [batch, tokens], so that rows of
    different lengths can share a batch.
    """
    ids, source = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    before = torch.ones(2, 4 + 3, dtype=torch.int64)
    encoded = torch.zeros(2, 5, model.heads * model.size)
    own, read = (torch.zeros(2, model.heads, n, model.size) for n in (4, 5))
    layers, sides = range(len(model.decoder)), ("decoder", "encoder")

    def caches(head: str, sides: Sequence[str]) -> list[str]:
        return [
            f"{head}.{n}.{s}.{kind}" for n in layers for s in sides for kind in ("key", "value")
        ]

    tokens = ("input_ids", {0: _BATCH, 1: _TOKENS})
    mask = ("encoder_attention_mask", {0: _BATCH, 1: _SOURCE})
    places = ("decoder_position_ids", {0: _BATCH, 1: _TOKENS})
    logits = ("logits", {0: _BATCH, 1: _TOKENS})

    def cache_axes(names: Sequence[str], length: str) -> list[tuple[str, dict[int, str]]]:
        return [(n, {0: _BATCH, 2: _SOURCE if ".encoder." in n else length}) for n in names]

    source_axes = {0: _BATCH, 1: _SOURCE}
    _export(
        ExportedEncoder(model),
        (source, source),
        folder / FILES[0],
        [("input_ids", source_axes), ("attention_mask", source_axes)],
        [("last_hidden_state", source_axes)],
    )
    _export(
        FirstDecoder(model),
        (source, ids, encoded, ids, ids),
        folder / FILES[1],
        [
            mask,
            tokens,
            ("encoder_hidden_states", source_axes),
            ("decoder_attention_mask", {0: _BATCH, 1: _TOKENS}),
            places,
        ],
        [logits, *cache_axes(caches("present", sides), _TOKENS)],
    )
    _export(
        NextDecoder(model),
        (source, ids, before, ids, *(own, own, read, read) * len(layers)),
        folder / FILES[2],
        [
            mask,
            tokens,
            ("decoder_attention_mask", {0: _BATCH, 1: _TOTAL}),
            places,
            *cache_axes(caches("past_key_values", sides), _PAST),
        ],
        [logits, *cache_axes(caches("present", sides[:1]), _TOTAL)],
    )


def _export(
    module: nn.Module,
    examples: tuple[Tensor, ...],
    path: Path,
    inputs: Sequence[tuple[str, dict[int, str]]],
    outputs: Sequence[tuple[str, dict[int, str]]],
) -> None:
    torch.onnx.export(
        # The exporter restores the mode of modules that were in another mode.
        module.eval(),
        examples,
        str(path),
        input_names=[name for name, _ in inputs],
        output_names=[name for name, _ in outputs],
        dynamic_axes=dict([*inputs, *outputs]),
        opset_version=17,
        dynamo=False,
    )


def greedy_of_files(
    folder: Path, input_ids: NDArray[np.int64], mask: NDArray[np.int64], *, most: int
) -> NDArray[np.int64]:
    """Return the result of :func:`greedy`, from the files of :func:`export` in ONNX Runtime."""
    encoder, first, following = (
        ort.InferenceSession(folder / name, providers=["CPUExecutionProvider"]) for name in FILES
    )
    (encoded,) = encoder.run(None, {"input_ids": input_ids, "attention_mask": mask})
    rows = len(input_ids)
    feeds: dict[str, Any] = {"encoder_attention_mask": mask, "encoder_hidden_states": encoded}
    tokens, found = np.full((rows, 1), START, np.int64), list[NDArray[np.int64]]()
    ended = np.zeros(rows, bool)
    while len(found) < most and not ended.all():
        session = following if found else first
        feeds |= {
            "input_ids": tokens,
            "decoder_attention_mask": np.ones((rows, len(found) + 1), np.int64),
            "decoder_position_ids": np.full((rows, 1), len(found), np.int64),
        }
        logits, *present = session.run(None, feeds)
        feeds.pop("encoder_hidden_states", None)
        names = [output.name for output in session.get_outputs()[1:]]
        feeds |= {
            name.replace("present", "past_key_values"): cache
            for name, cache in zip(names, present, strict=True)
        }
        tokens = np.where(ended[:, None], PADDING, logits.argmax(2))
        ended |= tokens[:, 0] == END
        found.append(tokens)
    return np.concatenate(found, axis=1)
