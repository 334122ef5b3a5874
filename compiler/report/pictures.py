"""Pictures of example answers: an exit's answer, the model's answer, and their difference."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.compiler.report import numbers

_GOLDEN = 0.618033988749895
"""Difference in hue from one class to the next, which makes the classes easy to tell apart."""
_MOST_PIXELS = 256
"""Largest side of a picture in pixels; larger maps are subsampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyMap:
    """Classes of a sample's pixels, as answered by an exit and by the model's end."""

    exit: int
    early: NDArray[np.uint8]
    """Classes that the exit answers, [height, width]."""
    end: NDArray[np.uint8]
    """Classes that the model's end answers, [height, width]."""

    @property
    def equal(self) -> float:
        """Share of pixels with equal classes."""
        return float((self.early == self.end).mean())


class MapView(NamedTuple):
    """A sample as it is shown on the page."""

    title: str
    pictures: tuple[tuple[str, str], ...]
    """Title and address of each picture; the address contains the picture."""


def views(maps: Sequence[EarlyMap]) -> tuple[MapView, ...]:
    """Draw all samples, with the same colour for a class in all of them."""
    palette = colours(1 + max((int(max(m.early.max(), m.end.max())) for m in maps), default=0))
    difference = np.array([[238, 238, 234], [179, 38, 30]], np.uint8)
    return tuple(
        MapView(
            f"exit {m.exit}: {numbers.percent(m.equal, 1)} of the pixels equal",
            (
                ("early answer", picture(m.early, palette)),
                ("the model's answer", picture(m.end, palette)),
                ("difference", picture((m.early != m.end).astype(np.uint8), difference)),
            ),
        )
        for m in maps
    )


def colours(classes: int) -> NDArray[np.uint8]:
    """Return a colour for each class, uint8 [classes, 3]; the first, mostly background, is grey."""
    hues = np.arange(classes) * _GOLDEN % 1
    offsets = np.array([0, 2 / 3, 1 / 3])
    wave = np.clip(np.abs((hues[:, None] + offsets) % 1 * 6 - 3) - 1, 0, 1)
    found: NDArray[np.uint8] = (60 + 170 * wave).astype(np.uint8)
    found[0] = 200
    return found


def picture(classes: NDArray[np.uint8], palette: NDArray[np.uint8]) -> str:
    """Return a map of classes as a PNG with a palette, in a ``data:`` address."""
    step = -(-max(classes.shape) // _MOST_PIXELS)
    shown = classes[::step, ::step]
    height, width = shown.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: 0, none
    rows[:, 1:] = shown
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        [
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", palette.tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        ]
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))
