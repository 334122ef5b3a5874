"""The shift guard: notices changed inputs without audits, and has everything audited afterwards.

Two things that audits alone are too slow for. A share of 2 % audited shows a disagreement of 4 %
after some ten thousand samples; what exits say of *all* samples that reach them shows most shifts
after some hundred (:mod:`.shift`). Samples are then not like those that the certificate was made
from: the controller gives it up, no exit answers, and its levels are tested afresh
(:meth:`.certified.CertifiedController.invalidate`). And after that, or after a drift alarm, every
sample runs to the end for as long as evidence for more aggressive levels is still missing, within a
limit: for these moments audits may take more than their budget.

After a notice, the next one has to wait twice as long as the last time, so that a load which never
comes to rest is not tested all the time; quiet halves that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from offramp.bundle import ExitPolicy
from offramp.certify import NEVER, BoolArray, Float32Array, Observations, Window, first_exit
from offramp.certify.decision import reaches
from offramp.certify.kept import kept_array, kept_count
from offramp.engine.control.shift import ShiftDetector

RECOVERY: Final = 8_192
"""Samples that are all audited after an alarm, at most."""
REMEMBERED: Final = 4_096
"""Samples that are compared with when a policy comes into force."""
BLIND: Final = 1_024
"""Samples until exits of which too little was known are compared too."""
ALIKE: Final = 1_024
"""Samples that have to look like those before a restart until they count as alike."""
KEPT: Final = 2_048
"""Samples that are kept over a restart to compare with."""
FIRST_WAIT: Final = 1_024
"""Samples until a second notice may follow the first."""
_UNSAID: Final = -1.0
"""In a kept state, the confidence of an exit that a sample did not pass."""
_MISSING: Final = 0.1
"""Share of those that would have reached an exit of which it may be unknown what it says."""
QUIET: Final = 32_768
"""Samples without a notice that halve the wait again."""


class ShiftGuard:
    """Compares what exits say of samples with what they said of those before."""

    def __init__(self, calibration: Float32Array, *, recovery: int = RECOVERY) -> None:
        """Compare with the float32[K, n] confidences of calibration at first; :meth:`watch` begins.

        After an alarm, at most ``recovery`` samples are all audited.
        """
        self._recovery = recovery
        self._wait = self._since = FIRST_WAIT
        """Samples from one notice to the next, at least, and since the last one."""
        self._left = 0
        """Samples that are still all audited."""
        self._detector = ShiftDetector()
        self._watched: tuple[int, ...] = ()
        """Exits whose confidences are compared."""
        self._answering: tuple[tuple[int, float], ...] | None = None
        """Exits that answered when they were chosen: who reaches an exit depends on these."""
        self._calibration = calibration[:, -REMEMBERED:]
        self._recent = Window(exits=len(calibration), capacity=REMEMBERED)
        """The last samples, whether they ran to the end or not."""
        self._recent.add_confidence(calibration)
        self.alike = ALIKE
        """Samples since a restart that look like those before it, up to :data:`ALIKE`."""
        self._is_half_blind, self._blind_for = False, 0
        """Whether some exits are not compared for want of samples; for so many samples more."""

    @property
    def is_alike(self) -> bool:
        """Whether enough samples look like those before a restart, if there was one."""
        return self.alike >= ALIKE

    @property
    def audits_all(self) -> bool:
        """Whether every sample runs to the end, as evidence is gathered again."""
        return self._left > 0

    def pass_by(self, samples: int) -> None:
        """Count samples; to be called with every chunk."""
        before, self._since = self._since, self._since + samples
        if before // QUIET < self._since // QUIET:
            self._wait = max(self._wait // 2, FIRST_WAIT)

    def has_shifted(self, seen: Observations, policy: ExitPolicy, *, needs_evidence: bool) -> bool:
        """Take in samples after which no other alarm rang; whether inputs have changed.

        If so, the evidence has to be given up, and :meth:`recover` be called. ``needs_evidence``
        says whether audits could still bring more aggressive thresholds, or confirm those in force.
        """
        self._left = max(self._left - len(seen), 0) if needs_evidence else 0
        mine = seen.take(seen.policy_version == policy.version)
        if self._differs(mine) and (self._since >= self._wait or not self.is_alike):
            self._since, self._wait = 0, self._wait * 2
            return True
        self.alike = min(self.alike + len(mine), ALIKE)
        self._recent.add_confidence(seen.confidence)
        self._blind_for = max(self._blind_for - len(seen), 0)
        if _answering(policy) != self._answering:
            self.watch(policy)
        elif self._is_half_blind and not self._blind_for and self.is_alike:
            self._recent.keep(BLIND)
            self.watch(policy)
        return False

    def recover(self, policy: ExitPolicy) -> None:
        """After any alarm: have everything audited, and compare with what comes now."""
        self._left = self._recovery
        self._recent.keep(0)
        self.alike = ALIKE
        self.watch(policy)

    def start_over(self, policy: ExitPolicy) -> None:
        """Compare with calibration, as at first."""
        self._recent.keep(0)
        self._recent.add_confidence(self._calibration)
        self.alike = ALIKE
        self.watch(policy)

    def compare_with_past(self, policy: ExitPolicy) -> bool:
        """Compare with the samples before a restart: whether there are enough of them."""
        self.watch(policy)
        self.alike = 0
        return self._detector.compares

    def watch(self, policy: ExitPolicy) -> None:
        """Compare what is served under a policy from now on.

        Which samples reach an exit depends on those before it that answer. So samples are compared
        with those of the last ones that would have reached it now. Where a threshold has risen,
        that is not known of all of them; exits of which too little is known are compared again
        when there are enough new samples.
        """
        self._answering = _answering(policy)
        self._watched = tuple(active.exit for active in policy.active)
        confidence = self._recent.confidence(self._watched)
        if not confidence.size:
            self._detector.reset()
            return
        thresholds = [active.threshold for active in policy.active]
        answered_by = first_exit(confidence, thresholds)
        reached = reaches(answered_by, range(len(self._watched)))
        missing = np.count_nonzero(reached & np.isnan(confidence), axis=1)
        unknown = missing > _MISSING * np.count_nonzero(reached, axis=1)
        self._is_half_blind, self._blind_for = bool(unknown.any()), BLIND
        self._detector.reset(_only(reached & ~unknown[:, None], confidence))

    def state(self) -> dict[str, Any]:
        """What to keep over a restart: when to notice again, and what inputs look like."""
        recent = self._recent.confidence(range(len(self._calibration)), KEPT)
        return {
            "wait": self._wait,
            "since": self._since,
            "recent": np.nan_to_num(recent, nan=_UNSAID),
            "excess": self._detector.excess.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; ValueError, and nothing has changed, if it does not fit."""
        wait = kept_count(state, "wait", least=FIRST_WAIT)
        since = kept_count(state, "since")
        shape = (len(self._calibration), None)
        recent = kept_array(state, "recent", shape, least=_UNSAID, most=1.0).astype(np.float32)
        excess = kept_array(state, "excess", self._detector.excess.shape, least=0.0)
        self._wait, self._since, self._detector.excess = wait, since, excess
        self._recent.keep(0)
        self._recent.add_confidence(np.where(recent < 0, np.float32(np.nan), recent))

    def _differs(self, seen: Observations) -> bool:
        """Whether what exits say of the samples that reach them has changed."""
        if not self._watched:
            return False
        reached = reaches(seen.answered_at, self._watched)
        return self._detector.add(_only(reached, seen.confidence[list(self._watched)]))


def _answering(policy: ExitPolicy) -> tuple[tuple[int, float], ...]:
    """The exits that answer."""
    return tuple((a.exit, a.threshold) for a in policy.active if a.threshold < NEVER)


def _only(reached: BoolArray, confidence: Float32Array) -> Float32Array:
    """What exits said of those that reach them, NaN elsewhere (audited samples go further)."""
    return np.where(reached, confidence, np.float32(np.nan))
