"""The input guard: who sends what calibration never saw the like of changes nothing for others.

Thresholds were certified, and are tested while serving, on the answers to samples. Anybody who may
send requests could feed the controller noise, have it find that samples have changed, and so turn
exits off for all. A sample with an element that is no finite number, where the calibration data
had none such, or far outside of what they had, is therefore no evidence, and no exit is sure of it:
it runs to the model's end, where its answer is the unmodified model's (unless a scheduling policy
ends its batch before, which is marked as forced). Noise within the range still counts, as it may be
what the model is for; it is told by the drift alarm, and may cost exits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import InputRanges

MARGIN: Final = 0.5
"""Of what calibration saw, from least to greatest: so far beyond either end is still in range."""


class InputGuard:
    """Tells samples that are like those of calibration, element by element, from others.

    Where their lengths are counted by a mask, one that is shorter or longer than all of those is
    not like them either, by however little.
    """

    def __init__(self, ranges: InputRanges) -> None:
        self._bounds = {}
        self._beyond = {r.name: [float(each) for each in r.beyond] for r in ranges.inputs}
        for seen in ranges.inputs:
            margin = MARGIN * (seen.highest - seen.lowest)
            self._bounds[seen.name] = (seen.lowest - margin, seen.highest + margin)
        # Lengths that were all the same tell nothing of what they may be, as constant inputs do.
        self._lengths = [r for r in ranges.lengths if r.mask and r.shortest < r.longest]

    def in_range(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """[n]: whether every element of a sample is in range; inputs are [n, …]."""
        found = np.ones(len(next(iter(inputs.values()))), np.bool_)
        for name, (lowest, highest) in self._bounds.items():
            rows = inputs[name].reshape(len(found), -1)
            if beyond := self._beyond[name]:  # missing or masked, as in the calibration data
                rows = np.where(_is_one_of(rows, beyond), lowest, rows)
            if rows.shape[1]:  # a NaN is neither at least nor at most anything
                least, most = (ends.astype(np.float64) for ends in (rows.min(1), rows.max(1)))
                found &= (least >= lowest) & (most <= highest)
        for seen in self._lengths:
            length = (inputs[seen.mask] == 1).sum(axis=1)
            found &= (length >= seen.shortest) & (length <= seen.longest)
        return found


def _is_one_of(values: NDArray[Any], known: Sequence[float]) -> NDArray[np.bool_]:
    """Find elements that equal one of some values, NaN included."""
    each = [np.isnan(values) if math.isnan(one) else values == one for one in known]
    found: NDArray[np.bool_] = np.logical_or.reduce(each)
    return found
