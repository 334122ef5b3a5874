"""The first samples of a source that is read as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash, DataSource
from offramp.calibration.data.scratch import ScratchSpace


def first_of(source: DataSource, samples: int | None) -> DataSource:
    """Return a source of the first samples of another one; of all where ``samples`` is ``None``."""
    return source if samples is None else FirstSamples(source, samples)


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """As many of the first samples of a source, or all that it has."""

    source: DataSource
    samples: int

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Return the beginning of each array, and a hash of the source's and the number."""
        arrays, digest = self.source.load(specs, scratch, keys=keys)
        if all(not array.ndim or len(array) <= self.samples for array in arrays.values()):
            return arrays, digest
        first = {n: array[: self.samples] if array.ndim else array for n, array in arrays.items()}
        return first, hashlib.sha256(f"{digest} first {self.samples}".encode()).hexdigest()
