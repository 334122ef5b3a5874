"""The page of ``eecompile plan``: splits of the model over devices, and their utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jinja2 import Template
from markupsafe import Markup

from offramp.cluster.planning.cluster import ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan, PlannedSplit, Replicas
from offramp.commands import svg
from offramp.commands.pages import page_template
from offramp.commands.svg import Scale
from offramp.compiler.report import numbers

_WIDTH, _LEFT, _RIGHT = 1080.0, 62.0, 20.0
_BAND, _BAND_HEIGHT = 20.0, 28.0
_SPLITS, _SPLIT_HEIGHT = 78.0, 62.0
_BUSY, _BUSY_HEIGHT = 176.0, 80.0
_LEAST_WIDTH = 90.0
"""Smallest width, in pixels, of a split's box that contains its text."""


def render_plan(
    name: str,
    plan: ClusterPlan,
    baseline: ClusterPlan | None,
    model: ModelFacts,
    *,
    reasons: Sequence[str],
    label: str,
) -> str:
    """Render a self-contained page; all of its figures are predicted.

    ``baseline`` is the unmodified model on the same devices; ``reasons`` explain the plan.
    """
    page = _template().render(
        name=name,
        plan=plan,
        baseline=baseline,
        picture=draw_plan(plan, model),
        reasons=reasons,
        label=label,
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def draw_plan(plan: ClusterPlan, model: ModelFacts) -> Markup:
    """Draw the segments, the splits with their devices, and the devices' utilisation."""
    x = Scale(low=0, high=model.segments, start=_LEFT, end=_WIDTH - _RIGHT)
    y = Scale(low=1, high=0, start=_BUSY, end=_BUSY + _BUSY_HEIGHT)
    return svg.drawing(
        _WIDTH,
        _BUSY + _BUSY_HEIGHT + 40,
        "The model's segments, its splits with their devices, and their utilisation",
        _segments(plan, model, x),
        *(_split(number, split, x) for number, split in enumerate(plan.splits)),
        _busy(plan, x, y),
    )


def devices_of(split: PlannedSplit) -> str:
    """Describe the devices of a split's replicas, for instance ``4 × v100 + 2 × t4``."""
    return " + ".join(f"{r.count} × {r.device_type}" for r in split.replicas)


def exits_of(replicas: Sequence[Replicas]) -> str:
    """Return the exits that are on, for each device type if the types have different exits on."""
    return " | ".join(dict.fromkeys(",".join(map(str, r.exits)) or "–" for r in replicas))


def _segments(plan: ClusterPlan, model: ModelFacts, x: Scale) -> Markup:
    on = {exit_ for split in plan.splits for r in split.replicas for exit_ in r.exits}
    parts = [svg.text(14, _BAND + 18, "model", "label")]
    for segment in range(model.segments):
        width = max(x(segment + 1) - x(segment) - 3.5, 0.5)
        parts.append(svg.box(x(segment) + 1.75, _BAND, width, _BAND_HEIGHT, class_="segment"))
        if width > 16:
            middle = (x(segment) + x(segment + 1)) / 2
            parts.append(svg.text(middle, _BAND + 18, str(segment), "number", "middle"))
    shares = zip(model.exit_names, model.exit_after, model.going_on, strict=True)
    for exit_, after, going_on in shares:
        state = "on" if exit_ in on else "off, as it saves no time here"
        title = f"Exit {exit_}: {state}; {going_on:.1%} of the rows continue after it"
        class_ = "knot" if exit_ in on else "knot idle"
        parts.append(svg.dot(x(after + 1), _BAND + _BAND_HEIGHT, 5, class_, title))
    return svg.join(parts)


def _split(number: int, split: PlannedSplit, x: Scale) -> Markup:
    start, end = x(split.first_segment), x(split.last_segment + 1)
    words = [
        devices_of(split),
        f"{split.share:.1%} of the rows",
        " | ".join(f"{numbers.milliseconds(1e3 * r.stage_s)} ms" for r in split.replicas),
    ]
    title = f"Split {number}, segments {split.first_segment} to {split.last_segment}: " + "; ".join(
        words
    )
    box = svg.box(
        start + 1.75, _SPLITS, end - start - 3.5, _SPLIT_HEIGHT, class_="running", title=title
    )
    if end - start < _LEAST_WIDTH:
        middle = svg.text((start + end) / 2, _SPLITS + 36, str(number), "number", "middle")
        return svg.join([box, middle])
    most = max(int((end - start) / 6.5), 4)
    lines = [
        svg.text((start + end) / 2, _SPLITS + 20 + 16 * i, _cut(word, most), "number", "middle")
        for i, word in enumerate(words)
    ]
    return svg.join([box, *lines])


def _busy(plan: ClusterPlan, x: Scale, y: Scale) -> Markup:
    parts = []
    for share in (1.0, 0.5, 0.0):
        parts.append(svg.line(x.start, y(share), x.end, y(share), "grid"))
        parts.append(svg.text(x.start - 7, y(share) + 4, f"{share:.0%}", "tick", "end"))
    for number, split in enumerate(plan.splits):
        start, end = x(split.first_segment), x(split.last_segment + 1)
        busy = split.period_s / plan.period_s
        title = f"Split {number}: busy for {busy:.0%} of the time at the plan's rate"
        top = y(busy)
        parts.append(
            svg.box(
                start + 1.75, top, end - start - 3.5, y.end - top, class_="running", title=title
            )
        )
        if split.link_period_s > 0:
            busy = split.link_period_s / plan.period_s
            title = f"Link to split {number}: busy for {busy:.0%} of the time"
            parts.append(svg.dot(start, y(busy), 5, "knot", title))
    caption = "utilisation of devices and links (dots) at the plan's rate, PREDICTED"
    parts.append(svg.text((x.start + x.end) / 2, y.end + 24, caption, "label", "middle"))
    return svg.join(parts)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@cache
def _template() -> Template:
    return page_template(
        "plan.html",
        "offramp.cluster",
        "offramp.compiler",
        percent=numbers.percent,
        ms=numbers.milliseconds,
        devices=devices_of,
        exits=exits_of,
    )
