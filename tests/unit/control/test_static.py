"""The static baselines: thresholds tuned once, and a controller that only counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.control.served import policy_of, serve

from offramp.bundle import ExitPolicy, Promise
from offramp.bundle.schema.policy import NEVER
from offramp.certify import UNKNOWN
from offramp.engine.control.controller import Evidence
from offramp.engine.control.static import StaticController

POLICY = policy_of(3, {0: 0.5, 2: 0.25})
PROMISE = Promise(
    max_disagreement=0.01,
    confidence_level=0.95,
    certify_samples=1000,
    certify_errors=3,
    p_value=0.01,
    predicted_savings=0.5,
)


def observations(policy: ExitPolicy = POLICY) -> Any:
    """Six samples: 0 to 3 leave at exit 0, 4 at exit 2, 5 nowhere; 0 and 4 are wrong."""
    confidence = np.array([[0.9] * 4 + [0.1] * 2, [0.9] * 6, [0.9] * 5 + [0.1]])
    agrees = np.ones((3, 6), dtype=np.bool_)
    agrees[0, 0] = agrees[2, 4] = agrees[1, 1] = False
    return serve(policy, confidence, agrees)


def controller(policy: ExitPolicy = POLICY, **options: Any) -> StaticController:
    return StaticController(policy, max_disagreement=0.01, **options)


def test_it_counts_and_changes_nothing() -> None:
    target = controller()
    assert target.status().disagreement is None
    target.observe(observations())
    target.observe(observations())
    status = target.status()
    assert (status.observed, status.audited, status.disagreed) == (12, 10, 4)
    assert status.disagreement == pytest.approx(4 / 12)
    assert (status.disagreement_upper_bound, status.controller) == (1.0, "static")
    assert (status.alarms, status.tunings, status.adjustments) == (0, 0, 0)
    assert target.policy is POLICY
    assert target.take_job() is None
    assert target.take_events() == []


def test_audits_are_weighted_by_how_rare_they_are() -> None:
    target = controller(audit_probability=0.5)
    assert target.audit_probability == 0.5
    final = observations().final.copy()
    final[[1, 2]] = UNKNOWN  # left for good
    seen = replace(observations(), final=final, audit_probability=np.full(6, 0.5))
    target.observe(seen)
    status = target.status()
    assert (status.observed, status.audited, status.disagreed) == (6, 3, 2)
    assert status.disagreement == pytest.approx(2 * 2 / 6)


def test_forced_answers_and_other_policies_are_outside_of_the_estimate() -> None:
    target = controller()
    target.observe(observations(replace(POLICY, version=2)))
    assert target.status().disagreement is None
    target.observe(replace(observations(), forced=np.arange(6) == 0))
    assert target.status().disagreement == pytest.approx(1 / 5)
    assert target.status().observed == 12


@pytest.mark.parametrize(
    ("policy", "evidence"),
    [
        (POLICY, Evidence.NONE),
        (replace(POLICY, promise=PROMISE), Evidence.CALIBRATED),
        (replace(POLICY, promise=replace(PROMISE, max_disagreement=0.02)), Evidence.NONE),
        (replace(POLICY, promise=replace(PROMISE, confidence_level=0.9)), Evidence.NONE),
        (policy_of(1, {0: NEVER}), Evidence.CONSERVATIVE),
        (policy_of(1, {}), Evidence.CONSERVATIVE),
    ],
)
def test_evidence_is_the_promise_that_the_policy_came_with(
    policy: ExitPolicy, evidence: Evidence
) -> None:
    assert controller(policy).status().evidence is evidence


@pytest.mark.parametrize(
    ("bound", "evidence"), [(0.01, Evidence.SUSPICIOUS), (2 / 6, Evidence.CALIBRATED)]
)
def test_an_estimate_above_the_bound_makes_a_promise_suspicious(
    bound: float, evidence: Evidence
) -> None:
    policy = replace(POLICY, promise=replace(PROMISE, max_disagreement=bound))
    target = StaticController(policy, max_disagreement=bound)
    target.observe(observations(policy))
    assert target.status().disagreement == 2 / 6
    assert target.status().evidence is evidence


def test_a_kept_policy_is_restored_with_its_counts() -> None:
    target = controller()
    target.observe(observations())
    other = controller(policy_of(1, {}))
    other.policy, numbers = other._kept(kept_of(target), ("moves", "raises"), exits=3)
    assert (other.policy, numbers) == (POLICY, [7, 2])
    assert other.status() == target.status()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": -1}, ("'version' is -1", "count")),
        ({"exits": np.array([0, 3])}, ("exit 3", "3 exits")),
        ({"thresholds": np.array([0.5])}, ("argument",)),
        ({"raises": None}, ("'raises' is None", "count")),
        ({"counters": {"observed": 3}}, ("'audited' is None", "count")),
    ],
)
def test_a_kept_policy_that_does_not_fit_is_refused(changed: dict[str, Any], message: Told) -> None:
    target = controller()
    before = target.status()
    with pytest.raises(ValueError, match=facts("no state of the static controller:", *message)):
        target._kept({**kept_of(target), **changed}, ("moves", "raises"), exits=3)
    assert target.status() == before


def kept_of(target: StaticController) -> dict[str, Any]:
    """Return the saved state of a controller with two counts of its own."""
    own = {"moves": 7, "raises": 2, "counters": target._counters.state()}
    return target._kept_policy() | own


def test_it_keeps_no_state() -> None:
    target = controller()
    assert target.state() is None
    with pytest.raises(ValueError, match=r"keeps no state; got one with \['version'\]"):
        target.restore({"version": 1})


@pytest.mark.parametrize("probability", [0.0, 1.5, np.nan])
def test_an_audit_probability_outside_0_to_1_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="audit_probability must be in"):
        controller(audit_probability=probability)
