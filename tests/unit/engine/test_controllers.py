"""What the state of a controller fits: the bundle and what was asked for, not what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offramp.bundle import Bundle
from offramp.engine.control.costs import CostModel
from offramp.engine.controllers import make_controller, ramp_budget
from offramp.engine.options import ModelOptions
from offramp.engine.plan import Mode

BUNDLE = Path(__file__).parents[2] / "golden" / "bundle"


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.RELEASE])
def test_times_of_a_busy_machine_do_not_make_the_state_unfit(mode: Mode) -> None:
    bundle, options = Bundle.open(BUNDLE), ModelOptions()
    profile = bundle.profile()
    busy = replace(
        profile, exits_ms=tuple(tuple(20 * ms for ms in row) for row in profile.exits_ms)
    )
    calm_costs, busy_costs = (
        CostModel.of(bundle.manifest, p, options.max_batch_size) for p in (profile, busy)
    )
    budgets = [ramp_budget(bundle.policy, c, mode, options) for c in (calm_costs, busy_costs)]
    assert (budgets[0] < budgets[1]) == (mode is Mode.AUDIT)
    _, calm_print = make_controller(bundle, profile, mode, options)
    _, busy_print = make_controller(bundle, busy, mode, options)
    assert calm_print == busy_print


def test_another_ramp_budget_is_another_state() -> None:
    bundle = Bundle.open(BUNDLE)
    prints = [
        make_controller(bundle, bundle.profile(), Mode.AUDIT, ModelOptions(ramp_budget=budget))[1]
        for budget in (None, 0.1, 0.2)
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(("bound", "confidence"), [(None, None), (0.05, 0.9)])
def test_what_the_bundle_promises_is_taken_as_it_is(
    bound: float | None, confidence: float | None
) -> None:
    bundle = Bundle.open(BUNDLE)
    promise = bundle.policy.promise
    assert promise is not None
    options = ModelOptions(
        controller="static",
        max_disagreement=bound or promise.max_disagreement,
        confidence=confidence or promise.confidence_level,
    )
    controller, _ = make_controller(bundle, bundle.profile(), Mode.AUDIT, options)
    assert controller.policy == bundle.policy
    stricter = replace(options, max_disagreement=0.9 * promise.max_disagreement)
    again, _ = make_controller(bundle, bundle.profile(), Mode.AUDIT, stricter)
    assert again.policy != bundle.policy
