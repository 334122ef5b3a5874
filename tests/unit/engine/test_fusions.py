"""ONNX Runtime's fusions in the source model also happen in the stages, with exits and borders.

The graphs that ONNX Runtime runs are compared; it can write them to a file.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests import models
from tests.models import Builder
from tests.sliced import Sliced, slice_proto

from offramp.bundle import Answer, Head
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.exits.heads import build_exit
from offramp.engine.graphs.assembly import assemble
from offramp.engine.graphs.blocked_layout import enter_blocked

ROOT = Path(__file__).parents[3]
EXITS = 4
SAME = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
"""Fused operators, and what they grew of."""


def resnet(*, width: int = 16) -> onnx.ModelProto:
    """Three times three residual blocks; the first of each but the first halves the map."""
    b = Builder()
    x = b.node("Relu", b.conv(b.input("image", ["batch", 3, 16, 16]), (3, width)))
    for block in range(9):
        stride, wider = (2, 2 * width) if block in (3, 6) else (1, width)
        inner = b.node("Relu", b.conv(x, (width, wider), stride=stride))
        short = x if stride == 1 else b.conv(x, (width, wider), kernel=1, stride=stride)
        x = b.node("Relu", b.node("Add", b.conv(inner, (wider, wider)), short))
        width = wider
    return classified(b, x, width)


def mobilenet(*, width: int = 16, blocks: int = 9) -> onnx.ModelProto:
    """Inverted residuals: wider, by channel, narrower without an activation; ReLU6."""
    b = Builder()
    low, high = b.constant(0.0, np.float32), b.constant(6.0, np.float32)
    x = b.conv(b.input("image", ["batch", 3, 16, 16]), (3, width))
    for _ in range(blocks):
        wide = b.node("Clip", b.conv(x, (width, 4 * width), kernel=1), low, high)
        by_channel = b.node(
            "Conv", wide, b.weight(4 * width, 1, 3, 3), pads=[1] * 4, group=4 * width
        )
        inner = b.node("Clip", by_channel, low, high)
        x = b.node("Add", x, b.conv(inner, (4 * width, width), kernel=1))
    return classified(b, x, width)


def preactivated(*, width: int = 16, blocks: int = 9) -> onnx.ModelProto:
    """Residual blocks with the activation before the convolution."""
    b = Builder()
    x = b.conv(b.input("image", ["batch", 3, 16, 16]), (3, width))
    for _ in range(blocks):
        inner = b.conv(b.node("Relu", x), (width, width))
        x = b.node("Add", x, b.conv(b.node("Relu", inner), (width, width)))
    return classified(b, x, width)


def classified(b: Builder, x: str, width: int) -> onnx.ModelProto:
    x = b.node("Flatten", b.node("GlobalAveragePool", x), axis=1)
    b.linear(x, width, 5, out="logits")
    b.output("logits", ["batch", 5])
    return b.build()


MODELS = {
    "example": lambda: onnx.load(ROOT / "examples/fashion/fashion_resnet56.onnx"),
    "resnet": resnet,
    "mobilenet": mobilenet,
    "preactivated": preactivated,
    "dense": functools.partial(models.dense_net, layers=9),
    "inception": functools.partial(models.inception, modules=9),
    "transformer": functools.partial(models.bert_like, layers=5),
    "transformer without mask": functools.partial(models.bert_like, layers=5, mask=False),
}


@functools.cache
def pieces_of(name: str) -> Sliced:
    return slice_proto(MODELS[name]())


def run_as(model: bytes, path: Path) -> Counter[str]:
    """Operators of the graph that ONNX Runtime makes of a model."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return operators(path.read_bytes())


def operators(model: bytes) -> Counter[str]:
    return Counter(
        SAME.get(node.op_type, node.op_type) for node in onnx.load_from_string(model).graph.node
    )


@functools.cache
def blocks_are_used(folder: Path) -> bool:
    model = resnet().SerializeToString()
    return run_as(model, folder / "blocks.onnx")["ReorderOutput"] > 0


def exit_after(cut: CutTensor, classes: int, index: int) -> bytes:
    grid = 0 if cut.rank != 4 else min(2, int(cut.shape[2]))
    head = Head(kind="grid", grid=grid) if grid else Head(kind="mean")
    features = cut.width * max(grid, 1) ** 2
    weights = {
        "weight": np.ones((features, classes), np.float32),
        "bias": np.ones(classes, np.float32),
    }
    answer = Answer(output="answer", classes=classes, form="logits")
    settings = {"answer_dtype": "float32", "opset": 17, "ir_version": 8}
    return build_exit(cut, head, weights, answer, f"exit_{index}/", **settings)


def staged(pieces: Sliced) -> list[bytes]:
    """Stages between exits spread over the cuts."""
    places = np.linspace(0, len(pieces.cuts) - 1, EXITS + 2).round().astype(int)[1:-1].tolist()
    stages, first = [], 0
    for place in places:
        cut = pieces.cuts[place]
        exit_ = exit_after(cut, pieces.model.answer.classes, place)
        outputs = [f"exit_{place}/answer", f"exit_{place}/confidence", cut.name]
        stages.append(assemble([*pieces.graphs[first : place + 1], exit_], outputs))
        first = place + 1
    return [*stages, assemble(pieces.graphs[first:], [pieces.model.answer.output])]


@pytest.mark.parametrize("name", MODELS)
def test_stages_lose_no_fusion(name: str, tmp_path: Path) -> None:
    """All that they run more than the source is written in them more: heads, recomputed masks."""
    if not blocks_are_used(tmp_path):
        pytest.skip("ONNX Runtime has no blocked convolutions for this CPU")
    pieces = pieces_of(name)
    source = pieces.model.proto.SerializeToString()
    stages = [enter_blocked(stage) for stage in staged(pieces)]
    assert len(stages) == EXITS + 1

    written = sum((operators(stage) for stage in stages), Counter()) - operators(source)
    run = Counter[str]()
    for index, stage in enumerate(stages):
        run += run_as(stage, tmp_path / f"{index}.onnx")
    run -= run_as(source, tmp_path / "source.onnx")
    reorders = {"in": run.pop("ReorderInput", 0), "out": run.pop("ReorderOutput", 0)}

    assert run <= written
    assert reorders["in"] <= EXITS
    assert reorders["out"] <= 2 * EXITS
