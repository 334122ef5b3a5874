"""JSON responses of the protocol, with tensors in the JSON or in bytes after it.

Values that are not finite are written as ``NaN``, ``Infinity`` and ``-Infinity``, as in Python's
and Triton's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import Message

from offramp.proto.messages import InferParameter, ModelInferResponse
from offramp.proto.tensors import dtype_of

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""HTTP header with the bytes of JSON in a body that binary data follow."""

_LENGTH_BYTES: Final = 4


class JsonBody(NamedTuple):
    """The body of a response: JSON, then binary data if the client wants them."""

    data: bytes
    header_bytes: int | None
    """Bytes of JSON; ``None`` if no binary data follow."""


def write_inference(response: ModelInferResponse, wants_binary: Callable[[str], bool]) -> JsonBody:
    """Return the body of a response to an inference request."""
    document: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = _parameters(response.parameters)
    outputs, binary = [], []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if "shared_memory_region" in tensor.parameters:
            pass  # as in Triton, whose C++ client reads parameters as those of binary data
        elif wants_binary(tensor.name):
            output["parameters"] = {"binary_data_size": len(raw)}
            binary.append(raw)
        else:
            output["data"] = _elements(tensor.datatype, tensor.name, raw)
        outputs.append(output)
    document["outputs"] = outputs
    header = json.dumps(document, separators=(",", ":")).encode()
    if not binary:
        return JsonBody(header, None)
    return JsonBody(b"".join((header, *binary)), len(header))


def _elements(datatype: str, name: str, raw: bytes) -> list[Any]:
    """Return the elements of a tensor as one flat list."""
    if datatype != "BYTES":
        elements: list[Any] = np.frombuffer(raw, dtype_of(datatype, name)).tolist()
        return elements
    found, position = [], 0
    while position < len(raw):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(raw[position:start], "little")
        found.append(raw[start:position].decode(errors="replace"))
    return found


def _parameters(parameters: Any) -> dict[str, Any]:
    return {name: _value(parameters[name]) for name in parameters}


def _value(parameter: InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def to_document(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object: all fields by name, numbers as numbers.

    Unset messages, and fields of a oneof that are not chosen, are left out.
    """
    return {
        field.name: _plain(getattr(message, field.name), field.enum_type)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(value: Any, enum: Any) -> Any:
    if isinstance(value, Message):
        return to_document(value)
    if isinstance(value, Mapping):
        return {key: _plain(value[key], enum) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each, enum) for each in value]
    return value if enum is None else enum.values_by_number[value].name
