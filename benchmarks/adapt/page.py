"""The comparison as a page: agreement, savings and thresholds over time, one card per controller.

Drawing and style are those of the bundle's report; the page is self-contained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from benchmarks.adapt.report import Comparison, ControllerRun
from benchmarks.adapt.sequence import SampleSequence
from jinja2 import Template
from markupsafe import Markup

from offramp.certify import FloatArray
from offramp.commands import svg
from offramp.commands.pages import page_template
from offramp.commands.svg import Scale, Tick
from offramp.compiler.report import numbers
from offramp.tools.bench.common.dynamics import plain, steps, stroke

_WIDTH, _HEIGHT = 520.0, 132.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 6.0, 16.0, 20.0
_AGREEMENT_SPANS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Possible lengths of the agreement axis, which ends at 100 %."""
_EVERY: Final = 2
"""Every n-th window is drawn: more would be indistinguishable."""
_LETTER_WIDTH: Final = 7.0
"""Pixels that a letter of a segment's name takes, about."""


class CardPlot(NamedTuple):
    """A drawing on a controller's card, and its title."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """Entries of the legend: each label with the CSS of its mark."""
    drawing: Markup


class Card(NamedTuple):
    """The part of the page about one controller on one sequence."""

    run: ControllerRun
    plots: tuple[CardPlot, ...]


def write_page(
    path: Path,
    *,
    title: str,
    comparisons: Sequence[Comparison],
    max_disagreement: float,
    environment: Mapping[str, object],
) -> None:
    """Write one HTML file; ``environment`` has the machine and the settings of the run."""
    page = _template().render(
        title=title,
        comparisons=[(c, cards(c, max_disagreement)) for c in comparisons],
        constraint=max_disagreement,
        environment=environment,
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def cards(comparison: Comparison, max_disagreement: float) -> list[Card]:
    """Draw all controllers on one sequence, on the same axes."""
    least = min(float(run.course.agreement.min()) for run in comparison.runs)
    low = 1 - next(s for s in _AGREEMENT_SPANS if s >= max(1 - least, 2 * max_disagreement) - 1e-9)
    lost = min(float(run.course.compute_savings.min()) for run in comparison.runs)
    return [
        Card(
            run,
            (
                _agreement(comparison.sequence, run, low, max_disagreement),
                _savings(comparison.sequence, run, min(0.0, lost)),
                _thresholds(comparison.sequence, run),
            ),
        )
        for run in comparison.runs
    ]


def _agreement(
    sequence: SampleSequence, run: ControllerRun, low: float, max_disagreement: float
) -> CardPlot:
    x, y = _scales(sequence, low, 1.0)
    constraint = 1 - max_disagreement
    below = svg.box(
        x.start, y(constraint), x.end - x.start, y(low) - y(constraint), class_="beyond"
    )
    ticks: list[Tick] = [(v, f"{100 * v:.4g}%") for v in (low, (1 + low) / 2, 1.0)]
    alarms = [
        svg.element("g", svg.line(x(at), y.start, x(at), y.end, "alarm"), svg.titled(event.text))
        for at, event in run.trace.events
        if event.kind == "alarm"
    ]
    drawing = _draw(
        sequence,
        f"Agreement of {run.contender.label} over time",
        x,
        y,
        ticks,
        below,
        svg.line(x.start, y(constraint), x.end, y(constraint), "constraint"),
        *alarms,
        svg.path(_points(x, y, run.course.ends, 1 - run.course.risk), "longrun series"),
        svg.path(_points(x, y, run.course.ends, run.course.agreement), "series"),
    )
    keys: tuple[tuple[str, str], ...] = (
        ("last 1,000 answers", stroke("solid", "accent")),
        ("in the long run", stroke("solid", "quiet")),
        ("constraint", stroke("dashed", "wrong")),
    )
    if alarms:
        keys = (*keys, ("alarm", stroke("dotted", "ink")))
    return CardPlot("Agreement with the source model", keys, drawing)


def _savings(sequence: SampleSequence, run: ControllerRun, low: float) -> CardPlot:
    x, y = _scales(sequence, min(low, -0.05), 1.0)
    ticks: list[Tick] = [(v, f"{100 * v:g}%") for v in (0.0, 0.5, 1.0)]
    course = run.course
    drawing = _draw(
        sequence,
        f"Savings of {run.contender.label} over time",
        x,
        y,
        ticks,
        svg.path(_points(x, y, course.ends, course.compute_savings), "busy series"),
        svg.path(_points(x, y, course.ends, course.latency_savings), "series"),
    )
    keys = (
        ("time until the answer", stroke("solid", "accent")),
        ("busy time, audits included", stroke("dashed", "wrong")),
    )
    return CardPlot("Saved, predicted from profiled times", keys, drawing)


def _thresholds(sequence: SampleSequence, run: ControllerRun) -> CardPlot:
    x, y = _scales(sequence, 0.0, 1.0)
    ticks: list[Tick] = [(v, f"{v:g}") for v in (0.0, 0.5, 1.0)]
    changed = [*run.course.changed_at.tolist(), len(sequence)]
    exits = run.course.thresholds.shape[1]
    answering = np.where(run.course.thresholds <= 1, run.course.thresholds, np.nan)  # not NEVER
    used = [e for e in range(exits) if np.isfinite(answering[:, e]).any()]
    paths = [
        svg.element(
            "g",
            svg.path(((x(a), y(v)) for a, v in piece), "series", f"exit {e}"),
            stroke_opacity=_shade(e, exits),
        )
        for e in used
        for piece in steps(changed[:-1], changed[1:], answering[:, e])
    ]
    label = f"Thresholds of {run.contender.label} over time"
    keys = tuple(
        (f"exit {e}", f"{stroke('solid', 'accent')}; opacity: {_shade(e, exits):.2f}") for e in used
    )
    drawing = _draw(sequence, label, x, y, ticks, *paths)
    return CardPlot("Thresholds of the exits that answer", keys, drawing)


def _draw(
    sequence: SampleSequence, label: str, x: Scale, y: Scale, ticks: list[Tick], *marks: Markup
) -> Markup:
    """Draw marks over the segments of a sequence, with axes."""
    shades, names = [], []
    for number, span in enumerate(sequence.spans):
        left, right = x(span.start), x(span.end)
        if number % 2:
            shades.append(svg.box(left, y.end, right - left, y.start - y.end, class_="shade"))
        name = span.segment.name
        if len(name) * _LETTER_WIDTH < right - left:
            names.append(svg.text((left + right) / 2, _TOP - 5, name, "tick", "middle"))
    values = svg.nice_values(0, len(sequence), 6)
    times = [(v, f"{v / 1000:g}k" if v else "0") for v in values]
    return svg.drawing(
        _WIDTH, _HEIGHT, label, *shades, *names, svg.axes(x, y, times, ticks), *marks
    )


def _scales(sequence: SampleSequence, low: float, high: float) -> tuple[Scale, Scale]:
    x = Scale(low=0, high=len(sequence), start=_LEFT, end=_WIDTH - _RIGHT)
    return x, Scale(low=low, high=high, start=_HEIGHT - _BOTTOM, end=_TOP)


def _points(
    x: Scale, y: Scale, at: Sequence[int] | np.ndarray, values: FloatArray
) -> Iterator[tuple[float, float]]:
    for a, value in zip(at[::_EVERY], values[::_EVERY].tolist(), strict=True):
        yield x(float(a)), y(max(value, y.low))


def _shade(exit_: int, exits: int) -> float:
    """Return the shade of an exit: deeper exits are darker."""
    return 0.35 + 0.65 * (exit_ + 1) / exits


@cache
def _template() -> Template:
    return page_template(
        "adapt.html.j2",
        Path(__file__).parent,
        "offramp.compiler",
        percent=numbers.percent,
        bare=numbers.plain_percent,
        plain=plain,
        count=lambda value: "never" if value is None else f"{value:,}",
    )
