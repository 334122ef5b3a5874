"""Protobuf's wire format: positions of a message's fields, and their encoding.

Nothing is copied, and only the standard library is needed: requests are inspected before they are
decoded, and graph files without protobuf or onnx installed. The encoding is that of
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of Protocol Buffers: the last three bits of a field's tag."""
_FIXED_BYTES: Final = {FIXED64: 8, FIXED32: 4}
_NUMBERS: Final = 2**29
"""Limit of field numbers, exclusive."""


class WireError(ValueError):
    """Bytes are not a message; the text names the invalid part, as "a field of wire type 3"."""


class WireField(NamedTuple):
    """A field of a message, by its position."""

    number: int
    wire: int
    begin: int
    """Offset at which the field's tag begins."""
    start: int
    """Offset at which the field's value begins."""
    end: int


def fields_of(
    message: bytes | memoryview, begin: int = 0, end: int | None = None
) -> Iterator[WireField]:
    """Yield the fields between two positions of a message; WireError for invalid bytes."""
    at, end = begin, len(message) if end is None else end
    while at < end:
        first = at
        tag, at = varint_at(message, at, end)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == BYTES:
            length, start = varint_at(message, at, end)
            at = start + length
        elif wire == VARINT:
            _, at = varint_at(message, at, end)
        elif wire in _FIXED_BYTES:
            at += _FIXED_BYTES[wire]
        else:
            raise WireError(f"a field of wire type {wire} at byte {first}")
        if not 0 < number < _NUMBERS:
            raise WireError(f"a field of number {number} at byte {first}")
        if at > end:
            raise WireError(f"a field at byte {first} that is not whole")
        yield WireField(number, wire, first, start, at)


def varint_at(message: bytes | memoryview, at: int, end: int | None = None) -> tuple[int, int]:
    """Decode a number of at most 64 bits; return it, and the position after it."""
    end = len(message) if end is None else end
    if at < end and (value := message[at]) < 0x80:
        return value, at + 1
    value = 0
    for place in range(at, min(at + 10, end)):
        byte = message[place]
        value |= (byte & 0x7F) << 7 * (place - at)
        if byte < 0x80:
            return value & 2**64 - 1, place + 1
    raise WireError(f"no whole number at byte {at}")


def varint(number: int) -> bytes:
    """Encode a number with seven bits a byte, lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def message_of(number: int, content: bytes) -> bytes:
    """Encode a field of bytes."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def text_of(number: int, text: str) -> bytes:
    """Encode a field of text."""
    return message_of(number, text.encode())
