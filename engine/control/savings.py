"""The savings estimator: what levels of threshold paths would bring on the samples seen of late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from offramp.certify import FloatArray, ThresholdPath, Weighted, Window
from offramp.certify.fitting import Fitted, expect
from offramp.certify.path import Outlook, look_ahead
from offramp.engine.control.costs import CostModel
from offramp.engine.control.settings import CertifiedSettings

_JUDGED: Final = 2048
"""Complete samples, the newest, to judge by."""
_FEWEST: Final = 64
"""Complete samples below which expectations serve instead."""
_WORTH_A_TEST: Final = 3.0
"""Least gains that a candidate must promise: its test costs a share of α, and audits."""
_PROMISING: Final = 0.8
"""Estimated risk, as a share of the bound, up to which a level is worth testing."""
_ENOUGH_AUDITED: Final = 500
"""Audited samples, or as many as the others are worth, below which recent risk is not judged. With
fewer the drift alarm is quicker, and would only be put off by a change of policy."""
_DEVIATIONS: Final = 3.0
"""Standard errors by which recent risk must be above the bound to be taken for drift. It is looked
at again and again, and 2 were often reached by chance."""


class SavingsEstimator:
    """Judges levels and paths by a window of samples that its owner fills."""

    def __init__(self, window: Window, costs: CostModel, settings: CertifiedSettings) -> None:
        self._window, self._costs = window, costs
        self._bound, self._min_gain = settings.max_disagreement, settings.min_gain

    def recent(self, exits: Sequence[int]) -> Weighted:
        """Of the newest samples, those that all these exits saw."""
        return self._window.seen_by(exits, _JUDGED)

    def outlook(self, path: ThresholdPath) -> Outlook:
        """What levels would have done of late; what is expected of them while little is known."""
        recent = self.recent(path.exits)
        if len(recent) < _FEWEST:
            return Outlook(risk=path.risk, shares=path.shares)
        return look_ahead(path.thresholds, recent)

    def recent_excess(self, path: ThresholdPath, level: int) -> float | None:
        """Disagreement of a level of late, where it contradicts all that speaks for the level."""
        if level == 0:
            return None
        recent = self.recent(path.exits)
        audited = float(recent.weight.sum()) / float(recent.weight.max(initial=1.0))
        if audited < _ENOUGH_AUDITED:
            return None
        risk = recent.risk(path.thresholds[level])
        limit = self._bound + _DEVIATIONS * math.sqrt(self._bound / audited)
        return risk if risk > limit else None

    def mean_ms(self, exits: Sequence[int], shares: FloatArray) -> FloatArray:
        """float64[levels]: mean time until the answer, with these exits in use."""
        return np.asarray(shares @ self._costs.latency_ms(exits))

    def best_certified(self, path: ThresholdPath, outlook: Outlook) -> int:
        """The most aggressive level that passed and did not do worse than the bound of late."""
        fine = outlook.risk[: path.certified + 1] <= self._bound
        return int(np.flatnonzero(fine)[-1])

    def promising(self, risk: FloatArray) -> int:
        """The most aggressive level that may pass one day, by float64[levels] estimates."""
        return int(np.flatnonzero(risk <= _PROMISING * self._bound)[-1])

    def is_gain(self, mean_ms: float, than_ms: float) -> bool:
        """Whether the first is enough less than the second for a change."""
        return mean_ms <= than_ms * (1 - self._min_gain)

    def promises_more(self, fitted: Fitted, exits: Sequence[int], than: ThresholdPath) -> bool:
        """Whether a path may end where it saves more than another one, as far as curves tell."""
        goal = self.mean_ms(exits, fitted.shares)[self.promising(fitted.risk)]
        if set(than.exits) <= set(exits):
            # Both by the same curves, which are smooth: errors counted on a window would differ by
            # chance.
            curves = [fitted.curves[exits.index(e)] for e in than.exits]
            ours = expect(than.thresholds, curves, self.recent(than.exits))
        else:
            ours = self.outlook(than)
        reach = self.mean_ms(than.exits, ours.shares)[self.promising(ours.risk)]
        return float(goal) <= float(reach) * (1 - _WORTH_A_TEST * self._min_gain)
