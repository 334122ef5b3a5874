"""The curves of the status page as SVG: a history, with its events on the time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from markupsafe import Markup

from offramp.commands import svg
from offramp.commands.svg import LogScale, Scale, Tick
from offramp.engine.stages.plan import Mode
from offramp.server.pages.history import History, IntervalPoint, ModelEvent, ModelHistory

_WIDTH, _HEIGHT = 400.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 16.0, 16.0, 24.0
_SHORTEST_S = 60.0
"""Shortest time axis, in seconds, for a server that has just started."""
_STEPS_S = (10, 20, 60, 120, 300)
"""Possible distances between ticks of the time axis."""
LAYERS: Final = 8
"""Number of colours for places (exits and the model's end); if there are more, some share one."""
_CONSTRAINTS: Final = 4
"""The axis of disagreement ends at most at this multiple of the constraint."""
_NO_INTERVAL = "no interval is complete yet: the first one takes 5 s"
_NO_ANSWER = "no request was answered in the last 15 minutes"

Values: TypeAlias = Sequence[tuple[float, float | None]]
"""Times, each with a value or ``None``."""


class LegendEntry(NamedTuple):
    """An entry of a chart's legend."""

    class_: str
    """CSS class of its line or area."""
    name: str
    now: str
    """Latest value of the curve, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with title and legend, or a text in its place."""

    title: str
    legend: tuple[LegendEntry, ...] = ()
    drawing: Markup | None = None
    words: str = ""
    """Reason why there is no drawing; empty if there is one."""


class _Curve(NamedTuple):
    class_: str
    name: str
    values: Values


@lru_cache(maxsize=32)
def draw_model(history: ModelHistory, mode: str, now_s: float) -> tuple[Chart, ...]:
    """Draw rate, latency, places of answers and disagreement, each with the events.

    Drawing takes a few milliseconds. The charts are cached until the next snapshot, at ``now_s``,
    so that clients that load page after page do not slow requests down.
    """
    points = tuple(history.points)
    frame = _Frame(points[0].start_s if points else now_s, now_s, tuple(history.events))
    return (
        _rates(frame, points),
        _latencies(frame, points),
        _shares(frame, points, history.places()),
        _disagreement(frame, points, mode),
    )


def draw_refused(history: History) -> Chart:
    """Draw the requests of all models that were refused or failed."""
    title = "Requests refused or failed, per second, all models"
    points = tuple(history.refused)
    if points and not any(point.refused_per_s for point in points):
        return Chart(title=title, words="None in the last 15 minutes.")
    frame = _Frame(points[0].start_s if points else 0.0, history.taken_s, ())
    values = [(point.end_s, point.refused_per_s) for point in points]
    return _lines(frame, title, [_Curve("third", "refused or failed", values)], empty=_NO_INTERVAL)


def describe_age(seconds: float) -> str:
    """Return an age such as ``now``, ``40 s ago`` or ``3 min 20 s ago``."""
    minutes, rest = divmod(round(seconds), 60)
    parts = [f"{minutes} min"] * (minutes > 0) + [f"{rest} s"] * (rest > 0)
    return f"{' '.join(parts)} ago" if parts else "now"


class _Frame:
    """Time axis of a chart, with the events on it."""

    def __init__(self, start_s: float, now_s: float, events: tuple[ModelEvent, ...]) -> None:
        span_s = max(now_s - start_s, _SHORTEST_S)
        self.x = Scale(low=now_s - span_s, high=now_s, start=_LEFT, end=_WIDTH - _RIGHT)
        self._now_s = now_s
        self._events = [event for event in events if self.x.inside(event.time_s)]

    def draw(self, title: str, summary: str, y: Scale, body: str) -> Markup:
        """Draw axes, ``body`` and the events; ``summary`` is the text for screen readers."""
        logarithmic = isinstance(y, LogScale)
        values = svg.nice_logs(y.low, y.high) if logarithmic else svg.nice_values(y.low, y.high, 4)
        y_ticks = [(value, short_number(value)) for value in values]
        return svg.drawing(
            _WIDTH,
            _HEIGHT,
            f"{title}: {summary}",
            svg.axes(self.x, y, self._time_ticks(), y_ticks),
            body,
            svg.join(self._marks()),
        )

    def _time_ticks(self) -> list[Tick]:
        span_s = self.x.high - self.x.low
        longest_s = 60 * math.ceil(span_s / 240)  # the process was suspended for a while
        step_s = next((step for step in _STEPS_S if span_s / step <= 4), longest_s)
        ages_s = range(0, int(span_s + 1e-6) + 1, step_s)
        return [(self._now_s - age_s, _tick(age_s)) for age_s in ages_s]

    def _marks(self) -> Iterator[Markup]:
        for event in self._events:
            x = self.x(event.time_s)
            title = f"{describe_age(self._now_s - event.time_s)}: {event.change.text}"
            head = svg.path([(x - 5, 2), (x + 5, 2), (x, 11)], "head", closed=True)
            line = svg.line(x, 11, x, _HEIGHT - _BOTTOM, "when")
            class_ = "event bad" if event.change.warning else "event"
            yield svg.element("g", svg.titled(title), line, head, class_=class_)


def _tick(age_s: int) -> str:
    if not age_s:
        return "now"
    return f"−{age_s // 60} min" if age_s % 60 == 0 else f"−{age_s} s"


_Points: TypeAlias = tuple[IntervalPoint, ...]


def _rates(frame: _Frame, points: _Points) -> Chart:
    curves = (
        _curve("first", "requests", points, lambda point: point.requests_per_s),
        _curve("second", "samples", points, lambda point: point.samples_per_s),
        _curve("third", "unanswered samples", points, lambda point: point.failed_per_s),
    )
    return _lines(frame, "Rate, per second", curves, empty=_NO_INTERVAL)


def _latencies(frame: _Frame, points: _Points) -> Chart:
    curves = (
        _curve("first", "p50", points, lambda point: _scaled(point.latency_p50_s, 1000)),
        _curve("second", "p99", points, lambda point: _scaled(point.latency_p99_s, 1000)),
    )
    empty = _NO_ANSWER if points else _NO_INTERVAL
    return _lines(
        frame, "Latency of requests, ms, logarithmic", curves, empty=empty, fit=_log_scale
    )


def _disagreement(frame: _Frame, points: _Points, mode: str) -> Chart:
    curves = (
        _curve("first", "measured", points, lambda point: _scaled(point.disagreement, 100)),
        _curve("second", "upper bound", points, lambda point: _scaled(point.upper_bound, 100)),
        _curve("limit", "constraint", points, lambda point: _scaled(point.constraint, 100)),
    )
    empty = (
        "no controller observes the answers of this model"
        if Mode(mode).observed
        else f"answers are not compared with the unmodified model's in mode {mode}; "
        "use --mode audit to compare them"
    )
    most = 100 * _CONSTRAINTS * max((point.constraint or 0 for point in points), default=0)
    return _lines(
        frame,
        "Disagreement with the unmodified model, %",
        curves,
        empty=empty if points else _NO_INTERVAL,
        fit=lambda values: _scale(min(max(values), most)),
    )


def _curve(
    class_: str, name: str, points: _Points, read: Callable[[IntervalPoint], float | None]
) -> _Curve:
    return _Curve(class_, name, [(point.end_s, read(point)) for point in points])


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _lines(
    frame: _Frame,
    title: str,
    curves: Sequence[_Curve],
    *,
    empty: str,
    fit: Callable[[Sequence[float]], Scale] | None = None,
) -> Chart:
    """Draw curves on the scale from ``fit``, by default from 0 up.

    Values above the scale are drawn at its top.
    """
    present = [value for curve in curves for _, value in curve.values if value is not None]
    if not present:
        return Chart(title=title, words=_sentence(empty))
    y = _scale(max(present)) if fit is None else fit(present)
    body = svg.join(_line(frame.x, y, curve) for curve in curves)
    return _chart(frame, title, curves, y, body)


def _scale(highest: float) -> Scale:
    return Scale(low=0, high=1.08 * highest or 1.0, start=_HEIGHT - _BOTTOM, end=_TOP)


def _log_scale(values: Sequence[float]) -> Scale:
    """Return a scale on which p50 is legible next to a p99 that is 100 times as high."""
    ticks = svg.nice_logs(min(values), max(values))
    return LogScale(low=ticks[0], high=ticks[-1], start=_HEIGHT - _BOTTOM, end=_TOP)


def _chart(frame: _Frame, title: str, curves: Sequence[_Curve], y: Scale, body: str) -> Chart:
    return Chart(
        title=title,
        legend=tuple(LegendEntry(c.class_, c.name, _latest(c.values, y.high)) for c in curves),
        drawing=frame.draw(title, "; ".join(map(_summary, curves)), y, body),
    )


def _line(x: Scale, y: Scale, curve: _Curve) -> Markup:
    """Draw a curve with gaps where values are missing; a single point is a dot."""
    stretches = [
        [(x(at), y(min(value, y.high))) for at, value in stretch]
        for stretch in stretches_of(curve.values)
    ]
    return svg.join(
        svg.path(points, f"curve {curve.class_}")
        if len(points) > 1
        else svg.dot(*points[0], 2, f"dot {curve.class_}")
        for points in stretches
    )


def stretches_of(values: Values) -> Iterator[list[tuple[float, float]]]:
    """Yield the parts of a curve that have no missing value."""
    stretch: list[tuple[float, float]] = []
    for at, value in values:
        if value is not None:
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _shares(frame: _Frame, points: _Points, places: Sequence[str]) -> Chart:
    """Stack the shares of answers by place (exits, the model's end), the deepest at the bottom."""
    title = "Answers by place, %"
    if not places:
        return Chart(title=title, words=_sentence(_NO_ANSWER if points else _NO_INTERVAL))
    y = Scale(low=0, high=100, start=_HEIGHT - _BOTTOM, end=_TOP)
    curves = [
        _Curve(
            _layer(number, len(places)),
            place,
            [(point.end_s, _scaled(point.share(place), 100)) for point in points],
        )
        for number, place in enumerate(places)
    ]
    return _chart(frame, title, curves, y, svg.join(_stack(frame.x, y, points, curves)))


def _layer(number: int, count: int) -> str:
    """Return the CSS class of a place's colour; the colours are spread over all places."""
    last = LAYERS - 1
    return f"layer-{last - round((count - 1 - number) * last / max(count - 1, 1))}"


def _stack(x: Scale, y: Scale, points: _Points, curves: Sequence[_Curve]) -> Iterator[Markup]:
    """Yield each layer as one path of rectangles, since a share applies to its whole interval."""
    edges = [(f"{x(point.start_s):.5g}", f"{x(point.end_s):.5g}") for point in points]
    below = [y(0)] * len(points)
    for curve in reversed(curves):
        above = [
            low - (y.start - y(share or 0))
            for low, (_, share) in zip(below, curve.values, strict=True)
        ]
        boxes = [
            f"M{left},{low:.5g}V{high:.5g}H{right}V{low:.5g}Z"
            for (left, right), low, high in zip(edges, below, above, strict=True)
            if high < low
        ]
        class_, title = f"layer {curve.class_}", svg.titled(curve.name)
        yield svg.element("path", title, d="".join(boxes), class_=class_)
        below = above


def _latest(values: Values, top: float = math.inf) -> str:
    """Return the latest value, with an arrow if it is above the ``top`` of the chart."""
    value = values[-1][1]
    if value is None:
        return "–"
    return f"{short_number(value)} ↑" if value > top else short_number(value)


def _summary(curve: _Curve) -> str:
    present = [value for _, value in curve.values if value is not None]
    if not present:
        return f"{curve.name}: none"
    low, high = short_number(min(present)), short_number(max(present))
    return f"{curve.name}: {_latest(curve.values)} now, from {low} to {high}"


def short_number(value: float) -> str:
    """Return a number such as ``0.25``, ``420`` or ``12.5k``, with at most three digits."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
