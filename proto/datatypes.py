"""The protocol's names of element types, and numpy's."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import numpy as np

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
    }
)
"""By the protocol's name; little endian, as raw contents are."""

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items()}

_REMEDIES: Final = {
    "BYTES": "strings are not served: send the numbers that the model reads, such as token ids",
    "BF16": "numpy has no bfloat16: send FP32 or FP16, as the model's metadata says",
}


class TensorError(ValueError):
    """A tensor on the wire is not well-formed, or cannot be put on the wire."""


def dtype_of(datatype: str, tensor: str) -> np.dtype[Any]:
    """The numpy dtype of a datatype such as ``FP32``; ``tensor`` is named in the error.

    Raises:
        TensorError: The protocol or Offramp does not know it.
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
    """The protocol's name of a numpy dtype; ``tensor`` is named in the error.

    Raises:
        TensorError: The protocol has no name for it.
    """
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        known = ", ".join(known.name for known in _NAMES)
        raise TensorError(
            f"tensor {tensor!r} has numpy dtype {dtype}, which has no name in the protocol; "
            f"convert it with .astype to one of {known}"
        )
    return name
