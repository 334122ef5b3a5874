"""The page that shows runs over time, as SuperServe's figure 10 does.

Each plot is drawn twice, for wide and for narrow screens, because text shrinks with its drawing;
the style sheet shows one of the two. Drawing and style are those of the bundle's report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Template
from markupsafe import Markup
from numpy.typing import NDArray

from offramp.commands import svg
from offramp.commands.pages import page_template
from offramp.commands.svg import Scale, Tick
from offramp.compiler.report import numbers
from offramp.tools.bench.common.outcomes import Summary, Timeline

_WIDE, _NARROW = 1040.0, 360.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 10.0, 8.0, 22.0
_HEIGHT, _TALL = 110.0, 240.0
_LABEL_SPACING = 44.0
"""Smallest distance in pixels between the middles of two labels below an axis."""
Point = tuple[float, float]
_SHARE_SPANS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Lengths of the axis of a plot of shares, below its top of 100 %."""


class RunView(NamedTuple):
    """The facts of a run that its page shows."""

    name: str
    summary: Summary
    timeline: Timeline
    percentiles: Sequence[tuple[float, float, int]]
    """Rows of ``hdr_table``: percentile, latency in ms, number of samples."""
    environment: Mapping[str, object]
    """Versions, machine and settings of the run, by name."""


class Key(NamedTuple):
    """An entry of a plot's legend."""

    label: str
    style: str
    """CSS of its mark."""


class Plot(NamedTuple):
    """A plot, drawn at both widths."""

    title: str
    keys: tuple[Key, ...]
    wide: Markup
    narrow: Markup


class _Series(NamedTuple):
    label: str
    """Label in the legend; empty if the plot has only one series."""
    values: NDArray[np.float64]
    colour: str = "accent"
    class_: str = "series"


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: list[Tick]
    """Ticks of the axis, at the positions where they are drawn."""
    scaled: Callable[[float], float] = float
    """Function from a value to its drawn position."""


def write_page(path: Path, *, title: str, measured: bool, runs: Sequence[RunView]) -> None:
    """Write a self-contained HTML file about one or more runs.

    Unless the figures were ``measured``, all are labelled as simulated.
    """
    if not runs:
        raise ValueError("a page needs one run or more")
    page = _template().render(
        title=title,
        kind="measured" if measured else "simulated",
        runs=runs,
        plots=[plots(run) for run in runs],
        tails=[percentile_plot(run) for run in runs],
        figures=[figures(run.summary) for run in runs],
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def figures(summary: Summary) -> list[tuple[str, str]]:
    """Return a run's main figures with their descriptions; unknown figures are omitted."""
    latency, slo = summary.latency_ms, summary.slo_ms
    found = [
        (f"{rate(summary.offered_rps)}/s", "offered"),
        (f"{rate(summary.throughput_rps)}/s", "answered"),
    ]
    if slo is not None:
        found.append((f"{rate(summary.goodput_rps)}/s", f"answered within {slo:g} ms"))
    if summary.attainment is not None:
        found.append((numbers.percent(summary.attainment, 2), f"of all within {slo:g} ms"))
    if latency:
        found.append((f"{numbers.milliseconds(latency['p50'])} ms", "median latency"))
        found.append((f"{numbers.milliseconds(latency['p99'])} ms", "99th percentile"))
        early = 1 - summary.exit_shares.get("final", 0.0)
        found.append((numbers.percent(early), "left before the model's end"))
    if summary.agreement is not None:
        found.append((numbers.percent(summary.agreement, 2), "agree with the source model"))
    if summary.mean_batch_size is not None:
        found.append((f"{summary.mean_batch_size:.1f}", "mean batch size"))
    return found


def plots(run: RunView) -> list[Plot]:
    """Draw a run over time: plots with a common time axis; empty plots are omitted."""
    t, slo_ms = run.timeline, run.summary.slo_ms
    rates = [
        _Series("offered", t.offered_rps, "quiet", "offered series"),
        _Series("answered", t.answered_rps),
    ]
    times = [
        _Series("99th percentile", t.p99_ms, "wrong", "tail series"),
        _Series("median", t.p50_ms),
    ]
    within, agree = "Share of all answered within the objective", "Share like the source model"
    drawn = [
        _lines(t, "Requests per second", rates, _from_zero),
        _lines(t, "Mean batch size", [_Series("", t.batch_size)], _from_zero),
        _shares(t),
        _lines(t, within, [_Series("", t.attainment)], _up_to_all),
        _lines(t, "Latency, ms", times, _latency_axis, slo_ms=slo_ms),
        _lines(t, agree, [_Series("", t.agreement)], _up_to_all),
    ]
    return [plot for plot in drawn if plot is not None]


def percentile_plot(run: RunView) -> Plot | None:
    """Draw latency by percentile; each further tenth of the tail has the same width."""
    if not run.percentiles:
        return None
    # the percentile 100 is drawn where the next halving would be
    nines = [-math.log10(1 - p / 100) for p, _, _ in run.percentiles[:-1]]
    nines.append(nines[-1] + math.log10(2))
    values = [ms for _, ms, _ in run.percentiles]
    axis = _latency_axis(np.array(values))
    marks = [(p, f"{p:g}%") for p in (0, 50, 90, 99, 99.9, 99.99, 99.999, 99.9999)]
    ticks = [(-math.log10(1 - p / 100), label) for p, label in marks]

    def draw(width: float) -> Markup:
        x = Scale(low=0, high=nines[-1], start=_LEFT, end=width - _RIGHT)
        y = Scale(low=axis.low, high=axis.high, start=_TALL - _BOTTOM, end=_TOP)
        points = [(x(n), y(axis.scaled(v))) for n, v in zip(nines, values, strict=True)]
        seen = _apart([tick for tick in ticks if tick[0] <= nines[-1]], x)
        return svg.drawing(
            width,
            _TALL,
            "Latency by percentile",
            svg.axes(x, y, seen, axis.ticks),
            svg.path(points, "series"),
            *(
                svg.dot(px, py, 2.5, "end", f"{p:.6g} %: {numbers.milliseconds(ms)} ms")
                for (px, py), (p, ms, _) in zip(points, run.percentiles, strict=True)
            ),
        )

    return Plot("Latency by percentile, ms", (), draw(_WIDE), draw(_NARROW))


def rate(value: float) -> str:
    """Return such as ``1,234`` or ``12.3``: three significant digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain(value: object) -> str:
    """Write an environment's value in one line."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "–"
        case Mapping():
            return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items())
        case list() | tuple():
            return ", ".join(plain(inner) for inner in value)
        case float():
            return f"{value:.6g}"
    return str(value)


def _lines(
    timeline: Timeline,
    title: str,
    series: Sequence[_Series],
    axis_of: Callable[[NDArray[np.float64]], _Axis],
    *,
    slo_ms: float | None = None,
) -> Plot | None:
    """Draw values by window, and the objective; nothing if there are no values."""
    values = np.concatenate([s.values for s in series])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    keys = [Key(s.label, stroke("solid", s.colour)) for s in series if s.label]
    levels = []
    if slo_ms is not None and slo_ms <= 10 * values.max():  # a higher line would flatten the rest
        levels.append(slo_ms)
        keys.append(Key(f"objective, {slo_ms:g} ms", stroke("dashed", "ink")))
    axis = axis_of(np.append(values, levels))

    def draw(width: float) -> Markup:
        x, y = _scales(timeline, axis, width)
        heights = [y(axis.scaled(level)) for level in levels]
        paths = [
            svg.path([(x(a), y(axis.scaled(v))) for a, v in piece], s.class_)
            for s in series
            for piece in _by_window(timeline, s.values)
        ]
        dashes = [svg.line(x.start, at, x.end, at, "threshold") for at in heights]
        label = f"{title} over time"
        return svg.drawing(width, y.start + _BOTTOM, label, _frame(x, y, axis), *dashes, *paths)

    return Plot(title, tuple(keys), draw(_WIDE), draw(_NARROW))


def stroke(kind: str, colour: str) -> str:
    """Return CSS for a line's mark in a legend: ``solid``, ``dashed`` or ``dotted``."""
    return f"height: 0; border-radius: 0; border-top: 2px {kind} var(--{colour})"


def _shares(timeline: Timeline) -> Plot | None:
    """Stack the shares of answers by exit and model's end; the deepest is on top and darkest."""
    upper = np.cumsum(timeline.exit_shares, axis=1)
    if not np.isfinite(upper).any():
        return None
    deepest = len(timeline.labels) - 1
    shade = [1.0 if i == deepest else 0.15 + 0.6 * i / deepest for i in range(deepest + 1)]
    keys = tuple(
        Key(label, f"background: var(--accent); opacity: {opacity:.2f}")
        for label, opacity in zip(timeline.labels, shade, strict=True)
    )
    axis = _Axis(0.0, 1.0, [(v, f"{100 * v:g}%") for v in (0.0, 0.5, 1.0)])

    def draw(width: float) -> Markup:
        x, y = _scales(timeline, axis, width)
        areas = []
        for place, opacity in enumerate(shade):
            below = upper[:, place - 1] if place else 0.0 * upper[:, 0]
            over, under = _by_window(timeline, upper[:, place]), _by_window(timeline, below)
            for top, bottom in zip(over, under, strict=True):
                around = [(x(a), y(v)) for a, v in [*top, *reversed(bottom)]]
                areas.append(
                    svg.element("g", svg.path(around, "layer", closed=True), fill_opacity=opacity)
                )
        label = "Exit shares over time"
        return svg.drawing(width, y.start + _BOTTOM, label, _frame(x, y, axis), *areas)

    return Plot("Where answers came from", keys, draw(_WIDE), draw(_NARROW))


def _by_window(timeline: Timeline, values: NDArray[np.float64]) -> Iterator[list[Point]]:
    starts = timeline.start_s
    return steps(starts.tolist(), (starts + timeline.window_s).tolist(), values)


def steps(
    starts: Sequence[float], ends: Sequence[float], values: NDArray[np.float64]
) -> Iterator[list[Point]]:
    """Yield the corners of a step line, as one list for each run of values without NaN."""
    piece: list[Point] = []
    for start, end, value in zip(starts, ends, values.tolist(), strict=True):
        if not math.isnan(value):
            piece += [(start, value), (end, value)]
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _scales(timeline: Timeline, axis: _Axis, width: float) -> tuple[Scale, Scale]:
    end_s = float(timeline.start_s[-1]) + timeline.window_s
    x = Scale(low=0.0, high=end_s, start=_LEFT, end=width - _RIGHT)
    return x, Scale(low=axis.low, high=axis.high, start=_HEIGHT - _BOTTOM, end=_TOP)


def _frame(x: Scale, y: Scale, axis: _Axis) -> Markup:
    """Draw axes, and grid lines at the times, so that plots below each other can be compared."""
    times = svg.nice_values(x.low, x.high, 10 if x.end > _NARROW else 4)
    grid = [svg.line(x(s), y.start, x(s), y.end, "grid") for s in times]
    labels = [(s, f"{s:g} s" if s else "0") for s in times]
    return svg.join([*grid, svg.axes(x, y, labels, axis.ticks)])


def _apart(ticks: list[Tick], x: Scale) -> list[Tick]:
    """Drop ticks whose labels would touch the previous label."""
    kept = ticks[:1]
    for tick in ticks[1:]:
        if x(tick[0]) - x(kept[-1][0]) >= _LABEL_SPACING:
            kept.append(tick)
    return kept


def _from_zero(values: NDArray[np.float64]) -> _Axis:
    high = 1.05 * float(values.max()) or 1.0
    return _Axis(0.0, high, [(v, f"{v:,.10g}") for v in svg.nice_values(0, high, 3)])


def _up_to_all(values: NDArray[np.float64]) -> _Axis:
    """Return an axis of shares, up to 100 %, which begins at a round share below all values."""
    missing = 1 - float(values.min())
    span = next(s for s in _SHARE_SPANS if s >= missing - 1e-9)
    ticks = [(v, f"{100 * v:.4g}%") for v in (1 - span, 1 - span / 2, 1.0)]
    return _Axis(1 - span, 1.0, ticks)


def _latency_axis(values: NDArray[np.float64]) -> _Axis:
    """Return an axis of latencies: from 0, or logarithmic if they span more than a decade."""
    low, high = float(values.min()), float(values.max())
    if not 0 < 10 * low < high:
        return _from_zero(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 200 * low else (1,)
    round_ = [m * 10.0**k for k in decades for m in steps]
    inside = [v for v in round_ if low <= v <= high]
    ticks = [(math.log10(v), f"{v:,.10g}") for v in inside]
    return _Axis(math.log10(low) - 0.05, math.log10(high) + 0.05, ticks, math.log10)


@cache
def _template() -> Template:
    return page_template(
        "dynamics.html.j2",
        "offramp.tools.bench",
        "offramp.compiler",
        percent=numbers.percent,
        ms=numbers.milliseconds,
        rate=rate,
        plain=plain,
    )
