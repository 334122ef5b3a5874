"""The comparison as a table, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.adapt.replay import ComparedController, ReplayTrace
from benchmarks.adapt.scores import WINDOW, ControllerSeries, HindsightMetrics, Score, SegmentScore
from benchmarks.adapt.sequence import SampleSequence
from rich.console import Console

from offramp.tools.bench.common.output import figure_table

WIDTH = 124
"""Console width, in characters, at which the table is not cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControllerRun:
    """The replay and the score of one controller on one sequence."""

    contender: ComparedController
    trace: ReplayTrace
    score: Score
    course: ControllerSeries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The runs of all controllers on one sequence."""

    sequence: SampleSequence
    runs: tuple[ControllerRun, ...]
    hindsight: tuple[HindsightMetrics, ...]
    """Best possible figures by segment; empty if there is no threshold to tune."""


def print_comparison(console: Console, comparison: Comparison, *, max_disagreement: float) -> None:
    """Print a table of segments, and the result of each controller over all of them."""
    sequence = comparison.sequence
    figures = ("agree", "long run", "above", "settled", "then", "worst", "viol.", "saved", "busy")
    table = figure_table(
        f"{sequence.scenario}: {sequence.description}",
        _caption(max_disagreement),
        ("segment", "controller", *figures, "cert.", "right"),
        names=("segment", "controller"),
    )
    for place, span in enumerate(sequence.spans):
        for number, run in enumerate(comparison.runs):
            segment = run.score.segments[place]
            name = span.segment.name if not number else ""
            table.add_row(name, run.contender.label, *_cells(segment, max_disagreement))
        if comparison.hindsight:
            best = comparison.hindsight[place]
            saved = f"{best.latency_savings:.1%}"
            cells = (f"{best.agreement:.2%}", *[""] * 6, saved, saved, "", "")
            table.add_row("", "(hindsight)", *cells, style="dim")
        table.add_section()
    console.print(table)
    for run in comparison.runs:
        console.print(_summary(run), soft_wrap=True, highlight=False)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    sequence = comparison.sequence
    return {
        "scenario": sequence.scenario,
        "description": sequence.description,
        "segments": [
            {"name": s.segment.name, "start": s.start, "end": s.end} for s in sequence.spans
        ],
        "hindsight": [asdict(best) for best in comparison.hindsight],
        "runs": [_run_json(run) for run in comparison.runs],
    }


def _run_json(run: ControllerRun) -> dict[str, Any]:
    every = slice(None, None, 10)
    return {
        "controller": run.contender.label,
        "mode": run.contender.mode.value,
        "description": run.contender.description,
        "score": asdict(run.score),
        "windows": {
            "end": run.course.ends[every].tolist(),
            "agreement": run.course.agreement[every].round(4).tolist(),
            "latency_savings": run.course.latency_savings[every].round(4).tolist(),
            "compute_savings": run.course.compute_savings[every].round(4).tolist(),
        },
        "events": [
            {"at": at, "kind": event.kind, "text": event.text}
            for at, event in run.trace.events
            if event.warning or event.kind == "alarm"
        ],
    }


def _caption(max_disagreement: float) -> str:
    return (
        f"Constraint: {max_disagreement:.2%} disagreement. agree: measured, on recorded answers of "
        "the real model. long run: what agreement would be under the policies that were in force; "
        "above: share answered under one beyond the constraint; settled: samples until none is any "
        f"more, then: agreement from there on. worst: of windows of {WINDOW:,} samples; viol.: "
        "share of them beyond the constraint. saved: of the source model's time until the answer, "
        "busy: of its busy time, audits included; PREDICTED from profiled times. cert.: share "
        "served under a policy that the controller called certified; right: share of these that "
        "was. (hindsight): the best thresholds of the bundle's exits in use for each segment's own "
        "samples, known to nobody beforehand."
    )


def _cells(segment: SegmentScore, max_disagreement: float) -> list[str]:
    whole, settled = segment.whole, segment.settled
    wrong = segment.certified_wrongly / segment.certified if segment.certified else 0.0
    return [
        _marked(whole.agreement, max_disagreement),
        f"{1 - whole.risk:.2%}",
        f"{whole.above:.1%}",
        "never" if segment.settled_after is None else f"{segment.settled_after:,}",
        "–" if settled is None else _marked(settled.agreement, max_disagreement),
        f"{segment.worst_window:.1%}",
        f"{segment.windows_below:.0%}",
        f"{whole.latency_savings:.1%}",
        f"{whole.compute_savings:.1%}",
        f"{segment.certified:.0%}" if segment.certified else "–",
        f"{1 - wrong:.1%}" if segment.certified else "–",
    ]


def _marked(agreement: float, max_disagreement: float) -> str:
    text = f"{agreement:.2%}"
    return text if agreement >= 1 - max_disagreement else f"[red]{text}[/]"


def _summary(run: ControllerRun) -> str:
    score = run.score
    times = ""
    if score.tuning_ms is not None:
        middle, _, most = score.tuning_ms
        times = f" ({middle:.1f} ms in the median, {most:.1f} ms at most, measured)"
    return (
        f"[bold]{run.contender.label}[/] ({run.contender.mode.value}): "
        f"agreement {score.whole.agreement:.2%}, saved {score.whole.latency_savings:.1%} of the "
        f"time until the answer and {score.whole.compute_savings:.1%} of the busy time; "
        f"{_count(score.policies, 'policy', 'policies')}, {_count(score.tunings, 'job')}{times}, "
        f"{_count(score.adjustments, 'adjustment')}, {_count(score.alarms, 'alarm')}"
    )


def _count(value: int, noun: str, several: str = "") -> str:
    return f"{value:,} {noun if value == 1 else several or noun + 's'}"
