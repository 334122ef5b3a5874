"""Notices changed inputs without audits, and has everything audited until evidence is there again.

Two things that audits alone are too slow for. A share of 2 % audited shows a disagreement of 4 %
after some ten thousand samples; what exits say of *all* samples that reach them shows most shifts
after some hundred (:mod:`.shift`). Samples are then not like those that the certificate was made
from: it is given up, no exit answers, and the controller's levels are tested afresh
(:meth:`.certified.CertifiedController.doubt`). And after that, or after a drift alarm, every sample
runs to the end for as long as evidence for bolder levels is still missing, within a limit: for
these moments audits may take more than their budget.

After a notice, the next one has to wait twice as long as the last time, so that a load which never
comes to rest is not tested all the time; quiet halves that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from offramp.bundle import NEVER, ExitPolicy
from offramp.certify.decision import BoolArray, Float32Array, first_exit, reaches
from offramp.certify.observations import Observations
from offramp.engine.control.controller import ControlStatus
from offramp.engine.control.delegating import Considering, DelegatingController
from offramp.engine.control.shift import ShiftDetector

RECOVERY: Final = 8_192
"""Samples that are all audited after an alarm, at most."""
REMEMBERED: Final = 4_096
"""Samples that are compared with when a policy comes into force."""
BLIND: Final = 1_024
"""Samples until exits of which too little was known are compared too."""
FIRST_WAIT: Final = 1_024
"""Samples until a second notice may follow the first."""
_MISSING: Final = 0.1
"""Share of those that would have reached an exit of which it may be unknown what it says."""
QUIET: Final = 32_768
"""Samples without a notice that halve the wait again."""


_Answering: TypeAlias = tuple[tuple[int, float], ...]
"""Exits with their thresholds."""


class Invalidatable(Considering, Protocol):
    """A controller whose evidence can be called into question."""

    @property
    def wants_evidence(self) -> bool:
        """Whether audits could still bring bolder thresholds, or confirm those in force."""
        ...

    def invalidate(self, why: str) -> None:
        """Give up all evidence, answer nothing early, and test afresh."""
        ...


class WatchfulController(DelegatingController[Invalidatable]):
    """A controller, and a look at its inputs; see :class:`.controller.Controller`."""

    def __init__(
        self, inner: Invalidatable, calibration: Float32Array, *, recovery: int = RECOVERY
    ) -> None:
        """Watch.

        Args:
            inner: Owned by this one from here on.
            calibration: float32[K, n]: what exits said of the calibration data, which inputs are
                compared with at first.
            recovery: Samples that are all audited after an alarm, at most.
        """
        super().__init__(inner)
        self._recovery = recovery
        self._patience = _Patience()
        self._alarms = inner.status().alarms
        self._left = 0
        """Samples that are still all audited."""
        self._detector = ShiftDetector()
        self._watched: tuple[int, ...] = ()
        """Exits whose confidences are compared."""
        self._answering: _Answering | None = None
        """Exits that answered when they were chosen: who reaches an exit depends on these."""
        self._seen = calibration[:, -REMEMBERED:]
        """float32[K, n]: what exits said of the last samples alike, NaN where they were not asked;
        at first, of the calibration data."""
        self._is_half_blind, self._blind_for = False, 0
        """Whether some exits are not compared for want of samples; for so many samples more."""
        self._watch()

    @property
    def audit_probability(self) -> float:
        """The inner one's; 1 while evidence is gathered again."""
        return 1.0 if self._left > 0 else self._inner.audit_probability

    def observe(self, seen: Observations) -> None:
        """Pass on; then compare."""
        super().observe(seen)
        self._patience.pass_by(len(seen))
        self._left = max(self._left - len(seen), 0) if self._inner.wants_evidence else 0
        if self._has_alarmed():
            return
        if self._has_shifted(seen) and self._patience.allows():
            self._inner.invalidate("inputs are not what they were")
            self._has_alarmed()
            return
        self._seen = np.concatenate([self._seen, seen.confidence], axis=1)[:, -REMEMBERED:]
        self._blind_for = max(self._blind_for - len(seen), 0)
        if _answering(self._inner.policy) != self._answering:
            self._watch()
        elif self._is_half_blind and not self._blind_for:
            self._seen = self._seen[:, -BLIND:]
            self._watch()

    def status(self) -> ControlStatus:
        """The inner one's, with the audit probability in force."""
        return replace(self._inner.status(), audit_probability=self.audit_probability)

    def state(self) -> Mapping[str, Any] | None:
        """The inner one's, and how long to wait for the next notice."""
        inner = self._inner.state()
        return None if inner is None else {"inner": inner, "patience": self._patience.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state; inputs are compared with those that come first now.

        Raises:
            ValueError: It does not fit.
        """
        try:
            self._patience.restore(state["patience"])
            self._inner.restore(state["inner"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of the {self.name} controller: {error!r}") from error
        self._alarms = self._inner.status().alarms
        self._forget()

    def _watch(self) -> None:
        """Compare what is served under the policy in force from now on.

        Which samples reach an exit depends on those before it that answer. So samples are compared
        with those of the last ones that would have reached it now. Where a threshold has risen,
        that is not known of all of them; exits of which too little is known join in again when
        there are enough new samples.
        """
        policy = self._inner.policy
        self._answering = _answering(policy)
        self._watched = tuple(active.exit for active in policy.active)
        confidence = self._seen[list(self._watched)]
        if not self._watched or not confidence.shape[1]:
            self._detector.reset()
            return
        thresholds = np.array([active.threshold for active in policy.active])
        reached_by = first_exit(np.nan_to_num(confidence, nan=-1.0), thresholds)
        reached = reaches(reached_by, range(len(self._watched)))
        missing = np.count_nonzero(reached & np.isnan(confidence), axis=1)
        unknown = missing > _MISSING * np.count_nonzero(reached, axis=1)
        self._is_half_blind, self._blind_for = bool(unknown.any()), BLIND
        self._detector.reset(_only(reached & ~unknown[:, None], confidence))

    def _has_shifted(self, seen: Observations) -> bool:
        """Whether what exits say of those that reach them has changed."""
        if not self._watched:
            return False
        mine = seen.take(seen.policy_version == self._inner.policy.version)
        reached = reaches(mine.answered_at, self._watched)
        return self._detector.add(_only(reached, mine.confidence[list(self._watched)]))

    def _has_alarmed(self) -> bool:
        """Whether the inner one has just given up its evidence."""
        alarms = self._inner.status().alarms
        if alarms == self._alarms:
            return False
        self._alarms, self._left = alarms, self._recovery
        self._forget()
        return True

    def _forget(self) -> None:
        """Compare with what comes now."""
        self._seen = self._seen[:, :0]
        self._watch()


def _answering(policy: ExitPolicy) -> _Answering:
    """The exits that answer."""
    return tuple((a.exit, a.threshold) for a in policy.active if a.threshold < NEVER)


def _only(reached: BoolArray, confidence: Float32Array) -> Float32Array:
    """What exits said of those that reach them, NaN elsewhere (audited samples go further)."""
    return np.where(reached, confidence, np.float32(np.nan))


class _Patience:
    """How long to wait from one notice to the next."""

    def __init__(self) -> None:
        self._wait = FIRST_WAIT
        self._since = FIRST_WAIT
        """Samples since the last notice."""

    def pass_by(self, samples: int) -> None:
        """Count samples."""
        before, self._since = self._since, self._since + samples
        if before // QUIET < self._since // QUIET:
            self._wait = max(self._wait // 2, FIRST_WAIT)

    def allows(self) -> bool:
        """Whether a notice may be given now; if so it is."""
        if self._since < self._wait:
            return False
        self._since, self._wait = 0, self._wait * 2
        return True

    def state(self) -> dict[str, int]:
        return {"wait": self._wait, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        wait, since = int(state["wait"]), int(state["since"])
        if wait < FIRST_WAIT or since < 0:
            raise ValueError(f"state: wait {wait}, since {since} are no counts of samples")
        self._wait, self._since = wait, since
