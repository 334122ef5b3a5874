"""Splitting of a request's bytes, with limits that hold before anything is decoded.

An empty field takes two bytes on the wire and a hundred once decoded, so a message within gRPC's
limit could occupy a server for minutes and fill its memory. :func:`split_message` therefore walks
the fields first. The elements of tensors stay in place, neither copied nor decoded; the rest must
be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from offramp.proto.messages import ModelInferRequest
from offramp.proto.wire_format import BYTES, WireError, WireField, fields_of, message_of

MAX_FIELDS: Final = 1024
"""Largest number of fields in a request: 256 inputs with their contents, 256 outputs, and more."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Largest size, in bytes, of everything but tensor elements: names, shapes and parameters."""

MAX_TYPED_BYTES: Final = 1024 * 1024
"""Largest size, in bytes, of typed contents that are not packed floats: each element becomes a
Python object."""

MAX_NAME_CHARS: Final = 1024
"""Largest number of characters in a name: error messages search for the most similar name, in
O(n²)."""

SMALL_BYTES: Final = 2 * MAX_FIELDS
"""Size up to which messages cannot exceed :data:`MAX_FIELDS`, and are decoded without a walk."""

_SMALL_INPUT_BYTES: Final = 256
"""Size up to which inputs are not walked; the head can hold 256 of them."""

_QUICK_TYPED_BYTES: Final = 16 * 1024
QUICK_BYTES: Final = 4 * 1024 * 1024
"""Sizes up to which messages are decoded, and arrays aligned, within a few milliseconds."""

_INPUT, _RAW_CONTENTS = (5, BYTES), (7, BYTES)
"""Number and wire type of the fields of a request that hold inputs and raw contents."""
_CONTENTS: Final = (5, BYTES)
"""Number and wire type of an input's contents."""
_FLOATS: Final[Mapping[int, str]] = {6: "fp32_contents", 7: "fp64_contents"}
"""Fields of ``InferTensorContents`` whose packed elements need no decoding."""


class MessageError(ValueError):
    """The bytes are not a message of the protocol."""


class MessageLimitError(MessageError):
    """The message has more fields, or more bytes apart from tensor elements, than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFloats:
    """Typed contents of a float tensor as memory, in the form of raw contents."""

    field: str
    """Name of the field of ``InferTensorContents`` that has the elements."""
    elements: memoryview
    """Elements as in raw contents, little endian."""


_NO_FLOATS: Final[Mapping[int, PackedFloats]] = MappingProxyType({})


class InferMessage(NamedTuple):  # made for every request, in half the time of a frozen dataclass
    """A request whose tensor elements are still in the received bytes."""

    head: ModelInferRequest
    """The request without the parts that the fields below hold."""
    raw_contents: Sequence[memoryview | bytes]
    floats: Mapping[int, PackedFloats] = _NO_FLOATS
    """Packed floats by the input's index."""
    slow: bool = False
    """True if decoding the tensors would block an event loop for too long."""


class MessageParts(NamedTuple):
    """The bytes of a request by their content, before anything is decoded."""

    head: bytes
    raw_contents: Sequence[memoryview] = ()
    """Raw contents; if empty, all contents are in the head."""
    floats: Mapping[int, PackedFloats] = _NO_FLOATS
    slow: bool = False
    """True if decoding would block an event loop, and belongs on a thread."""
    fields: int = 0
    """Number of fields walked; 0 for a small message."""

    def decode(self) -> InferMessage:
        """Decode the head.

        Raises:
            MessageError: The head is not that of a ``ModelInferRequest``.
        """
        try:
            head = ModelInferRequest.FromString(self.head)
        except DecodeError as error:
            raise MessageError(
                f"the message is not a ModelInferRequest ({error}); "
                "is this a client of the protocol that inference.proto defines?"
            ) from None
        if len(head.model_name) > MAX_NAME_CHARS:
            raise MessageLimitError(
                f"model_name has {len(head.model_name)} characters, expected at most "
                f"{MAX_NAME_CHARS}; send the name that the model is served under"
            )
        raw = self.raw_contents or head.raw_input_contents
        return InferMessage(head=head, raw_contents=raw, floats=self.floats, slow=self.slow)


def split_message(data: bytes) -> MessageParts:
    """Split a ``ModelInferRequest`` into its parts; arrays will be views of ``data``.

    Raises:
        MessageLimitError: A limit of this module is exceeded.
        MessageError: The bytes are not a protobuf message.
    """
    if len(data) <= SMALL_BYTES:
        return MessageParts(head=data)
    splitting = _Splitting(data)
    splitting.split()
    typed_bytes = splitting.typed_bytes
    head = b"".join(splitting.head)
    if typed_bytes > MAX_TYPED_BYTES:
        raise MessageLimitError(
            f"typed contents take {typed_bytes} bytes, expected at most {MAX_TYPED_BYTES} "
            "(packed floats may take any number); send raw_input_contents"
        )
    if len(head) - typed_bytes > MAX_HEAD_BYTES:
        raise MessageLimitError(
            f"the request has {len(head) - typed_bytes} bytes besides the elements of its tensors, "
            f"expected at most {MAX_HEAD_BYTES} (names, shapes, parameters); send elements as "
            "raw_input_contents, and shorten the rest"
        )
    return MessageParts(
        head=head,
        raw_contents=splitting.raw_contents,
        floats=splitting.floats,
        slow=typed_bytes > _QUICK_TYPED_BYTES or len(data) > QUICK_BYTES,
        fields=splitting.fields,
    )


class _Splitting:
    """The state of :func:`split_message`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._view = memoryview(data)
        self.fields = 0
        self._inputs = 0
        self.head: list[memoryview | bytes] = []
        self.raw_contents: list[memoryview] = []
        self.floats: dict[int, PackedFloats] = {}
        self.typed_bytes = 0

    def split(self) -> None:
        view, kept = self._view, 0
        for number, wire, begin, start, end in self._walk(0, len(view)):
            if (number, wire) == _RAW_CONTENTS:
                self.raw_contents.append(view[start:end])
                self.head.append(view[kept:begin])
                kept = end
            elif (number, wire) == _INPUT:
                if end - start > _SMALL_INPUT_BYTES and (rest := self._split_input(start, end)):
                    self.head += (view[kept:begin], message_of(number, rest))
                    kept = end
                self._inputs += 1
        self.head.append(view[kept:])

    def _split_input(self, position: int, end: int) -> bytes | None:
        """Set the input's floats aside and return the rest; ``None`` if the input has no floats."""
        found = [field for field in self._walk(position, end) if field[:2] == _CONTENTS]
        if len(found) > 1:
            raise MessageError("an input has its contents twice; send them once")
        for field in found:
            if floats := self._floats(field.start, field.end):
                self.floats[self._inputs] = floats
                return bytes(self._view[position : field.begin]) + self._view[field.end : end]
            self.typed_bytes += field.end - field.start
        return None

    def _floats(self, position: int, end: int) -> PackedFloats | None:
        """Return the contents' floats if the contents are one packed field, else ``None``."""
        if position == end:
            return None
        first = next(self._walk(position, end))
        if first.wire != BYTES or first.number not in _FLOATS or first.end != end:
            return None
        return PackedFloats(field=_FLOATS[first.number], elements=self._view[first.start : end])

    def _walk(self, position: int, end: int) -> Iterator[WireField]:
        """Yield the fields from ``position`` on; MessageLimitError if they exceed the limit."""
        try:
            for field in fields_of(self._data, position, end):
                self.fields += 1
                if self.fields > MAX_FIELDS:
                    raise MessageLimitError(
                        f"the request has more than {MAX_FIELDS} fields, inputs, outputs, contents "
                        "and parameters together; send fewer, and elements as raw_input_contents"
                    )
                yield field
        except WireError as error:
            raise MessageError(f"the message has {error}") from None
