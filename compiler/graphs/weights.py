"""One copy of a model's weights, on the disk: graphs name them, and hold none.

The source model, its segments and the stages made of them have the same weights. In memory each
serialised graph and each message had a copy, and each session some: of a model of 440 MB that was
more than 5 GB. While a model is compiled its weights are in a file (:class:`WeightFile`) that
sessions map (:mod:`offramp.engine.graphs.external_weights`); a bundle gets one of its own
(:func:`pack_weights`), with what its graphs have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import onnx
from google.protobuf.message import Message
from onnx import helper

from offramp.bundle import Bundle
from offramp.bundle.graph_weights import ITEM_BYTES, PAGE, WEIGHTS, moved, named_weights
from offramp.bundle.onnx_wire import Place, length_of
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.common.resources import feature_folder
from offramp.compiler.common.tensors import named_bytes, named_place
from offramp.compiler.graphs.graph import all_graphs, copied, refill, weight_bytes
from offramp.engine.graphs.external_weights import weights_in

LEAST_BYTES: Final = PAGE
"""Of a weight that is kept in the file; smaller ones stay in the graph, where shapes are read."""
_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightFile:
    """A file of weights, each of which is there once however many graphs name it."""

    folder: Path
    file: BinaryIO
    scratch: ScratchSpace
    _places: dict[bytes, Place] = field(default_factory=dict)
    """Where the bytes of a weight are, by their hash."""
    _beginnings: dict[bytes, list[Place]] = field(default_factory=dict)
    """What was written, by its first bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes that were written."""
        return self.file.seek(0, 2)

    @property
    def hashes(self) -> dict[Place, bytes]:
        """The SHA-256 of all weights, by where they are."""
        return {place: key for key, place in self._places.items()}

    def check_room(self, proto: onnx.ModelProto) -> None:
        """Check that the disk has room for the weights of a model; ScratchError if not."""
        what = "the model's weights"
        self.scratch.check_room(weight_bytes(proto), what, "compile a smaller model")

    def light(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Give a model that names its weights, which are put into the file; it is not changed."""
        model = onnx.ModelProto()
        _copy_but(proto, model, "graph")
        _copy_but(proto.graph, model.graph, "initializer")
        for tensor in proto.graph.initializer:
            named = model.graph.initializer.add()
            if not self.takes(tensor, len(tensor.raw_data)):
                named.CopyFrom(tensor)
                continue
            _copy_but(tensor, named, "raw_data")
            self.name(named, tensor.raw_data)
        self.file.flush()
        return model

    def takes(self, tensor: onnx.TensorProto, size_bytes: int) -> bool:
        """Whether an initializer of so many bytes is kept in the file, or stays in its graph.

        What has not the bytes of its shape stays, for checks of the graph to find it.
        """
        expected = prod(tensor.dims) * ITEM_BYTES.get(tensor.data_type, 0)
        return LEAST_BYTES <= size_bytes == expected

    def name(self, tensor: onnx.TensorProto, content: bytes) -> None:
        """Have a tensor, which holds nothing, name its bytes, which are put into the file."""
        place = {"location": WEIGHTS, "offset": self.keep(content), "length": len(content)}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        tensor.data_location = onnx.TensorProto.EXTERNAL

    def whole(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Copy a model with the weights that it names."""
        copy = copied(proto)
        self.fill(copy)
        return copy

    def fill(self, model: onnx.ModelProto) -> None:
        """Give a model the weights that it names, in place."""
        for tensor in model.graph.initializer:
            if tensor.external_data:
                tensor.raw_data = b"".join(self.read(_taken_from(tensor)))

    def read(self, place: Place) -> Iterator[bytes]:
        """Give the bytes of a weight, piece by piece."""
        for start in range(0, place.length, _PIECE_BYTES):
            self.file.seek(place.offset + start)
            yield self.file.read(min(_PIECE_BYTES, place.length - start))

    def keep(self, content: bytes) -> int:
        """Write the bytes of a weight, unless they are there; gives where they begin.

        The beginning of a longer weight that was kept before is there: so is what a subnet has of
        a weight whose first rows it takes (SuperServe's WeightSlice, 3).
        """
        key = hashlib.sha256(content).digest()
        if key not in self._places:
            self._places[key] = self._beginning(content) or self._written(content)
        return self._places[key].offset

    def _beginning(self, content: bytes) -> Place | None:
        """Find a weight in the beginning of a longer one."""
        for longer in self._beginnings.get(content[:LEAST_BYTES], ()):
            place = Place(longer.offset, len(content))
            fits = place.length <= longer.length
            if fits and _equal(self.read(place), _split(memoryview(content))):
                return place
        return None

    def _written(self, content: bytes) -> Place:
        end = self.size_bytes
        place = Place(_next_page(end), len(content))
        self.scratch.take(place.offset + place.length - end)
        self.file.seek(place.offset)
        self.file.write(content)
        self._beginnings.setdefault(content[:LEAST_BYTES], []).append(place)
        return place


@contextmanager
def weight_file(scratch: ScratchSpace) -> Iterator[WeightFile]:
    """Make a file for weights, where graphs find them as long as the context lasts."""
    taken = scratch.taken_bytes
    with (
        feature_folder(scratch.folder) as made,
        weights_in(folder := made.resolve()),  # processes run in it, wherever this one was started
        (folder / WEIGHTS).open("w+b") as file,
    ):
        try:
            yield WeightFile(folder=folder, file=file, scratch=scratch)
        finally:
            scratch.take(taken - scratch.taken_bytes)


def save(proto: onnx.ModelProto, path: Path) -> None:
    """Write a model of any size, its large weights in a file beside it; it is not changed."""
    with path.with_name(WEIGHTS).open("w+b") as file:
        weights = WeightFile(folder=path.parent, file=file, scratch=ScratchSpace())
        path.write_bytes(weights.light(proto).SerializeToString())


def without_named(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Give a model with inputs in the place of the weights that it names in a file; a copy if any.

    So tools take it that read no such file, or read it to no purpose.
    """
    if not any(tensor.external_data for g in all_graphs(proto.graph) for tensor in g.initializer):
        return proto
    model = copied(proto)
    known = {info.name for info in proto.graph.input}
    for graph in all_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.external_data and tensor.name not in known:
                known.add(tensor.name)
                kind = (tensor.data_type, tensor.dims)
                model.graph.input.append(helper.make_tensor_value_info(tensor.name, *kind))
        refill(graph.initializer, [t for t in graph.initializer if not t.external_data])
    return model


def filled(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model with the weights that it, and graphs inside it, name in the file in use."""
    model = copied(proto)
    for tensor in (t for graph in all_graphs(model.graph) for t in graph.initializer):
        if tensor.external_data:
            content = named_bytes(tensor)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = content
    return model


def renamed_file(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Copy a model that names weights, with another name for their file."""
    model = copied(proto)
    for tensor in (t for graph in all_graphs(model.graph) for t in graph.initializer):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    return model


def check_standard(proto: onnx.ModelProto) -> None:
    """Have ONNX's checker look at a model; raises its ValidationError.

    Of weights in a file it sees type and shape: it takes one message, of 2 GiB at most.
    """
    onnx.checker.check_model(without_named(proto))


_Content: TypeAlias = Place | memoryview
"""A weight: in the file where it was kept, or in a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """How much room the large weights of a bundle take, in one file and without it."""

    file_bytes: int
    """Of the file; 0 if no graph has such weights."""
    graph_bytes: int
    """Of the weights in it, counted in every graph that has them: what graphs would hold."""

    @classmethod
    def of(cls, bundle: Bundle) -> WeightSizes:
        """Count those of a bundle."""
        size = next((e.size_bytes for e in bundle.manifest.files if e.path == WEIGHTS), 0)
        named = [named_weights(bundle.graph(name), size) for name in bundle.manifest.graphs]
        return cls(file_bytes=size, graph_bytes=sum(p.length for places in named for p in places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeights:
    """The graphs of a bundle, which name their weights in one file, and what is in that."""

    graphs: Mapping[str, bytes]
    """By path in the bundle; the weights of a page or more are named."""
    sizes: WeightSizes
    _layout: Mapping[int, _Content]
    """What is in the file, by where it begins, in order."""
    _kept: WeightFile | None

    def pieces(self) -> Iterator[bytes]:
        """Give the file, a piece at a time."""
        at = 0
        for offset, content in self._layout.items():
            yield bytes(offset - at)
            yield from _read(content, self._kept)
            at = offset + length_of(content)


def pack_weights(graphs: Mapping[str, bytes], kept: WeightFile | None) -> PackedWeights:
    """Lay out one file for the weights of graphs, each of them there once.

    ``graphs`` hold their weights, or name them in ``kept``. What is the beginning of a longer
    weight is no more than that. A weight is not read into memory as a whole.
    """
    size = 0 if kept is None else kept.size_bytes
    contents = _DistinctContents(kept)
    for graph in graphs.values():
        moved(graph, size, contents.add)
    offsets, end = contents.lay_out(), 0
    keys = iter(contents.keys)

    def move(_: _Content) -> int | None:
        key = next(keys)
        return None if key is None else offsets[key]

    light = {name: moved(graph, size, move) for name, graph in graphs.items()}
    layout = {offsets[key]: contents.by_key[key] for key in contents.first}
    for offset, content in layout.items():
        end = offset + length_of(content)
    return PackedWeights(
        graphs=light,
        sizes=WeightSizes(
            file_bytes=end,
            graph_bytes=sum(length_of(contents.by_key[k]) for k in contents.keys if k is not None),
        ),
        _layout=layout,
        _kept=kept,
    )


class _DistinctContents:
    """The weights of some graphs, by the hash of their bytes."""

    def __init__(self, kept: WeightFile | None) -> None:
        self._kept = kept
        self._known = {} if kept is None else kept.hashes
        self.by_key: dict[bytes, _Content] = {}
        self.keys: list[bytes | None] = []
        """Of all weights, in the order of graphs; ``None`` of those that stay in them."""
        self.first: list[bytes] = []
        """Those that others are no more than beginnings of; known once they are laid out."""

    def add(self, content: _Content) -> None:
        """Take a weight of a graph."""
        if isinstance(content, memoryview) and len(content) < LEAST_BYTES:
            self.keys.append(None)
            return
        key = (
            self._known[content] if isinstance(content, Place) else hashlib.sha256(content).digest()
        )
        self.by_key.setdefault(key, content)
        self.keys.append(key)

    def lay_out(self) -> dict[bytes, int]:
        """Give where each begins: in the order of first use, or with the one that it begins."""
        begins = self._beginnings()
        offsets: dict[bytes, int] = {}
        end = 0
        for key, content in self.by_key.items():
            if key not in begins:
                offsets[key] = _next_page(end)
                end = offsets[key] + length_of(content)
                self.first.append(key)
        return {key: offsets[begins.get(key, key)] for key in self.by_key}

    def _beginnings(self) -> dict[bytes, bytes]:
        """Find the weights that are the beginning of another one, and of which."""
        groups: dict[bytes, list[bytes]] = {}
        for key, content in self.by_key.items():
            groups.setdefault(next(self._read(content, LEAST_BYTES)), []).append(key)
        found: dict[bytes, bytes] = {}
        for group in groups.values():
            longest: list[bytes] = []
            for key in sorted(group, key=lambda key: -length_of(self.by_key[key])):
                size = length_of(self.by_key[key])
                for other in longest:
                    there = self._read(self.by_key[other], size)
                    if _equal(self._read(self.by_key[key], size), there):
                        found[key] = other
                        break
                else:
                    longest.append(key)
        return found

    def _read(self, content: _Content, size: int) -> Iterator[bytes]:
        """Give the first bytes of a weight, piece by piece."""
        first = Place(content.offset, size) if isinstance(content, Place) else content[:size]
        return _read(first, self._kept)


def _read(content: _Content, kept: WeightFile | None) -> Iterator[bytes]:
    if isinstance(content, memoryview):
        return _split(content)
    assert kept is not None, "no file of weights is named without one"
    return kept.read(content)


def _split(content: memoryview) -> Iterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield bytes(content[start : start + _PIECE_BYTES])


def _equal(one: Iterator[bytes], other: Iterator[bytes]) -> bool:
    """Whether two weights of a length, in pieces of a length, are the same."""
    return all(a == b for a, b in zip(one, other, strict=True))


def _next_page(end: int) -> int:
    return -(-end // PAGE) * PAGE


def _copy_but(source: Message, target: Message, left_out: str) -> None:
    """Copy all fields of a message but one, which may be large."""
    for descriptor, value in source.ListFields():
        if descriptor.name != left_out:
            _copy_field(descriptor.name, value, target)


def _copy_field(name: str, value: Any, target: Message) -> None:
    # By the value: no property of descriptors tells this in every version of protobuf from 5 on.
    if isinstance(value, MutableSequence):
        getattr(target, name).extend(value)
    elif isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)


def _taken_from(tensor: onnx.TensorProto) -> Place:
    """Give where a tensor's bytes are, and take the name of the place from it."""
    place = named_place(tensor)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    return place
