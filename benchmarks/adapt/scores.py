"""Scores of a replay: agreement, violations and savings, by segment and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from benchmarks.adapt.replay import ReplayTrace
from benchmarks.adapt.sequence import SampleSequence, SegmentSpan

from offramp.baselines.thresholds import tune
from offramp.certify import BoolArray, FloatArray, IntArray
from offramp.engine.control.controller import Evidence
from offramp.engine.control.costs import CostModel

WINDOW: Final = 1000
"""Number of samples in each window for which the constraint is checked."""
STEP: Final = 100
"""Number of samples from the start of a window to the start of the next one."""
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerMetrics:
    """The figures of a controller over some samples. Shares are of these samples unless stated
    otherwise."""

    samples: int
    agreement: float
    """Share answered like the source model; measured."""
    risk: float
    """Expected disagreement in the long run under the policies that were active."""
    above: float
    """Share of answers under a policy whose risk exceeds the constraint."""
    latency_savings: float
    """Mean time saved until the answer, as a share of the source model's time; predicted from the
    profile."""
    compute_savings: float
    """Mean time saved until the sample left, as a share of the source model's time. Audits and
    samples that run on count as time used."""
    audited: float
    """Share of samples that an exit answered and that ran to the end nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentScore:
    """The figures of one controller in one segment."""

    name: str
    whole: ControllerMetrics
    settled: ControllerMetrics | None
    """Figures from ``settled_after`` on; ``None`` if the controller never settled."""
    settled_after: int | None
    """Number of samples of the segment after which no active policy exceeds the constraint."""
    windows_settled_after: int | None
    """Number of samples until every further window satisfies the constraint. At a risk near the
    constraint windows of 1,000 exceed it by chance."""
    worst_window: float
    """Smallest share of agreeing answers in a window."""
    windows_below: float
    """Share of the windows that violate the constraint."""
    certified: float
    """Share of the samples served while the controller claimed that its policy was certified."""
    certified_wrongly: float
    """Share of all samples served as certified while the policy's risk exceeded the constraint."""
    bound_wrong: float
    """Share of the samples served while the risk was above the upper bound that the controller
    reported."""
    accuracy: float | None
    """Share of the answers that equal the labels; ``None`` without labels."""
    source_accuracy: float | None
    """Share of the source model's answers that equal the labels; ``None`` without labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The figures of one controller on one sequence."""

    whole: ControllerMetrics
    segments: tuple[SegmentScore, ...]
    policies: int
    """Number of policies that were active."""
    tunings: int
    """Number of jobs that the controller ran."""
    tuning_ms: tuple[float, float, float] | None
    """Median, 95th percentile and largest of their run times; measured."""
    adjustments: int
    """Changes of the exits in use."""
    alarms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControllerSeries:
    """One controller over time: a point for every window of :data:`WINDOW` samples."""

    ends: IntArray
    """int64[windows]: number of samples served until the end of each window."""
    agreement: FloatArray
    latency_savings: FloatArray
    compute_savings: FloatArray
    audit_share: FloatArray
    """Share of the window that was answered early and ran on."""
    changed_at: IntArray
    """int64[policies]: number of samples served before each policy became active."""
    thresholds: FloatArray
    """float64[policies, K]: NaN where an exit was not in use, ``NEVER`` in shadow mode."""
    risk: FloatArray
    """float64[windows]: mean of the risk of the active policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HindsightMetrics:
    """The figures of the best thresholds for a segment, had they been known before."""

    agreement: float
    latency_savings: float
    """Predicted share of the time saved; without audits it is also the compute saved."""


def hindsight(
    sequence: SampleSequence, costs: CostModel, active: Sequence[int], max_disagreement: float
) -> tuple[HindsightMetrics, ...]:
    """Find, for each segment, the best thresholds within the constraint; return their figures.

    The thresholds are tuned on the segment's own samples.
    """
    exits, drawn, found = list(active), sequence.drawn, []
    latency_ms, source_ms = costs.latency_ms(active), costs.source_ms
    for span in sequence.spans:
        rows = slice(span.start, span.end)
        known = drawn.confidence[exits, rows], drawn.agrees[exits, rows]
        best = tune(*known, latency_ms, max_disagreement, vanilla_ms=source_ms)
        found.append(
            HindsightMetrics(agreement=1 - best.disagreement, latency_savings=best.savings)
        )
    return tuple(found)


def score(sequence: SampleSequence, trace: ReplayTrace, *, max_disagreement: float) -> Score:
    """Compare the answers of a replay with the constraint, over all samples and by segment."""
    risk = risks(sequence, trace)
    times = [t.took_ms for t in trace.tunings]
    middle, tail = np.quantile(times, (0.5, 0.95)) if times else (0.0, 0.0)
    last = trace.statuses[-1]
    return Score(
        whole=_conduct(trace, risk, np.arange(len(sequence)), max_disagreement),
        segments=tuple(
            _segment(sequence, trace, risk, span, max_disagreement) for span in sequence.spans
        ),
        policies=len(trace.changes),
        tunings=len(times),
        tuning_ms=(float(middle), float(tail), max(times)) if times else None,
        adjustments=last.adjustments,
        alarms=last.alarms,
    )


def risks(sequence: SampleSequence, trace: ReplayTrace) -> FloatArray:
    """Return float64[N]: the risk, in a sample's segment, of the policy that served the sample."""
    risk = np.empty(len(sequence))
    for span in sequence.spans:
        rows = slice(span.start, span.end)
        for number in np.unique(trace.policy[rows]):
            served = trace.policy[rows] == number
            risk[rows][served] = span.segment.risk(trace.changes[number].policy)
    return risk


def course(sequence: SampleSequence, trace: ReplayTrace) -> ControllerSeries:
    """Return the figures of a replay over time, window by window."""
    starts = _window_starts(0, len(sequence))
    ends = starts + min(WINDOW, len(sequence))

    def mean(values: FloatArray | BoolArray) -> FloatArray:
        total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        return np.asarray((total[ends] - total[starts]) / (ends - starts))

    exits = sequence.drawn.exits
    thresholds = np.full((len(trace.changes), exits), np.nan)
    for row, change in zip(thresholds, trace.changes, strict=True):
        for active in change.policy.active:
            row[active.exit] = active.threshold
    return ControllerSeries(
        ends=ends,
        agreement=mean(trace.agrees),
        latency_savings=1 - mean(trace.latency_ms) / trace.source_ms,
        compute_savings=1 - mean(trace.compute_ms) / trace.source_ms,
        audit_share=mean(trace.audited),
        changed_at=np.array([change.at for change in trace.changes]),
        thresholds=thresholds,
        risk=mean(risks(sequence, trace)),
    )


def _segment(
    sequence: SampleSequence,
    trace: ReplayTrace,
    risk: FloatArray,
    span: SegmentSpan,
    max_disagreement: float,
) -> SegmentScore:
    rows = np.arange(span.start, span.end)
    above = risk[rows] > max_disagreement + _ROUNDING
    settled_after = _after_last(above)
    starts = _window_starts(span.start, span.end)
    wrong = np.concatenate([[0], np.cumsum(~trace.agrees)])
    size = min(WINDOW, len(rows))
    share = (wrong[starts + size] - wrong[starts]) / size
    below = share > max_disagreement + _ROUNDING
    last_below = _after_last(below)
    chunks = rows // trace.chunk
    certified = np.array([s.evidence is Evidence.CERTIFIED for s in trace.statuses])[chunks]
    bounds = np.array([s.disagreement_upper_bound for s in trace.statuses])[chunks]
    labels, final = sequence.drawn.labels, sequence.drawn.final
    places = np.concatenate([sequence.drawn.prediction, final[None]])
    answers = places[trace.answered_at, np.arange(len(sequence))]
    return SegmentScore(
        name=span.segment.name,
        whole=_conduct(trace, risk, rows, max_disagreement),
        settled=None
        if settled_after is None
        else _conduct(trace, risk, rows[settled_after:], max_disagreement),
        settled_after=settled_after,
        windows_settled_after=None if last_below is None else int(starts[last_below] - span.start),
        worst_window=float(1 - share.max()),
        windows_below=float(below.mean()),
        certified=float(certified.mean()),
        certified_wrongly=float((certified & above).mean()),
        bound_wrong=float((risk[rows] > bounds + _ROUNDING).mean()),
        accuracy=None if labels is None else float((answers == labels)[rows].mean()),
        source_accuracy=None if labels is None else float((final == labels)[rows].mean()),
    )


def _conduct(
    trace: ReplayTrace, risk: FloatArray, rows: IntArray, max_disagreement: float
) -> ControllerMetrics:
    return ControllerMetrics(
        samples=len(rows),
        agreement=float(trace.agrees[rows].mean()),
        risk=float(risk[rows].mean()),
        above=float((risk[rows] > max_disagreement + _ROUNDING).mean()),
        latency_savings=float(1 - trace.latency_ms[rows].mean() / trace.source_ms),
        compute_savings=float(1 - trace.compute_ms[rows].mean() / trace.source_ms),
        audited=float(trace.audited[rows].mean()),
    )


def _after_last(marks: BoolArray) -> int | None:
    """Return the index after the last mark, 0 without marks; ``None`` if the last element is
    one.
    """
    marked = np.flatnonzero(marks)
    if not marked.size:
        return 0
    return None if marked[-1] == len(marks) - 1 else int(marked[-1]) + 1


def _window_starts(start: int, end: int) -> IntArray:
    """Return the starts of the windows between two samples; a short range is one window."""
    return np.arange(start, max(end - WINDOW, start) + 1, STEP)
