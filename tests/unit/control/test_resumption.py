"""After a restart, what was learned waits until samples look like those before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.certify.population import Population, feed, policy_of, synthetic, synthetic_costs

from offramp.bundle import ExitPolicy
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Evidence
from offramp.engine.control.shift import ALIKE, ShiftGuard

EPSILON = 0.01
PROMISED = policy_of({0: 0.995, 1: 0.99, 2: 0.99}, version=4, promised=EPSILON)
COMPILED = {a.exit: a.threshold for a in PROMISED.active}


@pytest.fixture(scope="module")
def population() -> Population:
    return synthetic(0, size=50_000)


def controller_of(population: Population, **settings: Any) -> CertifiedController:
    """Return the controller as served, in release mode, so that evidence comes fast."""
    records = population.records(np.random.default_rng(0), tune=2_000, certify=10)
    options = CertifiedSettings(release=True, **settings)
    guard = ShiftGuard(records["confidence"])
    return CertifiedController(PROMISED, synthetic_costs(), records, options, guard=guard)


def answers(policy: ExitPolicy) -> dict[int, float]:
    return {a.exit: a.threshold for a in policy.active if a.threshold <= 1}


def is_beyond(policy: ExitPolicy) -> bool:
    """Return True if samples are answered that the compiled policy does not answer."""
    return any(t < COMPILED.get(e, 2.0) for e, t in answers(policy).items())


@pytest.fixture(scope="module")
def learned(population: Population) -> CertifiedController:
    controller = controller_of(population)
    feed(controller, population, 8_000, rng=np.random.default_rng(1))
    assert is_beyond(controller.policy)
    return controller


@pytest.fixture
def restarted(population: Population, learned: CertifiedController) -> CertifiedController:
    controller = controller_of(population)
    controller.restore(learned.state())
    return controller


def test_compiled_thresholds_hold_until_samples_look_alike(
    population: Population, learned: CertifiedController, restarted: CertifiedController
) -> None:
    assert answers(restarted.policy) == COMPILED
    assert restarted.policy.promise == PROMISED.promise
    assert restarted.policy.version > learned.policy.version
    assert restarted.status().evidence is Evidence.CALIBRATED
    assert restarted.status().state.startswith("as compiled: 0 of 1,024 samples")
    rng = np.random.default_rng(2)
    history = feed(restarted, population, ALIKE, rng=rng)
    assert all(answers(policy) == COMPILED for policy, _ in history)
    assert answers(restarted.policy) == answers(learned.policy)
    assert restarted.policy.version > history[-1][0].version
    assert restarted.status().evidence is Evidence.CERTIFIED
    assert restarted.status().disagreement == learned.status().disagreement
    assert restarted.status().observed == learned.status().observed + ALIKE
    feed(restarted, population, 8_000, rng=rng)
    assert restarted.status().alarms == 0
    assert population.risk(restarted.policy) <= EPSILON


def test_what_was_learned_on_other_samples_is_forgotten(
    population: Population, restarted: CertifiedController
) -> None:
    """One easy sample taught the thresholds, say, and the load is another one now."""
    harder = Population(confidence=population.confidence**3, agrees=population.agrees)
    history = feed(restarted, harder, 640, rng=np.random.default_rng(3))
    assert all(not is_beyond(policy) for policy, _ in history)
    (*_, event) = [e for e in restarted.take_events() if e.kind == "policy"]
    assert "is dropped" in event.text
    assert answers(restarted.policy) == COMPILED
    assert restarted.status().alarms == 0


def test_state_saved_before_resumption_is_the_learned_state(
    population: Population, learned: CertifiedController, restarted: CertifiedController
) -> None:
    feed(restarted, population, ALIKE // 2, rng=np.random.default_rng(4))
    np.testing.assert_equal(restarted.state(), learned.state())


def test_after_an_alarm_the_compiled_thresholds_are_not_trusted(population: Population) -> None:
    """The level in force until samples look alike is certified, and answers no more than they."""
    before, rng = controller_of(population), np.random.default_rng(5)
    before.invalidate("a test")
    feed(before, population, 20_000, rng=rng)
    assert is_beyond(before.policy)
    after = controller_of(population)
    after.restore(before.state())
    assert not is_beyond(after.policy)
    assert after.status().evidence in (Evidence.CERTIFIED, Evidence.CONSERVATIVE)
    assert after.policy.promise is None
    harder = Population(confidence=population.confidence**3, agrees=population.agrees)
    trial = controller_of(population)
    trial.restore(before.state())
    feed(trial, harder, 640, rng=rng)
    assert trial.status().alarms == before.status().alarms + 1
    feed(after, population, ALIKE, rng=rng)
    assert answers(after.policy) == answers(before.policy)


def test_a_restored_policy_without_additional_answers_is_active_immediately(
    population: Population,
) -> None:
    before = controller_of(population)
    before.invalidate("a test")
    after = controller_of(population)
    after.restore(before.state())
    assert answers(after.policy) == {}
    assert after.policy.version == before.policy.version
    assert after.status().evidence is Evidence.CONSERVATIVE


def test_an_alarm_ends_the_comparison(
    population: Population, restarted: CertifiedController
) -> None:
    restarted.invalidate("a test")
    assert answers(restarted.policy) == {}
    history = feed(restarted, population, ALIKE, rng=np.random.default_rng(6))
    assert not any(is_beyond(policy) for policy, _ in history[:8])
    assert restarted.status().alarms == 1


def test_a_state_beyond_compiled_thresholds_is_refused_where_none_may_be(
    population: Population, learned: CertifiedController
) -> None:
    pinned = controller_of(population, never_beyond_compiled=True)
    with pytest.raises(ValueError, match="answer more samples than the compiled policy"):
        pinned.restore(learned.state())


def test_thresholds_may_be_limited_to_the_compiled_ones(population: Population) -> None:
    controller, rng = (
        controller_of(population, never_beyond_compiled=True),
        np.random.default_rng(7),
    )
    history = feed(controller, population, 20_000, rng=rng)
    assert answers(controller.policy) == COMPILED
    controller.invalidate("a test")
    history += feed(controller, population, 30_000, rng=rng)
    assert not any(is_beyond(policy) for policy, _ in history)
    assert answers(controller.policy)
