"""BERT with random weights as a classifier, made of onnx and numpy.

Token numbers and mask are int64, as exported models have them; the sequence has a fixed length.
GELU is spelled out with Erf, since opset 17 has no operator for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from offramp.tools.gpu.graphs import GraphMaker

IDS, MASK = "input_ids", "attention_mask"
SEQUENCE = "sequence"
"""Symbol of a free sequence length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSize:
    """Dimensions of a BERT; the defaults are BERT-base (Devlin et al. 2019, section 3)."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 3072
    """Width between the two linear layers of a block."""
    vocabulary: int = 30522
    tokens: int = 128
    """Length of every sequence; if lengths are free, of the longest one."""
    classes: int = 2


def bert(size: BertSize, seed: int = 0, *, any_length: bool = False) -> onnx.ModelProto:
    """Make the model; its blocks end in ``layer3.out`` and the like, its answer is ``logits``.

    With ``any_length`` it takes shorter sequences, too: a symbolic size.
    """
    maker = _BertMaker(seed, size, any_length=any_length)
    value = maker.embedded()
    bias = maker.mask_bias()
    for layer in range(size.layers):
        value = maker.layer(value, bias, f"layer{layer}")
    row = (SEQUENCE if any_length else size.tokens,)
    return maker.model(
        "bert",
        {IDS: ("int64", row), MASK: ("int64", row)},
        {maker.answer(value): (size.classes,)},
    )


class _BertMaker(GraphMaker):
    def __init__(self, seed: int, size: BertSize, *, any_length: bool) -> None:
        super().__init__(seed)
        self._size, self._any_length = size, any_length
        heads, depth = size.heads, size.width // size.heads
        tokens = -1 if any_length else size.tokens
        self.constant("split", np.array([0, tokens, heads, depth], np.int64))
        self.constant("joined", np.array([0, tokens, size.width], np.int64))
        for name, number in (("half", 0.5), ("one", 1.0), ("root2", math.sqrt(2)),
                             ("scale", 1 / math.sqrt(depth)), ("masked", -10000.0)):  # fmt: skip
            self.constant(name, np.array(number, np.float32))

    def embedded(self) -> str:
        size = self._size
        words = self.random("words", (size.vocabulary, size.width), 1.0)
        value = self.node("Gather", [words, IDS], "embedded.words")
        places = self.random("places", (1, size.tokens, size.width), 0.3)
        if self._any_length:
            second, zero = (self.constant(f"at{n}", np.array([n], np.int64)) for n in (1, 0))
            shape = self.node("Shape", [IDS], "embedded.shape")
            length = self.node("Gather", [shape, second], "embedded.length")
            places = self.node("Slice", [places, zero, length, second], "embedded.places")
        return self._norm(self.node("Add", [value, places], "embedded.sum"), "embedded")

    def mask_bias(self) -> str:
        """[batch, 1, 1, tokens]: 0 where the mask is 1, -10000 where it is 0."""
        axes = self.constant("mask.axes", np.array([1, 2], np.int64))
        value = self.node("Unsqueeze", [MASK, axes], "mask.wide")
        value = self.node("Cast", [value], "mask.float", to=onnx.TensorProto.FLOAT)
        value = self.node("Sub", ["one", value], "mask.off")
        return self.node("Mul", [value, "masked"], "mask.bias")

    def layer(self, value: str, bias: str, name: str) -> str:
        size = self._size
        mixed = self._attention(value, bias, name)
        value = self._norm(self.node("Add", [value, mixed], f"{name}.sum1"), f"{name}.attended")
        inner = self._gelu(self._linear(value, f"{name}.up", size.width, size.inner), name)
        inner = self._linear(inner, f"{name}.down", size.inner, size.width)
        return self._norm(self.node("Add", [value, inner], f"{name}.sum2"), f"{name}.out")

    def answer(self, value: str) -> str:
        size = self._size
        self.constant("first", np.array(0, np.int64))
        token = self.node("Gather", [value, "first"], "pooler.token", axis=1)
        pooled = self._linear(token, "pooler", size.width, size.width)
        pooled = self.node("Tanh", [pooled], "pooler.tanh")
        return self._linear(pooled, "logits", size.width, size.classes, name="logits")

    def _attention(self, value: str, bias: str, name: str) -> str:
        width = self._size.width
        query, key, mixed = (
            self._heads(self._linear(value, f"{name}.{part}", width, width), f"{name}.{part}", perm)
            for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        )
        scores = self.node("MatMul", [query, key], f"{name}.qk")
        scores = self.node("Mul", [scores, "scale"], f"{name}.scaled")
        scores = self.node("Add", [scores, bias], f"{name}.biased")
        shares = self.node("Softmax", [scores], f"{name}.softmax", axis=-1)
        value = self.node("MatMul", [shares, mixed], f"{name}.mixed")
        value = self.node("Transpose", [value], f"{name}.back", perm=[0, 2, 1, 3])
        value = self.node("Reshape", [value, "joined"], f"{name}.joined")
        return self._linear(value, f"{name}.o", width, width)

    def _heads(self, value: str, stem: str, perm: list[int]) -> str:
        split = self.node("Reshape", [value, "split"], f"{stem}.split")
        return self.node("Transpose", [split], f"{stem}.heads", perm=perm)

    def _linear(
        self, value: str, stem: str, before: int, after: int, *, name: str | None = None
    ) -> str:
        weight = self.random(f"{stem}.weight", (before, after), 1 / math.sqrt(before))
        bias = self.random(f"{stem}.bias", (after,), 0.01)
        product = self.node("MatMul", [value, weight], f"{stem}.product")
        return self.node("Add", [product, bias], name or f"{stem}.linear")

    def _gelu(self, value: str, name: str) -> str:
        inner = self.node("Div", [value, "root2"], f"{name}.gelu.scaled")
        inner = self.node("Erf", [inner], f"{name}.gelu.erf")
        inner = self.node("Add", [inner, "one"], f"{name}.gelu.shifted")
        inner = self.node("Mul", [value, inner], f"{name}.gelu.gated")
        return self.node("Mul", [inner, "half"], f"{name}.gelu")

    def _norm(self, value: str, name: str) -> str:
        width = self._size.width
        scale = self.constant(f"{name}.scale", np.ones(width, np.float32))
        shift = self.constant(f"{name}.shift", np.zeros(width, np.float32))
        return self.node("LayerNormalization", [value, scale, shift], name, axis=-1, epsilon=1e-12)
