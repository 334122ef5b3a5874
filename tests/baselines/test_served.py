"""Published controllers as a server creates them: their initial state and inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import facts

from offramp.baselines.apparate import ApparateController, evenly_spaced
from offramp.baselines.pame import PERIOD, PameController
from offramp.bundle import NEVER, Bundle
from offramp.engine.common.errors import OptionsError
from offramp.engine.control.controller import Controller
from offramp.engine.control.costs import CostModel
from offramp.engine.models.controllers import STATIC_AUDIT_PROBABILITY, make_controller
from offramp.engine.models.options import ModelOptions
from offramp.engine.stages.plan import Mode

BUNDLE = Bundle.open(Path(__file__).parents[1] / "golden" / "bundle")
PROFILE = replace(
    BUNDLE.profile(),
    stages_ms=tuple((0.0,) * len(row) for row in BUNDLE.profile().stages_ms),
    exits_ms=tuple(
        tuple(0.015 * source for source in BUNDLE.profile().source_ms)
        for _ in BUNDLE.profile().exits_ms
    ),
)
"""Each exit costs 1.5 % of the model."""


def made(name: str, mode: Mode, **options: Any) -> tuple[Controller, str]:
    """A controller, and the ramp budget that its state is kept under."""
    wanted = ModelOptions(controller=name, **options)
    controller, fingerprint = make_controller(BUNDLE, PROFILE, mode, wanted)
    return controller, fingerprint["ramp_budget"]


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.RELEASE])
@pytest.mark.parametrize(("asked", "budget"), [(None, 0.02), (0.04, 0.04), (1.0, 1.0)])
def test_apparate_starts_as_published_in_every_mode(
    mode: Mode, asked: float | None, budget: float
) -> None:
    controller, kept_under = made("apparate", mode, ramp_budget=asked)
    assert isinstance(controller, ApparateController)
    costs = CostModel.of(BUNDLE.manifest, PROFILE, 32)
    spaced = evenly_spaced(costs, budget)
    assert len(spaced) == min(int(budget / 0.015 + 1e-6), costs.exits) > 0
    assert {a.exit: a.threshold for a in controller.policy.active} == dict.fromkeys(spaced, NEVER)
    assert controller.policy.version == BUNDLE.policy.version + 1
    assert controller.audit_probability == 1.0
    assert controller.status().state == "shadow mode"
    assert kept_under == repr(budget)


def test_pame_starts_with_the_policy_of_the_bundle() -> None:
    controller, kept_under = made("pame", Mode.AUDIT)
    assert isinstance(controller, PameController)
    assert controller.policy == BUNDLE.policy
    assert controller.audit_probability == STATIC_AUDIT_PROBABILITY
    assert kept_under == "0.1"
    assert made("pame", Mode.RELEASE)[0].audit_probability == 1.0


@pytest.mark.parametrize(
    ("mode", "batch", "period"),
    [(Mode.RELEASE, 32, PERIOD), (Mode.AUDIT, 32, 20 * PERIOD), (Mode.RELEASE, 2048, 2048)],
)
def test_a_period_of_pame_has_as_many_audited_samples_in_every_mode(
    mode: Mode, batch: int, period: int
) -> None:
    controller, _ = made("pame", mode, max_batch_size=batch)
    assert isinstance(controller, PameController)
    assert controller.settings.period == period
    assert controller.settings.batch_size == batch


@pytest.mark.parametrize("name", ["apparate", "pame"])
def test_what_is_promised_for_each_class_is_refused(name: str) -> None:
    assert BUNDLE.policy.promise is not None
    promise = replace(BUNDLE.policy.promise, max_class_disagreement=0.05)
    served = replace(BUNDLE, policy=replace(BUNDLE.policy, promise=promise))
    with pytest.raises(OptionsError, match=facts(name, "choose certified")):
        make_controller(served, PROFILE, Mode.AUDIT, ModelOptions(controller=name))
