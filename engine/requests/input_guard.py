"""The input guard: inputs unlike the calibration data are excluded from the evidence.

Thresholds are tested while serving on the answers to samples. A client that sends noise could make
the controller believe that inputs have changed; the controller would then switch exits off for all
clients. Therefore a sample is no evidence if an element is far outside the range of the calibration
data, or is not a finite number although all calibration data were finite. No exit answers such a
sample: it runs to the model's end and gets the unmodified model's answer. (A scheduling policy may
end its batch earlier; the answer is then marked as forced.) Noise within the range still counts,
because it may be the intended load; the drift alarm detects such noise, and may switch exits off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import InputRanges

MARGIN: Final = 0.5
"""Margin beyond either end of the calibration range, as a share of the range."""


class InputGuard:
    """Detects samples with an element outside the calibration range of this element.

    If a mask input determines the length of samples, a sample that is shorter or longer than all
    calibration samples is out of range, too; the length has no margin.
    """

    def __init__(self, ranges: InputRanges) -> None:
        self._bounds = {}
        self._beyond = {r.name: [float(each) for each in r.beyond] for r in ranges.inputs}
        for seen in ranges.inputs:
            margin = MARGIN * (seen.highest - seen.lowest)
            self._bounds[seen.name] = (seen.lowest - margin, seen.highest + margin)
        # Equal lengths (like constant inputs) do not show which lengths are allowed.
        self._lengths = [r for r in ranges.lengths if r.mask and r.shortest < r.longest]

    def in_range(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return whether every element of a sample is in range, [n]; inputs are [n, …]."""
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
    """Return which elements equal one of some values, NaN included."""
    each = [np.isnan(values) if math.isnan(one) else values == one for one in known]
    found: NDArray[np.bool_] = np.logical_or.reduce(each)
    return found
