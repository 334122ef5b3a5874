"""JSON requests, with tensors in the JSON or in bytes after it, as the messages that gRPC uses.

A body is a JSON object (KServe's v2 protocol). With the header ``Inference-Header-Content-Length``,
the object has that many bytes. It is followed by the elements of the inputs with the parameter
``binary_data_size``, in their order (Triton's extension "binary tensor data").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.engine.common.errors import BadInputError
from offramp.proto.messages import InferParameter, ModelInferRequest
from offramp.proto.request_bytes import (
    MAX_FIELDS,
    MAX_NAME_CHARS,
    QUICK_BYTES,
    InferMessage,
)
from offramp.proto.tensors import TensorError, dtype_of
from offramp.server.common.errors import RequestLimitError, UndecodableError
from offramp.server.requests.shared_memory import REGION

MAX_JSON_BYTES: Final = 32 * 1024 * 1024
"""Largest size of the JSON in a request, in bytes; the decoded objects may take twenty times as
much memory."""

_BINARY_SIZE, _BINARY, _BINARY_OUTPUTS = "binary_data_size", "binary_data", "binary_data_output"

_MOST_INT64: Final = 2**63 - 1


class JsonRequest:
    """An inference request decoded from JSON."""

    def __init__(self, body: memoryview, header_bytes: int, model: str, version: str) -> None:
        """Decode a body that begins with ``header_bytes`` of JSON.

        Raises:
            UndecodableError: The body is not JSON of the right form.
            BadInputError: A tensor or a parameter is wrong.
            RequestLimitError: The body exceeds the limit of JSON bytes or of tensors.
        """
        if header_bytes > MAX_JSON_BYTES:
            raise RequestLimitError(
                f"the request has {header_bytes} bytes of JSON, expected at most "
                f"{MAX_JSON_BYTES}; send tensors as binary data "
                "(header Inference-Header-Content-Length)"
            )
        document = decode_object(bytes(body[:header_bytes]))
        self.binary_outputs: dict[str, bool] = {}
        """Whether elements are requested as binary data, by output."""
        parameters = dict(_object(document, "parameters"))
        self.binary_default = bool(parameters.pop(_BINARY_OUTPUTS, False))
        """Whether elements of outputs that the request does not name are requested as binary
        data."""
        head = ModelInferRequest(
            model_name=model, model_version=version, id=str(document.get("id", ""))
        )
        _check_name(model)
        _write_parameters(head.parameters, parameters)
        self._rest = body[header_bytes:]
        inputs = _list(document, "inputs")
        outputs = _list(document, "outputs")
        if len(inputs) + len(outputs) > MAX_FIELDS:
            raise RequestLimitError(
                f"the request has {len(inputs) + len(outputs)} inputs and outputs, expected at "
                f"most {MAX_FIELDS}"
            )
        raw = [each for spec in inputs if (each := self._add_input(head, spec)) is not None]
        for spec in outputs:
            self._add_output(head, spec)
        if len(self._rest):
            raise BadInputError(
                f"the body has {len(self._rest)} bytes more than the {_BINARY_SIZE} of its inputs "
                "add up to"
            )
        slow = sum(map(len, raw)) > QUICK_BYTES
        self.message: Final = InferMessage(head=head, raw_contents=raw, slow=slow)

    def wants_binary(self, output: str) -> bool:
        """Return whether an output's elements are requested as binary data."""
        return self.binary_outputs.get(output, self.binary_default)

    def _add_input(
        self, head: ModelInferRequest, spec: Mapping[str, Any]
    ) -> bytes | memoryview | None:
        """Add an input and return its elements; ``None`` if they are in shared memory."""
        name = _text(spec, "name", "an input")
        what = f"input {name!r}"
        shape = spec.get("shape")
        if not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise BadInputError(f"{what} has shape {shape!r:.80}, expected a list of sizes")
        tensor = head.inputs.add(name=name, datatype=_text(spec, "datatype", what), shape=shape)
        parameters = dict(_object(spec, "parameters", what))
        size = parameters.pop(_BINARY_SIZE, None)
        _write_parameters(tensor.parameters, parameters)
        if size is not None:
            return self._binary(what, size)
        if REGION in parameters:
            return None
        if "data" not in spec:
            raise BadInputError(f"{what} has no data; expected 'data', or {_BINARY_SIZE}")
        return _elements(what, tensor.datatype, shape, spec["data"])

    def _binary(self, what: str, size: object) -> memoryview:
        if not _is_size(size) or size > len(self._rest):  # type: ignore[operator]
            raise BadInputError(
                f"{what} has {_BINARY_SIZE} {size!r:.80}, and {len(self._rest)} bytes are left of "
                "the body after its JSON"
            )
        assert isinstance(size, int)
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def _add_output(self, head: ModelInferRequest, spec: Mapping[str, Any]) -> None:
        name = _text(spec, "name", "an output")
        output = head.outputs.add(name=name)
        parameters = dict(_object(spec, "parameters", f"output {name!r}"))
        binary = parameters.pop(_BINARY, None)
        if binary is not None:
            self.binary_outputs[name] = bool(binary)
        _write_parameters(output.parameters, parameters)


def decode_object(text: bytes) -> dict[str, Any]:
    """Decode a JSON object; an empty text is an empty object.

    Raises:
        UndecodableError: The text is not a JSON object.
    """
    try:
        document = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UndecodableError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UndecodableError(f"the body is {_kind(document)}, expected a JSON object")
    return document


def _elements(what: str, datatype: str, shape: Sequence[int], data: object) -> bytes:
    """Return the elements of a nested or flat list in the message's encoding."""
    try:
        dtype = dtype_of(datatype, what)
    except TensorError as error:
        raise BadInputError(str(error)) from None
    if not isinstance(data, list):
        raise BadInputError(f"{what} has data {data!r:.80}, expected a list of elements")
    if datatype == "BYTES":
        return _strings(what, shape, data)
    array = _array(what, data)
    if array.size != math.prod(shape):
        raise BadInputError(
            f"{what} has {array.size} elements, and shape {list(shape)} takes {math.prod(shape)}"
        )
    return _converted(what, datatype, dtype, array).tobytes()


def _strings(what: str, shape: Sequence[int], data: list[Any]) -> bytes:
    """Return strings from a flat list in the message's encoding."""
    if not all(isinstance(value, str) for value in data):
        raise BadInputError(f"{what} is BYTES, expected a flat list of strings")
    if len(data) != math.prod(shape):
        raise BadInputError(
            f"{what} has {len(data)} elements, and shape {list(shape)} takes {math.prod(shape)}"
        )
    encoded = [value.encode(errors="replace") for value in data]
    return b"".join(len(each).to_bytes(4, "little") + each for each in encoded)


def _array(what: str, data: list[Any]) -> NDArray[Any]:
    try:
        array = np.asarray(data)
        if array.dtype.kind in "fO":  # may be integers beyond int64
            exact: NDArray[Any] = np.asarray(data, dtype=np.object_)
            array = exact if all(type(value) is int for value in exact.flat) else array
    except (ValueError, OverflowError):
        raise BadInputError(
            f"{what} has lists of different lengths; nest as its shape does, or send a flat list"
        ) from None
    return array


def _converted(what: str, datatype: str, dtype: np.dtype[Any], array: NDArray[Any]) -> NDArray[Any]:
    """Convert an array to a dtype; refuse any change of an element other than rounding."""
    allowed = {"b": "b", "i": "iuO", "u": "iuO", "f": "iufO"}[dtype.kind]
    wrong = array.dtype.kind == "O" and not all(type(value) is int for value in array.flat)
    if array.size and (wrong or array.dtype.kind not in allowed):
        first = array.flat[:1].tolist()[0]  # of Python, which prints without numpy's type
        raise BadInputError(f"{what} is {datatype}, and has elements such as {first!r:.60}")
    try:
        with np.errstate(all="ignore"):
            converted = array.astype(dtype)
            changed = converted != array
            if dtype.kind == "f":
                changed = np.isinf(converted) & np.isfinite(array.astype(np.float64))
    except (OverflowError, TypeError, ValueError):
        raise BadInputError(f"{what} has an element that is not a {datatype}") from None
    found = np.flatnonzero(changed)
    if found.size:
        raise BadInputError(f"{what} has the element {array.flat[found[0]]}, beyond {datatype}")
    return converted


def _write_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        target[name].CopyFrom(_parameter(name, value))


def _parameter(name: str, value: object) -> InferParameter:
    if isinstance(value, bool):
        return InferParameter(bool_param=value)
    if isinstance(value, int) and -_MOST_INT64 <= value <= _MOST_INT64:
        return InferParameter(int64_param=value)
    if isinstance(value, float):
        return InferParameter(double_param=value)
    if isinstance(value, str):
        return InferParameter(string_param=value)
    raise BadInputError(
        f"parameter {name!r:.80} is {_kind(value)}, expected a boolean, a number or a string"
    )


def _object(document: Mapping[str, Any], key: str, what: str = "the body") -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise UndecodableError(f"{what} has {key} that are {_kind(value)}, expected an object")
    return value


def _list(document: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UndecodableError(f"the body has {key} that are not a list of objects")
    return value


def _text(spec: Mapping[str, Any], key: str, what: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str):
        raise UndecodableError(f"{what} has {key} {value!r:.80}, expected a string")
    _check_name(value)
    return value


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        raise RequestLimitError(
            f"a name has {len(name)} characters, expected at most {MAX_NAME_CHARS}"
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_INT64


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
