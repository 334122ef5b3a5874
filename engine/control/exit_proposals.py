"""Ramp adjustment, Apparate's in what it tries, ours in what it takes to use it.

Every 128 samples the exits in use are judged as Apparate does (3.3, :mod:`.adjustment`). What it
would do at once is only proposed here: the controller has the new exits look on, tests thresholds
for the new set, and uses them when a level that saves more is certified
(:meth:`.certified.CertifiedController.consider`). So an adjustment never loosens what is promised.

Chosen here: a set that was proposed is not proposed again for a while, since trying one takes many
samples, and low-risk probing would come back to the same exit whenever the trial fails. After a
drift alarm everything may be tried again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from offramp.bundle import NEVER
from offramp.certify.decision import Float32Array, FloatArray, IntArray
from offramp.certify.observations import Observations
from offramp.certify.window import Window
from offramp.engine.control.adjustment import adjust
from offramp.engine.control.costs import CostModel
from offramp.engine.control.delegating import Considering, DelegatingController

ADJUST_EVERY: Final = 128
"""Samples between two adjustments (Apparate 3.3)."""
AGAIN_AFTER: Final = 65_536
"""Samples after which a set of exits that was proposed may be proposed again."""
JUDGED_BY: Final = 512
"""Samples that exits are judged by, drawn from a window of twice as many complete ones."""


class AdjustingController(DelegatingController[Considering]):
    """A controller, with proposals for its exits; see :class:`.controller.Controller`."""

    def __init__(
        self,
        inner: Considering,
        costs: CostModel,
        *,
        max_overhead: float,
        adjust_every: int = ADJUST_EVERY,
        again_after: int = AGAIN_AFTER,
    ) -> None:
        """Propose to ``inner``, which decides.

        Args:
            inner: Owned by this one from here on.
            costs: Of all exits of the bundle.
            max_overhead: Ramp budget: how much later the model's end may come, as a share.
            adjust_every: Samples from one adjustment to the next, at least 1.
            again_after: Samples until a set may be proposed again.

        Raises:
            ValueError: A number is out of range.
        """
        if adjust_every < 1 or not max_overhead >= 0:
            raise ValueError(
                f"adjust_every is {adjust_every}, expected at least 1; "
                f"max_overhead is {max_overhead}, expected at least 0"
            )
        super().__init__(inner)
        self._costs = costs
        self._max_overhead = max_overhead
        self._adjust_every = adjust_every
        self._again_after = again_after
        self._window = Window(exits=costs.exits, capacity=2 * JUDGED_BY)
        self._seen = 0
        self._adjusted_at = 0
        self._proposed: dict[tuple[int, ...], int] = {}
        """Sets of exits, and after how many samples each was."""
        self._alarms = 0

    def observe(self, seen: Observations) -> None:
        """Pass on, and adjust when it is time."""
        super().observe(seen)
        self._window.add(seen)
        self._seen += len(seen)
        if self._seen - self._adjusted_at >= self._adjust_every:
            self._adjusted_at = self._seen
            self._adjust()

    def _adjust(self) -> None:
        """Judge the exits in use, and propose what Apparate would do about it."""
        alarms = self._inner.status().alarms
        if alarms != self._alarms:  # what was seen and tried before says nothing any more
            self._alarms = alarms
            self._window.clear()
            self._proposed.clear()
        active = self._inner.policy.active
        thresholds = [a.threshold for a in active]
        if all(threshold >= NEVER for threshold in thresholds):
            return  # nothing answers: there is nothing to judge by
        exits = tuple(a.exit for a in active)
        samples = self._window.seen_by(exits)
        if samples.effective < JUDGED_BY / 4:
            return
        found = adjust(
            representative(samples.confidence, samples.weight, JUDGED_BY),
            exits,
            thresholds,
            self._costs,
            max_overhead=self._max_overhead,
        )
        before = self._proposed.get(found.active)
        is_due = before is None or self._seen - before >= self._again_after
        if found.active != exits and is_due and self._inner.consider(found.active):
            self._proposed[found.active] = self._seen


def representative(confidence: Float32Array, weight: FloatArray, count: int) -> Float32Array:
    """Turn weighted samples into samples of equal weight: float32[exits, count].

    Systematic resampling (Kitagawa 1996): a sample comes up in proportion to its weight, up to
    rounding, and nothing is left to chance.

    Args:
        confidence: float32[exits, n], n at least 1.
        weight: float64[n], above 0.
        count: How many.
    """
    upto = np.cumsum(weight)
    places = (np.arange(count) + 0.5) * (upto[-1] / count)
    rows: IntArray = np.searchsorted(upto, places)
    chosen: Float32Array = confidence[:, rows]
    return chosen
