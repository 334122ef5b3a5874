"""How models and reports show themselves in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from offramp.bundle import NEVER, Promise
from offramp.engine.results import ModelInfo
from offramp.engine.statistics import ModelStatistics


def describe_model(info: ModelInfo) -> str:
    """``resnet: image: uint8 [batch, 1, 28, 28] → logits: float32 [batch, 10], 3 exits in use``."""
    inputs = ", ".join(spec.describe() for spec in info.inputs)
    outputs = ", ".join(spec.describe() for spec in info.outputs)
    count = len(info.policy.active)
    return f"{info.name}: {inputs} → {outputs}, {count} exit{'' if count == 1 else 's'} in use"


def model_html(info: ModelInfo, statistics: ModelStatistics) -> str:
    """Show a model as a table of its exits: thresholds, and how many samples each answered."""
    answered = max(statistics.answered, 1)
    rows = [
        f"<tr><td>{escape(stage.label)}</td><td>{_threshold(stage.threshold)}</td>"
        f"<td>{stage.answered:,}</td><td>{stage.answered / answered:.1%}</td></tr>"
        for stage in statistics.stages
    ]
    head = "".join(f"<th>{word}</th>" for word in ("exit", "threshold", "answered", "share"))
    lines = "".join(f"<div>{escape(line)}</div>" for line in _lines(info, statistics))
    return (
        f"<div><b>{escape(info.name)}</b>{lines}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _lines(info: ModelInfo, statistics: ModelStatistics) -> Iterator[str]:
    yield f"{', '.join(spec.describe() for spec in info.inputs)} → " + ", ".join(
        spec.describe() for spec in info.outputs
    )
    yield f"mode {statistics.mode}, {statistics.backend}, {statistics.answered:,} samples answered"
    if info.policy.active and info.policy.promise is not None:
        yield describe_promise(info.policy.promise)
    else:
        yield "no exit is in use: the unmodified model answers"


def describe_promise(promise: Promise) -> str:
    """Say what an exit policy was certified for."""
    return (
        f"certified: at most {promise.max_disagreement:.2%} of answers differ from the unmodified "
        f"model's, with {promise.confidence_level:.0%} confidence; predicted to save "
        f"{promise.predicted_savings:.0%} of its time"
    )


def _threshold(threshold: float) -> str:
    return "–" if threshold in (0.0, NEVER) else f"{threshold:.3f}"


def report_html(document: str) -> str:
    """Show a report, a whole document, in a frame of its own: its style stays in there."""
    return (
        f'<iframe srcdoc="{escape(document)}" sandbox="" title="report" '
        'style="width: 100%; height: 40em; border: 1px solid #ccc"></iframe>'
    )
