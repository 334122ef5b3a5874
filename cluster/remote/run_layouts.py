"""What is the same from run to run, made once: layouts of batches, orders, and what replies say.

Between two stages a router has a few dozen µs, and its caches are cold. So what a run needs is
looked up by what it is given: from the layout of its batch to the order, from the order and the
reply's header to what the reply says, which ends with the layout that the next stage is given.
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
"""Most that is kept of a kind; where there is more, all of it is made anew."""
_DTYPES: Final = frozenset(DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormSet:
    """The forms of a batch's tensors; there is one of the same forms, so it equals itself only."""

    forms: tuple[TensorForm, ...]
    offsets: tuple[int, ...]
    """Where each begins in a part of memory that holds all of them."""
    part_bytes: int
    """Size of that part."""
    size_bytes: int
    """Of all elements."""


def forms_of(tensors: Mapping[str, NDArray[Any]]) -> FormSet:
    """Give the forms of arrays; BackendError for a dtype that does not travel."""
    return form_set(tuple([(name, a.dtype, a.shape) for name, a in tensors.items()]))


@lru_cache(maxsize=MOST_KEPT)
def form_set(given: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> FormSet:
    """Give the set of these forms; BackendError for a dtype that does not travel."""
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
    """Tensors of some forms at some places; of a slot there is one of the same."""

    forms: FormSet
    places: Mapping[str, int]
    memory: SharedMemory | None
    """Where the places are; ``None`` if all tensors travel inline."""
    tensors: Mapping[str, NDArray[Any]]
    """Views of that memory."""
    orders: dict[tuple[int, int, float | None, int, int], Order] = field(default_factory=dict)

    def order(
        self, stage: int, rows: int, threshold: float | None, region: tuple[int, int]
    ) -> Order:
        """Give the order to run a stage on it; ``region``: offset and size, for results."""
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
    """Where results may be in shared memory."""
    ends: int
    replies: dict[bytes, RunReply] = field(default_factory=dict)
    """By their headers."""

    def check(self, arrays: Sequence[PlacedArray]) -> None:
        """See that results are where they may be; FrameError."""
        for form, place in arrays:
            end = place + form.size_bytes
            if place >= 0 and not self.begins <= place <= end <= self.ends:
                raise FrameError(
                    f"it wrote {form.name!r:.60} from {place} to {end}, expected within "
                    f"{self.begins} and {self.ends}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyArray:
    """An array that a reply tells of."""

    form: TensorForm
    offset: int
    """In the body; −1 if it is not inline."""
    view: NDArray[Any] | None
    """Of shared memory, where it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReply:
    """What a worker says of a run, taken apart; all of it may be said of that run."""

    answer: ReplyArray | None
    confidence: ReplyArray
    carried: tuple[ReplyArray, ...] | None
    """``None`` after the last stage."""
    layout: TensorLayout | None
    """Of what is carried, if all of it is in shared memory."""
    passed: bool
    """Whether some of it is where the run was given it."""
    row_bytes: float
    """What a row of all that it gave would take in shared memory."""
    body_bytes: int


def keep(kept: dict[Any, Any], key: object, value: object) -> None:
    """Keep what was made, of a bounded number."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value
