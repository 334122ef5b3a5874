"""Tiny classifiers, built in code, that have the topologies of the real ones.

Weights are random but the same in every run. Tensors that are expected to become cut points have
telling names (``block0``, ``layer1/out``); all others are numbered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence


class Builder:
    """Collects nodes and weights of a graph."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(
        self, name: str, dims: Sequence[int | str], elem_type: int = TensorProto.FLOAT
    ) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, elem_type, dims))
        return name

    def output(
        self, name: str, dims: Sequence[int | str], elem_type: int = TensorProto.FLOAT
    ) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, elem_type, dims))

    def weight(self, *dims: int) -> str:
        """A random weight that keeps the variance of what it is applied to."""
        fan_in = int(np.prod(dims[1:])) if len(dims) == 4 else dims[0]
        scale = (2 / fan_in) ** 0.5
        return self.constant((self._rng.standard_normal(dims) * scale).astype(np.float32))

    def constant(self, value: Any, dtype: Any = None) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        out = out or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def nodes(self, kind: str, *inputs: str, outs: Sequence[str], **attributes: Any) -> list[str]:
        """Add an operator with several outputs."""
        self._nodes.append(helper.make_node(kind, inputs, outs, **attributes))
        return list(outs)

    def conv(self, x: str, channels: tuple[int, int], *, kernel: int = 3, stride: int = 1) -> str:
        before, after = channels
        pads = [kernel // 2] * 4
        weight = self.weight(after, before, kernel, kernel)
        return self.node("Conv", x, weight, pads=pads, strides=[stride, stride])

    def linear(self, x: str, before: int, after: int, *, out: str | None = None) -> str:
        bias = self.constant(self._rng.standard_normal(after) * 0.1, np.float32)
        return self.node("Gemm", x, self.weight(before, after), bias, out=out)

    def matmul(self, x: str, before: int, after: int) -> str:
        return self.node("MatMul", x, self.weight(before, after))

    def norm(self, x: str, width: int, *, out: str | None = None) -> str:
        scale = self.constant(1 + self._rng.standard_normal(width) * 0.1, np.float32)
        return self.node("LayerNormalization", x, scale, out=out, axis=-1)

    def build(self, *, opset: int = 17) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes, "test", self._inputs, self._outputs, initializer=self._weights
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 8
        return model


def residual_cnn(
    *,
    blocks: int = 3,
    batch: int | str = "batch",
    classes: int = 5,
    dense: str = "",
) -> onnx.ModelProto:
    """A ResNet: stem, residual blocks (the second halves the map), pooling, linear head.

    A ``dense`` one answers for every pixel instead: scores, probabilities, classes or heat maps, as
    ``logits``, ``Softmax``, ``ArgMax`` and ``Sigmoid`` say.

    Cut points: ``stem`` and every ``block{i}`` but the last, after which nothing is left to save.
    """
    b = Builder()
    x = b.input("image", [batch, 3, 16, 16])
    x = b.node("Relu", b.conv(x, (3, 8)), out="stem")
    width = 8
    for i in range(blocks):
        stride, wider = (2, 2 * width) if i == 1 else (1, width)
        inner = b.node("Relu", b.conv(x, (width, wider), stride=stride))
        inner = b.conv(inner, (wider, wider))
        short = b.conv(x, (width, wider), kernel=1, stride=stride) if i == 1 else x
        x = b.node("Relu", b.node("Add", inner, short), out=f"block{i}")
        width = wider
    if dense:
        scale = b.constant([1, 1, 2, 2], np.float32)
        x = b.node("Resize", b.conv(x, (width, classes), kernel=1), "", scale)
        sizes = [batch, classes, 16, 16]
        if dense == "ArgMax":
            b.node("ArgMax", x, out="pixels", axis=1, keepdims=0)
            b.output("pixels", [batch, 16, 16], TensorProto.INT64)
        else:
            kind = dense if dense in ("Softmax", "Sigmoid") else "Identity"
            settings = {"axis": 1} if dense == "Softmax" else {}
            b.node(kind, x, out="pixels", **settings)
            b.output("pixels", sizes)
        return b.build()
    x = b.node("Flatten", b.node("GlobalAveragePool", x), axis=1)
    x = b.linear(x, width, classes)
    b.node("Softmax", x, out="probabilities", axis=-1)
    b.output("probabilities", [batch, classes])
    return b.build()


def vgg_chain(*, batch: int | str = "batch", classes: int = 4, opset: int = 13) -> onnx.ModelProto:
    """A VGG: a plain chain. Cut points: ``relu0``, ``pool1``, ``relu2``, ``pool3``."""
    b = Builder()
    x = b.input("image", [batch, 3, 16, 16])
    width = 3
    for i in range(4):
        x = b.node("Relu", b.conv(x, (width, 8)), out=f"relu{i}")
        width = 8
        if i % 2:
            x = b.node("MaxPool", x, out=f"pool{i}", kernel_shape=[2, 2], strides=[2, 2])
    target = b.constant([batch if isinstance(batch, int) else 0, 128], np.int64)
    x = b.node("Reshape", x, target)
    x = b.node("Relu", b.linear(x, 128, 64), out="relu4")
    b.linear(x, 64, classes, out="logits")
    b.output("logits", [batch, classes])
    return b.build(opset=opset)


def bert_like(
    *,
    layers: int = 3,
    mask: bool = True,
    token_types: bool = False,
    width: int = 16,
    padding: bool = False,
    tags: int = 0,
) -> onnx.ModelProto:
    """A transformer encoder whose mask, and whose shape vector, cross every layer.

    Cut points: ``layer{i}/attended`` and ``layer{i}/out``, all but the last ``out``. With
    ``padding`` the ids say themselves what to mask (0 is padding), and which token answers: the
    last one that is none. With ``tags`` every token has one of so many classes.
    """
    b = Builder()
    ids = b.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    x = b.node("Gather", b.weight(50, width), ids)
    sequence = b.node("Gather", b.node("Shape", ids), b.constant([1], np.int64))
    places = b.node("Slice", b.weight(64, width), b.constant([0], np.int64), sequence)
    x = b.node("Add", x, places)
    if token_types:
        types = b.input("token_type_ids", ["batch", "sequence"], TensorProto.INT64)
        x = b.node("Add", x, b.node("Gather", b.weight(2, width), types))
    bias = None
    if padding:
        bias = _padding_bias(b, ids)
    elif mask:
        bias = _mask_bias(b, b.input("attention_mask", ["batch", "sequence"], TensorProto.INT64))
    x = b.norm(x, width, out="embedded")
    rows = b.node("Slice", b.node("Shape", x), *(b.constant([i], np.int64) for i in (0, 2)))
    for i in range(layers):
        attended = _attention(b, x, bias, rows, width)
        x = b.norm(b.node("Add", x, attended), width, out=f"layer{i}/attended")
        inner = b.matmul(b.node("Relu", b.matmul(x, width, 2 * width)), 2 * width, width)
        x = b.norm(b.node("Add", x, inner), width, out=f"layer{i}/out")
    if tags:
        b.node("Add", b.matmul(x, width, tags), b.weight(tags), out="tags")
        b.output("tags", ["batch", "sequence", tags])
        return b.build()
    if padding:
        first = _last_token(b, x, ids)
    else:
        first = b.node("Gather", x, b.constant(0, np.int64), axis=1)
    b.linear(b.node("Tanh", b.linear(first, width, width)), width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def _mask_bias(b: Builder, mask: str) -> str:
    """[batch, 1, 1, sequence]: 0 where the mask is 1, -10000 where it is 0."""
    x = b.node("Unsqueeze", mask, b.constant([1, 2], np.int64))
    x = b.node("Cast", x, to=TensorProto.FLOAT)
    x = b.node("Sub", b.constant(1.0, np.float32), x)
    return b.node("Mul", x, b.constant(-10000.0, np.float32))


def _padding_bias(b: Builder, ids: str) -> str:
    """[batch, 1, 1, sequence]: 0 where there is a token, -10000 where there is padding."""
    padding = b.node("Equal", ids, b.constant(0, np.int64))
    low, zero = b.constant(-10000.0, np.float32), b.constant(0.0, np.float32)
    return b.node("Unsqueeze", b.node("Where", padding, low, zero), b.constant([1, 2], np.int64))


def _last_token(b: Builder, x: str, ids: str) -> str:
    """[batch, width]: of the last token that is no padding."""
    token = b.node("Not", b.node("Equal", ids, b.constant(0, np.int64)))
    place = b.node("CumSum", b.node("Cast", token, to=TensorProto.INT64), b.constant(1, np.int64))
    last = b.node("Unsqueeze", b.node("ArgMax", place, axis=1), b.constant([2], np.int64))
    found = b.node("GatherND", x, b.node("Squeeze", last, b.constant([2], np.int64)), batch_dims=1)
    return b.node("Identity", found)


def two_sequences(*, layers: int = 3, width: int = 16) -> onnx.ModelProto:
    """Tokens that attend to each other, and to those of a second sequence of another length.

    Cut points are after the first layers, where fewer later layers read the second sequence.
    """
    b = Builder()
    ids, mask = (
        b.input(name, ["batch", "sequence"], TensorProto.INT64)
        for name in ("input_ids", "attention_mask")
    )
    others, other_mask = (
        b.input(name, ["batch", "context"], TensorProto.INT64)
        for name in ("context_ids", "context_mask")
    )
    x, context = (
        b.norm(b.node("Gather", b.weight(50, width), read), width) for read in (ids, others)
    )
    rows = b.node("Slice", b.node("Shape", x), *(b.constant([i], np.int64) for i in (0, 2)))
    bias = _mask_bias(b, mask)
    far = b.node("Squeeze", _mask_bias(b, other_mask), b.constant([1], np.int64))
    for i in range(layers):
        attended = _attention(b, x, bias, rows, width)
        x = b.norm(b.node("Add", x, attended), width, out=f"layer{i}/attended")
        query, key, value = (b.matmul(read, width, width) for read in (x, context, context))
        query = b.node("Mul", query, b.constant(1 / width, np.float32))
        scores = b.node("MatMul", query, b.node("Transpose", key, perm=[0, 2, 1]))
        mixed = b.node("MatMul", b.node("Softmax", b.node("Add", scores, far), axis=-1), value)
        x = b.norm(b.node("Add", x, mixed), width, out=f"layer{i}/crossed")
        inner = b.matmul(b.node("Relu", b.matmul(x, width, 2 * width)), 2 * width, width)
        x = b.norm(b.node("Add", x, inner), width, out=f"layer{i}/out")
    first = b.node("Gather", x, b.constant(0, np.int64), axis=1)
    b.linear(b.node("Tanh", b.linear(first, width, width)), width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def rotary(*, layers: int = 3, width: int = 16) -> onnx.ModelProto:
    """A Llama: rotary embeddings, a small product of position ids, are read in every layer.

    Cut points: ``layer{i}/attended`` and ``layer{i}/out``, all but the last ``out``.
    """
    b = Builder()
    ids = b.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    places = b.input("position_ids", ["batch", "sequence"], TensorProto.INT64)
    x = b.node("Gather", b.weight(50, width), ids)
    bias = _padding_bias(b, ids)
    places = b.node("Unsqueeze", b.node("Cast", places, to=TensorProto.FLOAT), b.constant([2]))
    angles = b.node("MatMul", places, b.constant([[1.0, 0.1] * (width // 2)], np.float32))
    turns = b.node("Cos", angles), b.node("Sin", angles)
    for i in range(layers):
        x = b.node("Add", x, _turned_attention(b, x, bias, turns, width), out=f"layer{i}/attended")
        inner = b.matmul(b.node("Relu", b.matmul(x, width, 2 * width)), 2 * width, width)
        x = b.node("Add", x, inner, out=f"layer{i}/out")
    b.linear(b.node("ReduceMean", x, axes=[1], keepdims=0), width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def _turned_attention(b: Builder, x: str, bias: str, turns: tuple[str, str], width: int) -> str:
    """Attention of one head whose queries and keys are turned by their positions."""
    query, key = (
        b.node(
            "Add",
            b.node("Mul", b.matmul(x, width, width), turns[0]),
            b.node("Mul", b.matmul(x, width, width), turns[1]),
        )
        for _ in range(2)
    )
    scores = b.node("MatMul", query, b.node("Transpose", key, perm=[0, 2, 1]))
    scores = b.node("Add", scores, b.node("Squeeze", bias, b.constant([1], np.int64)))
    return b.matmul(b.node("MatMul", b.node("Softmax", scores, axis=-1), x), width, width)


def _attention(b: Builder, x: str, bias: str | None, rows: str, width: int, heads: int = 2) -> str:
    """Multi-head attention; ``rows`` is the shape vector [batch, sequence]."""
    split = b.node("Concat", rows, b.constant([heads, width // heads], np.int64), axis=0)
    joined = b.node("Concat", rows, b.constant([width], np.int64), axis=0)
    query, key, value = (
        b.node("Transpose", b.node("Reshape", b.matmul(x, width, width), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = b.node("MatMul", query, key)
    if bias:
        scores = b.node("Add", scores, bias)
    mixed = b.node("MatMul", b.node("Softmax", scores, axis=-1), value)
    mixed = b.node("Reshape", b.node("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
    return b.matmul(mixed, width, width)


def batch_second(*, layers: int = 3) -> onnx.ModelProto:
    """Tokens [sequence, batch, width] inside, as torch's encoders have them by default.

    Cut points: ``stem`` and ``layer{i}`` but the last, with the batch in front
    (``/batch_first``).
    """
    b = Builder()
    x = b.input("x", ["batch", "sequence", 8])
    x = b.norm(b.matmul(b.node("Transpose", x, perm=[1, 0, 2]), 8, 8), 8, out="stem")
    for i in range(layers):
        inner = b.matmul(b.node("Relu", b.matmul(x, 8, 16)), 16, 8)
        x = b.norm(b.node("Add", x, inner), 8, out=f"layer{i}")
    x = b.node("ReduceMean", x, axes=[0], keepdims=0)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def recurrent(*, layers: int = 3, width: int = 8) -> onnx.ModelProto:
    """Stacked LSTMs of one direction over token ids; the last step answers.

    Cut points: ``states{i}/batch_first``, [batch, sequence, width], but the last.
    """
    b = Builder()
    ids = b.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    x = b.node("Transpose", b.node("Gather", b.weight(50, width), ids), perm=[1, 0, 2])
    for i in range(layers):
        weights = [b.weight(1, 4 * width, width) for _ in range(2)]
        x = b.node("LSTM", x, *weights, hidden_size=width)
        x = b.node("Squeeze", x, b.constant([1], np.int64), out=f"states{i}")
    last = b.node("Gather", x, b.constant(-1, np.int64), axis=0)
    b.linear(last, width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def two_tower(*, layers: int = 2, merged: int = 2) -> onnx.ModelProto:
    """Two towers that meet: no cut point of one tensor before, as both are needed from there on."""
    b = Builder()
    towers = []
    for side in ("left", "right"):
        x = b.input(side, ["batch", 16])
        for i in range(layers):
            x = b.node("Relu", b.linear(x, 16, 16), out=f"{side}{i}")
        towers.append(x)
    x = b.node("Concat", *towers, axis=1)
    for i in range(merged):
        x = b.node("Relu", b.linear(x, 32, 32), out=f"merged{i}")
    b.linear(x, 32, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def text_cnn(*, widths: Sequence[int] = (3, 5, 7), channels: int = 24) -> onnx.ModelProto:
    """Parallel convolutions of several widths, written one after the other.

    Cut points: ``pooled{i}`` of finished ones, and ``embedded``, except the last.
    """
    b = Builder()
    ids = b.input("input_ids", ["batch", 12], TensorProto.INT64)
    x = b.node("Transpose", b.node("Gather", b.weight(50, 16), ids), perm=[0, 2, 1], out="embedded")
    done = []
    for i, width in enumerate(widths):
        kernel = b.weight(channels, 16, width)
        y = b.node("Relu", b.node("Conv", x, kernel, pads=[width // 2] * 2))
        done.append(b.node("ReduceMax", y, axes=[2], keepdims=0, out=f"pooled{i}"))
    b.linear(b.node("Concat", *done, axis=1), channels * len(widths), 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def hidden_states(*, layers: int = 3, width: int = 16) -> onnx.ModelProto:
    """Stacked LSTMs of which the last state of every layer answers, as ``nn.LSTM`` gives them.

    Cut points: ``states{i}`` [sequence, batch, width] and all ``last{i}`` [1, batch, width] so far,
    with the batch in front; after the last layer the latter alone.
    """
    b = Builder()
    ids = b.input("input_ids", ["batch", 6], TensorProto.INT64)
    x = b.node("Transpose", b.node("Gather", b.weight(50, width), ids), perm=[1, 0, 2])
    every = []
    for i in range(layers):
        weights = [b.weight(1, 4 * width, width) for _ in range(2)]
        y, last = b.nodes("LSTM", x, *weights, outs=[f"y{i}", f"last{i}"], hidden_size=width)
        x = b.node("Squeeze", y, b.constant([1], np.int64), out=f"states{i}")
        every.append(last)
    joined = b.node("Concat", *every, axis=2)
    b.linear(b.node("Squeeze", joined, b.constant([0], np.int64)), layers * width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def mlp(
    *, layers: int = 3, width: int = 16, classes: int = 3, ending: str | None = None
) -> onnx.ModelProto:
    """A plain chain of linear layers. Cut points: ``hidden{i}``."""
    b = Builder()
    x = b.input("x", ["batch", width])
    for i in range(layers):
        x = b.node("Relu", b.linear(x, width, width), out=f"hidden{i}")
    logits = b.linear(x, width, classes, out="logits")
    b.output(
        b.node(ending, logits, **({} if ending == "Sigmoid" else {"axis": -1}), out="answer")
        if ending
        else logits,
        ["batch", classes],
    )
    return b.build()


def dynamically_quantised(
    *, layers: int = 3, width: int = 16, mean: bool = False
) -> onnx.ModelProto:
    """Return an MLP from ONNX Runtime's ``quantize_dynamic``: rounded by the range of the batch.

    With ``mean`` one over the batch is subtracted. Cut points: ``hidden{i}``.
    """
    b = Builder()
    x = b.input("x", ["batch", width])
    for i in range(layers):
        steps, scale, zero = (f"round{i}/{part}" for part in ("steps", "scale", "zero"))
        outputs = [steps, scale, zero]
        b._nodes.append(helper.make_node("DynamicQuantizeLinear", [x], outputs, name=f"round{i}"))
        weight = b.constant(b._rng.integers(-127, 128, (width, width)), np.int8)
        product = b.node("MatMulInteger", steps, weight, zero)
        step = b.node("Mul", scale, b.constant(0.35 / 127, np.float32))
        x = b.node("Mul", b.node("Cast", product, to=TensorProto.FLOAT), step)
        x = b.node("Relu", x, out=f"hidden{i}")
    if mean:
        x = b.node("Sub", x, b.node("ReduceMean", x, out="mean", axes=[0], keepdims=1))
    b.linear(x, width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def crossing_size() -> onnx.ModelProto:
    """``Size(hidden0)`` scales the answer: it crosses ``hidden1`` and can be had nowhere else."""
    b = Builder()
    x = b.input("x", ["batch", 16])
    hidden = b.node("Relu", b.linear(x, 16, 16), out="hidden0")
    size = b.node("Cast", b.node("Size", hidden), to=TensorProto.FLOAT)
    x = b.node("Relu", b.linear(hidden, 16, 16), out="hidden1")
    b.node("Div", b.linear(x, 16, 3), size, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def dense_net(*, layers: int = 3) -> onnx.ModelProto:
    """A dense block: each layer appends to all before it. Cut points: ``joined{i}``."""
    b = Builder()
    x = b.input("image", ["batch", 3, 8, 8])
    x = b.node("Relu", b.conv(x, (3, 8)), out="stem")
    width = 8
    for i in range(layers):
        x = b.node("Concat", x, b.node("Relu", b.conv(x, (width, 4))), out=f"joined{i}", axis=1)
        width += 4
    x = b.node("Flatten", b.node("GlobalAveragePool", x), axis=1)
    b.linear(x, width, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def inception(*, modules: int = 3) -> onnx.ModelProto:
    """Parallel branches joined by Concat. Cut points: ``stem`` and ``module{i}`` but the last."""
    b = Builder()
    x = b.input("image", ["batch", 3, 8, 8])
    x = b.node("Relu", b.conv(x, (3, 8)), out="stem")
    for i in range(modules):
        one = b.node("Relu", b.conv(x, (8, 4), kernel=1))
        three = b.node("Relu", b.conv(b.node("Relu", b.conv(x, (8, 4), kernel=1)), (4, 4)))
        x = b.node("Concat", one, three, out=f"module{i}", axis=1)
    x = b.node("Flatten", b.node("GlobalAveragePool", x), axis=1)
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()


def conditional() -> onnx.ModelProto:
    """Between ``hidden0`` and ``hidden1`` an ``If`` whose bodies capture a tensor and a weight."""
    b = Builder()
    x = b.input("x", ["batch", 8])
    hidden = b.node("Relu", b.linear(x, 8, 8), out="hidden0")
    weight, rows = b.weight(8, 8), b.node("Size", x)
    many = b.node("Greater", rows, b.constant(10_000, np.int64))
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, [hidden, weight], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["batch", 8])],
        )
        for name, kind in (("then", "MatMul"), ("else", "Gemm"))
    }
    x = b.node("Relu", b.node("If", many, **bodies), out="hidden1")
    x = b.node("Relu", b.linear(x, 8, 8), out="hidden2")
    b.linear(x, 8, 3, out="logits")
    b.output("logits", ["batch", 3])
    return b.build()
