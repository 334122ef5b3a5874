"""Serialised ONNX models, read and written field by field (:mod:`offramp.proto.wire_format`).

The package that reads bundles needs neither protobuf nor onnx, and copies no large weights:
messages are lists of consecutive parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from offramp.proto.wire_format import BYTES, WireError, WireField, fields_of, varint

_GRAPH, _INPUT = 7, 11
"""Fields of ``ModelProto`` and ``GraphProto``."""


class Place(NamedTuple):
    """Offset and length of a weight's bytes in a file."""

    offset: int
    length: int


Part: TypeAlias = memoryview | Place
"""Part of a message: bytes in memory, or a place in a file."""


def with_length(number: int, parts: Iterable[Part]) -> list[Part]:
    """Put the tag and the length of a field before its value."""
    held = list(parts)
    head = varint(number << 3 | BYTES) + varint(sum(map(length_of, held)))
    return [memoryview(head), *held]


def length_of(part: Part) -> int:
    """Return the number of bytes of a part."""
    return part.length if isinstance(part, Place) else len(part)


def graph_fields(message: memoryview) -> Iterator[WireField]:
    """Yield the fields of a model or of a part of one; WireError if it is not valid."""
    try:
        yield from fields_of(message)
    except WireError as error:
        raise WireError(f"not an ONNX graph: it has {error}") from None


def without_inputs(model: bytes, names: Collection[str]) -> bytes:
    """Remove graph inputs from a serialised ONNX model, by name; WireError if it is not valid."""
    whole, parts = memoryview(model), list[Part]()
    for field in graph_fields(whole):
        if (field.number, field.wire) == (_GRAPH, BYTES):
            parts += with_length(_GRAPH, _kept_fields(whole[field.start : field.end], names))
        else:
            parts.append(whole[field.begin : field.end])
    return b"".join(part for part in parts if not isinstance(part, Place))


def _kept_fields(graph: memoryview, names: Collection[str]) -> Iterator[memoryview]:
    """Yield the fields of a graph except inputs with these names."""
    for field in graph_fields(graph):
        if field.number != _INPUT or _name_in(graph[field.start : field.end]) not in names:
            yield graph[field.begin : field.end]


def _name_in(value_info: memoryview) -> str:
    found = (value_info[f.start : f.end] for f in graph_fields(value_info) if f.number == 1)
    return bytes(next(found, b"")).decode("utf-8", "replace")
