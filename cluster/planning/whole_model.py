"""The whole model on every device, as candidates beside splits: data parallel, E3's baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.planning.stage_times import SplitTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeModel:
    """The whole model on any counts of devices, at one batch size."""

    times: SplitTimes
    exits: bool
    """With the exits that pay, or none."""
    rate_rps: NDArray[np.float64]
    """[grid]."""
    slowest_s: NDArray[np.float64]
    """[grid]: of a batch of which no row leaves; infinite where a device cannot hold the model."""

    @staticmethod
    def of(times: SplitTimes, counts: NDArray[np.int64], *, exits: bool) -> WholeModel:
        """Put it on all ``counts`` [grid, types] of devices, which share rows by their speed."""
        stage_s = times.seconds[:, 0, -1] if exits else times.whole_s
        longest_s = times.longest_s[:, 0, -1] if exits else times.whole_s
        fits = np.isfinite(stage_s)
        rates = np.where(fits, times.batch_size / np.where(fits, stage_s, 1.0), 0.0)
        return WholeModel(
            times=times,
            exits=exits,
            rate_rps=(counts * rates).sum(axis=1),
            slowest_s=np.where(counts > 0, longest_s, 0.0).max(axis=1),
        )
