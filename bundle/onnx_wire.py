"""Protobuf's wire format, as far as serialised ONNX models need it: fields, numbers, lengths.

The package that reads bundles needs neither protobuf nor onnx, and copies no large weight: fields
are found by where they are, and messages are given as parts that follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
_GRAPH, _INPUT = 7, 11
"""Fields of ``ModelProto`` and ``GraphProto``."""


class WireError(ValueError):
    """Bytes are no message of protobuf's, or a graph's weights are not what they must be.

    The message names the place or the weight.
    """


class Place(NamedTuple):
    """Where in a file the bytes of a weight are."""

    offset: int
    length: int


Part: TypeAlias = memoryview | Place
"""Of a message: bytes that are there, or bytes of a file."""


class WireField(NamedTuple):
    """A field of a message, by where it is in the message."""

    number: int
    wire: int
    begin: int
    """Of its tag."""
    start: int
    """Of its value."""
    end: int


def with_length(number: int, parts: Iterable[Part]) -> list[Part]:
    """Put the tag and the length of a field before what it holds."""
    held = list(parts)
    head = varint(number << 3 | BYTES) + varint(sum(map(length_of, held)))
    return [memoryview(head), *held]


def length_of(part: Part) -> int:
    """Count the bytes of a part."""
    return part.length if isinstance(part, Place) else len(part)


def fields_of(message: memoryview) -> Iterator[WireField]:
    """Yield the fields of a message; WireError if it is none."""
    at, size = 0, len(message)
    while at < size:
        begin = at
        tag, at = varint_at(message, at)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == BYTES:
            length, start = varint_at(message, at)
            at = start + length
        elif wire == VARINT:
            _, at = varint_at(message, at)
        elif wire in (FIXED64, FIXED32):
            at += 8 if wire == FIXED64 else 4
        else:
            raise WireError(f"not an ONNX graph: wire type {wire}")
        if not 0 < number < 2**29 or at > size:
            raise WireError(f"not a whole ONNX graph: field {number} ends at {at} of {size}")
        yield WireField(number, wire, begin, start, at)


def without_inputs(model: bytes, names: Collection[str]) -> bytes:
    """Remove inputs of the graph from a serialised ONNX model, by name; WireError if it is none."""
    whole, parts = memoryview(model), list[Part]()
    for field in fields_of(whole):
        if (field.number, field.wire) == (_GRAPH, BYTES):
            parts += with_length(_GRAPH, _kept_fields(whole[field.start : field.end], names))
        else:
            parts.append(whole[field.begin : field.end])
    return b"".join(part for part in parts if not isinstance(part, Place))


def _kept_fields(graph: memoryview, names: Collection[str]) -> Iterator[memoryview]:
    """Yield the fields of a graph but the inputs of some names."""
    for field in fields_of(graph):
        if field.number != _INPUT or _name_in(graph[field.start : field.end]) not in names:
            yield graph[field.begin : field.end]


def _name_in(value_info: memoryview) -> str:
    found = (value_info[f.start : f.end] for f in fields_of(value_info) if f.number == 1)
    return bytes(next(found, b"")).decode("utf-8", "replace")


def varint_at(message: memoryview, at: int) -> tuple[int, int]:
    """Decode a number of at most 64 bits; gives it, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 2**64 - 1, at
    raise WireError("not a whole ONNX graph: a number does not end")


def varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits a byte, the lowest first."""
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
