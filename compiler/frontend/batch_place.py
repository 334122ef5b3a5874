"""Where a tensor has its batch, and where a reshape puts it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from offramp.compiler.graphs.shape_trace import Shape


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where a tensor has its batch: an axis, and how much of that axis is slower than the batch."""

    axis: int
    slower: int = 1
    """In ``[tokens * batch, width]`` the tokens; 1 in ``[batch * heads, tokens, width]``."""


def scaled(shape: Shape, axis: int, old: int, rows: int) -> Shape:
    """Give a shape of ``old`` rows as it is of ``rows``."""
    return (*shape[:axis], shape[axis] // old * rows, *shape[axis + 1 :])


def moved(place: BatchPlace, before: Shape, after: Shape, batch: int) -> BatchPlace | None:
    """Find where a reshape, which keeps the order of elements, puts the batch.

    ``before`` and ``after`` are shapes at ``batch`` rows. The batch goes where as much is slower
    than it as before; alone in front of its axis if it can be.
    """
    slower = prod(before[: place.axis]) * place.slower
    outer = [prod(after[:axis]) for axis in range(len(after))]
    alone = [i for i, size in enumerate(after) if outer[i] == slower and size % batch == 0]
    if alone and (alone[0] < len(after) - 1 or after[alone[0]] == batch):
        return BatchPlace(alone[0])
    for axis, size in enumerate(after):  # rather into the rows than into the features
        within, rest = divmod(slower, outer[axis])
        if within > 1 and not rest and size % (within * batch) == 0:
            return BatchPlace(axis, within)
    return BatchPlace(alone[0]) if alone else None
