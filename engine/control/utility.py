"""What exits in use are worth on recent samples, and the most that another one could be worth.

Apparate 3.3: the utility of an exit is the sum of the raw latency that samples avoid by leaving
there, less the sum of the latency that it adds to the samples that pass it without leaving. Raw
latency is the model's own time after the exit; the exits behind it are not counted as avoided, so
that an exit's utility does not grow with what others cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp.certify.decision import Float32Array, FloatArray, IntArray, count_answers, first_exit
from offramp.engine.control.costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Utilities:
    """Of the exits in use, under one set of thresholds."""

    active: tuple[int, ...]
    """The exits in use, in depth order."""
    counts: IntArray
    """int64[active + 1]: samples that leave at each, the last at the model's end."""
    utility_ms: FloatArray
    """float64[active]: milliseconds won, less those lost, summed over the samples."""
    mean_ms: float
    """Mean time until the answer, the cost of every exit passed included."""

    @property
    def samples(self) -> int:
        """Samples looked at."""
        return int(self.counts.sum())


def measure_utilities(
    confidence: Float32Array, thresholds: Sequence[float], active: Sequence[int], costs: CostModel
) -> Utilities:
    """Send samples through the exits in use, and add up what each of them wins and loses.

    Args:
        confidence: float32[active, n] in [0, 1], n above 0; every exit in use saw every sample.
        thresholds: [active], ``NEVER`` where the exit only looks on.
        active: Indices of the exits in use, rising.
        costs: Of all exits of the bundle.
    """
    exits, samples = confidence.shape
    counts = count_answers(first_exit(confidence, thresholds), exits)
    passing = samples - np.cumsum(counts[:-1])
    rows = list(active)
    return Utilities(
        active=tuple(rows),
        counts=counts,
        utility_ms=counts[:-1] * avoided_ms(costs)[rows] - passing * added_ms(costs)[rows],
        mean_ms=float(counts @ costs.latency_ms(rows)) / samples,
    )


def upper_bound_ms(candidate: int, leaving: int, reaching: int, costs: CostModel) -> float:
    """Utility of an exit not in use if ``leaving`` of the ``reaching`` samples left there."""
    added = costs.exits_ms[candidate] + costs.stages_ms[candidate]
    return float(leaving * avoided_ms(costs)[candidate] - (reaching - leaving) * added)


def avoided_ms(costs: CostModel) -> FloatArray:
    """float64[K]: the model's own time that is left after each exit."""
    return np.asarray(costs.source_ms - costs.until_ms(), dtype=np.float64)


def added_ms(costs: CostModel) -> FloatArray:
    """float64[K]: what each exit costs a sample that passes it: bridge, head and border."""
    return np.add(costs.exits_ms, costs.stages_ms, dtype=np.float64)
