"""What levels of a threshold path would bring, judged by the samples seen of late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from offramp.certify.decision import FloatArray
from offramp.certify.threshold_path import Outlook, ThresholdPath, look_ahead
from offramp.certify.window import Weighted, Window
from offramp.engine.control.costs import CostModel
from offramp.engine.control.refit import Fitted, expect

_JUDGED: Final = 2048
"""Complete samples, the newest, to judge by."""
_FEWEST: Final = 64
"""Complete samples below which expectations serve instead."""
_WORTH_A_TRIAL: Final = 3.0
"""Least gains that a trial must promise: it costs a share of α, and audits."""
_HOPEFUL: Final = 0.8
"""Estimated risk, as a share of the bound, up to which a level is worth testing."""


class SavingsEstimator:
    """Judges by a window of samples that someone else fills."""

    def __init__(
        self, window: Window, costs: CostModel, *, max_disagreement: float, min_gain: float
    ) -> None:
        """Judge.

        Args:
            window: Complete samples.
            costs: Of all exits.
            max_disagreement: ε.
            min_gain: Share of the mean time that a change must save.
        """
        self._window = window
        self._costs = costs
        self._bound = max_disagreement
        self._min_gain = min_gain

    def recent(self, exits: Sequence[int]) -> Weighted:
        """Of the newest samples, those that all these exits looked at."""
        return self._window.seen_by(exits, _JUDGED)

    def outlook(self, threshold_path: ThresholdPath) -> Outlook:
        """What levels would have done of late; what is expected of them while little is known."""
        recent = self.recent(threshold_path.exits)
        if len(recent.weight) < _FEWEST:
            return Outlook(risk=threshold_path.risk, shares=threshold_path.shares)
        return look_ahead(threshold_path.thresholds, recent)

    def mean_ms(self, exits: Sequence[int], shares: FloatArray) -> FloatArray:
        """float64[levels]: mean time until the answer, with these exits in use."""
        mean_ms: FloatArray = shares @ self._costs.latency_ms(exits)
        return mean_ms

    def best_certified(self, threshold_path: ThresholdPath, outlook: Outlook) -> int:
        """The boldest level that passed and did not do worse than the bound of late."""
        fine = outlook.risk[: threshold_path.certified + 1] <= self._bound
        return int(np.flatnonzero(fine)[-1])

    def hopeful(self, risk: FloatArray) -> int:
        """The boldest level that may pass one day, by float64[levels] estimates."""
        return int(np.flatnonzero(risk <= _HOPEFUL * self._bound)[-1])

    def is_gain(self, mean_ms: float, than_ms: float) -> bool:
        """Whether the first is enough less than the second for a change."""
        return mean_ms <= than_ms * (1 - self._min_gain)

    def promises_more(self, fitted: Fitted, exits: Sequence[int], than: ThresholdPath) -> bool:
        """Whether a path may end where it saves more than a threshold path, as far as curves tell.

        Both are judged by the same curves, which are smooth: errors counted on a window would
        differ by chance. A threshold path with other exits is judged by what was counted, for want of
        curves.
        """
        goal = self.mean_ms(exits, fitted.shares)[self.hopeful(fitted.risk)]
        if set(than.exits) <= set(exits):
            recent = self.recent(than.exits)
            curves = [fitted.curves[exits.index(e)] for e in than.exits]
            ours = expect(than.thresholds, curves, recent)
        else:
            ours = self.outlook(than)
        reach = self.mean_ms(than.exits, ours.shares)[self.hopeful(ours.risk)]
        return float(goal) <= float(reach) * (1 - _WORTH_A_TRIAL * self._min_gain)
