"""Evidence is given up when inputs change, and gathered in full until it is there again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes import ScriptedController, policy_of

from offramp.bundle import NEVER
from offramp.certify.decision import MODEL_END, reaches
from offramp.certify.observations import UNKNOWN, Observations
from offramp.engine.control.controller import ControlStatus
from offramp.engine.control.shift_guard import FIRST_WAIT, QUIET, WatchfulController


class Doubted(ScriptedController):
    """Notes what it is told; answers nothing once doubted."""

    def __init__(self, **thresholds: float) -> None:
        super().__init__(policy_of(1, **thresholds), audit_probability=0.02)
        self.alarms = 0
        self.wants_evidence = True
        self.reasons: list[str] = []

    def invalidate(self, why: str) -> None:
        self.reasons.append(why)
        self.alarms += 1
        self.policy = policy_of(self.policy.version + 1, e0=NEVER, e1=NEVER)

    def consider(self, active: Sequence[int]) -> bool:
        return False

    def status(self) -> ControlStatus:
        return replace(super().status(), alarms=self.alarms)


class Stream:
    """Samples of two exits, under whatever policy is in force."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def confidences(self, count: int, *, hardness: float = 0.0) -> np.ndarray[Any, Any]:
        values = self.rng.beta([[5 - hardness], [6 - hardness]], 1.5, (2, count))
        return values.astype(np.float32)

    def serve(self, controller: Doubted, count: int, *, hardness: float = 0.0) -> Observations:
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


def watched(**thresholds: float) -> tuple[Doubted, WatchfulController, Stream]:
    inner, stream = Doubted(**thresholds), Stream()
    return inner, WatchfulController(inner, stream.confidences(4000)), stream


def test_inputs_like_those_of_calibration_change_nothing() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    for _ in range(200):
        controller.observe(stream.serve(inner, 50))
    assert inner.reasons == []
    assert controller.audit_probability == 0.02
    assert len(inner.seen) == 200


def test_changed_inputs_are_doubted_and_audited_in_full() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    while not inner.reasons:
        controller.observe(stream.serve(inner, 50, hardness=2.0))
    assert inner.reasons == ["inputs are not what they were"]
    assert controller.audit_probability == 1.0
    assert controller.status().audit_probability == 1.0
    for _ in range(100):  # the new inputs are what is compared with now
        controller.observe(stream.serve(inner, 50, hardness=2.0))
    assert len(inner.reasons) == 1
    inner.wants_evidence = False
    controller.observe(stream.serve(inner, 50, hardness=2.0))
    assert controller.audit_probability == 0.02


def test_recovery_has_a_limit() -> None:
    inner, stream = Doubted(e0=0.8, e1=0.8), Stream()
    controller = WatchfulController(inner, stream.confidences(4000), recovery=500)
    inner.alarms = 1  # of the drift alarm, say
    controller.observe(stream.serve(inner, 50))
    assert controller.audit_probability == 1.0
    for _ in range(9):
        controller.observe(stream.serve(inner, 50))
    assert controller.audit_probability == 1.0
    controller.observe(stream.serve(inner, 50))
    assert controller.audit_probability == 0.02


def test_a_change_of_policy_is_no_change_of_inputs() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    for version, threshold in enumerate((0.75, 0.7, 0.9, 0.5, 0.85), start=2):
        for _ in range(60):
            controller.observe(stream.serve(inner, 50))
        inner.policy = policy_of(version, e0=threshold, e1=0.8)
    for _ in range(60):
        controller.observe(stream.serve(inner, 50))
    assert inner.reasons == []


def test_a_shift_after_a_change_of_policy_is_noticed() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    inner.policy = policy_of(2, e0=0.7, e1=0.8)
    for _ in range(20):
        controller.observe(stream.serve(inner, 50))
    for _ in range(40):
        controller.observe(stream.serve(inner, 50, hardness=2.0))
    assert len(inner.reasons) == 1


def test_a_load_that_never_rests_is_doubted_ever_more_rarely() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    at = []
    for step in range(600):
        hardness = 2.5 * (step // 20 % 2)  # another load every 1,000 samples
        before = len(inner.reasons)
        controller.observe(stream.serve(inner, 50, hardness=hardness))
        at += [step * 50] * (len(inner.reasons) - before)
    gaps = np.diff(at)
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()
    assert 3 <= len(at) <= 2 + np.log2(30_000 / FIRST_WAIT)


def test_quiet_shortens_the_wait_again() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    inner.kept = {}
    while not inner.reasons:
        controller.observe(stream.serve(inner, 50, hardness=2.0))
    for since, wait in ((QUIET - 64, 2 * FIRST_WAIT), (64, FIRST_WAIT)):
        for _ in range(since // 64):
            controller.observe(stream.serve(inner, 64, hardness=2.0))
        state = controller.state()
        assert state is not None
        assert state["patience"]["wait"] == wait


def test_state_is_kept_and_checked() -> None:
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    assert controller.state() is None
    inner.kept = {"policy": 1}
    controller.observe(stream.serve(inner, 50))
    state = controller.state()
    assert state == {
        "inner": {"policy": 1},
        "patience": {"wait": FIRST_WAIT, "since": FIRST_WAIT + 50},
    }
    controller.restore(state)
    with pytest.raises(ValueError, match="no state of the scripted controller"):
        controller.restore({})
    with pytest.raises(ValueError, match="are no counts of samples"):
        controller.restore({"inner": {}, "patience": {"wait": 1, "since": 0}})
    with pytest.raises(ValueError, match="no policy in it"):
        controller.restore({"inner": {}, "patience": state["patience"]})


def test_a_policy_is_watched_by_what_was_seen_before_it() -> None:
    """Calibration data are forgotten, and the inputs shift as soon as the policy changes."""
    inner, controller, stream = watched(e0=0.8, e1=0.8)
    inner.alarms = 1  # of the drift alarm, say
    for _ in range(40):
        controller.observe(stream.serve(inner, 50))
    inner.policy = policy_of(2, e0=0.7, e1=0.8)
    controller.observe(stream.serve(inner, 50))
    for _ in range(40):
        controller.observe(stream.serve(inner, 50, hardness=2.0))
    assert inner.reasons == ["inputs are not what they were"]
