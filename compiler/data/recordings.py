"""Inputs that a server recorded, as a source of samples.

Recorded samples of a model with symbolic sizes may have different shapes. If a mask marks which
positions of a sample count, samples are padded with zeros to the longest one. Without a mask,
padding could change answers: only samples of the most frequent shape are used, and the number of
other samples is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace
from offramp.engine.learning.recording_file import (
    Recorded,
    RecordingError,
    read_recording,
    shapes_by_count,
)

_log = logging.getLogger(__name__)

_BATCH: Final = 64
"""Number of samples that are read at a time."""
_FAR: Final = 1e4
"""A sample is left out if its largest value is above this multiple of the median sample's."""


class RecordingSource:
    """Inputs that a server recorded in its learn folder."""

    def __init__(self, folder: Path) -> None:
        """Create a source for a learn folder; nothing is read yet."""
        self._folder = folder

    @property
    def name(self) -> str:
        """Folder as it was passed in."""
        return str(self._folder)

    def load(
        self,
        specs: Sequence[TensorSpec],
        scratch: ScratchSpace,
        *,
        keys: Collection[str] = (),  # noqa: ARG002 - a recording has inputs alone
    ) -> ArraysAndHash:
        """Return the recorded samples in the order of their arrival."""
        try:
            recorded = read_recording(self._folder)
            rows, shapes = self._choose(recorded, specs)
            rows = self._near(recorded, rows)
            with SampleWriter(self.name, scratch) as writer:
                for start in range(0, len(rows), _BATCH):
                    some = rows[start : start + _BATCH]
                    writer.append(_stack(recorded, some, shapes), f"{self.name}: {some[0]}")
                return writer.finish()
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}") from error
        except RecordingError as error:
            raise DataError(str(error)) from error

    def _choose(
        self, recorded: Recorded, specs: Sequence[TensorSpec]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the rows of the recording to use, and the shape that each input is padded to."""
        groups = shapes_by_count(recorded)
        if not groups:
            raise DataError(f"{self.name} holds no sample; let eeserve --learn record some")
        found = list(groups)
        if len(found) == 1 or _are_masked(specs):
            shapes = [tuple(map(max, zip(*each, strict=True))) for each in zip(*found, strict=True)]
            return list(range(len(recorded))), shapes
        rows = groups[found[0]]
        _log.warning(
            "%s: %d of %d samples are used, of the most frequent shape %s: there is no mask to pad "
            "those of other shapes.",
            self.name, len(rows), len(recorded), [list(shape) for shape in found[0]],
        )  # fmt: skip
        return rows, list(found[0])

    def _near(self, recorded: Recorded, rows: list[int]) -> list[int]:
        """Leave out samples with far larger values than all others: one could spoil training."""
        sizes = np.array([_magnitude(recorded.sample(row)) for row in rows])
        usual = sizes[np.isfinite(sizes) & (sizes > 0)]
        if not usual.size:
            return rows
        far = np.isfinite(sizes) & (sizes > _FAR * np.median(usual))
        if not far.any():
            return rows
        _log.warning(
            "%s: %d of %d samples are left out: their values are more than %g times as large as "
            "usual.",
            self.name, np.count_nonzero(far), len(rows), _FAR,
        )  # fmt: skip
        return [row for row, is_far in zip(rows, far, strict=True) if not is_far]


def _are_masked(specs: Sequence[TensorSpec]) -> bool:
    """Return whether each symbolic size has an input [batch, size] with "mask" in its name."""
    sizes = {size for spec in specs for size in spec.shape[1:] if isinstance(size, str)}
    masked = {
        spec.shape[1] for spec in specs if len(spec.shape) == 2 and "mask" in spec.name.lower()
    }
    return sizes <= masked


def _magnitude(sample: dict[str, NDArray[Any]]) -> float:
    """Return the largest magnitude of a sample's floating-point values; 0 if there are none."""
    floats = [values for values in sample.values() if values.dtype.kind == "f" and values.size]
    with np.errstate(invalid="ignore"):
        return max((float(np.abs(values).max()) for values in floats), default=0.0)


def _stack(
    recorded: Recorded, rows: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> dict[str, NDArray[Any]]:
    """Put samples into a batch: each fills the beginning of its row, and zeros the rest."""
    samples = [recorded.sample(row) for row in rows]
    batch = {}
    for (name, dtype), shape in zip(recorded.header.inputs, shapes, strict=True):
        batch[name] = np.zeros((len(rows), *shape), dtype)
        for at, sample in enumerate(samples):
            batch[name][at][tuple(map(slice, sample[name].shape))] = sample[name]
    return batch
