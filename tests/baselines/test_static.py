"""Thresholds tuned once, as Apparate compares with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.certify.problems import realistic
from tests.unit.control.served import policy_of

from offramp.baselines.thresholds import always_active, tune_separate, tune_shared
from offramp.bundle.schema.policy import NEVER
from offramp.certify import Records, evaluate


def records(seed: int = 0, exits: int = 4, samples: int = 300) -> Records:
    return Records.of(*realistic(seed, exits, samples))


def data(of: Records) -> tuple[Any, Any, Any]:
    return of.confidence, of.agrees, of.latency_ms


@pytest.mark.parametrize("seed", range(4))
def test_the_shared_threshold_is_the_best_of_all(seed: int) -> None:
    given = records(seed)
    tuned = tune_shared(given, 0.02)
    assert len(set(tuned.thresholds.tolist())) == 1
    tries = [evaluate(*data(given), np.full(4, c)) for c in np.unique(given.confidence)]
    assert tuned.savings == max(t.savings for t in tries if t.disagreement <= 0.02)


@pytest.mark.parametrize("seed", range(4))
def test_separate_thresholds_save_at_least_as_much(seed: int) -> None:
    given = records(seed)
    tuned = tune_separate(given, 0.02)
    assert tuned.savings > tune_shared(given, 0.02).savings
    found = evaluate(*data(given), tuned.thresholds)
    assert found.savings == tuned.savings
    assert found.disagreement <= 0.02


def test_separate_thresholds_of_two_exits_are_those_of_the_grid_search() -> None:
    given = records(5, exits=2, samples=40)
    levels = [np.append(np.unique(row), NEVER) for row in given.confidence]
    tries = [evaluate(*data(given), np.array([a, b])) for a in levels[0] for b in levels[1]]
    best = max(t.savings for t in tries if t.disagreement <= 0.05)
    assert tune_separate(given, 0.05).savings == pytest.approx(best, abs=1e-12)  # summation


def test_every_exit_is_in_use_whatever_its_threshold() -> None:
    policy = always_active(np.array([0.5, NEVER, 0.25]))
    assert policy == policy_of(1, {0: 0.5, 1: NEVER, 2: 0.25})
