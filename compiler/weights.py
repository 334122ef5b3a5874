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
from pathlib import Path
from typing import BinaryIO, Final

import onnx
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

    def whole(self, graph: bytes) -> bytes:
        """Give a serialised graph the weights that it names; as it was serialised before."""
        model = onnx.ModelProto.FromString(graph)
        return model.SerializeToString() if self.fill(model) else graph

    def fill(self, model: onnx.ModelProto) -> bool:
        """Give a model the weights that it names, in place; tells whether it named any."""
        named = [t for t in model.graph.initializer if t.external_data]
        for tensor in named:
            told = {entry.key: entry.value for entry in tensor.external_data}
            self.file.seek(int(told["offset"]))
            tensor.raw_data = self.file.read(int(told["length"]))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        return bool(named)

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
        if descriptor.name == left_out:
            continue
        if descriptor.is_repeated:
            getattr(target, descriptor.name).extend(value)
        elif descriptor.message_type is not None:
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)
