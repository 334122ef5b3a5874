"""ResNet-50 with random weights, as one graph and as stages with exits, made of onnx and numpy.

The batch normalisations are folded into the convolutions, as any simplifier does. The weights are
seeded and scaled so that activations keep their size through all layers: what an engine computes
can be compared with what ONNX Runtime does. What it answers means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

CLASSES = 1000
INPUT = "image"
INPUT_SHAPE = (3, 224, 224)
_BLOCKS = (3, 4, 6, 3)
"""Residual blocks of each of the four stages."""
_OPSET = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A graph, and what it takes and gives."""

    name: str
    graph: bytes
    """ONNX, opset 17, float32, a symbolic batch."""
    input: str
    """Its only input."""
    input_shape: tuple[int, ...]
    """Of one row."""
    carry: str | None
    """Output that the next stage takes."""
    carry_shape: tuple[int, ...]
    """Of one row; empty where nothing is carried."""
    logits: str
    """Output: what the exit, or the model, answers."""


def whole(seed: int = 0) -> Piece:
    """The model as one graph."""
    maker = _Maker(seed)
    value = _body(maker, INPUT, range(4))
    return maker.piece("resnet50", INPUT, INPUT_SHAPE, carry=None, logits=_head(maker, value, 3))


def stages(seed: int = 0) -> tuple[Piece, ...]:
    """The model as four graphs; those before the last have an exit of pooling and one layer."""
    pieces = []
    value = INPUT
    shape: tuple[int, ...] = INPUT_SHAPE
    for index in range(4):
        maker = _Maker(seed)
        carry = _body(maker, value, range(index, index + 1))
        logits = _head(maker, carry, index)
        last = index == 3
        pieces.append(
            maker.piece(f"stage{index}", value, shape, carry=None if last else carry, logits=logits)
        )
        value, shape = carry, _carry_shape(index)
    return tuple(pieces)


def _carry_shape(stage: int) -> tuple[int, ...]:
    return (256 << stage, 56 >> stage, 56 >> stage)


class _Maker:
    """Collects nodes and weights; a weight depends on its name and the seed alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def conv(self, value: str, name: str, channels: tuple[int, int], **how: float) -> str:
        """Convolution and bias; ``how``: kernel, stride, gain."""
        kernel, stride = int(how["kernel"]), int(how.get("stride", 1))
        fan_in = channels[0] * kernel * kernel
        scale = how.get("gain", 1.0) * np.sqrt(2 / fan_in)
        weight = self._random(f"{name}.weight", (channels[1], channels[0], kernel, kernel), scale)
        bias = self._random(f"{name}.bias", (channels[1],), 0.01)
        return self._node(
            "Conv", [value, weight, bias], name,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
        )  # fmt: skip

    def relu(self, value: str, name: str) -> str:
        return self._node("Relu", [value], name)

    def add(self, left: str, right: str, name: str) -> str:
        return self._node("Add", [left, right], name)

    def stem_pool(self, value: str) -> str:
        how: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
        return self._node("MaxPool", [value], "stem.pool", **how)

    def classify(self, value: str, name: str, width: int) -> str:
        pooled = self._node("GlobalAveragePool", [value], f"{name}.pool")
        flat = self._node("Flatten", [pooled], f"{name}.flat", axis=1)
        weight = self._random(f"{name}.weight", (CLASSES, width), 4 / np.sqrt(width))
        bias = self._random(f"{name}.bias", (CLASSES,), 0.01)
        return self._node("Gemm", [flat, weight, bias], f"{name}.logits", transB=1)

    def piece(
        self, name: str, value: str, shape: tuple[int, ...], *, carry: str | None, logits: str
    ) -> Piece:
        carry_shape = _carry_shape(int(name[-1])) if carry else ()
        outputs = [_info(logits, (CLASSES,))] + ([_info(carry, carry_shape)] if carry else [])
        graph = helper.make_graph(
            self._nodes, name, [_info(value, shape)], outputs, initializer=self._weights
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        return Piece(
            name=name,
            graph=model.SerializeToString(deterministic=True),
            input=value,
            input_shape=shape,
            carry=carry,
            carry_shape=carry_shape,
            logits=logits,
        )

    def _random(self, name: str, shape: tuple[int, ...], scale: float) -> str:
        rng = np.random.default_rng([self._seed, *name.encode()])
        values: NDArray[np.float32] = rng.standard_normal(shape, np.float32) * np.float32(scale)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def _node(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name


def _info(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])


def _body(maker: _Maker, value: str, stages: range) -> str:
    for stage in stages:
        if stage == 0:
            value = maker.relu(maker.conv(value, "stem", (3, 64), kernel=7, stride=2), "stem.relu")
            value = maker.stem_pool(value)
        for block in range(_BLOCKS[stage]):
            value = _block(maker, value, stage, block)
    return value


def _block(maker: _Maker, value: str, stage: int, block: int) -> str:
    """A bottleneck: 1×1, 3×3, 1×1, and what came in added to it (He et al. 2016, figure 5)."""
    name, narrow, wide = f"layer{stage + 1}.{block}", 64 << stage, 256 << stage
    comes_in = wide if block else (64 if stage == 0 else wide // 2)
    stride = 2 if block == 0 and stage > 0 else 1
    inner = maker.relu(maker.conv(value, f"{name}.a", (comes_in, narrow), kernel=1), f"{name}.ar")
    inner = maker.conv(inner, f"{name}.b", (narrow, narrow), kernel=3, stride=stride)
    inner = maker.relu(inner, f"{name}.br")
    # A small gain: sixteen additions must not let the values grow without end.
    inner = maker.conv(inner, f"{name}.c", (narrow, wide), kernel=1, gain=0.25)
    if block == 0:
        value = maker.conv(value, f"{name}.d", (comes_in, wide), kernel=1, stride=stride, gain=0.7)
    return maker.relu(maker.add(inner, value, f"{name}.add"), f"{name}.relu")


def _head(maker: _Maker, value: str, stage: int) -> str:
    name = "answer" if stage == 3 else f"exit{stage}"
    return maker.classify(value, name, 256 << stage)
