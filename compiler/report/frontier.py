"""The report's comparison of exits alone, subnets alone, and subnets with exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from markupsafe import Markup

from offramp.calibration.choose.trade_offs import (
    TRADE_OFF_KINDS,
    Judged,
    TradeOff,
    TradeOffKind,
    cheapest_at,
    front_of,
    same_samples,
    trade_offs,
)
from offramp.certify import MODEL_END
from offramp.commands import svg
from offramp.commands.svg import Scale
from offramp.compiler.report import numbers
from offramp.compiler.report.figures import thin

LEVELS: Final = (0.999, 0.995, 0.99, 0.98, 0.95, 0.9)
"""Levels of agreement at which these ways (:data:`.TRADE_OFF_KINDS`) are compared, in addition to
the promised level."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760.0, 380.0, 60.0, 24.0, 28.0, 46.0
_LOWEST: Final = 0.8
"""Agreement at which the axis ends, if curves continue below it."""
_MARKS: Final = 14
"""Largest number of marks on a curve."""
_FAINT: Final = 25
"""Largest number of points of each variant that are drawn although other points are better."""
_SIZE: Final = 4.0
NAMES: Final[Mapping[TradeOffKind, str]] = {
    "exits": "exits alone",
    "subnets": "subnets alone",
    "both": "subnets with exits",
    "handing-on": "handing on",
}


class LevelRow(NamedTuple):
    """The shortest time of each way (:data:`.TRADE_OFF_KINDS`) at one level of agreement."""

    level: float
    cheapest: list[TradeOff]
    """The cheapest point of each way, in the order of :data:`.TRADE_OFF_KINDS`."""
    what: str
    """Description of the cheapest point of subnets with exits."""


class SubnetRow(NamedTuple):
    """A variant that always runs to its own end, without exits."""

    mark: str
    name: str
    whole: TradeOff


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierView:
    """The report's section that compares exits and subnets."""

    sentence: str
    chart: Markup
    levels: list[LevelRow]
    subnets: list[SubnetRow]
    labelled: bool
    """True if accuracies are known, because the data has labels."""
    below: float | None
    """Agreement at which the axis ends, if points are below that."""


def frontier_view(variants: Judged, promised: float | None) -> FrontierView | None:
    """Compare the three ways; ``None`` if there are no subnets, or no common samples.

    ``variants`` are the full model and its subnets, each with records of the certify split;
    ``promised`` is the agreement that the policy promises at least, if there is a promise.
    """
    if len(variants) < 2 or not len(variants[0][1].final_prediction):
        return None
    if not same_samples(variants):  # a rehearsal replaces the full model's records alone
        return None
    points: dict[TradeOffKind, list[TradeOff]] = {
        way: trade_offs(variants, way) for way in TRADE_OFF_KINDS
    }
    names = {v.variant: v.name for v, _ in variants}
    headline = 0.99 if promised is None else promised
    levels = [_row(level, points, names) for level in sorted({*LEVELS, headline}, reverse=True)]
    subnets = [
        SubnetRow(_mark(v.variant), v.name, v.judge((), v.end, records)) for v, records in variants
    ]
    fronts = {way: front_of(found) for way, found in points.items()}
    lowest = min(p.agreement for front in fronts.values() for p in front)
    low = max(lowest, min(_LOWEST, max(s.whole.agreement for s in subnets[1:])))
    told = next(row for row in levels if row.level == headline)
    return FrontierView(
        sentence=_sentence(told),
        chart=_chart(fronts, _dominated(points["both"], fronts["both"]), subnets, low),
        levels=levels,
        subnets=subnets,
        labelled=subnets[0].whole.accuracy is not None,
        below=low if lowest < low else None,
    )


def _mark(variant: int) -> str:
    return f"S{variant}" if variant else "full"


def _row(
    level: float, points: Mapping[TradeOffKind, Sequence[TradeOff]], names: Mapping[int, str]
) -> LevelRow:
    cheapest = []
    for way in TRADE_OFF_KINDS:
        found = cheapest_at(points[way], level)
        assert found is not None, "the full model agrees with itself"
        cheapest.append(found)
    return LevelRow(level, cheapest, describe(cheapest[TRADE_OFF_KINDS.index("both")], names))


def describe(point: TradeOff, names: Mapping[int, str]) -> str:
    """Return a description of a point, such as ``S2 (depth 5 of 7), 40 % leave at E0 and E1``."""
    name = names[point.variant]
    who = f"{_mark(point.variant)} ({name})" if point.variant else name
    inner = [a.exit for a in point.active if a.exit != point.deepest and a.threshold <= 1]
    if not inner:
        return (
            f"{who}, all of it"
            if point.deepest == MODEL_END
            else f"{who}, all at its E{point.deepest}"
        )
    listed = " and ".join(f"E{index}" for index in inner)
    left = numbers.percent(point.early, 0)
    return f"{who}, {left} leave at {listed}"


def _sentence(row: LevelRow) -> str:
    exits, subnets, both, handing_on = (point.cost for point in row.cheapest)
    told = (
        f"At {numbers.plain_percent(row.level)} agreement with the full model: exits alone take "
        f"{exits:.2f} of its time, subnets alone {subnets:.2f}, subnets with exits {both:.2f}; "
        f"handing on to the full model what a subnet is not sure of, {handing_on:.2f} (predicted)."
    )
    better, combined = min(exits, subnets), min(both, handing_on)
    if combined < better:
        saved = numbers.percent(1 - combined / better, 0)
        return f"{told} Together they take {saved} less than the better one alone."
    return f"{told} Together they save nothing here beyond the better one alone."


def _dominated(points: Sequence[TradeOff], front: Sequence[TradeOff]) -> list[TradeOff]:
    """Return some points of each variant's own front that are not on the joint front."""
    kept, found = {id(point) for point in front}, []
    for variant in sorted({point.variant for point in points}):
        own = front_of(p for p in points if p.variant == variant)
        others = [p for p in own if id(p) not in kept]
        found += [others[i] for i in thin(len(others), _FAINT)]
    return found


def _chart(
    fronts: Mapping[TradeOffKind, Sequence[TradeOff]],
    faint: Sequence[TradeOff],
    subnets: Sequence[SubnetRow],
    low: float,
) -> Markup:
    drawn = [p for front in fronts.values() for p in front if p.agreement >= low]
    high = max(1.0, *(p.cost for p in drawn), *(s.whole.cost for s in subnets))
    x = Scale(low=0, high=1.04 * high, start=_LEFT, end=_WIDTH - _RIGHT)
    y = Scale(low=low - 0.03 * (1 - low), high=1, start=_HEIGHT - _BOTTOM, end=_TOP)
    middle = (x.start + x.end) / 2
    inside = [p for p in faint if p.agreement >= low and x.inside(p.cost)]
    y_ticks = [(v, f"{100 * v:.4g}%") for v in svg.nice_values(low, 1.0)]
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        "Agreement over predicted time: exits alone, subnets alone, subnets with exits",
        svg.axes(x, y, [(v, f"{v:.3g}") for v in svg.nice_values(0, x.high, 8)], y_ticks),
        svg.text(4, 12, "agreement with the full model, counted", "label"),
        svg.text(middle, _HEIGHT - 6, "time over the full model's, predicted", "label", "middle"),
        *(svg.dot(x(p.cost), y(p.agreement), 2.0, "dominated") for p in inside),
        *(_line(way, fronts[way], x, y) for way in ("both", "exits", "subnets", "handing-on")),
        *_subnets(subnets, fronts["subnets"], x, y),
    )


def _line(way: TradeOffKind, front: Sequence[TradeOff], x: Scale, y: Scale) -> Markup:
    """Draw a front as steps, because no policy was found between two points."""
    points = [p for p in front if p.agreement >= y.low]
    if not points:
        return Markup("")
    corners = [(x(points[0].cost), y(points[0].agreement))]
    for point in points[1:]:
        corners += [(x(point.cost), corners[-1][1]), (x(point.cost), y(point.agreement))]
    marks = [
        _shape(way, x(p.cost), y(p.agreement), tooltip(way, p))
        for p in (points[i] for i in thin(len(points), _MARKS))
    ]
    return svg.join([svg.path(corners, f"way {way}"), *marks])


def _shape(way: TradeOffKind, x: float, y: float, title: str) -> Markup:
    """Draw a mark: circle, square, diamond or triangle, which differ even without colours."""
    class_ = f"way-mark {way}"
    if way == "exits":
        return svg.dot(x, y, _SIZE, class_, title)
    if way == "subnets":
        return svg.box(x - _SIZE, y - _SIZE, 2 * _SIZE, 2 * _SIZE, class_=class_, title=title)
    reach = 1.5 * _SIZE
    if way == "handing-on":
        corners = [(x - reach, y + _SIZE), (x, y - reach), (x + reach, y + _SIZE)]
        return svg.path(corners, class_, title, closed=True)
    corners = [(x - reach, y), (x, y - reach), (x + reach, y), (x, y + reach)]
    return svg.path(corners, class_, title, closed=True)


def tooltip(way: TradeOffKind, point: TradeOff) -> str:
    """Return the description of a mark, which the page shows under the pointer."""
    accurate = ""
    if point.accuracy is not None:
        accurate = f", {numbers.percent(point.accuracy, 2)} right"
    return (
        f"{NAMES[way]}, {_mark(point.variant)}: {point.cost:.2f} of the full model's time "
        f"(predicted), {numbers.percent(point.agreement, 2)} agree{accurate} (counted)"
    )


def _subnets(
    subnets: Sequence[SubnetRow], front: Sequence[TradeOff], x: Scale, y: Scale
) -> list[Markup]:
    """Write the names of subnets next to their squares; the square of a dominated one is hollow."""
    parts = []
    for subnet in subnets[1:]:
        whole = subnet.whole
        if whole.agreement < y.low:
            continue
        at, height = x(whole.cost), y(whole.agreement)
        if whole not in front:
            size, title = 1.6 * _SIZE, tooltip("subnets", whole)
            corner = at - size / 2, height - size / 2
            parts.append(svg.box(*corner, size, size, class_="way-mark subnets idle", title=title))
        parts.append(svg.text(at + 8, height + 14, subnet.mark, "note tick"))
    return parts
