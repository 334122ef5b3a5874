"""Random inputs (``--data random``) for a dry run: it shows exits and times, certifies nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace

RANDOM: Final = "random"
"""Command-line text that asks for random inputs."""
SAMPLES: Final = 1000
"""Default number of random samples: a little more than a compilation needs."""
_BATCH: Final = 32

Draw: TypeAlias = Callable[[int, int], Mapping[str, NDArray[Any]]]
"""Function that draws random inputs, as arrays by name, for a batch size and a seed."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Random inputs within the range that a model accepts.

    That range depends on the model, so the compiler sets the function that draws
    (:meth:`drawn_by`).
    """

    samples: int = SAMPLES
    draw: Draw | None = None

    @property
    def name(self) -> str:
        """Name of the source in messages: ``random``."""
        return RANDOM

    def __str__(self) -> str:
        """Return ``random``, as in ``--data random``."""
        return RANDOM

    def drawn_by(self, draw: Draw) -> RandomSource:
        """Return the source with a function that draws samples."""
        return replace(self, draw=draw)

    def load(
        self,
        specs: Sequence[TensorSpec],
        scratch: ScratchSpace,
        *,
        keys: Collection[str] = (),  # noqa: ARG002 - generated inputs have no groups
    ) -> ArraysAndHash:
        """Draw the samples; DataError if real samples are required."""
        if self.draw is None:
            raise DataError(
                "--data random is for compiling a model: random inputs do not test a bundle's "
                "answers; use samples"
            )
        names = [spec.name for spec in specs]
        with SampleWriter(self.name, scratch) as writer:
            for seed in range(-(-self.samples // _BATCH)):
                size = min(_BATCH, self.samples - seed * _BATCH)
                batch = self.draw(size, seed)
                writer.append({name: batch[name] for name in names}, self.name)
            return writer.finish()
