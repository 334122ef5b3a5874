"""Samples of different length: batch keys, padding, and the detection of new lengths.

Where the compiler found that padding changes no answer by more than rounding, samples of nearly
equal length share a bucket, and a batch is padded to its longest sample. A bucket contains
:data:`STEP` lengths, so a sample is padded by fewer positions than that. The padding costs less
than another run of the model, which would read all weights again: for a MiniLM on two cores,
another run took as long as about 20 positions (``benchmarks/lengths.py``). Under policies that
merge the remainders of several batches, a batch is padded to the end of its bucket, so that all
batches of a bucket have one shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import LengthRange, Padding, TensorSpec

_log = logging.getLogger(__name__)

STEP: Final = 8
"""Number of lengths in a bucket: 1 to 8, 9 to 16, and so on."""

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
BatchKey: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of a sample by input, in the order of input names; padded shapes where padding is allowed.
"""


class Added(NamedTuple):
    """Amount of padding in a batch."""

    samples: int
    """Number of samples that were padded."""
    positions: int
    """Number of positions that were added to these samples, in total."""


class LengthRules:
    """Rules for a model's symbolic sizes: allowed padding, and lengths in the calibration data.

    With ``whole_buckets``, samples are padded to the end of their bucket.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec] = (),
        paddings: Sequence[Padding] = (),
        seen: Sequence[LengthRange] = (),
        *,
        pads: bool = True,
        whole_buckets: bool = False,
    ) -> None:
        self._paddings = tuple(paddings) if pads else ()
        self._limits = {p.mask: (p.size, p.limit) for p in paddings if p.limit is not None}
        sizes = {p.size for p in paddings} | {s.size for s in seen}
        self._axes = {size: _axes(inputs, size) for size in sizes}
        self._seen = tuple(seen)
        self._whole_buckets = whole_buckets and self.pads
        self._told = False

    def wrong(self, inputs: Arrays) -> str | None:
        """Return which size is beyond the model's limit; ``None`` if none is."""
        for mask, (size, limit) in self._limits.items():
            length = inputs[mask].shape[1]
            if limit is not None and length > limit:
                return (
                    f"{size} is {length} in input {mask!r}, and the model fails beyond {limit}; "
                    "shorten the samples"
                )
        return None

    def batch_key(self, inputs: Arrays) -> BatchKey:
        """Return the key that requests must have in common to share a batch.

        A request is not padded if the mask of one of its samples is all zero, as then every
        position counts, or if it is longer than the compiler allows for padding.
        """
        shapes = {name: array.shape[1:] for name, array in inputs.items()}
        for padding in self._paddings:
            mask = inputs[padding.mask]
            length = mask.shape[1]
            end = min(-(-length // STEP) * STEP, padding.longest)
            if length < end and (mask == 1).any(axis=1).all():
                for name, axis in self._axes[padding.size]:
                    shape = shapes[name]
                    shapes[name] = (*shape[: axis - 1], end, *shape[axis:])
        return tuple(shapes[name] for name in sorted(shapes))

    def unseen(self, inputs: Arrays) -> int:
        """Count the samples of a length that calibration never had; log the first one."""
        if not self._seen:
            return 0
        new = np.zeros(len(next(iter(inputs.values()))), np.bool_)
        for seen in self._seen:
            lengths = self._lengths(inputs, seen)
            outside = (lengths < seen.shortest) | (lengths > seen.longest)
            if not self._told and outside.any():
                self._told = True
                _log.warning(
                    "A sample has size %d in `%s`, but calibration samples had %d to %d: the "
                    "promise does not cover other sizes. Such samples are counted "
                    "(offramp_unseen_length_samples_total).",
                    lengths[outside][0],
                    seen.size,
                    seen.shortest,
                    seen.longest,
                )
            new |= outside
        return int(np.count_nonzero(new))

    def join(self, parts: Sequence[Arrays], key: BatchKey) -> dict[str, NDArray[Any]]:
        """Join the inputs of requests of equal batch key into one batch, padded where needed."""
        if len(parts) == 1 and not self._whole_buckets:
            return dict(parts[0])
        if not self._paddings:
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        joined = {}
        for name, shape in self._shapes(parts, key).items():
            arrays = [part[name] for part in parts]
            if all(array.shape[1:] == shape for array in arrays):
                joined[name] = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
            else:
                joined[name] = _filled(arrays, shape, self._fill(name))
        return joined

    @property
    def pads(self) -> bool:
        """True if anything is ever padded."""
        return bool(self._paddings)

    def added(self, parts: Sequence[Arrays], rows: Sequence[int], key: BatchKey) -> Added:
        """Count the padding of :meth:`join` for ``rows`` rows of each part."""
        shapes = self._shapes(parts, key)
        samples = positions = 0
        for part, count in zip(parts, rows, strict=True):
            missing = [shapes[p.mask][0] - part[p.mask].shape[1] for p in self._paddings]
            samples += count if any(missing) else 0
            positions += count * sum(missing)
        return Added(samples, positions)

    def _shapes(self, parts: Sequence[Arrays], key: BatchKey) -> dict[str, tuple[int, ...]]:
        """Return the shape of a sample in a batch, by input."""
        names = sorted(parts[0])
        if self._whole_buckets:
            return dict(zip(names, key, strict=True))
        shapes = {name: [part[name].shape[1:] for part in parts] for name in names}
        return {name: tuple(map(max, *of, of[0])) for name, of in shapes.items()}

    def _fill(self, name: str) -> float:
        return next(p.fills[name] for p in self._paddings if name in p.fills)

    def _lengths(self, inputs: Arrays, seen: LengthRange) -> NDArray[np.int64]:
        if seen.mask:
            ones: NDArray[np.int64] = (inputs[seen.mask] == 1).sum(axis=1)
            return ones
        (name, axis), *_ = self._axes[seen.size]
        return np.full(len(inputs[name]), inputs[name].shape[axis])


def _axes(inputs: Sequence[TensorSpec], size: str) -> tuple[tuple[str, int], ...]:
    """Return the dimensions of inputs that have a symbolic size."""
    return tuple(
        (spec.name, axis)
        for spec in inputs
        for axis, found in enumerate(spec.shape)
        if axis and found == size
    )


def _filled(arrays: Sequence[NDArray[Any]], shape: tuple[int, ...], fill: float) -> NDArray[Any]:
    """Concatenate arrays along rows, and fill the end of shorter ones."""
    rows = sum(map(len, arrays))
    filled = np.full((rows, *shape), fill, arrays[0].dtype)
    start = 0
    for array in arrays:
        places = (slice(start, start + len(array)), *map(slice, array.shape[1:]))
        filled[places] = array
        start += len(array)
    return filled
