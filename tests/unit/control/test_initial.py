"""A policy that is certified again, on data that had a say in its exits, keeps its promise."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.unit.certify.population import Population, synthetic_costs

from offramp.bundle import ExitPolicy
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.selection import certified_policy
from offramp.certify import tuning_path
from offramp.certify.binomial import binomial_cdf
from offramp.engine.control.initial import certified_on

EXITS, EPSILON = 6, 0.05
CONFIDENCE = 0.8
"""Low, so that few streams show what is wrong."""
COSTS = synthetic_costs(EXITS)
TRIALS = 60


@cache
def population() -> Population:
    """Exits that err independently of each other; the deeper ones are sure at earlier levels."""
    rng = np.random.default_rng(0)
    confidence, agrees = [], []
    for _ in range(EXITS):
        sure = 1 / (1 + np.exp(-rng.normal(3.3, 1.2, 20_000)))
        confidence.append(sure)
        agrees.append(rng.random(20_000) < sure)
    return Population(confidence=np.array(confidence, np.float32), agrees=np.array(agrees))


def records_of(rng: np.random.Generator) -> dict[str, Any]:
    return population().records(rng, tune=400, certify=1_000)


def false_certificates() -> float:
    """Return the rate of wrong certificates for any of the nested sets of exits.

    A controller that reads the certify split before it names the bundle's exits can cause this.
    """
    wrong = 0
    for trial in range(TRIALS):
        records = records_of(np.random.default_rng([1, trial]))
        for first in range(EXITS):
            exits = tuple(range(first, EXITS))
            found = again(exits, records)
            if found.promise is not None and population().risk(found) > EPSILON:
                wrong += 1
                break
    return wrong / TRIALS


def again(exits: tuple[int, ...], records: dict[str, Any]) -> ExitPolicy:
    return certified_on(
        exits,
        COSTS,
        records,
        max_disagreement=EPSILON,
        confidence_level=CONFIDENCE,
    )


@pytest.mark.slow
def test_false_certificates_are_as_rare_as_promised_whichever_exits_were_chosen() -> None:
    """The limit is 20 %, plus 3 standard errors of 60 trials; the bundle's promise had 95 %."""
    assert false_certificates() <= 0.2 + 3 * np.sqrt(0.2 * 0.8 / TRIALS)


@pytest.mark.slow
def test_as_many_tests_at_the_full_share_would_be_wrong_too_often() -> None:
    """So δ is shared: with one test per set, and exits chosen afterwards, the rate is far above 20
    %.
    """
    records = [records_of(np.random.default_rng([1, trial])) for trial in range(TRIALS)]
    wrong = 0
    for record in records:
        wrong += any(
            (found := walked(record, tuple(range(first, EXITS)))).active
            and population().risk(found) > EPSILON
            for first in range(EXITS)
        )
    assert wrong / TRIALS > 0.2 + 3 * np.sqrt(0.2 * 0.8 / TRIALS)


def walked(records: dict[str, Any], exits: tuple[int, ...]) -> ExitPolicy:
    """Return the policy certified as by the compiler: one path, at the full δ."""
    rows, split = list(exits), records["split"]
    agrees = records["prediction"] == records["final_prediction"]
    tune, certify = split == TUNE, split == CERTIFY
    path = tuning_path(records["confidence"][rows][:, tune], agrees[rows][:, tune])
    return certified_policy(
        exits,
        path,
        records["confidence"][:, certify],
        agrees[:, certify],
        COSTS,
        max_disagreement=EPSILON,
        confidence_level=CONFIDENCE,
    )


@pytest.mark.parametrize(("bound", "confidence"), [(EPSILON, CONFIDENCE), (0.9 * EPSILON, 0.9)])
def test_past_where_an_abrupt_exit_stopped_the_walk_a_certificate_is_at_a_share(
    bound: float, confidence: float
) -> None:
    """All exits of the bundle are kept, with no laxer thresholds: without the exit that is suddenly
    wrong, and not in the bundle, the same samples let the walk go on.
    """
    records = with_abrupt_exit(records_of(np.random.default_rng(4)))
    bundled = walked(records, tuple(range(EXITS)))
    exits = tuple(active.exit for active in bundled.active)
    assert exits == tuple(range(1, EXITS))
    limits = {"max_disagreement": bound, "confidence_level": confidence}
    found = certified_on(exits, COSTS, records, **limits)
    assert found.promise is not None
    pairs = list(zip(found.active, bundled.active, strict=True))
    assert any(new.threshold < old.threshold for new, old in pairs)
    once = binomial_cdf(found.promise.certify_errors, found.promise.certify_samples, bound)
    assert EXITS * once <= 1 - confidence
    assert found.promise.p_value == pytest.approx(EXITS * once)


def with_abrupt_exit(records: dict[str, Any]) -> dict[str, Any]:
    """The same, but the first exit is equally sure of everything, and often wrong on what it was
    not tuned on: where it begins to answer, it answers everything."""
    tune = records["split"] == TUNE
    records["confidence"][0] = 1.0
    rng = np.random.default_rng(3)
    wrong = rng.random(len(tune)) < np.where(tune, 0.05, 0.5)
    records["prediction"][0] = np.where(wrong, 2, 1)
    return records
