"""Values of programs and tables as arrays of the dtypes of inputs, where nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.errors import DataError

_NUMBERS = "biuf"


def as_array(value: Any, where: str) -> NDArray[Any]:
    """Return a value as an array: one of numpy's, a tensor of another library, or a list.

    Tensors of torch are recognised by their methods; torch is not imported. DataError for what is
    no array of numbers or texts.
    """
    for method in ("detach", "cpu"):  # tensors that need a gradient, or are on a GPU
        if not isinstance(value, np.ndarray) and hasattr(value, method):
            value = getattr(value, method)()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a bfloat16 tensor, a ragged list
        reason = " ".join(str(error).split())
        raise DataError(
            f"{where}: a value of type {type(value).__name__} is no array ({reason:.150}); give "
            "numpy arrays, or tensors that numpy can read"
        ) from error
    if array.dtype.kind not in _NUMBERS + "SU":
        raise DataError(
            f"{where}: a value of type {type(value).__name__} is an array of dtype {array.dtype}, "
            "expected numbers"
        )
    return array


def fit(
    array: NDArray[Any], spec: TensorSpec, place: Callable[[int], str], *, numbers: bool = False
) -> NDArray[Any]:
    """Return an array in the dtype of an input, where that loses nothing but digits.

    Integers become integers of another width, booleans integers, and floats other floats. With
    ``numbers``, integers become floats too, and floats integers: in a table they are just numbers,
    elsewhere they may be pixels that nobody has scaled. What is not converted is returned as it is,
    and refused where names, dtypes and shapes are checked. DataError where a value is out of range;
    ``place`` names its row.
    """
    wanted = np.dtype(spec.dtype)
    if array.dtype == wanted or not array.size:
        return array.astype(wanted) if array.dtype.kind in _NUMBERS else array
    found, kind = array.dtype.kind, wanted.kind
    if kind == "f" and found in ("fbiu" if numbers else "f"):
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        same = np.isfinite(converted) | ~np.isfinite(array)
    elif kind in "biu" and found in ("fbiu" if numbers else "biu"):
        with np.errstate(invalid="ignore"):
            converted = array.astype(wanted)
            same = converted.astype(array.dtype) == array
        same &= (converted < 0) == (array < 0)  # a change of sign goes back to the same bits
    else:
        return array
    if not same.all():
        row, *rest = (int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
        raise DataError(
            f"{place(row)}: {spec.name!r} has the value {array[row, *rest]}, which {wanted} cannot "
            f"hold; expected {spec.describe()}"
        )
    return converted
