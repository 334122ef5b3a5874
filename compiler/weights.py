"""One copy of a model's weights, on the disk: what is compiled names them, and holds none.

The source model, its segments and the stages made of them have the same weights. In memory each
serialised graph and each message had a copy, and each session some: of a model of 440 MB that was
more than 5 GB. Sessions map the file (:mod:`offramp.engine.external_weights`), and a graph gets its
weights back when it is written into the bundle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from offramp.calibration.scratch import ScratchSpace
from offramp.compiler.feature_folder import feature_folder
from offramp.compiler.graph import weight_bytes
from offramp.engine.external_weights import weights_in

LEAST_BYTES: Final = 4096
"""Of a weight that is kept in the file; smaller ones stay in the graph, where shapes are read."""
_SMALL_BYTES: Final = 2**24
"""Of weights that are rather copied in memory than written to the disk for a moment."""
_NAME: Final = "weights"
_PAGE: Final = 4096
"""Weights begin at a multiple of it, as what is mapped does."""
_PIECE_BYTES: Final = 2**20
_LENGTH_DELIMITED: Final = 2
"""Protobuf's wire type of bytes and of messages."""


class _Place(NamedTuple):
    """Where in the file the bytes of a weight are."""

    offset: int
    length: int


_Part: TypeAlias = bytes | _Place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightFile:
    """A file of weights, each of which is there once however many graphs name it."""

    folder: Path
    file: BinaryIO
    scratch: ScratchSpace
    _places: dict[bytes, int] = field(default_factory=dict)
    """Where the bytes of a weight begin, by their hash."""

    def light(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Give a model that names its weights, which are put into the file; it is not changed."""
        model = onnx.ModelProto()
        _copy_but(proto, model, "graph")
        _copy_but(proto.graph, model.graph, "initializer")
        for tensor in proto.graph.initializer:
            named = model.graph.initializer.add()
            if len(tensor.raw_data) < LEAST_BYTES:
                named.CopyFrom(tensor)
                continue
            _copy_but(tensor, named, "raw_data")
            place = {"location": _NAME, "offset": self._keep(tensor.raw_data)}
            for key, value in {**place, "length": len(tensor.raw_data)}.items():
                named.external_data.add(key=key, value=str(value))
            named.data_location = onnx.TensorProto.EXTERNAL
        self.file.flush()
        return model

    def pieces(self, graph: bytes) -> Iterator[bytes]:
        """Give a serialised graph with the weights that it names, a piece at a time.

        Together they are what the filled model would be serialised to, byte for byte; of the
        weights no more than a piece is in memory.
        """
        model = onnx.ModelProto.FromString(graph)
        if not any(tensor.external_data for tensor in model.graph.initializer):
            yield graph
            return
        for part in _model_in_parts(model):
            yield from (part,) if isinstance(part, bytes) else self._read(part)

    def fill(self, model: onnx.ModelProto) -> None:
        """Give a model the weights that it names, in place."""
        for tensor in model.graph.initializer:
            if tensor.external_data:
                tensor.raw_data = b"".join(self._read(_taken_from(tensor)))

    def _read(self, place: _Place) -> Iterator[bytes]:
        for start in range(0, place.length, _PIECE_BYTES):
            self.file.seek(place.offset + start)
            yield self.file.read(min(_PIECE_BYTES, place.length - start))

    def _keep(self, content: bytes) -> int:
        """Write what is not there yet; gives where it begins."""
        key = hashlib.sha256(content).digest()
        if key not in self._places:
            start = -(-self.file.seek(0, 2) // _PAGE) * _PAGE
            self.scratch.take(start + len(content) - self.file.tell())
            self.file.seek(start)
            self.file.write(content)
            self._places[key] = start
        return self._places[key]


@contextmanager
def weight_file(proto: onnx.ModelProto, scratch: ScratchSpace) -> Iterator[WeightFile]:
    """Make a file for the weights of a model, which graphs find as long as the context lasts.

    ScratchError if the disk has no room for them.
    """
    size = weight_bytes(proto)
    del proto  # else it would live, with all weights, as long as the context
    scratch.check_room(size, "the model's weights", "compile a smaller model")
    taken = scratch.taken_bytes
    with (
        feature_folder(scratch.folder) as folder,
        weights_in(folder),
        (folder / _NAME).open("w+b") as file,
    ):
        try:
            yield WeightFile(folder=folder, file=file, scratch=scratch)
        finally:
            scratch.take(taken - scratch.taken_bytes)


@contextmanager
def weight_file_if_large(
    proto: onnx.ModelProto, scratch: ScratchSpace
) -> Iterator[WeightFile | None]:
    """Make a file as :func:`weight_file` does for a model whose weights are worth it."""
    if weight_bytes(proto) <= _SMALL_BYTES:
        yield None
        return
    with weight_file(proto, scratch) as weights:
        yield weights


def _copy_but(source: Message, target: Message, left_out: str) -> None:
    """Copy all fields of a message but one, which may be large."""
    for descriptor, value in source.ListFields():
        if descriptor.name != left_out:
            _copy_field(descriptor, value, target)


def _copy_field(descriptor: FieldDescriptor, value: Any, target: Message) -> None:
    if descriptor.is_repeated:
        getattr(target, descriptor.name).extend(value)
    elif descriptor.message_type is not None:
        getattr(target, descriptor.name).CopyFrom(value)
    else:
        setattr(target, descriptor.name, value)


def _taken_from(tensor: onnx.TensorProto) -> _Place:
    """Give where a tensor's bytes are, and take the name of the place from it."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    return _Place(offset=int(told["offset"]), length=int(told["length"]))


def _model_in_parts(model: onnx.ModelProto) -> list[_Part]:
    """Serialise a model, with the places of the weights that it names among the bytes."""
    tensors = chain.from_iterable(
        _message(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, _tensor_in_parts(tensor))
        for tensor in model.graph.initializer
    )
    graph = _around(model.graph, onnx.GraphProto.INITIALIZER_FIELD_NUMBER, list(tensors))
    number = onnx.ModelProto.GRAPH_FIELD_NUMBER
    return _around(model, number, _message(number, graph))


def _tensor_in_parts(tensor: onnx.TensorProto) -> list[_Part]:
    if not tensor.external_data:
        return [tensor.SerializeToString()]
    place, number = _taken_from(tensor), onnx.TensorProto.RAW_DATA_FIELD_NUMBER
    return _around(tensor, number, _message(number, [place]))


def _around(message: Message, number: int, parts: list[_Part]) -> list[_Part]:
    """Serialise a message with ``parts`` for one of its fields.

    Protobuf's library writes fields by number, then those that it does not know.
    """
    before, after = type(message)(), type(message)()
    after.CopyFrom(message)
    for descriptor, value in message.ListFields():
        if descriptor.number < number:
            _copy_field(descriptor, value, before)
        if descriptor.number <= number:
            after.ClearField(descriptor.name)
    return [before.SerializeToString(), *parts, after.SerializeToString()]


def _message(number: int, parts: list[_Part]) -> list[_Part]:
    """Put the tag and the length of a field before what it holds."""
    size = sum(len(part) if isinstance(part, bytes) else part.length for part in parts)
    return [_varint(number << 3 | _LENGTH_DELIMITED) + _varint(size), *parts]


def _varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
