"""Models made node by node, as if they had been read."""

from __future__ import annotations

import onnx

from offramp.bundle import Answer
from offramp.compiler.graphs.source_model import SourceModel


def a_model(proto: onnx.ModelProto) -> SourceModel:
    """A model as if it had been read: what slicing looks at is the graph."""
    return SourceModel(
        proto=proto,
        name="made",
        inputs=(),
        outputs=(),
        original_sha256="",
        opset=18,
        answer=Answer(output="y", form="logits", classes=5),
    )
