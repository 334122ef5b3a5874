"""Conversion between tensors of messages and numpy arrays.

Elements have one of two forms. *Raw* contents, which all common clients send, are the array's
memory, little endian and in row-major order, and are viewed without a copy. *Typed* contents are
one protobuf field per datatype, slow but readable, for clients that write JSON by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.proto.messages import ModelInferRequest, ModelInferResponse
from offramp.proto.request_bytes import MAX_NAME_CHARS, PackedFloats

DATATYPES: Final = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "INT8": np.dtype("<i1"),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "UINT8": np.dtype("<u1"),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
        "BYTES": np.dtype(np.object_),
    }
)
"""Dtypes by the protocol's name; little endian, like raw contents. BYTES are ``bytes`` objects."""

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items()}

_REMEDIES: Final = {
    "BF16": "numpy has no bfloat16: send FP32 or FP16, as the model's metadata says",
}


MAX_STRINGS: Final = 4096
"""Largest number of elements of a BYTES tensor, since each becomes an object."""
_LENGTH_BYTES: Final = 4
"""Size, in bytes, of the length that precedes each element of a BYTES tensor."""

MAX_DIMENSIONS: Final = 32
"""Largest number of dimensions of an array before numpy 2.0; later versions allow 64."""

_MOST_ELEMENTS: Final = 2**60 - 1
"""Largest number of elements, at 8 bytes each, whose size is a signed 64-bit number."""

_SLICE: Final = 4096


class TensorError(ValueError):
    """A tensor of a message is malformed, or an array cannot be sent."""


def dtype_of(datatype: str, tensor: str) -> np.dtype[Any]:
    """Return the numpy dtype of a datatype such as ``FP32``; ``tensor`` is for the error.

    Raises:
        TensorError: The protocol or Offramp does not know the datatype.
    """
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        remedy = _REMEDIES.get(datatype, "names are upper case, as in the Open Inference Protocol")
        raise TensorError(
            f"tensor {tensor!r} has datatype {datatype!r}, which is not served; "
            f"served are {', '.join(DATATYPES)} ({remedy})"
        )
    return dtype


def datatype_of(dtype: np.dtype[Any], tensor: str) -> str:
    """Return the protocol's name of a numpy dtype; ``tensor`` is for the error.

    Raises:
        TensorError: The protocol has no name for the dtype.
    """
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        known = ", ".join(known.name for known in _NAMES)
        raise TensorError(
            f"tensor {tensor!r} has numpy dtype {dtype}, which has no name in the protocol; "
            f"convert it with .astype to one of {known}"
        )
    return name


WireTensor: TypeAlias = ModelInferRequest.InferInputTensor | ModelInferResponse.InferOutputTensor

_CONTENTS_FIELDS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode_tensors(
    tensors: Sequence[WireTensor],
    raw_contents: Sequence[bytes | memoryview | None],
    floats: Mapping[int, PackedFloats] = MappingProxyType({}),
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request's or response's tensors.

    Args:
        tensors: Name, datatype, shape and, if ``raw_contents`` is empty, typed contents.
        raw_contents: Empty, or the elements of every tensor, in the same order; ``None`` for a
            tensor with typed contents.
        floats: Typed contents that are not in the message, by the tensor's index.

    Returns:
        Arrays by name, in the same order. Raw contents and floats become read-only views if
        their address is a multiple of the element's size; otherwise they are copied.

    Raises:
        TensorError: A name appears twice, a datatype or shape is invalid, or the number of elements
            differs from the shape's.
    """
    if raw_contents and len(raw_contents) != len(tensors):
        raise TensorError(
            f"there are {len(tensors)} tensors and {len(raw_contents)} raw contents; "
            "send one for every tensor, or none and typed contents everywhere"
        )
    arrays: dict[str, NDArray[Any]] = {}
    for index, tensor in enumerate(tensors):
        name = tensor.name
        if len(name) > MAX_NAME_CHARS:
            raise TensorError(
                f"tensor {index} has a name of {len(name)} characters, expected at most "
                f"{MAX_NAME_CHARS}; send the name that the model's metadata gives"
            )
        if name in arrays:
            raise TensorError(f"tensor {name!r} comes twice; send each name once")
        raw = raw_contents[index] if raw_contents else None
        arrays[name] = _decode(tensor, raw, floats.get(index))
    return arrays


def encode_tensor(tensor: WireTensor, name: str, array: NDArray[Any]) -> bytes:
    """Write name, datatype and shape into ``tensor``.

    Returns:
        The elements, to append to the message's raw contents.

    Raises:
        TensorError: The protocol has no name for the dtype.
    """
    if array.dtype == np.object_:
        return encode_strings(tensor, name, array)
    describe_tensor(tensor, name, array)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def describe_tensor(tensor: WireTensor, name: str, array: NDArray[Any]) -> None:
    """Write name, datatype and shape into ``tensor``; TensorError if the dtype has no name."""
    tensor.name = name
    tensor.datatype = datatype_of(array.dtype, name)
    tensor.shape.extend(array.shape)


def encode_strings(tensor: WireTensor, name: str, array: NDArray[Any]) -> bytes:
    """Write name, datatype BYTES and shape into ``tensor``; return the elements, each ``bytes``.

    The length of each element precedes it (4 bytes, little endian). TensorError for an element of
    another type.
    """
    tensor.name, tensor.datatype = name, "BYTES"
    tensor.shape.extend(array.shape)
    if others := [item for item in array.flat if not isinstance(item, bytes)]:
        raise TensorError(
            f"tensor {name!r} has the element {others[0]!r:.60}, expected bytes in an array of "
            "objects"
        )
    return b"".join(len(item).to_bytes(_LENGTH_BYTES, "little") + item for item in array.flat)


def _decode(
    tensor: WireTensor, raw: bytes | memoryview | None, floats: PackedFloats | None
) -> NDArray[Any]:
    dtype = dtype_of(tensor.datatype, tensor.name)
    shape = _shape(tensor)
    count = math.prod(shape)
    if raw is not None:
        elements = _raw_elements(tensor, raw, dtype, count, typed=floats is not None)
    elif floats is not None:
        elements = _floats(tensor, floats, dtype, count)
    else:
        elements = _typed_elements(tensor, dtype, count)
    return elements.reshape(shape)


def _shape(tensor: WireTensor) -> tuple[int, ...]:
    """Return the shape, checked to be possible for an array."""
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise TensorError(
            f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, expected at most "
            f"{MAX_DIMENSIONS}"
        )
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise TensorError(
            f"tensor {tensor.name!r} has shape {list(shape)}; a tensor that is sent has the sizes "
            "of its array, -1 is for metadata only"
        )
    # numpy multiplies all sizes except 0, even for an array without elements.
    if math.prod(size for size in shape if size) > _MOST_ELEMENTS:
        raise TensorError(
            f"tensor {tensor.name!r} has shape {list(shape)}, which no array can have; "
            "send the sizes of the array"
        )
    return shape


def _raw_elements(
    tensor: WireTensor, raw: bytes | memoryview, dtype: np.dtype[Any], count: int, *, typed: bool
) -> NDArray[Any]:
    if typed or tensor.HasField("contents"):
        raise TensorError(f"tensor {tensor.name!r} has typed and raw contents; send one of them")
    if dtype == np.object_:
        return _raw_strings(tensor, raw, count)
    if len(raw) != count * dtype.itemsize:
        raise TensorError(
            f"tensor {tensor.name!r} has {len(raw)} bytes of raw contents; "
            f"{tensor.datatype} {list(tensor.shape)} takes {count * dtype.itemsize}"
        )
    if dtype == np.bool_:
        return _raw_bools(tensor, raw)
    return _aligned(np.frombuffer(raw, dtype=dtype))


def _raw_strings(tensor: WireTensor, raw: bytes | memoryview, count: int) -> NDArray[np.object_]:
    """Return strings that follow their lengths, exactly as many as the shape requires."""
    _check_strings(tensor, count)
    found, at = np.empty(count, np.object_), 0
    for number in range(count):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw) or start > len(raw):
            raise TensorError(
                f"tensor {tensor.name!r} has {len(raw)} bytes of raw contents, in which element "
                f"{number} does not end; send each string's length, 4 bytes, before it"
            )
        found[number] = bytes(raw[start:at])
    if at < len(raw):
        raise TensorError(
            f"tensor {tensor.name!r} has {len(raw)} bytes of raw contents; its {count} strings, "
            f"with 4 bytes of length each, take {at}"
        )
    return found


def _check_strings(tensor: WireTensor, count: int) -> None:
    if count > MAX_STRINGS:
        raise TensorError(
            f"tensor {tensor.name!r} has {count} strings, expected at most {MAX_STRINGS}"
        )


def _floats(
    tensor: WireTensor, floats: PackedFloats, dtype: np.dtype[Any], count: int
) -> NDArray[Any]:
    _check_field(tensor, [floats.field])
    given, rest = divmod(len(floats.elements), dtype.itemsize)
    if rest:
        raise TensorError(
            f"tensor {tensor.name!r} has {len(floats.elements)} bytes in {floats.field}; "
            f"each element takes {dtype.itemsize}"
        )
    _check_count(tensor, floats.field, given, count)
    return _aligned(np.frombuffer(floats.elements, dtype=dtype))


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array; copy it if its address is not a multiple of the element's size."""
    return array if array.flags.aligned else array.copy()


def _raw_bools(tensor: WireTensor, raw: bytes | memoryview) -> NDArray[np.bool_]:
    """Return the bytes as bool; check for 0 and 1, since numpy would accept other values."""
    elements = np.frombuffer(raw, dtype=np.uint8)
    if elements.max(initial=0) > 1:
        raise TensorError(
            f"tensor {tensor.name!r} is BOOL with a byte of {elements.max()}; "
            "each element is one byte, 0 or 1"
        )
    return elements.view(np.bool_)


def _typed_elements(tensor: WireTensor, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    field = _check_field(tensor, [used.name for used, _ in tensor.contents.ListFields()])
    elements = getattr(tensor.contents, field)
    _check_count(tensor, field, len(elements), count)
    if dtype == np.object_:
        _check_strings(tensor, count)
    wide = np.empty(count, _field_dtype(dtype))
    # Each element becomes an object; slices let other threads run in between.
    for start in range(0, count, _SLICE):
        wide[start : start + _SLICE] = elements[start : start + _SLICE]
    return _narrowed(tensor, wide, dtype)


def _check_field(tensor: WireTensor, used: Sequence[str]) -> str:
    """Return the field for a datatype's typed contents; TensorError if another field is used."""
    field = _CONTENTS_FIELDS.get(tensor.datatype)
    if field is None:
        raise TensorError(
            f"tensor {tensor.name!r} is {tensor.datatype}, for which typed contents have no field; "
            "send raw contents"
        )
    if others := [name for name in used if name != field]:
        raise TensorError(
            f"tensor {tensor.name!r} is {tensor.datatype} with its elements in {others[0]}; "
            f"they belong in {field}"
        )
    return field


def _check_count(tensor: WireTensor, field: str, given: int, expected: int) -> None:
    if given != expected:
        raise TensorError(
            f"tensor {tensor.name!r} has {given} elements in {field}; "
            f"shape {list(tensor.shape)} takes {expected}"
        )


def _field_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a field: INT8 to INT32 share int32, UINT8 to UINT32 share uint32."""
    narrow = {"i": np.dtype("<i4"), "u": np.dtype("<u4")}
    return narrow.get(dtype.kind, dtype) if dtype.itemsize < 4 else dtype


def _narrowed(tensor: WireTensor, wide: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == wide.dtype:
        return wide
    narrow = wide.astype(dtype)
    wrong = np.flatnonzero(narrow != wide)
    if wrong.size:
        raise TensorError(
            f"tensor {tensor.name!r} has the element {wide[wrong[0]]}, "
            f"which is outside of {tensor.datatype}"
        )
    return narrow
