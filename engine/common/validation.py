"""Checks of requests and data sets against a model's inputs, with the same messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec

_LEAST_PRIORITY, _MOST_PRIORITY = -(2**31), 2**31 - 1
_IMAGE_DIMENSIONS = 4
"""Batch, channels, height and width."""


def check_request(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, NDArray[Any]],
    *,
    deadline_s: float | None,
    priority: int,
    max_samples: int,
    unread: Collection[str] = (),
) -> str | None:
    """Return the error of a request; ``None`` if it is valid.

    ``specs`` are the model's inputs, ``unread`` the names of inputs that no node reads; the
    deadline is absolute; the queue holds ``max_samples``.
    """
    if wrong := check_tensors(specs, tensors, unread=unread):
        return wrong
    if not _LEAST_PRIORITY <= priority <= _MOST_PRIORITY:
        return f"priority {priority} is not a 32-bit number"
    if deadline_s is not None and math.isnan(deadline_s):
        return "the deadline is not a number"
    count = next(len(tensors[spec.name]) for spec in specs if spec.name not in unread)
    if count > max_samples:
        return (
            f"{count} samples are more than the queue holds ({max_samples}); "
            "send them in several requests"
        )
    return None


def check_tensors(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, NDArray[Any]],
    *,
    unread: Collection[str] = (),
    batched: bool = False,
) -> str | None:
    """Return the error of ``tensors``; ``None`` if they are valid.

    Names, dtypes and fixed sizes must be equal; a symbolic size must be the same for all uses of
    its symbol. There must be at least one sample. Inputs that no node reads (``unread``, by name)
    may be omitted. ``batched``: the tensors are a data set, so that none is a single sample
    without its batch dimension.
    """
    if wrong := _check_names(specs, tensors, unread):
        return wrong
    bound: dict[str, tuple[int, str]] = {}
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is not None and (wrong := _check_tensor(spec, tensor, bound, batched=batched)):
            return wrong
    return None


def _check_names(
    specs: Sequence[TensorSpec], tensors: Mapping[str, NDArray[Any]], unread: Collection[str]
) -> str | None:
    if len(tensors) == len(specs) and all(spec.name in tensors for spec in specs):
        return None
    names = {spec.name for spec in specs}
    expected = "; ".join(spec.describe() for spec in specs)
    for name in tensors:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            return f"there is no input {name!r}{hint}; expected {expected}"
    missing = min(names - set(tensors) - set(unread), default=None)
    return None if missing is None else f"input {missing!r} is missing; expected {expected}"


def _check_tensor(
    spec: TensorSpec, tensor: NDArray[Any], bound: dict[str, tuple[int, str]], *, batched: bool
) -> str | None:
    if tensor.dtype != np.dtype(spec.dtype):
        return f"{_differs(spec, tensor)}; {_conversion(spec, tensor)}"
    if tensor.ndim != len(spec.shape):
        return f"{_differs(spec, tensor)}{_missing_dimension(spec, tensor, bound, batched=batched)}"
    for axis, (size, wanted) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                return (
                    f"{_found(spec, tensor)}: size {size} of dimension {axis} is not {wanted}; "
                    f"expected {spec.describe()}{_layout_hint(spec, tensor)}"
                )
            continue
        if size < 1:
            return f"{_found(spec, tensor)}: dimension {axis} ({wanted}) is empty"
        known, owner = bound.setdefault(wanted, (size, spec.name))
        if known != size:
            return (
                f"{wanted} is {known} in input {owner!r}, but {size} in {spec.name!r}; "
                "it must be the same"
            )
    return None


def _missing_dimension(
    spec: TensorSpec, tensor: NDArray[Any], bound: Mapping[str, tuple[int, str]], *, batched: bool
) -> str:
    """Return the remedy where the shape fits with one more dimension of size 1; else no text."""
    if tensor.ndim != len(spec.shape) - 1:
        return ""
    for axis, wanted in enumerate(spec.shape):
        if wanted != 1 and (axis or batched):
            continue
        added = np.expand_dims(tensor, axis)
        if _check_tensor(spec, added, dict(bound), batched=batched) is not None:
            continue
        how = f"array[{':, ' * axis}None]"
        if not axis:
            return f"; for a single sample add the batch dimension with {how}"
        image = len(spec.shape) == _IMAGE_DIMENSIONS and axis in (1, _IMAGE_DIMENSIONS - 1)
        what = "the channel" if image else f"dimension {axis}"
        return f"; add {what} with {how}"
    return ""


def _conversion(spec: TensorSpec, tensor: NDArray[Any]) -> str:
    """Return the remedy for another dtype."""
    if spec.dtype == "object":
        return "send texts, encoded in UTF-8"
    if tensor.dtype == np.object_:
        return "send numbers"
    scaled = ""
    if tensor.dtype.kind in "iu" and np.dtype(spec.dtype).kind == "f":
        scaled = ", and scale its values as in training"
    return f"convert it with .astype({spec.dtype!r}){scaled}"


def _layout_hint(spec: TensorSpec, tensor: NDArray[Any]) -> str:
    """Return the remedy where the channels of images are last and the model wants them first."""
    if tensor.ndim != _IMAGE_DIMENSIONS or not all(
        not isinstance(wanted, int) or size == wanted
        for size, wanted in zip(np.array(tensor.shape)[[0, 3, 1, 2]], spec.shape, strict=True)
    ):
        return ""
    return (
        "; it looks like [batch, height, width, channels]: put the channels first with "
        ".transpose(0, 3, 1, 2)"
    )


def _differs(spec: TensorSpec, tensor: NDArray[Any]) -> str:
    return f"{_found(spec, tensor)}, expected {spec.describe()}"


def _found(spec: TensorSpec, tensor: NDArray[Any]) -> str:
    dtype = "bytes" if tensor.dtype == np.object_ else tensor.dtype
    return f"input {spec.name!r} is {dtype} {list(tensor.shape)}"
