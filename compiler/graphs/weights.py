"""One copy of a model's weights, on the disk: graphs refer to weights instead of containing them.

The source model, its segments and its stages have the same weights. If each serialised graph, each
protobuf message and each session had a copy, a model of 440 MB would need more than 5 GB of memory.
While a model is compiled, its weights are in a file (:class:`WeightFile`) that sessions map
(:mod:`offramp.engine.graphs.external_weights`). A bundle gets a separate file
(:func:`pack_weights`) with the weights of its graphs.
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
"""The smallest size in bytes of weights that are kept in the file. Smaller weights stay in the
graph, because inference reads shapes from them."""
_PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightFile:
    """A file of weights, which stores each weight once for all graphs that refer to it."""

    folder: Path
    file: BinaryIO
    scratch: ScratchSpace
    _places: dict[bytes, Place] = field(default_factory=dict)
    """Places of weights in the file, by the hash of their bytes."""
    _beginnings: dict[bytes, list[Place]] = field(default_factory=dict)
    """Places of weights in the file, by their first bytes."""

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes, so far."""
        return self.file.seek(0, 2)

    @property
    def hashes(self) -> dict[Place, bytes]:
        """SHA-256 of all weights in the file, by place."""
        return {place: key for key, place in self._places.items()}

    def check_space(self, proto: onnx.ModelProto) -> None:
        """Raise ScratchError if the disk has no space for the weights of a model."""
        what = "the model's weights"
        self.scratch.check_space(weight_bytes(proto), what, "compile a smaller model")

    def light(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of a model whose large weights are in the file."""
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
        """Return whether an initializer of this many bytes is kept in the file.

        An initializer whose number of bytes contradicts its shape stays in the graph, where checks
        find it.
        """
        expected = prod(tensor.dims) * ITEM_BYTES.get(tensor.data_type, 0)
        return LEAST_BYTES <= size_bytes == expected

    def name(self, tensor: onnx.TensorProto, content: bytes) -> None:
        """Put a tensor's bytes into the file, and let the empty tensor refer to them."""
        place = {"location": WEIGHTS, "offset": self.keep(content), "length": len(content)}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        tensor.data_location = onnx.TensorProto.EXTERNAL

    def whole(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Copy a model, and load its weights from the file into the copy."""
        copy = copied(proto)
        self.fill(copy)
        return copy

    def fill(self, model: onnx.ModelProto) -> None:
        """Load a model's weights from the file into the model, in place."""
        for tensor in model.graph.initializer:
            if tensor.external_data:
                tensor.raw_data = b"".join(self.read(_taken_from(tensor)))

    def read(self, place: Place) -> Iterator[bytes]:
        """Yield the bytes of a weight in pieces."""
        for start in range(0, place.length, _PIECE_BYTES):
            self.file.seek(place.offset + start)
            yield self.file.read(min(_PIECE_BYTES, place.length - start))

    def keep(self, content: bytes) -> int:
        """Write the bytes of a weight, unless the file has them already; return their offset.

        A weight may be the beginning of a longer one that was kept before: a subnet takes the first
        rows of some weights (SuperServe's WeightSlice, 3).
        """
        key = hashlib.sha256(content).digest()
        if key not in self._places:
            self._places[key] = self._beginning(content) or self._written(content)
        return self._places[key].offset

    def _beginning(self, content: bytes) -> Place | None:
        """Find a longer weight in the file that begins with these bytes."""
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
    """Make a file for weights; in the context, graphs find their weights there."""
    taken = scratch.taken_bytes
    with (
        feature_folder(scratch.folder) as made,
        weights_in(folder := made.resolve()),  # processes run in it, from any folder
        (folder / WEIGHTS).open("w+b") as file,
    ):
        try:
            yield WeightFile(folder=folder, file=file, scratch=scratch)
        finally:
            scratch.take(taken - scratch.taken_bytes)


def save(proto: onnx.ModelProto, path: Path) -> None:
    """Write a model of any size, with large weights in a file next to it; ``proto`` is kept."""
    with path.with_name(WEIGHTS).open("w+b") as file:
        weights = WeightFile(folder=path.parent, file=file, scratch=ScratchSpace())
        path.write_bytes(weights.light(proto).SerializeToString())


def without_named(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in which weights that are in the file are inputs instead.

    A model without such weights is returned itself. The copy is for tools that cannot or need not
    read the file of weights.
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
    """Copy a model, and load its weights, also of inner graphs, from the file that is in use."""
    model = copied(proto)
    for tensor in (t for graph in all_graphs(model.graph) for t in graph.initializer):
        if tensor.external_data:
            content = named_bytes(tensor)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = content
    return model


def renamed_file(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Copy a model whose weights are in a file, with another name of the file."""
    model = copied(proto)
    for tensor in (t for graph in all_graphs(model.graph) for t in graph.initializer):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    return model


def check_standard(proto: onnx.ModelProto) -> None:
    """Run ONNX's checker on a model; it raises a ValidationError.

    Only type and shape of weights in a file are checked: the checker takes one message of at most 2
    GiB.
    """
    onnx.checker.check_model(without_named(proto))


_Content: TypeAlias = Place | memoryview
"""A weight: its place in the file, or its bytes in a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Sizes of a bundle's large weights: in one file, and as they would be inside every graph."""

    file_bytes: int
    """Size of the file in bytes; 0 if no graph has large weights."""
    graph_bytes: int
    """Total size in bytes that the graphs' large weights would have if each graph contained
    them."""

    @classmethod
    def of(cls, bundle: Bundle) -> WeightSizes:
        """Compute the sizes of a bundle's weights, in the file and in its graphs."""
        size = next((e.size_bytes for e in bundle.manifest.files if e.path == WEIGHTS), 0)
        named = [named_weights(bundle.graph(name), size) for name in bundle.manifest.graphs]
        return cls(file_bytes=size, graph_bytes=sum(p.length for places in named for p in places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeights:
    """Graphs of a bundle whose large weights are in one file, and the content of that file."""

    graphs: Mapping[str, bytes]
    """Graphs by path in the bundle; weights of a page or more are in the file."""
    sizes: WeightSizes
    _layout: Mapping[int, _Content]
    """Weights in the file, by offset, in order."""
    _kept: WeightFile | None

    def pieces(self) -> Iterator[bytes]:
        """Yield the content of the file in pieces."""
        at = 0
        for offset, content in self._layout.items():
            yield bytes(offset - at)
            yield from _read(content, self._kept)
            at = offset + length_of(content)


def pack_weights(graphs: Mapping[str, bytes], kept: WeightFile | None) -> PackedWeights:
    """Lay out one file for the weights of graphs, each weight once.

    Weights are in the ``graphs``, or in the file ``kept``. A weight that is the beginning of a
    longer weight is not stored again. Weights are read in pieces.
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
    """The different weights of some graphs, by the hash of their bytes."""

    def __init__(self, kept: WeightFile | None) -> None:
        self._kept = kept
        self._known = {} if kept is None else kept.hashes
        self.by_key: dict[bytes, _Content] = {}
        self.keys: list[bytes | None] = []
        """Keys of all weights, in the order of graphs; ``None`` for a weight that stays in its
        graph."""
        self.first: list[bytes] = []
        """Keys of weights that are not the beginning of another weight; filled by
        :meth:`lay_out`."""

    def add(self, content: _Content) -> None:
        """Add a weight of a graph."""
        if isinstance(content, memoryview) and len(content) < LEAST_BYTES:
            self.keys.append(None)
            return
        key = (
            self._known[content] if isinstance(content, Place) else hashlib.sha256(content).digest()
        )
        self.by_key.setdefault(key, content)
        self.keys.append(key)

    def lay_out(self) -> dict[bytes, int]:
        """Return the offset of each weight in the file, in the order of first use.

        A weight that is the beginning of another one has the other's offset.
        """
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
        """Return, for each weight that is the beginning of a longer weight, that longer weight."""
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
        """Yield the first ``size`` bytes of a weight, in pieces."""
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
    """Return whether two weights, as pieces of equal lengths, are equal."""
    return all(a == b for a, b in zip(one, other, strict=True))


def _next_page(end: int) -> int:
    return -(-end // PAGE) * PAGE


def _copy_but(source: Message, target: Message, left_out: str) -> None:
    """Copy all fields of a message except ``left_out``, whose value may be large."""
    for descriptor, value in source.ListFields():
        if descriptor.name != left_out:
            _copy_field(descriptor.name, value, target)


def _copy_field(name: str, value: Any, target: Message) -> None:
    # Decide by the value: no property of descriptors states this in all versions of protobuf from 5
    # on.
    if isinstance(value, MutableSequence):
        getattr(target, name).extend(value)
    elif isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)


def _taken_from(tensor: onnx.TensorProto) -> Place:
    """Return the place of a tensor's bytes in the file, and clear the tensor's reference to it."""
    place = named_place(tensor)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    return place
