"""The report's charts: savings, latency by batch size, joint training, and curves of exits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from offramp.bundle import Manifest
from offramp.certify.decision import NEVER, leaves
from offramp.commands import svg
from offramp.commands.svg import Scale, Tick
from offramp.compiler.report import numbers
from offramp.compiler.report.figures import FloatArray, PolicyFigures, savings_curve, thin

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 500.0, 300.0, 54.0, 18.0, 26.0, 44.0
_REACH = 4.0
"""End of the disagreement axis, as a multiple of the bound in the promise."""
_DEFAULT_REACH = 0.05
"""End of the disagreement axis if there is no promise."""


class LatencyRow(NamedTuple):
    """Times in milliseconds at one batch size."""

    batch_size: int
    source_ms: float
    """Profiled time of the source model for a batch."""
    source_sample_ms: float
    """Profiled time of the source model per sample."""
    predicted_sample_ms: float
    """Predicted time per sample with the exit policy."""
    savings: float
    """Predicted saving, as a share of the source model's time."""


def savings_chart(found: PolicyFigures) -> Markup | None:
    """Draw savings against disagreement, and mark the policy in use; ``None`` without exits."""
    exits = found.active or [e.index for e in found.manifest.exits]
    if not exits or not found.certify.final_prediction.size:
        return None
    disagreement, saved = savings_curve(found, exits)
    promise = found.policy.promise
    reach = _DEFAULT_REACH if promise is None else _REACH * promise.max_disagreement
    reach = max(reach, 1.1 * found.disagreement)
    seen = disagreement <= reach
    x = Scale(low=0, high=reach, start=_LEFT, end=_WIDTH - _RIGHT)
    drawn = [0.0, 0.1, *saved[seen].tolist(), *([found.predicted_savings] if found.active else [])]
    y = Scale(low=min(drawn), high=min(1.0, 1.12 * max(drawn)), start=_HEIGHT - _BOTTOM, end=_TOP)
    points = [(x(d), y(s)) for d, s in zip(disagreement[seen], saved[seen], strict=True)]
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        "Predicted savings against disagreement on the certify split",
        _constraint(found, x, y),
        svg.axes(x, y, _percents(0, reach), _percents(y.low, y.high)),
        _titles("predicted savings", "disagreement on the certify split"),
        svg.path(points, "curve thin"),
        _shipped(found, x, y),
    )


def _percents(low: float, high: float, most: int = 5) -> list[Tick]:
    return [(v, f"{100 * v:.3g}%") for v in svg.nice_values(low, high, most)]


def latency_rows(found: PolicyFigures) -> list[LatencyRow]:
    """Return the times of source model and policy for every profiled batch size."""
    rows = []
    for size, source in zip(found.profile.batch_sizes, found.profile.source_ms, strict=True):
        predicted = found.predicted_ms(size)
        saved = 1 - predicted / source if source else 0.0
        rows.append(LatencyRow(size, source, source / size, predicted / size, saved))
    return rows


def latency_chart(found: PolicyFigures) -> Markup:
    """Draw milliseconds per sample by batch size; profiled times solid, predicted ones dashed."""
    rows = latency_rows(found)
    top = max(max(r.source_sample_ms, r.predicted_sample_ms) for r in rows)
    ends = max(len(rows) - 1, 1)
    x = Scale(low=0, high=ends, start=_LEFT + 16, end=_WIDTH - _RIGHT - 16)
    y = Scale(low=0, high=(1.12 * top) or 1.0, start=_HEIGHT - _BOTTOM, end=_TOP)
    frame = Scale(low=0, high=1, start=_LEFT, end=_WIDTH - _RIGHT)
    lines = [_line(x, y, [r.source_sample_ms for r in rows], "source", "profiled")]
    if found.active:
        lines.append(_line(x, y, [r.predicted_sample_ms for r in rows], "offramp", "predicted"))
    sizes = enumerate(str(r.batch_size) for r in rows)
    names = [svg.text(x(i), y.start + 16, size, "tick", "middle") for i, size in sizes]
    y_ticks = [(v, f"{v:g}") for v in svg.nice_values(0, y.high)]
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        "Milliseconds per sample by batch size",
        svg.axes(frame, y, [], y_ticks),
        *names,
        _titles("ms per sample", "batch size"),
        *lines,
    )


def _titles(y_title: str, x_title: str, right: float = _RIGHT) -> Markup:
    middle = (_LEFT + _WIDTH - right) / 2
    x_label = svg.text(middle, _HEIGHT - 6, x_title, "label", "middle")
    return svg.text(4, 11, y_title, "label") + x_label


def _constraint(found: PolicyFigures, x: Scale, y: Scale) -> Markup:
    """Shade the area in which disagreement is above the promised bound."""
    if (promise := found.policy.promise) is None:
        return Markup("")
    at = x(promise.max_disagreement)
    words = f"constraint {numbers.plain_percent(promise.max_disagreement)}"
    beyond = svg.box(at, y.end, x.end - at, y.start - y.end, class_="beyond")
    line = svg.line(at, y.start, at, y.end, "constraint")
    return beyond + line + svg.text(at + 6, y.end + 12, words, "label")


def _shipped(found: PolicyFigures, x: Scale, y: Scale) -> Markup:
    if not found.active:
        return Markup("")
    at, height = x(found.disagreement), y(found.predicted_savings)
    title = (
        f"shipped policy: predicted savings {numbers.percent(found.predicted_savings)}, "
        f"disagreement {numbers.percent(found.disagreement, 2)}"
    )
    right = at < (x.start + x.end) / 2
    words = [
        (f"shipped: {numbers.percent(found.predicted_savings)} saved,", "note strong"),
        (f"{numbers.percent(found.disagreement, 2)} disagree", "note"),
    ]
    start, anchor = (at + 12, "start") if right else (at - 12, "end")
    base = height + 24 if height < (y.start + y.end) / 2 else height - 26
    lines = [svg.text(start, base + 16 * i, t, c, anchor) for i, (t, c) in enumerate(words)]
    return svg.join([svg.dot(at, height, 6, "mark", title), *lines])


def _line(x: Scale, y: Scale, values: list[float], class_: str, kind: str) -> Markup:
    points = [(x(i), y(v)) for i, v in enumerate(values)]
    dots = [
        svg.dot(px, py, 3.5, f"{class_} point", f"{kind}: {numbers.milliseconds(v)} ms per sample")
        for (px, py), v in zip(points, values, strict=True)
    ]
    return svg.join([svg.path(points, f"{class_} series"), *dots])


_CARD_WIDTH, _CARD_LEFT, _CARD_RIGHT = 300.0, 46.0, 12.0
_CURVE_HEIGHT, _BARS_HEIGHT = 170.0, 122.0
_POINTS, _BINS, _FEWEST = 120, 26, 20
_MARKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
"""Confidences that may be labels of the logit axis."""
_SUREST = 0.99995


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCurves:
    """Two drawings of an exit: agreement against coverage, and the distribution of confidences."""

    index: int
    active: bool
    caption: str
    agreement: Markup
    confidence: Markup


def exit_curves(found: PolicyFigures) -> list[ExitCurves]:
    """Draw the curves of every exit, all on the same axes for comparison."""
    records = found.certify
    if not len(records.confidence) or not records.final_prediction.size:
        return []
    covers = [coverage(c, a) for c, a in zip(records.confidence, records.agrees, strict=True)]
    lowest = min(float(agreement.min()) for _, agreement in covers)
    bottom = math.floor(min(lowest, 0.98) * 20) / 20
    span = logit_span(records.confidence)
    return [
        ExitCurves(
            index=e.index,
            active=e.index in found.thresholds,
            caption=f"after segment {e.after_segment}",
            agreement=_agreement(found, e.index, covers[e.index], bottom),
            confidence=_confidence(found, e.index, span),
        )
        for e in found.manifest.exits
    ]


def coverage(
    confidence: NDArray[np.float32], agrees: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Return, for falling thresholds, the share of samples that leave, and their agreement.

    Both are float64[points]. Samples of equal confidence leave together. Points with fewer than 20
    samples are left out.
    """
    order = np.argsort(-confidence, kind="stable")
    sorted_ = confidence[order]
    leaving = np.arange(1, len(order) + 1)
    together = np.append(sorted_[1:] != sorted_[:-1], True)
    steps = np.flatnonzero(together & (leaving >= min(_FEWEST, len(order))))
    steps = steps[thin(len(steps), _POINTS)]
    return leaving[steps] / len(order), np.cumsum(agrees[order])[steps] / leaving[steps]


def logit(confidence: NDArray[Any] | float) -> FloatArray:
    """Return the logits of confidences, float64[...], clipped near 0 and 1."""
    clipped = np.clip(np.asarray(confidence, np.float64), 1e-4, _SUREST)
    return np.asarray(np.log(clipped / (1 - clipped)), dtype=np.float64)


def logit_span(confidence: NDArray[np.float32]) -> tuple[float, float]:
    """Return both ends of the confidence axis as logits; values beyond an end are drawn at it."""
    low, high = np.quantile(logit(confidence), [0.002, 1.0])
    return float(min(low, high - 1)), float(high)


def _agreement(
    found: PolicyFigures, index: int, cover: tuple[FloatArray, FloatArray], bottom: float
) -> Markup:
    x = Scale(low=0, high=1, start=_CARD_LEFT, end=_CARD_WIDTH - _CARD_RIGHT)
    y = Scale(low=bottom, high=1, start=_CURVE_HEIGHT - 36, end=20)
    active = index in found.thresholds
    points = [(x(s), y(a)) for s, a in zip(*cover, strict=True)]
    values = svg.nice_values(bottom, 1, 4)
    decimals = 0 if all(abs(100 * v - round(100 * v)) < 1e-6 for v in values) else 1
    y_ticks = [(v, f"{100 * v:.{decimals}f}%") for v in values]
    end = f"all leave: {numbers.percent(float(cover[1][-1]), 2)} agree"
    return svg.drawing(
        _CARD_WIDTH,
        _CURVE_HEIGHT,
        f"Exit {index}: agreement against the share that leaves",
        svg.axes(x, y, [(v, f"{v:.0%}") for v in (0, 0.25, 0.5, 0.75, 1)], y_ticks),
        svg.text(2, 9, "agreement of those leaving", "label"),
        svg.text(x.end, _CURVE_HEIGHT - 4, "share that leaves", "label", "end"),
        svg.path(points, "curve" if active else "curve idle"),
        svg.dot(*points[-1], 3, "end" if active else "end idle", end),
        _operating_point(found, index, x, y),
    )


def _operating_point(found: PolicyFigures, index: int, x: Scale, y: Scale) -> Markup:
    threshold = found.thresholds.get(index, NEVER)
    left = leaves(found.certify.confidence[index], np.float32(threshold))
    if not left.any():
        return Markup("")
    share, agreement = float(left.mean()), float(found.certify.agrees[index][left].mean())
    title = (
        f"threshold {numbers.threshold(threshold)}: {numbers.percent(share)} would leave, "
        f"{numbers.percent(agreement, 2)} of them agree"
    )
    at, height = x(share), y(max(agreement, y.low))
    line = svg.line(at, y.start, at, y.end, "threshold")
    return line + svg.dot(at, height, 4.5, "mark", title)


def _confidence(found: PolicyFigures, index: int, span: tuple[float, float]) -> Markup:
    edges = np.linspace(*span, _BINS + 1)
    values = np.clip(logit(found.certify.confidence[index]), *span)
    agrees = found.certify.agrees[index]
    right = np.histogram(values[agrees], edges)[0]
    wrong = np.histogram(values[~agrees], edges)[0]
    total = len(values)
    top = float((right + wrong).max()) / total
    x = Scale(low=span[0], high=span[1], start=_CARD_LEFT, end=_CARD_WIDTH - _CARD_RIGHT)
    y = Scale(low=0, high=top * 1.04, start=_BARS_HEIGHT - 36, end=20)
    active = index in found.thresholds
    parts = [
        _bar(x, y, edges[i : i + 2], right[i] / total, wrong[i] / total, active=active)
        for i in range(_BINS)
    ]
    return svg.drawing(
        _CARD_WIDTH,
        _BARS_HEIGHT,
        f"Exit {index}: how its confidences are spread",
        svg.axes(x, y, _confidence_ticks(x), _percents(0, top, 2)),
        svg.text(2, 9, "samples", "label"),
        svg.text(x.end, _BARS_HEIGHT - 4, "confidence (logit scale)", "label", "end"),
        *parts,
        _threshold_line(found, index, x, y),
    )


def _bar(
    x: Scale, y: Scale, edges: FloatArray, right: float, wrong: float, *, active: bool
) -> Markup:
    """Draw a bar: the share of disagreeing samples at the bottom, that of agreeing ones on top."""
    left, width = x(float(edges[0])) + 0.4, x(float(edges[1])) - x(float(edges[0])) - 0.8
    ends = ", ".join(f"{1 / (1 + math.exp(-e)):.4g}" for e in edges)
    title = (
        f"confidence {ends}: {numbers.percent(right, 2)} agree, {numbers.percent(wrong, 2)} do not"
    )
    boxes = [
        svg.box(left, y(low + share), width, y(low) - y(low + share), class_=class_, title=title)
        for low, share, class_ in (
            (0.0, wrong, "wrong"),
            (wrong, right, "right" if active else "right idle"),
        )
        if share > 0
    ]
    return svg.join(boxes)


def _confidence_ticks(x: Scale) -> list[Tick]:
    ticks: list[Tick] = []
    for value in _MARKS:
        at = float(logit(value))
        if x.inside(at) and (not ticks or x(at) - x(ticks[-1][0]) > 30):
            ticks.append((at, f"{value:g}"))
    return ticks


def _threshold_line(found: PolicyFigures, index: int, x: Scale, y: Scale) -> Markup:
    threshold = found.thresholds.get(index)
    if threshold is None:
        return Markup("")
    at = x(min(max(float(logit(threshold)), x.low), x.high))
    words = f"≥\u202f{numbers.threshold(threshold)}"
    line = svg.line(at, y.start, at, y.end, "threshold")
    return line + svg.text(max(at, _CARD_LEFT + 32), 9, words, "least", "middle")


_NAMES = 44.0
"""Width of the space on the right for the names of curves."""
_APART = 13.0
"""Smallest distance between the names of two curves."""


class TrainingView(NamedTuple):
    """Curves of a joint training, by epoch, measured on the tuning split."""

    words: str
    agreement: Markup
    losses: Markup
    lines: list[str]
    """Sentences on the agreement of each exit before and after training; the last sentence is on
    the copy's own answer."""


def training_view(manifest: Manifest) -> TrainingView | None:
    """Draw the joint training of a model with its exits; ``None`` if there was none."""
    if (training := manifest.training) is None:
        return None
    names = [f"E{exit_.index}" for exit_ in manifest.exits[:-1]] + ["copy"]
    agreement = [
        list(shares) for shares in zip(*(e.agreement for e in training.epochs), strict=True)
    ]
    losses = [list(values) for values in zip(*(e.losses for e in training.epochs), strict=True)]
    ends = [
        (name, shares[0], shares[training.kept])
        for name, shares in zip(names, agreement, strict=True)
    ]
    lowest = min(map(min, agreement))
    shares = [(v, f"{100 * v:.3g}%") for v in svg.nice_values(lowest, 1.0)]
    plain = [(v, f"{v:.3g}") for v in svg.nice_values(0, max(map(max, losses)))]
    return TrainingView(
        words=training.describe(),
        agreement=_by_epoch(
            "agreement with the unmodified model", names, agreement, shares, training.kept
        ),
        losses=_by_epoch("loss", names, losses, plain, training.kept),
        lines=[
            f"{name}: {numbers.percent(before)} → {numbers.percent(after)} agree"
            for name, before, after in ends
        ],
    )


def _by_epoch(
    title: str,
    names: Sequence[str],
    curves: Sequence[Sequence[float]],
    y_ticks: Sequence[Tick],
    kept: int,
) -> Markup:
    low = min(*(v for v, _ in y_ticks), *map(min, curves))
    high = max(*(v for v, _ in y_ticks), *map(max, curves))
    epochs = len(curves[0])
    x = Scale(low=0, high=max(epochs - 1, 1), start=_LEFT, end=_WIDTH - _NAMES)
    y = Scale(low=low, high=high if high > low else low + 1, start=_HEIGHT - _BOTTOM, end=_TOP)
    step = -(-epochs // 10)
    x_ticks = [(float(epoch), str(epoch)) for epoch in range(0, epochs, step)]
    drawn, taken = [], list[float]()
    by_height = sorted(range(len(curves)), key=lambda place: y(curves[place][-1]))
    for place in by_height:
        curve, name = curves[place], names[place]
        points = [(x(epoch), y(value)) for epoch, value in enumerate(curve)]
        drawn.append(svg.path(points, "source series" if name == "copy" else "curve thin", name))
        height = max([points[-1][1], *(other + _APART for other in taken[-1:])])
        taken.append(height)
        drawn.append(svg.text(x.end + 4, height + 4, name, "tick"))
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        f"{title} by epoch",
        svg.axes(x, y, x_ticks, y_ticks),
        _titles(title, "epoch", _NAMES),
        svg.line(x(kept), y.start, x(kept), y.end, "constraint"),
        *drawn,
    )
