"""Small decoders with random weights: [batch, tokens, vocabulary], with a cache and without."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from offramp.tools.zoo.small_decoder import SmallDecoder, export
from tests.models import Builder

LAYERS, VOCABULARY, PLACES = 3, 40, 48
TOKENS = (15, 0, 10)
"""Answers that are asked for: three of the vocabulary, not in its order."""


@functools.cache
def _exported(*, cache: bool) -> bytes:
    torch.manual_seed(0)
    model = SmallDecoder(vocabulary=VOCABULARY, tokens=PLACES, width=16, depth=LAYERS, heads=2)
    for weights in model.parameters():
        # As they are made, all tokens would be nearly as likely.
        torch.nn.init.normal_(weights, std=0.3)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        path = Path(folder) / "decoder.onnx"
        warnings.simplefilter("ignore")  # torch says that this exporter is not its newest
        export(model, path, cache=cache)
        return path.read_bytes()


def decoder(*, cache: bool = False) -> onnx.ModelProto:
    """A GPT as exporters write it: ``input_ids``, ``attention_mask``, ``logits``."""
    return onnx.ModelProto.FromString(_exported(cache=cache))


def prompts(
    count: int, width: int, *, left: bool = False, seed: int = 0
) -> dict[str, NDArray[np.int64]]:
    """Prompts of one token and more, padded on one side."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, count)
    lengths[0] = width
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    mask = np.ascontiguousarray(mask[:, ::-1]) if left else mask
    return {"input_ids": rng.integers(0, VOCABULARY, mask.shape) * mask, "attention_mask": mask}


def with_past(proto: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Add a past of length 0 for each input that wants one."""
    batch = len(next(iter(feeds.values())))
    past = {
        info.name: np.zeros(
            (batch, info.type.tensor_type.shape.dim[1].dim_value, 0,
             info.type.tensor_type.shape.dim[3].dim_value), np.float32,
        )
        for info in proto.graph.input
        if info.name.startswith("past")
    }  # fmt: skip
    return {**feeds, **past}


def summing(
    end: str = "matmul", *, mask: bool = True, batch: int | str = "batch", opset: int = 17
) -> onnx.ModelProto:
    """A model in which each place knows the sum of those before it, with one of many ends.

    The last three layers are: a sum that mixes tokens, an RMS norm as exporters write it, and a
    projection to the vocabulary.
    """
    b, width = Builder(seed=3), 8
    ids = b.input("input_ids", [batch, "sequence"], TensorProto.INT64)
    x = b.node("Gather", b.weight(VOCABULARY, width), ids)
    if mask:
        counts = b.input("attention_mask", [batch, "sequence"], TensorProto.INT64)
        kept = b.node("Cast", b.node("Unsqueeze", counts, b.constant([2], np.int64)), to=1)
        x = b.node("Mul", x, kept)
    x = b.node("CumSum", b.node("Tanh", b.matmul(x, width, width)), b.constant(1, np.int64))
    square = b.node("Pow", x, b.constant(2, np.float32))
    if opset >= 18:
        mean = b.node("ReduceMean", square, b.constant([-1], np.int64), keepdims=1)
    else:
        mean = b.node("ReduceMean", square, axes=[-1], keepdims=1)
    size = b.node("Sqrt", b.node("Add", mean, b.constant(1e-6, np.float32)))
    x = b.node("Mul", b.weight(width), b.node("Div", x, size))
    last = b.node("Cast", _END[end](b, x, width), to=1, out="logits")
    b.output(last, [batch, "sequence", VOCABULARY])
    return b.build(opset=opset)


def _tied(b: Builder, x: str, width: int) -> str:
    return b.node("MatMul", x, b.node("Transpose", b.weight(VOCABULARY, width), perm=[1, 0]))


def _computed(b: Builder, x: str, width: int) -> str:
    codes = b.constant(np.arange(width * VOCABULARY).reshape(width, -1) % 17, np.float32)
    return b.node("MatMul", x, b.node("Mul", codes, b.weight(1, VOCABULARY)))


def _capped(b: Builder, x: str, width: int) -> str:
    cap = b.constant(2, np.float32)
    x = b.node("Add", b.matmul(x, width, VOCABULARY), b.weight(VOCABULARY))
    return b.node("Mul", b.node("Tanh", b.node("Div", x, cap)), cap)


def _flat(b: Builder, x: str, width: int) -> str:
    measured = b.node("Shape", x)
    x = b.node("Reshape", x, b.constant([-1, width], np.int64))
    x = b.node("Gemm", x, b.weight(VOCABULARY, width), b.weight(VOCABULARY), transB=1)
    sizes = b.node("Slice", measured, b.constant([0], np.int64), b.constant([2], np.int64))
    target = b.node("Concat", sizes, b.constant([VOCABULARY], np.int64), axis=0)
    return b.node("Reshape", x, target)


def _sliced(b: Builder, x: str, width: int) -> str:
    begin, end = b.constant([0], np.int64), b.constant([2**63 - 1], np.int64)
    x = b.node("Slice", x, begin, end, b.constant([1], np.int64))
    return b.matmul(x, width, VOCABULARY)


_END = {
    "matmul": lambda b, x, width: b.matmul(x, width, VOCABULARY),
    "tied": _tied,
    "computed": _computed,
    "capped": _capped,
    "flat": _flat,
    "sliced": _sliced,
    "softmax": lambda b, x, width: b.node("Softmax", b.matmul(x, width, VOCABULARY), axis=-1),
    "mixed": lambda b, x, width: b.node(
        "CumSum", b.matmul(x, width, VOCABULARY), b.constant(1, np.int64)
    ),
}
ENDS = tuple(name for name in _END if name not in ("softmax", "mixed"))
