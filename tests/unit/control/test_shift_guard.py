"""Evidence is given up when inputs change, and gathered in full until it is there again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.facts import facts
from tests.fakes import policy_of

from offramp.bundle import NEVER
from offramp.certify import MODEL_END, UNKNOWN, Observations, reaches
from offramp.engine.control.shift import ALIKE, FIRST_WAIT, KEPT, QUIET, ShiftGuard


class Guarded:
    """A controller that does nothing but what its guard says; answers nothing once invalidated."""

    def __init__(self, calibration: Any, *, guard: ShiftGuard | None = None, **thresholds: float):
        self.policy = policy_of(1, **thresholds)
        self.guard = guard or ShiftGuard(calibration)
        self.guard.watch(self.policy)
        self.needs_evidence = True
        self.reasons: list[str] = []

    @property
    def audit_probability(self) -> float:
        return 1.0 if self.guard.audits_all else 0.02

    def observe(self, seen: Observations) -> None:
        self.guard.count_samples(len(seen))
        if self.guard.has_shifted(seen, self.policy, needs_evidence=self.needs_evidence):
            self.invalidate("inputs")

    def invalidate(self, why: str) -> None:
        self.reasons.append(why)
        self.policy = policy_of(self.policy.version + 1, e0=NEVER, e1=NEVER)
        self.guard.recover(self.policy)


class Stream:
    """Samples of two exits, under any active policy."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def confidences(self, count: int, *, hardness: float = 0.0) -> np.ndarray[Any, Any]:
        values = self.rng.beta([[5 - hardness], [6 - hardness]], 1.5, (2, count))
        return values.astype(np.float32)

    def serve(self, controller: Guarded, count: int, *, hardness: float = 0.0) -> Observations:
        confidence = self.confidences(count, hardness=hardness)
        thresholds = np.array([a.threshold for a in controller.policy.active])
        sure = confidence >= thresholds[:, None]
        answered_at = np.where(sure.any(axis=0), sure.argmax(axis=0), MODEL_END)
        reached = reaches(answered_at, range(2))
        return Observations(
            confidence=np.where(reached, confidence, np.nan).astype(np.float32),
            prediction=np.where(reached, 1, UNKNOWN).astype(np.int32),
            answered_at=answered_at,
            final=np.where(answered_at == MODEL_END, 1, UNKNOWN).astype(np.int32),
            audit_probability=np.full(count, 0.02),
            policy_version=np.full(count, controller.policy.version),
            forced=np.zeros(count, np.bool_),
        )


def watched(**thresholds: float) -> tuple[Guarded, Stream]:
    stream = Stream()
    return Guarded(stream.confidences(4000), **thresholds), stream


def test_inputs_like_those_of_calibration_change_nothing() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    for _ in range(200):
        controller.observe(stream.serve(controller, 50))
    assert controller.reasons == []
    assert controller.audit_probability == 0.02


def test_after_changed_inputs_everything_is_audited() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    while not controller.reasons:
        controller.observe(stream.serve(controller, 50, hardness=2.0))
    assert controller.reasons == ["inputs"]
    assert controller.audit_probability == 1.0
    for _ in range(100):  # the new inputs are what is compared with now
        controller.observe(stream.serve(controller, 50, hardness=2.0))
    assert len(controller.reasons) == 1
    controller.needs_evidence = False
    controller.observe(stream.serve(controller, 50, hardness=2.0))
    assert controller.audit_probability == 0.02


def test_recovery_has_a_limit() -> None:
    stream = Stream()
    calibration = stream.confidences(4000)
    guard = ShiftGuard(calibration, recovery=500)
    controller = Guarded(calibration, guard=guard, e0=0.8, e1=0.8)
    controller.invalidate("risk")  # by the drift alarm, say
    assert controller.audit_probability == 1.0
    for _ in range(9):
        controller.observe(stream.serve(controller, 50))
    assert controller.audit_probability == 1.0
    controller.observe(stream.serve(controller, 50))
    assert controller.audit_probability == 0.02


def test_a_change_of_policy_is_no_change_of_inputs() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    for version, threshold in enumerate((0.75, 0.7, 0.9, 0.5, 0.85), start=2):
        for _ in range(60):
            controller.observe(stream.serve(controller, 50))
        controller.policy = policy_of(version, e0=threshold, e1=0.8)
    for _ in range(60):
        controller.observe(stream.serve(controller, 50))
    assert controller.reasons == []


def test_a_shift_after_a_change_of_policy_is_noticed() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    controller.policy = policy_of(2, e0=0.7, e1=0.8)
    for _ in range(20):
        controller.observe(stream.serve(controller, 50))
    for _ in range(40):
        controller.observe(stream.serve(controller, 50, hardness=2.0))
    assert len(controller.reasons) == 1


def test_a_load_that_never_rests_is_invalidated_ever_more_rarely() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    at = []
    for step in range(600):
        hardness = 2.5 * (step // 20 % 2)  # another load every 1,000 samples
        before = len(controller.reasons)
        controller.observe(stream.serve(controller, 50, hardness=hardness))
        at += [step * 50] * (len(controller.reasons) - before)
    gaps = np.diff(at)
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()
    assert 3 <= len(at) <= 2 + np.log2(30_000 / FIRST_WAIT)


def test_quiet_shortens_the_wait_again() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    while not controller.reasons:
        controller.observe(stream.serve(controller, 50, hardness=2.0))
    for since, wait in ((QUIET - 64, 2 * FIRST_WAIT), (64, FIRST_WAIT)):
        for _ in range(since // 64):
            controller.observe(stream.serve(controller, 64, hardness=2.0))
        assert controller.guard.state()["wait"] == wait


def test_state_is_kept_and_checked() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    controller.observe(stream.serve(controller, 50))
    state = controller.guard.state()
    assert (state["wait"], state["since"]) == (FIRST_WAIT, FIRST_WAIT + 50)
    assert state["recent"].shape == (2, KEPT)
    controller.guard.restore(state)
    with pytest.raises(ValueError, match="'wait' is None"):
        controller.guard.restore({})
    with pytest.raises(ValueError, match=facts("'wait' is 1", "at least 1024")):
        controller.guard.restore({"wait": 1, "since": 0})
    with pytest.raises(ValueError, match="'recent' has shape"):
        controller.guard.restore({**state, "recent": state["recent"][:1]})
    np.testing.assert_equal(controller.guard.state(), state)


def test_after_a_restart_inputs_are_compared_with_those_before() -> None:
    """The load before the restart was another one than calibration; one goes on, one does not."""
    before, stream = watched(e0=0.8, e1=0.8)
    before.guard.recover(before.policy)
    for _ in range(60):
        before.observe(stream.serve(before, 50, hardness=2.0))
    assert before.reasons == []
    for hardness, differs in ((2.0, False), (0.0, True)):
        after, stream = watched(e0=0.8, e1=0.8)
        after.guard.restore(before.guard.state())
        assert after.guard.compare_with_past(after.policy)
        assert not after.guard.matches_previous
        for _ in range(ALIKE // 50 + 1):
            after.observe(stream.serve(after, 50, hardness=hardness))
        assert (after.reasons == ["inputs"]) == differs
        assert after.guard.matches_previous


def test_without_enough_samples_kept_nothing_is_compared() -> None:
    controller, stream = watched(e0=0.8, e1=0.8)
    controller.guard.recover(controller.policy)
    controller.observe(stream.serve(controller, 50))
    assert not controller.guard.compare_with_past(controller.policy)


def test_a_policy_is_watched_by_what_was_seen_before_it() -> None:
    """Calibration data are forgotten, and the inputs shift as soon as the policy changes."""
    controller, stream = watched(e0=0.8, e1=0.8)
    controller.guard.recover(controller.policy)  # after a drift alarm, say
    for _ in range(40):
        controller.observe(stream.serve(controller, 50))
    controller.policy = policy_of(2, e0=0.7, e1=0.8)
    controller.observe(stream.serve(controller, 50))
    for _ in range(40):
        controller.observe(stream.serve(controller, 50, hardness=2.0))
    assert controller.reasons == ["inputs"]
