"""The report's view of joint training: agreement and loss by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from offramp.bundle import Manifest
from offramp.compiler.report import numbers, svg
from offramp.compiler.report.svg import Scale, Tick

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 500.0, 300.0, 54.0, 44.0, 26.0, 44.0
_APART = 13.0
"""Between the names of two curves, at least."""


class TrainingView(NamedTuple):
    """Curves of the tuning split, by epoch."""

    words: str
    agreement: Markup
    losses: Markup
    lines: list[str]
    """What each exit came from and to, and last the copy's own answer."""


def training_view(manifest: Manifest) -> TrainingView | None:
    """Draw how exits learned together with their model; ``None`` where they did not."""
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
        agreement=_chart(
            "agreement with the unmodified model", names, agreement, shares, training.kept
        ),
        losses=_chart("loss", names, losses, plain, training.kept),
        lines=[
            f"{name}: {numbers.percent(before)} → {numbers.percent(after)} agree"
            for name, before, after in ends
        ],
    )


def _chart(
    title: str,
    names: Sequence[str],
    curves: Sequence[Sequence[float]],
    y_ticks: Sequence[Tick],
    kept: int,
) -> Markup:
    low = min(*(v for v, _ in y_ticks), *map(min, curves))
    high = max(*(v for v, _ in y_ticks), *map(max, curves))
    epochs = len(curves[0])
    x = Scale(low=0, high=max(epochs - 1, 1), start=_LEFT, end=_WIDTH - _RIGHT)
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
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return svg.drawing(
        _WIDTH,
        _HEIGHT,
        f"{title} by epoch",
        svg.axes(x, y, x_ticks, y_ticks),
        svg.text(4, 11, title, "label"),
        svg.text(middle, _HEIGHT - 6, "epoch", "label", "middle"),
        svg.line(x(kept), y.start, x(kept), y.end, "constraint"),
        *drawn,
    )
