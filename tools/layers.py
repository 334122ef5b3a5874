"""The layers of the code: read from the table in CONTRIBUTING.md, drawn as docs/layers.svg.

The table is the one place that says what each room is for and what it may import; the import test
holds the code against it, and this script draws it:

    python -m offramp.tools.layers            # writes docs/layers.svg
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DRAWING = ROOT / "docs" / "layers.svg"

_ROW = re.compile(
    r"^\| `(?P<name>[\w.]+)/` \| (?P<purpose>[^|]+) \| (?P<rooms>[^|]*) \| (?P<packages>[^|]*) \|$"
)
_WIDTH, _MARGIN, _GAP, _LINE = 960, 24, 16, 15
_HEAD, _PAD = 22, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A package of the code, with what it may import."""

    name: str
    """Dotted, below ``offramp``: ``engine.scheduling``."""
    purpose: str
    """What the room is for, in one sentence."""
    rooms: tuple[str, ...]
    """Other rooms that it may import; what is inside of those only if it is named too."""
    packages: tuple[str, ...]
    """Third-party packages that it may import."""


def read_rooms(text: str) -> dict[str, Room]:
    """Read the table of rooms, by name.

    Raises:
        ValueError: There is no table, or a row names a room that is not in it.
    """
    rooms: dict[str, Room] = {}
    for line in text.splitlines():
        if (row := _ROW.match(line)) is not None:
            name = row["name"].replace("/", ".")
            rooms[name] = Room(
                name=name,
                purpose=row["purpose"].strip().replace("`", ""),
                rooms=tuple(re.findall(r"`([\w.]+)`", row["rooms"])),
                packages=tuple(re.findall(r"`([\w.]+)`", row["packages"])),
            )
    if not rooms:
        raise ValueError("no table of rooms: expected rows such as | `bundle/` | … | … | … |")
    unknown = {other for room in rooms.values() for other in room.rooms} - rooms.keys()
    if unknown:
        raise ValueError(f"the table names {sorted(unknown)}, which it does not describe")
    return rooms


def levels(rooms: Mapping[str, Room]) -> list[list[str]]:
    """Top-level rooms by layer: each imports from layers before its own only.

    Raises:
        ValueError: Rooms import each other in a circle.
    """
    imported = _between_tops(rooms)
    placed: list[list[str]] = []
    while left := [name for name in imported if not any(name in layer for layer in placed)]:
        done = {name for layer in placed for name in layer}
        layer = [name for name in left if imported[name] <= done]
        if not layer:
            raise ValueError(f"rooms import each other in a circle: {sorted(left)}")
        placed.append(layer)
    return placed


def _top(name: str) -> str:
    return name.partition(".")[0]


def _between_tops(rooms: Mapping[str, Room]) -> dict[str, set[str]]:
    """Imports of each top-level room, those of the rooms inside it included."""
    imported: dict[str, set[str]] = {_top(name): set() for name in rooms}
    for room in rooms.values():
        imported[_top(room.name)] |= {_top(other) for other in room.rooms} - {_top(room.name)}
    return imported


def draw(rooms: Mapping[str, Room]) -> str:
    """Draw the layers as SVG: the ground at the bottom, each room with what is inside it."""
    body, top = [], float(_MARGIN)
    for layer in reversed(levels(rooms)):
        width = (_WIDTH - 2 * _MARGIN - _GAP * (len(layer) - 1)) / len(layer)
        boxes = [_box(rooms, name, width) for name in layer]
        height = max(box_height for _, box_height in boxes)
        for column, (lines, _) in enumerate(boxes):
            left = _MARGIN + column * (width + _GAP)
            body.append(
                f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" '
                'fill="#eef3f8" stroke="#30475e"/>'
            )
            body += [_text(left + _PAD, top + y, text, style) for y, text, style in lines]
        top += height + _GAP
    total = top - _GAP + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total:g}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        'aria-label="The packages in layers: each imports from those below it only">'
    )
    ground = f'<rect width="{_WIDTH}" height="{total:g}" fill="#ffffff"/>'
    return "\n".join((head, ground, *body, "</svg>\n"))


_Line = tuple[float, str, str]
"""Where, below the box's top; what; and how it looks."""


def _box(rooms: Mapping[str, Room], name: str, width: float) -> tuple[list[_Line], float]:
    """The lines of a room's box, and its height."""
    inside = [room for room in rooms.values() if room.name.startswith(f"{name}.")]
    columns = int((width - 2 * _PAD) / 6.1)
    lines: list[_Line] = [(_HEAD, f"{name}/", "name")]
    y = float(_HEAD)
    for text in _wrapped(rooms[name].purpose, columns):
        y += _LINE
        lines.append((y, text, "text"))
    for room in inside:
        y += _LINE * 1.2
        first, *rest = _wrapped(f"{room.name.partition('.')[2]}: {room.purpose}", columns)
        lines.append((y, first, "inside"))
        for text in rest:
            y += _LINE
            lines.append((y, f"   {text}", "inside"))
    imported = sorted(_between_tops(rooms)[name])
    for text in _wrapped(
        "imports " + (", ".join(imported) if imported else "no other room"), columns
    ):
        y += _LINE * 1.1
        lines.append((y, text, "imports"))
    return lines, y + _PAD


def _wrapped(text: str, columns: int) -> Sequence[str]:
    return textwrap.wrap(text, columns)


def _text(x: float, y: float, text: str, style: str) -> str:
    look = {
        "name": 'font-weight="600" font-size="14" fill="#1d2f40"',
        "text": 'fill="#30475e"',
        "inside": 'fill="#2f5d2e"',
        "imports": 'fill="#77838f" font-style="italic"',
    }[style]
    return f'<text x="{x:g}" y="{y:g}" {look} xml:space="preserve">{escape(text)}</text>'


def main() -> None:
    """Write the drawing."""
    DRAWING.write_text(draw(read_rooms(CONTRIBUTING.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {DRAWING.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
