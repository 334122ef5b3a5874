"""Cached parts of repeated runs: layouts of batches, orders, and parsed replies.

Between two stages a router has a few dozen µs, with cold CPU caches. So results are looked up by
their inputs: an order by the layout of the batch, and a parsed reply by its order and its header. A
parsed reply contains the layout of the next stage's batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.transport import SharedMemory
from offramp.cluster.remote.worker_messages import (
    DTYPES,
    FrameError,
    PlacedArray,
    RunStage,
    TensorForm,
    aligned,
    encode,
)
from offramp.engine.common.errors import BackendError

MOST_KEPT: Final = 1024
"""Largest number of cached objects of one kind; if a cache exceeds it, the whole cache is emptied.
"""
_DTYPES: Final = frozenset(DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormSet:
    """Forms (:class:`.TensorForm`) of a batch's tensors.

    Equal sets of forms are one object, so that they can be compared by identity.
    """

    forms: tuple[TensorForm, ...]
    offsets: tuple[int, ...]
    """Offset of each tensor in a memory block that has all tensors of the set."""
    part_bytes: int
    """Size of a memory block that has all tensors of the set, in bytes."""
    size_bytes: int
    """Bytes of the elements of all tensors, without padding."""


def forms_of(tensors: Mapping[str, NDArray[Any]]) -> FormSet:
    """Return the form of each array: name, dtype, shape; BackendError if a dtype cannot be sent."""
    return form_set(tuple([(name, a.dtype, a.shape) for name, a in tensors.items()]))


@lru_cache(maxsize=MOST_KEPT)
def form_set(given: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> FormSet:
    """Return the only :class:`FormSet` of these forms; BackendError if a dtype cannot be sent."""
    forms = tuple([TensorForm(*form) for form in given])
    offsets, end = [], 0
    for form in forms:
        if form.dtype not in _DTYPES:
            raise BackendError(
                f"tensor {form.name!r} of dtype {form.dtype} cannot be sent to a worker; serve "
                "without workers"
            )
        offsets.append(end)
        end += aligned(form.size_bytes)
    size_bytes = sum([form.size_bytes for form in forms])
    return FormSet(forms=forms, offsets=tuple(offsets), part_bytes=end, size_bytes=size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorLayout:
    """Tensors of given forms at given offsets; equal layouts of a slot are one object."""

    forms: FormSet
    places: Mapping[str, int]
    memory: SharedMemory | None
    """Memory of the offsets; ``None`` if all tensors are sent inline."""
    tensors: Mapping[str, NDArray[Any]]
    """Views of the tensors in that memory."""
    orders: dict[tuple[int, int, float | None, int, int], Order] = field(default_factory=dict)

    def order(
        self, stage: int, rows: int, threshold: float | None, region: tuple[int, int]
    ) -> Order:
        """Return the order to run a stage on these tensors.

        ``region`` is the offset and the size of the memory for results.
        """
        key = (stage, rows, threshold, *region)
        order = self.orders.get(key)
        if order is None:
            placed = [PlacedArray(form, self.places[form.name]) for form in self.forms.forms]
            header = encode(RunStage(stage, rows, threshold, region, tuple(placed)))
            order = Order(header=header, begins=region[0], ends=sum(region))
            keep(self.orders, key, order)
        return order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """An order to run a stage, and the replies to it so far."""

    header: bytes
    begins: int
    """Offsets between which results must be in shared memory."""
    ends: int
    replies: dict[bytes, RunReply] = field(default_factory=dict)
    """Replies that were parsed before, by their header."""

    def check(self, arrays: Sequence[PlacedArray]) -> None:
        """Check that results are within the bounds of the order; FrameError if not."""
        for form, place in arrays:
            end = place + form.size_bytes
            if place >= 0 and not self.begins <= place <= end <= self.ends:
                raise FrameError(
                    f"it wrote {form.name!r:.60} from {place} to {end}, expected between "
                    f"{self.begins} and {self.ends}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyArray:
    """A result that a worker returned, in shared memory or in the body of its reply."""

    form: TensorForm
    offset: int
    """Offset of the array in the body of the reply; −1 if the array is not inline."""
    view: NDArray[Any] | None
    """View of shared memory; ``None`` if inline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReply:
    """A worker's parsed reply to a run, with values that are valid for the order of that run."""

    answer: ReplyArray | None
    confidence: ReplyArray
    carried: tuple[ReplyArray, ...] | None
    """Arrays that are passed to the next stage (carried); ``None`` after the last stage."""
    layout: TensorLayout | None
    """Layout of the arrays in ``carried``, if all are in shared memory."""
    passed: bool
    """``True`` if some carried arrays are unchanged inputs of the run."""
    row_bytes: float
    """Bytes of one row of all results in shared memory."""
    body_bytes: int


def keep(kept: dict[Any, Any], key: object, value: object) -> None:
    """Store an object in a cache; a full cache is emptied first."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value
