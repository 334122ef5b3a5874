"""Made inputs: ``--data random``, a dry run for exits and times that certifies nothing."""

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
"""Text of the command line that asks for made inputs."""
SAMPLES: Final = 1000
"""Samples that are made where no number is asked for: a little more than a compilation needs."""
_BATCH: Final = 32

Draw: TypeAlias = Callable[[int, int], Mapping[str, NDArray[Any]]]
"""Makes inputs by name: of a batch size, for a seed."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Inputs that are made at random, within what a model accepts.

    The model knows that, so the compiler hands in how to draw (:meth:`drawn_by`).
    """

    samples: int = SAMPLES
    draw: Draw | None = None

    @property
    def name(self) -> str:
        """``random``."""
        return RANDOM

    def __str__(self) -> str:
        """``random``, as in ``--data random``."""
        return RANDOM

    def drawn_by(self, draw: Draw) -> RandomSource:
        """Return the source with a way to draw samples."""
        return replace(self, draw=draw)

    def load(
        self,
        specs: Sequence[TensorSpec],
        scratch: ScratchSpace,
        *,
        keys: Collection[str] = (),  # noqa: ARG002 - made samples have no groups
    ) -> ArraysAndHash:
        """Draw the samples; DataError where they would have to stand for real ones."""
        if self.draw is None:
            raise DataError(
                "--data random is for compiling a model: made inputs say nothing about a bundle's "
                "answers; give samples"
            )
        names = [spec.name for spec in specs]
        with SampleWriter(self.name, scratch) as writer:
            for seed in range(-(-self.samples // _BATCH)):
                size = min(_BATCH, self.samples - seed * _BATCH)
                batch = self.draw(size, seed)
                writer.append({name: batch[name] for name in names}, self.name)
            return writer.finish()
