"""Small functions that make inline SVG: elements, scales, axes; CSS classes have the colours."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup, escape

Tick: TypeAlias = tuple[float, str]
"""A value on the axis, and its label."""
Points: TypeAlias = Iterable[tuple[float, float]]
"""Points of a line, as x and y in pixels."""


def element(tag: str, *children: str | None, **attributes: object) -> Markup:
    """Return an element; text and attributes are escaped unless they are ``Markup`` already.

    ``class_`` becomes ``class`` and ``stroke_width`` becomes ``stroke-width``; ``None`` is omitted.
    """
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    text = "".join(f' {key}="{escape(_short(value))}"' for key, value in given.items())
    inner = join(child for child in children if child is not None)
    # Markup.format takes ten times as long, and a status page has hundreds of elements
    return Markup(f"<{tag}{text}>{inner}</{tag}>")  # noqa: S704 - escaped above


def join(parts: Iterable[str]) -> Markup:
    """Concatenate parts; those that are not ``Markup`` are escaped."""
    return Markup("").join(parts)


def drawing(width: float, height: float, label: str, *children: str, top: float = 0.0) -> Markup:
    """Return a drawing that scales with its column of the page; ``label`` is for screen readers.

    Sizes are in pixels; ``top`` pixels are cut off at the top.
    """
    box = f"0 {_short(top)} {_short(width)} {_short(height - top)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label)


def text(x: float, y: float, content: str, class_: str = "", anchor: str = "start") -> Markup:
    """Return a line of text; ``anchor`` is start, middle or end."""
    return element("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Draw a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Points, class_: str, title: str | None = None, *, closed: bool = False) -> Markup:
    """Draw a line through points; a closed one ends where it began."""
    d = "M" + "L".join(f"{x:.5g},{y:.5g}" for x, y in points) + ("Z" if closed else "")
    return element("path", titled(title), d=d, class_=class_)


def dot(x: float, y: float, radius: float, class_: str, title: str | None = None) -> Markup:
    """Draw a circle with the tooltip ``title``."""
    return element("circle", titled(title), cx=x, cy=y, r=radius, class_=class_)


def box(
    x: float, y: float, width: float, height: float, *, class_: str, title: str | None = None
) -> Markup:
    """Draw a rectangle with the tooltip ``title``."""
    return element("rect", titled(title), x=x, y=y, width=width, height=height, class_=class_)


def titled(title: str | None) -> Markup | None:
    """Return the tooltip of an element, as a child of the element."""
    return None if title is None else element("title", title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    """Pixel of ``low``."""
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel at which a value of the axis is drawn."""
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def inside(self, value: float) -> bool:
        """Return whether a value is on the scale, with a tolerance for rounding."""
        slack = 1e-9 * (abs(self.low) + abs(self.high))
        return self.low - slack <= value <= self.high + slack


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScale(Scale):
    """A logarithmic scale from values above 0 to pixels."""

    def __call__(self, value: float) -> float:
        """Return the pixel at which a value of the axis is drawn."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def axes(x: Scale, y: Scale, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> Markup:
    """Draw a horizontal grid line for each y tick, labels at both axes, and the base line."""
    parts = []
    for value, label in y_ticks:
        parts.append(line(x.start, y(value), x.end, y(value), "grid"))
        parts.append(text(x.start - 6, y(value) + 3.5, label, "tick", "end"))
    for value, label in x_ticks:
        parts.append(line(x(value), y.start, x(value), y.start + 4, "axis"))
        parts.append(text(x(value), y.start + 16, label, "tick", "middle"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    return join(parts)


def nice_step(span: float, most: int) -> float:
    """Return the smallest 1, 2, 2.5, 5 × 10^k that divides a span into at most ``most`` parts."""
    if not span > 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(span / most))
    steps = (unit * m for m in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0))
    return next(step for step in steps if span / step <= most + 1e-9)


def nice_values(low: float, high: float, most: int = 5) -> list[float]:
    """Return round values between two bounds, with about ``most`` steps or fewer."""
    step = nice_step(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def nice_logs(low: float, high: float, most: int = 6) -> list[float]:
    """Return values for a logarithmic axis from at most ``low`` to at least ``high``, both above 0.

    They are 1, 2 and 5 × 10^k, or only powers of ten if these are more than ``most``.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**k for k in range(first, max(first + 1, last) + 1)]
    steps = sorted(power * factor for power in powers for factor in (1, 2, 5))
    start = bisect_right(steps, low) - 1
    inside = steps[start : max(bisect_left(steps, high) + 1, start + 2)]
    return inside if len(inside) <= most else powers


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
