"""A campaign against the reader of graphs: what it lets through names weights in one file only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import helper

from offramp.bundle.graph_weights import PAGE, WEIGHTS, filled_parts, moved, named_weights
from offramp.bundle.onnx_wire import Place
from offramp.proto.wire_format import WireError
from tests import models
from tests.fuzz.campaign import WrongError
from tests.fuzz.files import one_line
from tests.fuzz.mutators import havoc, protobuf

SIZE: Final = 8 * PAGE
"""Bytes of the file of weights."""
_OTHERS: Final = (
    *("", "0", "1", "-1", "4095", "4096", "8192", "32768", str(2**31), str(2**63), str(2**64), "x"),
    *(
        "weights.bin",
        "./weights.bin",
        "../weights.bin",
        "/etc/passwd",
        "weights.bin\0",
        "WEIGHTS.BIN",
    ),
)
_KEYS: Final = ("location", "offset", "length", "checksum", "", "Location")


class Weights:
    """Graphs as bundles read them (:mod:`offramp.bundle.graph_weights`), against onnx's own."""

    def seeds(self) -> Sequence[bytes]:
        made = (models.mlp(layers=2, width=4), models.residual_cnn(blocks=2), models.conditional())
        return [bytes(named(model).SerializeToString()) for model in made]

    def mutate(self, case: bytes, random: Random) -> bytes:
        chosen = random.random()
        if chosen < 0.3:
            return protobuf(case, random)
        if chosen < 0.4:
            return havoc(case, random)
        try:
            model = onnx.ModelProto.FromString(case)
            for _ in range(random.choice((1, 1, 2, 4))):
                _change(model, random)
            return bytes(model.SerializeToString())
        except (DecodeError, ValueError):
            return havoc(case, random)

    def check(self, case: bytes) -> str:
        try:
            places = named_weights(case, SIZE)
            parts = filled_parts(case, SIZE)
        except WireError as error:
            return one_line(error)
        try:
            model = onnx.ModelProto.FromString(case)
        except DecodeError:
            return "no model"  # which no runtime loads
        named_there = [t for t in model.graph.initializer if _is_external(t)]
        if len(named_there) != len(places):
            raise WrongError(f"{len(places)} weights were found, {len(named_there)} are named")
        if sum(map(_is_external, _tensors(model))) != len(places):
            raise WrongError("a tensor that is no initializer is named")
        for tensor, place in zip(named_there, places, strict=True):
            _check_named(tensor, place)
        self._check_filled(model, parts)
        again = moved(case, SIZE, lambda weight: 0 if isinstance(weight, Place) else None)
        if [p.length for p in named_weights(again, SIZE)] != [p.length for p in places]:
            raise WrongError("weights that were moved are others")
        return f"{min(len(places), 3)} named"

    def _check_filled(
        self, model: onnx.ModelProto, parts: Sequence[memoryview | Place] | None
    ) -> None:
        """The graph with its weights is the same, with bytes in place of names."""
        if parts is None:
            return
        content = b"".join(bytes(p.length) if isinstance(p, Place) else p for p in parts)
        filled = onnx.ModelProto.FromString(content)
        if any(map(_is_external, _tensors(filled))):
            raise WrongError("a graph with its weights names some")
        for tensor in model.graph.initializer:
            if _is_external(tensor):
                told = {entry.key: entry.value for entry in tensor.external_data}
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
                tensor.raw_data = bytes(int(told["length"]))
        if model != filled:
            raise WrongError("a graph with its weights is another graph")

    def close(self) -> None:
        """Do nothing: there are no resources."""


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make a model refer to its larger initializers by name."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= 32:
            _name(tensor, 0)
    return model


def _name(tensor: onnx.TensorProto, offset: int) -> None:
    told = {"location": WEIGHTS, "offset": offset, "length": len(tensor.raw_data)}
    tensor.ClearField("raw_data")
    for key, value in told.items():
        tensor.external_data.add(key=key, value=str(value))
    tensor.data_location = onnx.TensorProto.EXTERNAL


def _change(model: onnx.ModelProto, random: Random) -> None:
    tensor = random.choice([*_tensors(model), model.graph.initializer.add()])
    entries = tensor.external_data
    kind = random.randrange(9)
    if kind == 0 and entries:
        random.choice(entries).value = random.choice(_OTHERS)
    elif kind == 1 and entries:
        random.choice(entries).key = random.choice(_KEYS)
    elif kind == 2 and entries:
        del entries[random.randrange(len(entries))]
    elif kind == 3:
        entries.add(key=random.choice(_KEYS), value=random.choice(_OTHERS))
    elif kind == 4:
        tensor.data_location = random.choice((0, 1))
    elif kind == 5:
        tensor.data_type = random.choice((0, 1, 2, 7, 8, 10, 16, 22, 23))
    elif kind == 6:
        tensor.dims[:] = random.choice(([], [0], [-1], [2**40, 2**40], [1], [*tensor.dims, 2]))
    elif kind == 7:
        _name(tensor, random.choice((0, PAGE, SIZE - PAGE, SIZE)))
    else:
        node = model.graph.node.add(op_type="Constant", output=["fuzz"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=tensor)


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """All tensors of a message, found by its descriptors: by no list of fields of ours."""
    if isinstance(message, onnx.TensorProto):
        yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        inner: Any = value if descriptor.is_repeated else [value]
        for one in inner:
            yield from _tensors(one)


def _is_external(tensor: onnx.TensorProto) -> bool:
    """Return True if a reader may look for the tensor elsewhere."""
    return bool(tensor.external_data) or tensor.data_location == onnx.TensorProto.EXTERNAL


def _check_named(tensor: onnx.TensorProto, place: Place) -> None:
    told = {entry.key: entry.value for entry in tensor.external_data}
    if told["location"] != WEIGHTS or len(tensor.external_data) != 3:
        raise WrongError(f"it is in {told}")
    if (int(told["offset"]), int(told["length"])) != place or place.offset % PAGE:
        raise WrongError(f"it is at {told}, {place} was found")
    if place.offset < 0 or place.length < 0 or place.offset + place.length > SIZE:
        raise WrongError(f"{place} is outside of {SIZE} bytes")
    size = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    for dim in tensor.dims:
        size *= dim
    if size != place.length or tensor.raw_data:
        raise WrongError(f"{place} is of a tensor of {size} bytes")
