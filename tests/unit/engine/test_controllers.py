"""A controller's state depends on the bundle and its options, not on measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import facts

from offramp.bundle import Bundle
from offramp.bundle.engine_index import addressed, model_digest
from offramp.bundle.engines import PrecisionEvidence
from offramp.bundle.schema.compilation import BatchEffect
from offramp.certify.binomial import both_hold
from offramp.engine.common.errors import OptionsError
from offramp.engine.control.costs import CostModel
from offramp.engine.models.controllers import left_for_exits, make_controller, ramp_budget
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.whole_promise import end_evidence, whole_policy, whole_status
from offramp.engine.stages.plan import Mode

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
    all_run_on = mode is Mode.RELEASE
    budgets = [
        ramp_budget(bundle.policy, c, options, all_run_on=all_run_on)
        for c in (calm_costs, busy_costs)
    ]
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


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (ModelOptions(ramp_budget=0.0), True),
        (ModelOptions(ramp_budget=9.0), False),
        (ModelOptions(ramp_budget=9.0, max_disagreement=1e-4), False),  # that certifies no exit
    ],
)
def test_exits_beyond_the_ramp_budget_are_warned_of(
    options: ModelOptions, caplog: pytest.LogCaptureFixture, *, warned: bool
) -> None:
    bundle = Bundle.open(BUNDLE)
    make_controller(bundle, bundle.profile(), Mode.RELEASE, options)
    assert ("a larger --ramp-budget lets more exits answer" in caplog.text) == warned


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ModelOptions(), ""),
        (ModelOptions(max_disagreement=1e-4), "no exit answers until served samples certify it: "),
        (ModelOptions(max_disagreement=1e-4, controller="static"), "no exit answers: "),
        (ModelOptions(max_disagreement=1e-4, never_beyond_compiled=True), "no exit answers: "),
    ],
)
def test_a_constraint_that_certifies_no_exit_is_warned_of(
    options: ModelOptions, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = Bundle.open(BUNDLE)
    controller, _ = make_controller(bundle, bundle.profile(), Mode.AUDIT, options)
    assert (controller.policy.promise is None) == bool(said)
    assert ("no exit answers" in caplog.text) == bool(said)
    assert said in caplog.text


def test_what_was_learned_beyond_compiled_thresholds_is_another_state() -> None:
    bundle = Bundle.open(BUNDLE)
    prints = [
        make_controller(bundle, bundle.profile(), Mode.AUDIT, options)[1]
        for options in (ModelOptions(), ModelOptions(never_beyond_compiled=True))
    ]
    assert prints[0] != prints[1]


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


def in_fp16(bundle: Bundle, end_differs: int) -> Bundle:
    """Return the bundle for engines whose final answers differ for some samples."""
    records = bundle.read("records.npz")
    promise = bundle.policy.promise
    assert promise is not None
    evidence = PrecisionEvidence(
        model=model_digest(bundle.manifest),
        policy=bundle.policy,
        records=addressed("records", records, ".npz"),
        samples=10_000,
        end_differs=end_differs,
        max_disagreement=0.05,
        confidence_level=promise.confidence_level,
    )
    return bundle.under(evidence, records)


def test_exits_get_what_the_end_leaves_of_constraint_and_risk() -> None:
    plain = Bundle.open(BUNDLE)
    assert left_for_exits(plain, ModelOptions(max_disagreement=0.03, confidence=0.9)) == (0.03, 0.9)
    served = in_fp16(plain, end_differs=20)
    assert served.evidence is not None
    for allowed, confidence in ((None, 0.95), (0.03, 0.9)):
        options = ModelOptions(max_disagreement=allowed, confidence=confidence)
        left, level = left_for_exits(served, options)
        assert left == pytest.approx((allowed or 0.05) - served.evidence.spent(confidence))
        assert level == pytest.approx(1 - (1 - confidence) / 2)
        controller, _ = make_controller(served, served.profile(), Mode.AUDIT, options)
        assert controller.status().max_disagreement == pytest.approx(left)


def test_a_constraint_that_the_end_spends_alone_is_refused() -> None:
    served = in_fp16(Bundle.open(BUNDLE), end_differs=20)
    with pytest.raises(OptionsError, match=facts("0.20% at 0.95", "raise --max-disagreement")):
        left_for_exits(served, ModelOptions(max_disagreement=0.002))


def test_what_is_said_is_about_the_float32_model() -> None:
    served = in_fp16(Bundle.open(BUNDLE), end_differs=20)
    options = ModelOptions(max_disagreement=0.03, confidence=0.9)
    controller, _ = make_controller(served, served.profile(), Mode.AUDIT, options)
    plain, said = controller.status(), whole_status(controller.status(), served.evidence)
    assert (said.max_disagreement, said.confidence_level) == pytest.approx((0.03, 0.9))
    assert said.disagreement_upper_bound >= plain.disagreement_upper_bound
    seen = replace(plain, disagreement=0.004, disagreement_upper_bound=0.01)
    said = whole_status(seen, served.evidence)
    assert said.disagreement == pytest.approx(0.004 + 0.002)
    assert served.evidence is not None
    assert said.disagreement_upper_bound == pytest.approx(0.01 + served.evidence.spent(0.9))
    assert whole_status(plain, None) is plain

    promise, whole = controller.policy.promise, whole_policy(controller.policy, served.evidence)
    assert promise is not None
    assert whole.promise is not None
    level = both_hold(promise.confidence_level)
    assert whole.promise.confidence_level == level
    spent = served.evidence.spent(level)
    assert whole.promise.max_disagreement == pytest.approx(promise.max_disagreement + spent)
    assert whole.active == controller.policy.active
    assert whole_policy(controller.policy, None) is controller.policy


def test_what_batches_change_is_taken_from_constraint_and_risk() -> None:
    plain = Bundle.open(BUNDLE)
    effect = BatchEffect(
        operators=("round",),
        batch_sizes=(1, 7, 64),
        samples=10_000,
        end_differs=20,
        max_disagreement=0.05,
        confidence_level=0.95,
    )
    served = replace(plain, manifest=replace(plain.manifest, batch_effect=effect))
    assert end_evidence(served) is effect
    left, level = left_for_exits(served, ModelOptions())
    assert (left, level) == (effect.left(), pytest.approx(0.975))
    with pytest.raises(OptionsError, match=facts("other batches", "0.3")):
        left_for_exits(served, ModelOptions(max_disagreement=0.002))
