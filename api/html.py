"""Representation of models: one line, and a table for notebooks."""

from __future__ import annotations

from offramp.bundle import NEVER
from offramp.bundle.notebook import describe_promise, table_html
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import ModelStatistics


def describe_model(info: ModelInfo) -> str:
    """Return ``mlp: image: uint8 [batch, 784] → logits: float32 [batch, 10], 3 exits in use``."""
    count = len(info.policy.active)
    return f"{info.name}: {_tensors(info)}, {count} exit{'' if count == 1 else 's'} in use"


def model_html(info: ModelInfo, statistics: ModelStatistics) -> str:
    """Return a table of a model's exits: threshold, and number of samples that each answered."""
    answered = max(statistics.answered, 1)
    rows = [
        (
            stage.label,
            "–" if stage.threshold in (0.0, NEVER) else f"{stage.threshold:.3f}",
            f"{stage.answered:,}",
            f"{stage.answered / answered:.1%}",
        )
        for stage in statistics.stages
    ]
    lines = (
        _tensors(info),
        f"mode {statistics.mode}, {statistics.backend}, {statistics.answered:,} samples answered",
        f"exits in use: {len(info.policy.active)}; {describe_promise(info.policy)}",
    )
    return table_html(info.name, lines, ("exit", "threshold", "answered", "share"), rows)


def _tensors(info: ModelInfo) -> str:
    inputs = ", ".join(spec.describe() for spec in info.inputs)
    return f"{inputs} → {', '.join(spec.describe() for spec in info.outputs)}"
