"""ResNets with random weights, as one graph and as stages with exits.

The batch normalisations are folded into the convolutions, as any simplifier does. The weights are
seeded and scaled so that activations keep their size through all layers: an engine's output can be
compared with ONNX Runtime's. The answers have no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from offramp.tools.gpu.graphs import GraphMaker

CLASSES = 1000
INPUT = "image"
INPUT_SHAPE = (3, 224, 224)
BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""Residual blocks of each of the four layers, by model (He et al. 2016, table 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A graph, and its inputs and outputs."""

    name: str
    graph: bytes
    """ONNX, opset 17, float32, a symbolic batch."""
    input: str
    """Name of its only input."""
    input_shape: tuple[int, ...]
    """Shape of one input row, without the batch."""
    carry: str | None
    """Name of the output that the next stage reads."""
    carry_shape: tuple[int, ...]
    """Shape of one carried row; empty without one."""
    logits: str
    """Name of the output with the answer of the exit, or of the model."""


def whole(seed: int = 0, *, model: str = "resnet50") -> Piece:
    """Return a model of :data:`BLOCKS` as one graph; outputs of blocks: ``layer3.5.relu`` etc."""
    maker = _ResNetMaker(seed, model)
    value = maker.body(INPUT, range(4))
    return maker.piece(model, INPUT, INPUT_SHAPE, carry=None, logits=maker.head(value, 3))


def of_pixels(model: str, seed: int = 0) -> onnx.ModelProto:
    """Return a model of :data:`BLOCKS` that takes images of uint8, as clients have them.

    Images of uint8 have a quarter of the bytes of float32 to copy and to transfer.
    """
    maker = _ResNetMaker(seed, model)
    value = maker.body(maker.scaled(INPUT), range(4))
    outputs = {maker.head(value, 3): (CLASSES,)}
    return maker.model(model, {INPUT: ("uint8", INPUT_SHAPE)}, outputs)


def stages(seed: int = 0, *, model: str = "resnet50") -> tuple[Piece, ...]:
    """Return the model as four graphs; all but the last have an exit of pooling and one layer."""
    pieces = []
    value = INPUT
    shape: tuple[int, ...] = INPUT_SHAPE
    for index in range(4):
        maker = _ResNetMaker(seed, model)
        carry = maker.body(value, range(index, index + 1))
        logits = maker.head(carry, index)
        last = index == 3
        pieces.append(
            maker.piece(f"stage{index}", value, shape, carry=None if last else carry, logits=logits)
        )
        value, shape = carry, _carry_shape(index)
    return tuple(pieces)


def _carry_shape(layer: int) -> tuple[int, ...]:
    return (256 << layer, 56 >> layer, 56 >> layer)


class _ResNetMaker(GraphMaker):
    def __init__(self, seed: int, model: str) -> None:
        super().__init__(seed)
        self._blocks = BLOCKS[model]

    def scaled(self, pixels: str) -> str:
        """Scale pixels to about mean 0 and deviation 1; return the name."""
        self.constant("pixels.middle", np.array(127.5, np.float32))
        self.constant("pixels.scale", np.array(1 / 64, np.float32))
        value = self.node("Cast", [pixels], "pixels.float", to=onnx.TensorProto.FLOAT)
        value = self.node("Sub", [value, "pixels.middle"], "pixels.centred")
        return self.node("Mul", [value, "pixels.scale"], "pixels.scaled")

    def body(self, value: str, layers: range) -> str:
        for layer in layers:
            if layer == 0:
                value = self._conv(value, "stem", (3, 64), kernel=7, stride=2)
                value = self._relu(value, "stem.relu")
                value = self._stem_pool(value)
            for block in range(self._blocks[layer]):
                value = self._block(value, layer, block)
        return value

    def head(self, value: str, layer: int) -> str:
        name, width = "answer" if layer == 3 else f"exit{layer}", 256 << layer
        pooled = self.node("GlobalAveragePool", [value], f"{name}.pool")
        flat = self.node("Flatten", [pooled], f"{name}.flat", axis=1)
        weight = self.random(f"{name}.weight", (CLASSES, width), 4 / np.sqrt(width))
        bias = self.random(f"{name}.bias", (CLASSES,), 0.01)
        return self.node("Gemm", [flat, weight, bias], f"{name}.logits", transB=1)

    def piece(
        self, name: str, value: str, shape: tuple[int, ...], *, carry: str | None, logits: str
    ) -> Piece:
        carry_shape = _carry_shape(int(name[-1])) if carry else ()
        outputs = {logits: (CLASSES,)} | ({carry: carry_shape} if carry else {})
        graph = self.model(name, {value: ("float32", shape)}, outputs)
        return Piece(
            name=name,
            graph=graph.SerializeToString(deterministic=True),
            input=value,
            input_shape=shape,
            carry=carry,
            carry_shape=carry_shape,
            logits=logits,
        )

    def _block(self, value: str, layer: int, block: int) -> str:
        """Add a bottleneck: 1×1, 3×3, 1×1, plus its input (He et al. 2016, figure 5)."""
        name, narrow, wide = f"layer{layer + 1}.{block}", 64 << layer, 256 << layer
        comes_in = wide if block else (64 if layer == 0 else wide // 2)
        stride = 2 if block == 0 and layer > 0 else 1
        inner = self._conv(value, f"{name}.a", (comes_in, narrow), kernel=1)
        inner = self._relu(inner, f"{name}.ar")
        inner = self._conv(inner, f"{name}.b", (narrow, narrow), kernel=3, stride=stride)
        inner = self._relu(inner, f"{name}.br")
        # A small gain, so that values do not grow with the number of additions.
        inner = self._conv(inner, f"{name}.c", (narrow, wide), kernel=1, gain=0.25)
        if block == 0:
            how = {"kernel": 1, "stride": stride, "gain": 0.7}
            value = self._conv(value, f"{name}.d", (comes_in, wide), **how)
        return self._relu(self.node("Add", [inner, value], f"{name}.add"), f"{name}.relu")

    def _conv(self, value: str, name: str, channels: tuple[int, int], **how: float) -> str:
        """Add a convolution with bias; ``how``: kernel, stride, gain."""
        kernel, stride = int(how["kernel"]), int(how.get("stride", 1))
        scale = how.get("gain", 1.0) * np.sqrt(2 / (channels[0] * kernel * kernel))
        shape = (channels[1], channels[0], kernel, kernel)
        weight = self.random(f"{name}.weight", shape, scale)
        bias = self.random(f"{name}.bias", (channels[1],), 0.01)
        return self.node(
            "Conv", [value, weight, bias], name,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
        )  # fmt: skip

    def _relu(self, value: str, name: str) -> str:
        return self.node("Relu", [value], name)

    def _stem_pool(self, value: str) -> str:
        how: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
        return self.node("MaxPool", [value], "stem.pool", **how)
