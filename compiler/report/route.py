"""Drawing of the model: its segments, its exits, and the share of samples that are still running.

The horizontal axis is the source model's time, and the vertical axis the share of samples that are
still running. So the filled area is the part of the model's time that is predicted to be used, and
the blank area is saved. In a cascade the copy's time comes before the source model's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from offramp.commands import svg
from offramp.commands.svg import Scale
from offramp.compiler.report import numbers
from offramp.compiler.report.figures import PolicyFigures

_WIDTH, _LEFT, _RIGHT = 1080.0, 62.0, 20.0
_FLAGS_END, _BAND, _BAND_HEIGHT = 46.0, 76.0, 30.0
_TOP, _DEPTH = 116.0, 150.0
_FLAG_WIDTH, _NARROW_FLAG, _IDLE_FLAG = 54.0, 34.0, 30.0


def route(found: PolicyFigures) -> Markup:
    """Draw the model with its segments and exits."""
    edges = segment_edges(found)
    x = Scale(low=0, high=1, start=_LEFT, end=_WIDTH - _RIGHT)
    y = Scale(low=1, high=0, start=_TOP, end=_TOP + _DEPTH)
    blank = 0.0 if found.active else _FLAGS_END - 16 if found.manifest.exits else _BAND - 8
    return svg.drawing(
        _WIDTH,
        _TOP + _DEPTH + 44,
        "The model's segments by share of time, its exits, and the share still running",
        _axes(found, x, y),
        _running(found, edges, x, y),
        _band(found, edges, x),
        _exits(found, edges, x, y),
        top=blank,
    )


def segment_edges(found: PolicyFigures) -> list[float]:
    """Return the segments' edges on the time axis, as shares of the total profiled time."""
    times = np.maximum(found.cost(found.reference).segments_ms, 0.0)
    if not times.sum() > 0:
        times = np.ones(len(times))
    return [0.0, *(np.cumsum(times) / times.sum()).tolist()]


def spread(
    wanted: Sequence[float], widths: Sequence[float], low: float, high: float
) -> list[float]:
    """Move labels with given widths apart, as little as needed, in order and inside bounds."""
    gaps = [(a + b) / 2 for a, b in pairwise(widths)]
    right = list(wanted)
    for i, gap in enumerate(gaps):
        right[i + 1] = max(right[i + 1], right[i] + gap)
    left = list(wanted)
    for i in reversed(range(len(gaps))):
        left[i] = min(left[i], left[i + 1] - gaps[i])
    places = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
    for i, width in enumerate(widths):
        least = low + width / 2 if i == 0 else places[i - 1] + gaps[i - 1]
        places[i] = max(places[i], least)
    for i in reversed(range(len(places))):
        last = i == len(places) - 1
        most = high - widths[i] / 2 if last else places[i + 1] - gaps[i]
        places[i] = min(places[i], most)
    return places


def _axes(found: PolicyFigures, x: Scale, y: Scale) -> Markup:
    parts = [svg.text(14, _BAND + 19, "model", "label")]
    for share in (1.0, 0.5, 0.0):
        parts.append(svg.line(x.start, y(share), x.end, y(share), "grid"))
        parts.append(svg.text(x.start - 7, y(share) + 4, f"{share:.0%}", "tick", "end"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(svg.line(x(share), y.end, x(share), y.end + 4, "axis"))
        parts.append(svg.text(x(share), y.end + 17, f"{share:.0%}", "tick", "middle"))
    middle = (x.start + x.end) / 2
    caption = "share of the unmodified model's time (profiled)"
    if found.manifest.source_begins:
        caption = "share of the time of the copy and the unmodified model (profiled)"
    parts.append(svg.text(middle, y.end + 36, caption, "label", "middle"))
    turned = f"rotate(-90 14 {(y.start + y.end) / 2:.0f})"
    label = svg.element(
        "text", "still running", x=14, y=(y.start + y.end) / 2,
        transform=turned, class_="label", text_anchor="middle",
    )  # fmt: skip
    return svg.join([*parts, label])


def _running(found: PolicyFigures, edges: Sequence[float], x: Scale, y: Scale) -> Markup:
    """Draw the share of running samples as a staircase: it falls at each active exit."""
    still, corners, begins = 1.0, [(x(0), y(1))], found.manifest.source_begins
    for index in found.active:
        at = x(edges[found.manifest.exits[index].after_segment + 1])
        corners.append((at, y(still)))
        still -= float(found.shares[index])
        corners.append((at, y(still)))
    if begins:
        corners += [(corners[-1][0], y(0)), (x(edges[begins]), y(0)), (x(edges[begins]), y(still))]
    corners.append((x(1), y(still)))
    outline = [(x(0), y(0)), *corners, (x(1), y(0))]
    return svg.join([svg.path(outline, "running", closed=True), svg.path(corners, "edge")])


def _band(found: PolicyFigures, edges: Sequence[float], x: Scale) -> Markup:
    times = found.cost(found.reference).segments_ms
    parts = []
    for segment in found.manifest.segments:
        begin, end = edges[segment.index], edges[segment.index + 1]
        width = x(end) - x(begin)
        title = (
            f"Segment {segment.index}, to {segment.output}: {numbers.percent(end - begin)} of the "
            f"time ({numbers.milliseconds(times[segment.index])} ms profiled), "
            f"{numbers.percent(segment.flops_share)} of the work"
        )
        drawn = x(begin) + 1.75, _BAND, max(width - 3.5, 0.5), _BAND_HEIGHT
        parts.append(svg.box(*drawn, class_="segment", title=title))
        if width > 18:
            middle = (x(begin) + x(end)) / 2
            parts.append(svg.text(middle, _BAND + 19, str(segment.index), "number", "middle"))
    return svg.join(parts)


def _exits(found: PolicyFigures, edges: Sequence[float], x: Scale, y: Scale) -> Markup:
    exits = found.manifest.exits
    places = [x(edges[e.after_segment + 1]) for e in exits]
    widths = [_FLAG_WIDTH if e.index in found.thresholds else _IDLE_FLAG for e in exits]
    crowded = sum(widths) > _WIDTH - _LEFT - _RIGHT
    if crowded:
        narrow = min(_NARROW_FLAG, (_WIDTH - 40) / len(exits))
        widths = [narrow if e.index in found.thresholds else narrow * 0.7 for e in exits]
    flags = spread(places, widths, _LEFT - 30, _WIDTH)
    return svg.join(
        _exit(found, index, place, flag, y, crowded=crowded)
        for index, (place, flag) in enumerate(zip(places, flags, strict=True))
    )


def _exit(
    found: PolicyFigures, index: int, place: float, flag: float, y: Scale, *, crowded: bool
) -> Markup:
    """Draw an exit: its flag, its depth on the model, and the line between them."""
    threshold = found.thresholds.get(index)
    answered = float(found.shares[index])
    share = numbers.percent(answered, 0 if crowded and answered >= 0.0995 else 1)
    knot = _BAND + _BAND_HEIGHT
    leader = [(flag, _FLAGS_END + 4), (flag, _FLAGS_END + 10), (place, _BAND - 5), (place, knot)]
    if threshold is None:
        name = svg.text(flag, _FLAGS_END, f"E{index}", "flag idle", "middle")
        title = f"Exit {index}: built, not in use"
        idle = svg.dot(place, knot, 4, "knot idle", title)
        return svg.path(leader, "leader idle") + name + idle
    title = f"Exit {index}: confidence of at least {numbers.threshold(threshold)} leaves, {share}"
    lines = [(f"E{index}", "flag"), (share, "flag share small" if crowded else "flag share")]
    if not crowded:
        lines.append((f"≥\u202f{numbers.threshold(threshold)}", "flag least"))
    top = _FLAGS_END - 15 * (len(lines) - 1)
    words = [svg.text(flag, top + 15 * i, t, c, "middle") for i, (t, c) in enumerate(lines)]
    down = svg.path([*leader[:-1], (place, y.end)], "leader")
    return svg.join([down, *words, svg.dot(place, knot, 5, "knot", title)])
