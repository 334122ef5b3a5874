"""Proposals for the exits in use: Apparate's in what they try, ours in what it takes to use them.

Every 128 samples the exits in use are judged as Apparate does (3.3, :mod:`.adjustment`). What it
would do at once is only proposed here: the controller runs the new exits in shadow mode, tests
thresholds for the new set, and uses them when a level that saves more is certified
(:meth:`.certified.CertifiedController.consider`). So an adjustment never loosens what is promised.

Chosen here: a set that was proposed is not proposed again for a while, since testing one takes many
samples, and low-risk probing would come back to the same exit whenever the test fails. After a
drift alarm everything may be proposed again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from offramp.bundle import NEVER, ExitPolicy
from offramp.certify import Float32Array, FloatArray, Observations, Window
from offramp.engine.control.adjustment import adjust
from offramp.engine.control.costs import CostModel

ADJUST_EVERY: Final = 128
"""Samples between two adjustments (Apparate 3.3)."""
AGAIN_AFTER: Final = 65_536
"""Samples after which a set of exits that was proposed may be proposed again."""
JUDGED_BY: Final = 512
"""Samples that exits are judged by, drawn from a window of twice as many complete ones."""


class ExitProposals:
    """Judges the exits in use by recent samples, and proposes others."""

    def __init__(
        self,
        costs: CostModel,
        *,
        max_overhead: float,
        adjust_every: int = ADJUST_EVERY,
        again_after: int = AGAIN_AFTER,
    ) -> None:
        """Start with an empty window, for all exits of the bundle.

        ``max_overhead`` is the ramp budget: how much later the model's end may come, as a share. A
        set may be proposed again after ``again_after`` samples.
        """
        if adjust_every < 1 or not max_overhead >= 0:
            raise ValueError(
                f"adjust_every is {adjust_every}, expected at least 1; "
                f"max_overhead is {max_overhead}, expected at least 0"
            )
        self._costs, self._max_overhead = costs, max_overhead
        self._adjust_every, self._again_after = adjust_every, again_after
        self._window = Window(exits=costs.exits, capacity=2 * JUDGED_BY)
        self._seen = self._adjusted_at = 0
        self._proposed: dict[tuple[int, ...], int] = {}
        """Sets of exits, and after how many samples each was."""
        self._alarms = 0

    def propose(
        self, seen: Observations, policy: ExitPolicy, *, alarms: int
    ) -> tuple[int, ...] | None:
        """Take in samples; when it is time, judge the exits in use and say what Apparate would do.

        Returns the exits to use instead of those of the policy in force; ``None`` for no change.
        With each drift alarm, of ``alarms`` so far, what was seen and proposed before is forgotten.
        """
        self._window.add(seen)
        self._seen += len(seen)
        if self._seen - self._adjusted_at < self._adjust_every:
            return None
        self._adjusted_at = self._seen
        if alarms != self._alarms:
            self._alarms = alarms
            self._window.keep(0)
            self._proposed.clear()
        thresholds = [a.threshold for a in policy.active]
        if all(threshold >= NEVER for threshold in thresholds):
            return None  # nothing answers: there is nothing to judge by
        exits = tuple(a.exit for a in policy.active)
        samples = self._window.seen_by(exits)
        if samples.effective < JUDGED_BY / 4:
            return None
        alike = representative(samples.confidence, samples.weight, JUDGED_BY)
        found = adjust(alike, exits, thresholds, self._costs, max_overhead=self._max_overhead)
        before = self._proposed.get(found.active)
        is_due = before is None or self._seen - before >= self._again_after
        return found.active if found.active != exits and is_due else None

    def accepted(self, exits: tuple[int, ...]) -> None:
        """Remember that a proposal is tried; one that came at a bad time may be made again."""
        self._proposed[exits] = self._seen


def representative(confidence: Float32Array, weight: FloatArray, count: int) -> Float32Array:
    """Turn weighted samples (at least one) into ``count`` of equal weight: float32[exits, count].

    Systematic resampling (Kitagawa 1996): a sample comes up in proportion to its weight, up to
    rounding, and nothing is left to chance.
    """
    upto = np.cumsum(weight)
    places = (np.arange(count) + 0.5) * (upto[-1] / count)
    return np.asarray(confidence[:, np.searchsorted(upto, places)])
