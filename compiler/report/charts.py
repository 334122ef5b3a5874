"""Savings against the constraint, and latency by batch size."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from offramp.compiler.report import numbers, svg
from offramp.compiler.report.analysis import Analysis, savings_curve
from offramp.compiler.report.svg import Scale

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 500.0, 300.0, 54.0, 18.0, 26.0, 44.0
_REACH = 4.0
"""The disagreement axis ends at this many times the constraint."""
_DEFAULT_REACH = 0.05
"""Its end where nothing was promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """Milliseconds at one batch size."""

    batch_size: int
    source_ms: float
    """Profiled, per batch."""
    source_sample_ms: float
    """Profiled, per sample."""
    predicted_sample_ms: float
    """Predicted, per sample."""
    savings: float
    """Predicted share of the source model's time."""


def savings_chart(found: Analysis) -> Markup | None:
    """Draw the descriptive curve and mark the shipped policy; nothing without exits."""
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
        svg.axes(
            x,
            y,
            [(v, f"{100 * v:.3g}%") for v in svg.nice_values(0, reach)],
            [(v, f"{100 * v:.3g}%") for v in svg.nice_values(y.low, y.high)],
        ),
        _titles("predicted savings", "disagreement on the certify split"),
        svg.path(points, "curve thin"),
        _shipped(found, x, y),
    )


def latency_rows(found: Analysis) -> list[LatencyRow]:
    """Compute what source and policy take at every profiled batch size."""
    rows = []
    for size, source in zip(found.profile.batch_sizes, found.profile.source_ms, strict=True):
        predicted = found.predicted_ms(size)
        rows.append(
            LatencyRow(
                batch_size=size,
                source_ms=source,
                source_sample_ms=source / size,
                predicted_sample_ms=predicted / size,
                savings=1 - predicted / source if source else 0.0,
            )
        )
    return rows


def latency_chart(found: Analysis) -> Markup:
    """Draw milliseconds per sample by batch size: profiled solid, predicted dashed."""
    rows = latency_rows(found)
    top = max(max(r.source_sample_ms, r.predicted_sample_ms) for r in rows)
    ends = max(len(rows) - 1, 1)
    x = Scale(low=0, high=ends, start=_LEFT + 16, end=_WIDTH - _RIGHT - 16)
    y = Scale(low=0, high=(1.12 * top) or 1.0, start=_HEIGHT - _BOTTOM, end=_TOP)
    frame = Scale(low=0, high=1, start=_LEFT, end=_WIDTH - _RIGHT)
    lines = [_line(x, y, [r.source_sample_ms for r in rows], "source", "profiled")]
    if found.active:
        lines.append(_line(x, y, [r.predicted_sample_ms for r in rows], "offramp", "predicted"))
    names = [
        svg.text(x(i), y.start + 16, str(r.batch_size), "tick", "middle")
        for i, r in enumerate(rows)
    ]
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


def _titles(y_title: str, x_title: str) -> Markup:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return svg.join(
        [
            svg.text(4, 11, y_title, "label"),
            svg.text(middle, _HEIGHT - 6, x_title, "label", "middle"),
        ]
    )


def _constraint(found: Analysis, x: Scale, y: Scale) -> Markup:
    """Shade what the constraint forbids."""
    if (promise := found.policy.promise) is None:
        return Markup("")
    at = x(promise.max_disagreement)
    words = f"constraint {numbers.plain_percent(promise.max_disagreement)}"
    return svg.join(
        [
            svg.box(at, y.end, x.end - at, y.start - y.end, class_="beyond"),
            svg.line(at, y.start, at, y.end, "constraint"),
            svg.text(at + 6, y.end + 12, words, "label"),
        ]
    )


def _shipped(found: Analysis, x: Scale, y: Scale) -> Markup:
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
