"""Maps as pictures: what is in the PNG is what was to be shown."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from offramp.compiler.report.pictures import EarlyMap, colours, picture, views


def pixels(address: str) -> np.ndarray:
    """Read a PNG with a palette: uint8 [height, width, 3]."""
    kind, content = address.split(",", 1)
    assert kind == "data:image/png;base64"
    raw = base64.b64decode(content)
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(raw):
        (length,) = struct.unpack(">I", raw[place : place + 4])
        body = raw[place + 4 : place + 8 + length]
        (told,) = struct.unpack(">I", raw[place + 8 + length : place + 12 + length])
        assert told == zlib.crc32(body)
        chunks[body[:4]] = body[4:]
        place += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[rows[:, 1:]]


def test_a_picture_has_the_colours_of_its_classes() -> None:
    classes = np.random.default_rng(0).integers(0, 7, (5, 9)).astype(np.uint8)
    palette = colours(7)
    np.testing.assert_array_equal(pixels(picture(classes, palette)), palette[classes])


def test_colours_differ() -> None:
    assert len({tuple(colour) for colour in colours(40)}) == 40


def test_large_maps_are_shown_smaller() -> None:
    classes = np.zeros((1000, 600), np.uint8)
    assert pixels(picture(classes, colours(1))).shape == (250, 150, 3)


def test_the_difference_is_where_classes_are_not_equal() -> None:
    early = np.array([[0, 1], [2, 3]], np.uint8)
    end = np.array([[0, 1], [2, 0]], np.uint8)
    (view,) = views([EarlyMap(exit=2, early=early, end=end)])
    assert view.title == "exit 2: 75.0\u202f% of the pixels equal"
    titles, addresses = zip(*view.pictures, strict=True)
    assert titles == ("early answer", "the model's answer", "difference")
    shown = pixels(addresses[2])
    differs = (shown != shown[0, 0]).any(axis=2)
    np.testing.assert_array_equal(differs, early != end)
