"""Weights that graph files name in ``weights.bin``: found, checked, and put back into the graph.

A graph file is a serialised ONNX model, and what it says of its weights is protobuf's wire format.
It is read here field by field, as this package needs neither protobuf nor onnx: a graph from
elsewhere is looked at before any runtime sees it, and only its large weights are ever copied. Field
numbers are those of onnx.proto3, which never change.
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
"""The file of a bundle that holds the large weights of all its graphs, each once."""
PAGE: Final = 4096
"""Weights in it begin at a multiple of it, as what is mapped does; smaller ones stay in graphs."""
MOST_BYTES: Final = 2**31 - 1
"""Of a graph with its weights: protobuf takes no more."""

ITEM_BYTES: Final = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20), 1),  # 8 bits: integers, booleans, floats
    **dict.fromkeys((4, 5, 10, 16), 2),
    **dict.fromkeys((1, 6, 12), 4),
    **dict.fromkeys((7, 11, 13, 14), 8),
    15: 16,
}
"""Bytes of an element, by ``TensorProto.DataType``; others, such as half bytes, stay in graphs."""

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
"""Where tensors may be: by message, the fields that hold others."""
_MOST_DEPTH: Final = 100
"""Of messages in messages, as protobuf's own readers have it."""
_MOST_DIGITS: Final = 19
_ANY_SIZE: Final = 2**62
"""Of a file that is not looked at."""


def named_weights(graph: bytes, size_bytes: int) -> tuple[Place, ...]:
    """List where the weights are that a graph names, in its order; each of them is checked.

    ``size_bytes`` are those of ``weights.bin``, 0 where there is none. WireError: the graph is no
    protobuf, or a tensor is said to be in another file, not wholly in this one, of another length
    than its shape, not at a page's beginning, or is none of the graph's initializers.
    """
    found: list[Place] = []

    def look(tensor: memoryview) -> None:
        place = _named_place(tensor, size_bytes)
        if place is not None:
            found.append(place)

    _changed(memoryview(graph), look)
    return tuple(found)


def filled_parts(graph: bytes, size_bytes: int) -> list[Part] | None:
    """Take a graph apart into what is there and the weights that it names, in order.

    With these read, it is what would have been written with the weights in it. ``None`` if it names
    none. WireError as of :func:`named_weights`.
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
    """Count about the bytes that a graph has with the weights that it names; WireError."""
    return len(graph) + sum(place.length for place in named_weights(graph, _ANY_SIZE))


def external_locations(model: bytes) -> frozenset[str]:
    """Return the files that tensors of any ONNX model name for their bytes; WireError."""
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
    """Give a graph that names its weights elsewhere in ``weights.bin``.

    ``move`` is asked where each of the weights begins that the graph names, and each that it holds
    as bytes and that may be named; ``None`` leaves a weight as it is. WireError as of
    :func:`named_weights`.
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
    """Encode that a tensor's bytes are at a place of ``weights.bin``, as fields of the tensor."""
    told = {"location": WEIGHTS, "offset": str(place.offset), "length": str(place.length)}
    entries = [
        message_of(_EXTERNAL, text_of(1, key) + text_of(2, value)) for key, value in told.items()
    ]
    return b"".join([*entries, varint(_LOCATION << 3 | VARINT), b"\x01"])


# ---------------------------------------------------------------------------------------------
# Tensors


def _named_place(tensor: memoryview, size_bytes: int) -> Place | None:
    """Read and check where a tensor is said to be, if it is said; ``None`` if it holds itself."""
    fields = list(graph_fields(tensor))
    if not any(f.number == _EXTERNAL or _says_external(tensor, f) for f in fields):
        return None
    name = _tensor_name(tensor, fields)
    told = _told_place(tensor, fields, name)
    if told["location"] != WEIGHTS:
        raise WireError(
            f"the weight {name} is said to be in the file {told['location']!r:.100}, expected "
            f"{WEIGHTS}"
        )
    if not size_bytes:
        raise WireError(f"the weight {name} is said to be in {WEIGHTS}, which is not there")
    offset, length = (_number(told[key], key, name) for key in ("offset", "length"))
    expected = _tensor_bytes(tensor, fields, name)
    if length != expected:
        raise WireError(
            f"the weight {name} is said to have {length} bytes, its shape and type make {expected}"
        )
    if offset % PAGE or offset + length > size_bytes:
        raise WireError(
            f"the weight {name} is said to be at bytes {offset} to {offset + length} of {WEIGHTS}; "
            f"expected a multiple of {PAGE}, and no more than its {size_bytes} bytes"
        )
    return Place(offset, length)


def _says_external(tensor: memoryview, field: WireField) -> bool:
    """Whether a field says that the bytes are elsewhere; one that nobody understands does too."""
    if field.number != _LOCATION:
        return False
    return field.wire != VARINT or varint_at(tensor, field.start)[0] != 0


def _told_place(tensor: memoryview, fields: Sequence[WireField], name: str) -> dict[str, str]:
    """Read ``external_data``, which must say location, offset and length once each."""
    told: dict[str, str] = {}
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
        if len(entry) != 2 or key not in ("location", "offset", "length") or key in told:
            raise WireError(
                f"the weight {name} has {key!r:.100} in external_data, expected location, offset "
                "and length once each"
            )
        told[key] = value
    if not located or len(told) != 3:
        raise WireError(
            f"the weight {name} says where it is by {sorted(told)} only, expected data_location 1, "
            "and location, offset and length"
        )
    return told


def _number(text: str, key: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise WireError(f"the weight {name} has the {key} {text!r:.50}, expected a number")
    return int(text)


def _tensor_name(tensor: memoryview, fields: Sequence[WireField]) -> str:
    names = [f for f in fields if f.number == _NAME and f.wire == BYTES]
    raw = bytes(tensor[names[-1].start : names[-1].end]) if names else b""
    return f"{raw.decode('utf-8', 'replace')!r:.100}"


def _tensor_bytes(tensor: memoryview, fields: Sequence[WireField], name: str) -> int:
    """Count the bytes that a tensor's shape and type make."""
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
            f"the weight {name} is of type {kind} and shape {dims!s:.100}, expected whole bytes an "
            "element and no negative size"
        )
    return prod(dims) * ITEM_BYTES[kind]


def _raw_bytes(tensor: memoryview) -> memoryview | None:
    """Give the bytes that a tensor holds, where they are all there is, of whole elements."""
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
    """Take a model apart, with other parts for the initializers that ``change`` gives some for.

    Tensors that are elsewhere in the model must hold themselves: WireError.
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
    """Refuse tensors in a field that are said to be in a file."""
    inner = _INSIDE[kind].get(field.number)
    if inner is None or field.wire != BYTES:
        return
    for tensor in _tensors(message[field.start : field.end], inner, 1):
        fields = list(graph_fields(tensor))
        if any(f.number == _EXTERNAL or _says_external(tensor, f) for f in fields):
            raise WireError(
                f"the tensor {_tensor_name(tensor, fields)} is said to be in a file, expected that "
                "of initializers of the graph alone"
            )


def _tensors(message: memoryview, kind: str, depth: int) -> Iterator[memoryview]:
    """Yield all tensors in a message of some kind."""
    if kind == "tensor":
        yield message
        return
    if depth > _MOST_DEPTH:
        raise WireError(f"messages are in each other more than {_MOST_DEPTH} deep")
    inside = _INSIDE[kind]
    for field in graph_fields(message):
        inner = inside.get(field.number)
        if inner is not None and field.wire == BYTES:
            yield from _tensors(message[field.start : field.end], inner, depth + 1)


def _with_field(
    message: memoryview, number: int, content: list[Part], *, without: tuple[int, ...]
) -> list[Part]:
    """Put a field where its number belongs, in place of others.

    ``content`` is a field's value of bytes, but of ``external_data`` whole fields.
    """
    new = content if number == _EXTERNAL else with_length(number, content)
    before: list[Part] = []
    behind: list[Part] = []
    for field in graph_fields(message):
        if field.number not in without:
            # Writers give fields by number, and then those that they do not know.
            side = before if field.number < number and not behind else behind
            side.append(message[field.begin : field.end])
    return [*before, *new, *behind]
