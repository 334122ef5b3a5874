"""The frontier as a page: busy time over disagreement, a plot and a table for each batch size.

Drawing and style are those of the bundle's report; the page is self-contained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.frontier.measurement import Frontier, FrontierPoint, FrontierSystem
from benchmarks.frontier.policies import (
    BOTH,
    DESCRIPTIONS,
    EXITS,
    INT8,
    INT8_CERTIFIED,
    SOURCE,
)
from jinja2 import Template
from markupsafe import Markup

from offramp.bundle import Ratio
from offramp.commands import svg
from offramp.commands.pages import page_template
from offramp.commands.svg import Scale, Tick
from offramp.compiler.report import numbers
from offramp.tools.bench.common.dynamics import plain, stroke

_WIDTH, _HEIGHT = 520.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 42.0, 40.0
_LABEL_SPACING = 34.0
"""Pixels between two labels of bounds, at least."""
_ZERO_OFFSET = 12.0
"""Pixels between the axis and systems without disagreement."""
_TOGETHER = 20.0
"""Pixels within which the marks of a system have one label."""


class _Style(NamedTuple):
    """Style of the line, marks and label of a system in the drawing."""

    class_: str
    """Class of its line and marks."""
    label_at: tuple[float, float, str]
    """Offset and anchor of the label with a mark's bound, from the mark's middle."""
    key: str
    """CSS of its mark in the legend."""


_STYLES: Final[Mapping[str, _Style]] = {
    INT8_CERTIFIED: _Style("copy", (-4.0, -10.0, "start"), stroke("solid", "wrong")),
    EXITS: _Style("exits", (8.0, -5.0, "start"), stroke("dashed", "quiet")),
    BOTH: _Style("both", (-8.0, 13.0, "end"), stroke("solid", "accent")),
}
_RING: Final = "width: .7rem; border-radius: 50%; border: 2px solid var(--{})"


class FrontierPlot(NamedTuple):
    """A batch size: its plot, and the rows of its table."""

    batch_size: int
    drawing: Markup
    rows: tuple[tuple[FrontierSystem, FrontierPoint | None], ...]


def write_page(
    path: Path, *, title: str, frontier: Frontier, environment: Mapping[str, object]
) -> None:
    """Write one HTML file; ``environment`` has the machine and the settings of the run."""
    keys = [(SOURCE, _RING.format("ink")), (f"{INT8}, not certified", _RING.format("wrong"))]
    keys += [(name, style.key) for name, style in _STYLES.items()]
    page = _template().render(
        title=title,
        frontier=frontier,
        plots=plots(frontier),
        keys=keys,
        descriptions=DESCRIPTIONS,
        samples=max(point.samples for point in frontier.systems[0].measured),
        environment=environment,
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def plots(frontier: Frontier) -> list[FrontierPlot]:
    """Draw every batch size, all on the same axes so that they compare."""
    points = [point for system in frontier.systems for point in system.measured]
    right = 1.12 * max([*frontier.bounds, *(point.disagreement for point in points)])
    top = max(1.1, *(1.05 * (point.busy.value + point.busy.half_width) for point in points))
    width = _WIDTH - _RIGHT - _LEFT
    left = -right * _ZERO_OFFSET / (width - _ZERO_OFFSET)
    x = Scale(low=left, high=right, start=_LEFT, end=_WIDTH - _RIGHT)
    y = Scale(low=0.0, high=top, start=_HEIGHT - _BOTTOM, end=_TOP)
    return [
        FrontierPlot(
            batch_size=of_source.batch_size,
            drawing=_draw(frontier, of_source.batch_size, x, y),
            rows=tuple((s, s.at(of_source.batch_size)) for s in frontier.systems),
        )
        for of_source in frontier.systems[0].measured
    ]


def _draw(frontier: Frontier, size: int, x: Scale, y: Scale) -> Markup:
    ticks: list[Tick] = [(v, numbers.plain_percent(v)) for v in svg.nice_values(0, x.high, 5)]
    heights: list[Tick] = [(v, f"{v:g}") for v in svg.nice_values(0, y.high, 5)]
    middle = (x.start + x.end) / 2
    lines = [_line(frontier, name, size, x, y) for name in _STYLES]
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        f"Busy time over disagreement at batch {size}",
        svg.axes(x, y, ticks, heights),
        svg.text(4, 11, "busy time over the source model's, measured", "label"),
        svg.text(middle, _HEIGHT - 4, "disagreement on the test data, measured", "label", "middle"),
        _bounds(frontier.bounds, x, y),
        svg.line(x.start, y(1.0), x.end, y(1.0), "parity"),
        *lines,
        *(_alone(frontier.find(name), size, x, y) for name in (SOURCE, INT8)),
    )


def _bounds(bounds: Sequence[float], x: Scale, y: Scale) -> Markup:
    """Draw a line at every bound: systems certified for it should be to its left."""
    parts, last = [], float("-inf")
    for bound in bounds:
        at = x(bound)
        parts.append(svg.line(at, y.start, at, y.end, "bound"))
        if at - last >= _LABEL_SPACING:
            last = at
            parts.append(
                svg.text(at, y.end - 6, f"≤ {numbers.plain_percent(bound)}", "tick", "middle")
            )
    return svg.join(parts)


def _line(frontier: Frontier, name: str, size: int, x: Scale, y: Scale) -> Markup:
    """Draw a system over all bounds at which it is certified."""
    style, places, marks = _STYLES[name], [], []
    labels: list[tuple[float, float, list[str]]] = []
    for bound in frontier.bounds:
        system = frontier.find(name, bound)
        if (point := system.at(size)) is None:
            continue
        px, py = x(point.disagreement), y(point.busy.value)
        places.append((px, py))
        marks.append(_interval(point, px, y, style.class_))
        marks.append(svg.dot(px, py, 4.5, f"{style.class_} mark", tooltip(system, point)))
        if labels and math.dist((px, py), labels[-1][:2]) < _TOGETHER:
            labels[-1][2].append(numbers.plain_percent(bound))
        else:
            labels.append((px, py, [numbers.plain_percent(bound)]))
    path = svg.path(places, f"{style.class_} series") if places else Markup("")
    right, down, anchor = style.label_at
    notes = [
        svg.text(px + right, py + down, ", ".join(words), f"{style.class_} note", anchor)
        for px, py, words in labels
    ]
    return svg.join([path, *marks, *notes])


def _alone(system: FrontierSystem, size: int, x: Scale, y: Scale) -> Markup:
    """Draw a system that has no bound."""
    point = system.at(size)
    assert point is not None, f"{system.system} is always measured"
    px, py = x(point.disagreement), y(point.busy.value)
    return svg.join(
        [
            _interval(point, px, y, "ring"),
            svg.dot(px, py, 5.0, f"{system.system} ring", tooltip(system, point)),
            svg.text(px + 9, py + 4, system.system, "note"),
        ]
    )


def _interval(point: FrontierPoint, at: float, y: Scale, class_: str) -> Markup:
    low, high = (point.busy.value + sign * point.busy.half_width for sign in (-1, 1))
    return svg.line(at, y(max(low, y.low)), at, y(high), f"{class_} interval")


def tooltip(system: FrontierSystem, point: FrontierPoint) -> str:
    """Return the tooltip of a mark: promise, time and measured disagreement."""
    bound = system.max_disagreement
    certified = "" if bound is None else f", certified for {numbers.plain_percent(bound)}"
    return (
        f"{system.system}{certified}: busy {with_width(point.busy)} of the source model's time, "
        f"{numbers.percent(point.disagreement, 2)} disagree (measured)"
    )


def with_width(ratio: Ratio) -> str:
    """Return a ratio with its width, such as ``0.83 ± 0.02``."""
    return f"{ratio.value:.2f} ± {ratio.half_width:.2f}"


@cache
def _template() -> Template:
    return page_template(
        "frontier.html.j2",
        Path(__file__).parent,
        "offramp.compiler",
        percent=numbers.percent,
        bare=numbers.plain_percent,
        ms=numbers.milliseconds,
        ratio=with_width,
        plain=plain,
    )
