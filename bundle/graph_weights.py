"""Weights that graph files name in ``weights.bin``: found, checked, and put back into the graph.

A graph file is a serialised ONNX model in protobuf's wire format. It is parsed here field by field,
as this package needs neither protobuf nor onnx. So a graph from elsewhere is checked before any
runtime reads it, and only its large weights are ever copied. Field numbers are those of
onnx.proto3, which never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Final

from offramp.bundle.onnx_wire import Part, Place, graph_fields, length_of, with_length
from offramp.proto.wire_format import (
    BYTES,
    VARINT,
    WireError,
    WireField,
    message_of,
    text_of,
    varint,
    varint_at,
)

WEIGHTS: Final = "weights.bin"
"""File of a bundle with the large weights of all its graphs, each stored once."""
PAGE: Final = 4096
"""Size in bytes. Weights in the file begin at multiples of it, so that they can be mapped; smaller
weights stay in graphs."""
MOST_BYTES: Final = 2**31 - 1
"""Limit of protobuf on the size of a graph with its weights."""

ITEM_BYTES: Final = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20), 1),  # 8 bits: integers, booleans, floats
    **dict.fromkeys((4, 5, 10, 16), 2),
    **dict.fromkeys((1, 6, 12), 4),
    **dict.fromkeys((7, 11, 13, 14), 8),
    15: 16,
}
"""Bytes of an element, by ``TensorProto.DataType``; other types, such as 4-bit ones, stay in
graphs."""

_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14
"""Fields of ``TensorProto``."""
_GRAPH, _INITIALIZER = 7, 5
"""Fields of ``ModelProto`` and ``GraphProto``."""
_INSIDE: Final = {
    "model": {_GRAPH: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", _INITIALIZER: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""Fields that contain tensors or messages with tensors, by kind of message."""
_MOST_DEPTH: Final = 100
"""Limit on the nesting of messages, as in protobuf's parsers."""
_MOST_DIGITS: Final = 19
_ANY_SIZE: Final = 2**62
"""Size to assume for a file that is not examined."""


def named_weights(graph: bytes, size_bytes: int) -> tuple[Place, ...]:
    """Return the checked places (offset, length) of a graph's named weights, in its order.

    ``size_bytes`` is the size of ``weights.bin``, 0 where there is none. WireError if the graph is
    not protobuf, or if a tensor that names a file is not an initializer of the graph, names another
    file, or has an offset within a page, an end beyond the file, or a length that does not fit its
    shape.
    """
    found: list[Place] = []

    def look(tensor: memoryview) -> None:
        place = _named_place(tensor, size_bytes)
        if place is not None:
            found.append(place)

    _changed(memoryview(graph), look)
    return tuple(found)


def filled_parts(graph: bytes, size_bytes: int) -> list[Part] | None:
    """Split a graph, in order, into its own bytes and the places of the weights that it names.

    If the weights are read from these places, all parts joined are the graph with its weights
    inside. ``None`` if the graph names no weights. WireError as for :func:`named_weights`.
    """
    named = False

    def fill(tensor: memoryview) -> list[Part] | None:
        nonlocal named
        place = _named_place(tensor, size_bytes)
        if place is None:
            return None
        named = True
        return _with_field(tensor, _RAW, [place], without=(_EXTERNAL, _LOCATION))

    parts = _changed(memoryview(graph), fill)
    return parts if named else None


def filled_size(graph: bytes) -> int:
    """Return a graph's approximate size in bytes with its named weights; raises WireError."""
    return len(graph) + sum(place.length for place in named_weights(graph, _ANY_SIZE))


def external_locations(model: bytes) -> frozenset[str]:
    """Return the external files that an ONNX model's tensors name; raises WireError."""
    found = set()
    for tensor in _tensors(memoryview(model), "model", 0):
        for field in graph_fields(tensor):
            if field.number == _EXTERNAL and field.wire == BYTES:
                inner = tensor[field.start : field.end]
                entry = {f.number: bytes(inner[f.start : f.end]) for f in graph_fields(inner)}
                if entry.get(1) == b"location":
                    found.add(entry.get(2, b"").decode("utf-8", "replace"))
    return frozenset(found)


def moved(graph: bytes, size_bytes: int, move: Callable[[Place | memoryview], int | None]) -> bytes:
    """Return a graph that names its weights at other places of ``weights.bin``.

    ``move`` is called with the place of each weight that the graph names, and with the bytes of
    each weight in the graph that may be moved to the file. It returns the weight's offset in the
    file; ``None`` leaves a weight as it is. WireError as for :func:`named_weights`.
    """

    def rename(tensor: memoryview) -> list[Part] | None:
        weight = _named_place(tensor, size_bytes) or _raw_bytes(tensor)
        offset = None if weight is None else move(weight)
        if weight is None or offset is None:
            return None
        place = Place(offset, length_of(weight))
        named = memoryview(reference(place))
        return _with_field(tensor, _EXTERNAL, [named], without=(_RAW, _EXTERNAL, _LOCATION))

    parts = _changed(memoryview(graph), rename)
    return b"".join(part for part in parts if not isinstance(part, Place))


def reference(place: Place) -> bytes:
    """Return the fields of a tensor whose bytes are at a place of ``weights.bin``."""
    external = {"location": WEIGHTS, "offset": str(place.offset), "length": str(place.length)}
    entries = [
        message_of(_EXTERNAL, text_of(1, key) + text_of(2, value))
        for key, value in external.items()
    ]
    return b"".join([*entries, varint(_LOCATION << 3 | VARINT), b"\x01"])


# ---------------------------------------------------------------------------------------------
# Tensors


def _named_place(tensor: memoryview, size_bytes: int) -> Place | None:
    """Return the checked place of a tensor's external data; ``None`` if the graph has its bytes."""
    fields = list(graph_fields(tensor))
    if not any(f.number == _EXTERNAL or _says_external(tensor, f) for f in fields):
        return None
    name = _tensor_name(tensor, fields)
    external = _external_place(tensor, fields, name)
    if external["location"] != WEIGHTS:
        raise WireError(
            f"the weight {name} is in the file {external['location']!r:.100}, expected {WEIGHTS}"
        )
    if not size_bytes:
        raise WireError(f"the weight {name} is in {WEIGHTS}, which is not there")
    offset, length = (_number(external[key], key, name) for key in ("offset", "length"))
    expected = _tensor_bytes(tensor, fields, name)
    if length != expected:
        raise WireError(
            f"the weight {name} has {length} bytes in {WEIGHTS}, but its shape and type need "
            f"{expected}"
        )
    if offset % PAGE or offset + length > size_bytes:
        raise WireError(
            f"the weight {name} is at bytes {offset} to {offset + length} of {WEIGHTS}; expected a "
            f"start that is a multiple of {PAGE}, and an end within its {size_bytes} bytes"
        )
    return Place(offset, length)


def _says_external(tensor: memoryview, field: WireField) -> bool:
    """Return whether a field states that a tensor is in a file; an unknown value counts as yes."""
    if field.number != _LOCATION:
        return False
    return field.wire != VARINT or varint_at(tensor, field.start)[0] != 0


def _external_place(tensor: memoryview, fields: Sequence[WireField], name: str) -> dict[str, str]:
    """Read ``external_data``, which must have location, offset and length once each."""
    external: dict[str, str] = {}
    located = False
    for field in fields:
        if field.number in (_RAW, 4, 5, 6, 7, 10, 11):
            raise WireError(f"the weight {name} is both in the graph and in a file")
        if field.number == _LOCATION:
            located = field.wire == VARINT and varint_at(tensor, field.start)[0] == 1
        if field.number != _EXTERNAL:
            continue
        entry = {}
        if field.wire == BYTES:
            inner = tensor[field.start : field.end]
            entry = {f.number: bytes(inner[f.start : f.end]) for f in graph_fields(inner)}
        key, value = (entry.get(n, b"").decode("utf-8", "replace") for n in (1, 2))
        if len(entry) != 2 or key not in ("location", "offset", "length") or key in external:
            raise WireError(
                f"the weight {name} has {key!r:.100} in external_data, expected location, offset "
                "and length once each"
            )
        external[key] = value
    if not located or len(external) != 3:
        raise WireError(
            f"the weight {name} names its place by {sorted(external)} only, expected "
            "data_location 1, and location, offset and length"
        )
    return external


def _number(text: str, key: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise WireError(f"the weight {name} has the {key} {text!r:.50}, expected a number")
    return int(text)


def _tensor_name(tensor: memoryview, fields: Sequence[WireField]) -> str:
    names = [f for f in fields if f.number == _NAME and f.wire == BYTES]
    raw = bytes(tensor[names[-1].start : names[-1].end]) if names else b""
    return f"{raw.decode('utf-8', 'replace')!r:.100}"


def _tensor_bytes(tensor: memoryview, fields: Sequence[WireField], name: str) -> int:
    """Return the number of bytes that follows from a tensor's shape and type."""
    dims: list[int] = []
    kind = 0
    for field in fields:
        if field.number == _TYPE and field.wire == VARINT:
            kind = varint_at(tensor, field.start)[0]
        elif field.number == _DIMS and field.wire == VARINT:
            dims.append(varint_at(tensor, field.start)[0])
        elif field.number == _DIMS and field.wire == BYTES:
            at = field.start
            while at < field.end:
                value, at = varint_at(tensor, at)
                dims.append(value)
    if kind not in ITEM_BYTES or any(size >= 2**63 for size in dims):
        raise WireError(
            f"the weight {name} is of type {kind} and shape {dims!s:.100}, expected elements of "
            "whole bytes, and no negative size"
        )
    return prod(dims) * ITEM_BYTES[kind]


def _raw_bytes(tensor: memoryview) -> memoryview | None:
    """Return the bytes that a tensor contains, if they are complete; else ``None``."""
    fields = list(graph_fields(tensor))
    raw = [f for f in fields if f.number == _RAW]
    if len(raw) != 1 or raw[0].wire != BYTES:
        return None
    try:
        expected = _tensor_bytes(tensor, fields, "")
    except WireError:
        return None
    found = tensor[raw[0].start : raw[0].end]
    return found if len(found) == expected else None


# ---------------------------------------------------------------------------------------------
# Messages


def _changed(model: memoryview, change: Callable[[memoryview], list[Part] | None]) -> list[Part]:
    """Split a model into parts, with new parts for the initializers that ``change`` replaces.

    WireError if tensors elsewhere in the model name a file.
    """
    parts: list[Part] = []
    for field in graph_fields(model):
        if field.number == _GRAPH and field.wire == BYTES:
            graph = _changed_graph(model[field.start : field.end], change)
            parts += with_length(field.number, graph)
        else:
            _check_inside(model, field, "model")
            parts.append(model[field.begin : field.end])
    return parts


def _changed_graph(
    graph: memoryview, change: Callable[[memoryview], list[Part] | None]
) -> list[Part]:
    parts: list[Part] = []
    for field in graph_fields(graph):
        new = None
        if field.number == _INITIALIZER and field.wire == BYTES:
            new = change(graph[field.start : field.end])
        else:
            _check_inside(graph, field, "graph")
        if new is None:
            parts.append(graph[field.begin : field.end])
        else:
            parts += with_length(field.number, new)
    return parts


def _check_inside(message: memoryview, field: WireField, kind: str) -> None:
    """Raise WireError if a tensor in a field names a file."""
    inner = _INSIDE[kind].get(field.number)
    if inner is None or field.wire != BYTES:
        return
    for tensor in _tensors(message[field.start : field.end], inner, 1):
        fields = list(graph_fields(tensor))
        if any(f.number == _EXTERNAL or _says_external(tensor, f) for f in fields):
            raise WireError(
                f"the tensor {_tensor_name(tensor, fields)} names a file, which only initializers "
                "of the graph may do"
            )


def _tensors(message: memoryview, kind: str, depth: int) -> Iterator[memoryview]:
    """Yield all tensors in a message of the kind ``kind``."""
    if kind == "tensor":
        yield message
        return
    if depth > _MOST_DEPTH:
        raise WireError(f"messages are nested more than {_MOST_DEPTH} deep")
    inside = _INSIDE[kind]
    for field in graph_fields(message):
        inner = inside.get(field.number)
        if inner is not None and field.wire == BYTES:
            yield from _tensors(message[field.start : field.end], inner, depth + 1)


def _with_field(
    message: memoryview, number: int, content: list[Part], *, without: tuple[int, ...]
) -> list[Part]:
    """Replace the fields ``without`` by one field, in the order of field numbers.

    ``content`` is the field's value in bytes; for ``external_data``, it is a list of whole fields.
    """
    new = content if number == _EXTERNAL else with_length(number, content)
    before: list[Part] = []
    behind: list[Part] = []
    for field in graph_fields(message):
        if field.number not in without:
            # Writers put fields in the order of numbers, then fields that they do not know.
            side = before if field.number < number and not behind else behind
            side.append(message[field.begin : field.end])
    return [*before, *new, *behind]
