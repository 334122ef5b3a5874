"""Suspicion: equals a plain loop, moves audits instead of adding them, and finds drift sooner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.certify.population import (
    Population,
    feed,
    policy_of,
    synthetic,
    synthetic_costs,
)

from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Evidence
from offramp.engine.control.drift import DriftAlarm, Suspicion

EPSILON = 0.01
KAPPA = 1.25 * EPSILON


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    risk=st.floats(0.0, 0.2),
    qs=st.lists(st.sampled_from([1.0, 0.3, 0.02]), min_size=1, max_size=4),
)
def test_equals_the_recursion_sample_by_sample(seed: int, risk: float, qs: list[float]) -> None:
    rng = np.random.default_rng(seed)
    suspicion, excess, disagreed, audits = Suspicion(EPSILON), 0.0, 0, 0.0
    for _ in range(4):
        q = np.repeat(qs, rng.integers(1, 60, size=len(qs)))
        loss = (rng.random(len(q)) < risk * q) / q
        for x, p in zip(loss, q, strict=True):
            excess = excess + p * x - KAPPA * p
            disagreed, audits = disagreed + (x > 0), audits + p
            if excess <= 0:
                excess, disagreed, audits = 0.0, 0, 0.0
        suspicion.observe(loss, q)
        assert suspicion.excess == pytest.approx(excess, abs=1e-9)
        assert (suspicion.disagreed, suspicion.audits) == (disagreed, pytest.approx(audits))


def test_one_disagreement_has_some_80_samples_audited_and_more_have_more() -> None:
    suspicion = Suspicion(EPSILON)
    assert suspicion.audit_probability(0.0156) == 2**-7.25  # of 2**-6; the rest is for later
    suspicion.count_samples(1)
    suspicion.observe(np.array([1 / 0.0078]), np.array([0.0078]))
    assert suspicion.raised
    assert suspicion.describe() == "suspicious: 1 of 1 audited samples disagreed"
    followed = 0
    while suspicion.raised:
        assert suspicion.audit_probability(0.0156) == 1.0
        suspicion.count_samples(1)
        suspicion.observe(np.zeros(1), np.ones(1))
        followed += 1
    assert followed == 80
    assert suspicion.audit_probability(0.0156) == 2**-7.25


def test_where_many_samples_come_at_once_a_share_of_them_is_enough() -> None:
    suspicion = Suspicion(EPSILON)
    loss = np.zeros(640)
    loss[-1] = 1 / 0.0078
    for part in (slice(0, 600), slice(600, 640)):  # one look reads several times
        suspicion.count_samples(len(loss[part]))
        suspicion.observe(loss[part], np.full(len(loss[part]), 0.0078))
    assert suspicion.audit_probability(0.0156) == 2**-3
    assert suspicion.audit_probability(0.0156) == 2**-3
    suspicion.count_samples(20)
    assert suspicion.audit_probability(0.0156) == 2**-2  # one small look does not say much
    suspicion.count_samples(640)
    assert suspicion.audit_probability(0.0156) == 2**-3


def test_nothing_observed_changes_nothing() -> None:
    suspicion = Suspicion(EPSILON)
    suspicion.observe(np.empty(0), np.empty(0))
    assert not suspicion.raised


def quiet(
    risk: float,
    *,
    answers: int,
    looks: tuple[tuple[int, ...], ...] = ((100,),),
    budgeted: float = 2**-6,
    least: float = 0.0,
    seed: int = 0,
) -> tuple[float, Suspicion]:
    """The audits a sample of a stream without drift; looks, over and over, with these reads."""
    rng, suspicion = np.random.default_rng(seed), Suspicion(EPSILON, least=least)
    served, audits = 0, 0.0
    while served < answers:
        for reads in looks:
            probability = suspicion.audit_probability(budgeted)
            assert probability >= least
            for read in reads:
                q = np.full(read, probability)
                loss = (rng.random(read) < risk * q) / q
                suspicion.count_samples(read)
                suspicion.observe(loss, q)
                suspicion.account(q, budgeted)
                served, audits = served + read, audits + q.sum()
    return audits / served, suspicion


@pytest.mark.parametrize("risk", [0.0, 0.002, 0.005, 0.007])
def test_audits_are_moved_and_not_added(risk: float) -> None:
    """Within a tenth, over half a million answers; a controller without suspicion makes 2⁻⁶."""
    audits, suspicion = quiet(risk, answers=500_000)
    assert audits <= 2**-6 * 1.1
    assert suspicion.share == pytest.approx(max(1 - risk / KAPPA, 0.3), abs=0.15)


@pytest.mark.parametrize("risk", [0.005, 0.007])
@pytest.mark.parametrize("looks", [((980, 20),), ((980,), (20,))], ids=["reads", "looks"])
def test_a_small_read_after_a_large_one_does_not_have_all_that_follows_audited(
    risk: float, looks: tuple[tuple[int, ...], ...]
) -> None:
    audits, _ = quiet(risk, answers=1_000_000, looks=looks)
    assert audits <= 2**-6 * 1.1


def test_audits_are_not_more_at_first_either() -> None:
    """Over the first 100,000 answers of 10 streams each."""
    audits = [
        quiet(risk, answers=100_000, looks=((200,),), seed=seed)[0]
        for risk in (0.005, 0.007)
        for seed in range(10)
    ]
    assert np.mean(audits) <= 2**-6 * 1.05


@pytest.mark.parametrize("risk", [0.0, 0.011])
def test_audits_never_get_rarer_than_the_least(risk: float) -> None:
    _, suspicion = quiet(risk, answers=20_000, budgeted=0.01, least=0.005)
    assert suspicion.audit_probability(0.01) >= 0.005


def test_the_settings_have_least_audits_that_the_controller_never_goes_below(
    population: Population,
) -> None:
    settings = CertifiedSettings(audit_budget=0.001)
    controller = controller_of(population, settings=settings)
    assert controller._active.audit_probability == settings.least_budgeted
    controller._suspicion.share = 0.1
    assert controller.audit_probability == settings.least_audit
    with pytest.raises(ValueError, match=r"least_audit is 0\.02, .* least_budgeted, 0\.01"):
        CertifiedSettings(least_audit=0.02)


def test_there_are_always_audits_at_other_times() -> None:
    _, suspicion = quiet(0.011, answers=200_000)
    assert suspicion.share == 0.3


@pytest.mark.parametrize("rising", [True, False])
def test_false_alarms_are_as_rare_as_promised_when_audits_rise(rising: bool) -> None:
    """With a = 1/1,000 and a risk of exactly ε, 50 streams of 1,000 audits ring at most about 50
    times; the alarm does not know that audits follow disagreements, and need not.
    """
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(50):
        alarm, suspicion, audits = DriftAlarm(EPSILON, rate=1e-3), Suspicion(EPSILON), 0.0
        while audits < 1_000:
            q = np.full(100, suspicion.audit_probability(0.05) if rising else 0.05)
            loss = (rng.random(100) < EPSILON * q) / q
            if alarm.add(loss, q) is not None:
                alarms += 1
                break
            suspicion.count_samples(100)
            suspicion.observe(loss, q)
            suspicion.account(q, 0.05)
            audits += q.sum()
    assert 1 <= alarms <= 50


PROMISED = policy_of({0: 0.96, 1: 0.96, 2: 0.94}, promised=EPSILON)


@pytest.fixture(scope="module")
def population() -> Population:
    return synthetic(0, size=40_000)


def worse(population: Population, added: float) -> Population:
    """The same inputs, with exits wrong on so many more."""
    luck = np.random.default_rng(9).random(population.size)
    return Population(
        confidence=population.confidence, agrees=population.agrees & (luck >= 1.1 * added)
    )


def served_until_alarm(population: Population, *, rising: bool, seed: int) -> int:
    controller = controller_of(population, rising=rising)
    rng = np.random.default_rng([seed, 3])
    feed(controller, population, 5_000, rng=rng, chunk=100)
    drifted, alarms = worse(population, 0.05), controller.status().alarms
    for served in range(100, 12_001, 100):
        feed(controller, drifted, 100, rng=rng, chunk=100)
        if controller.status().alarms > alarms:
            return served
    return 10**9


def controller_of(
    population: Population, *, rising: bool = True, settings: CertifiedSettings | None = None
) -> CertifiedController:
    records = population.records(np.random.default_rng(0), tune=2_000, certify=10)
    settings = settings or CertifiedSettings(raise_audits=rising, audit_budget=0.05)
    return CertifiedController(PROMISED, synthetic_costs(), records, settings)


def test_drift_is_found_much_sooner(population: Population) -> None:
    """5 % more disagreement, with inputs that look the same: 2,000 answers in the median."""
    rising = [served_until_alarm(population, rising=True, seed=seed) for seed in range(9)]
    assert np.median(rising) <= 2_500
    constant = [served_until_alarm(population, rising=False, seed=seed) for seed in range(3)]
    assert np.median(constant) > 4 * np.median(rising)


@pytest.mark.parametrize("rising", [True, False])
def test_no_status_says_that_all_is_well_above_the_constraint(
    population: Population, rising: bool
) -> None:
    controller = controller_of(population, rising=rising)
    seen = set()
    for _, status in feed(
        controller, worse(population, 0.01), 20_000, rng=np.random.default_rng(5), chunk=100
    ):
        if status.disagreement is None or status.disagreement <= EPSILON:
            continue
        seen.add(status.evidence)
        if status.evidence is not Evidence.CONSERVATIVE:
            assert status.evidence is Evidence.SUSPICIOUS
            assert status.state.startswith("suspicious: ")
    assert Evidence.SUSPICIOUS in seen


def test_serious_suspicion_is_in_the_log_and_says_how_much_is_audited(
    population: Population,
) -> None:
    controller = controller_of(population)
    rng = np.random.default_rng(6)
    while controller.status().evidence is not Evidence.SUSPICIOUS:
        feed(controller, worse(population, 0.05), 100, rng=rng, chunk=100)
    while not controller._suspicion.serious:
        feed(controller, worse(population, 0.05), 100, rng=rng, chunk=100)
    (event,) = [e for e in controller.take_events() if e.kind == "suspicion"]
    assert event.warning
    assert event.text.startswith("suspicious: ")
    status = controller.status()
    assert status.state.endswith("audited samples disagreed; auditing more")
    assert status.audit_probability > 0.5
    controller.invalidate("the weather changed")
    assert not controller._suspicion.raised


def test_a_restart_whitewashes_nothing(population: Population) -> None:
    controller, rng = controller_of(population), np.random.default_rng(6)
    while not controller._suspicion.serious:
        feed(controller, worse(population, 0.05), 100, rng=rng, chunk=100)
    after = controller_of(population)
    after.restore(controller.state())
    assert after.status().evidence is Evidence.SUSPICIOUS
    assert after.status().state == controller.status().state
    assert after.status().disagreement == controller.status().disagreement
    assert after._suspicion.state() == controller._suspicion.state()


@pytest.mark.parametrize(
    "wrong",
    [
        {"excess": 3.0},
        {"excess": -1.0},
        {"disagreed": 1.5},
        {"usual": float("inf")},
        {"audits": ""},
    ],
)
def test_a_suspicion_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    suspicion = Suspicion(EPSILON)
    suspicion.observe(np.full(2, 2.0), np.full(2, 0.5))
    before = suspicion.state()
    assert before["excess"] == 2 - KAPPA
    with pytest.raises(ValueError, match=f"state: '{next(iter(wrong))}'"):
        suspicion.restore({**before, **wrong})
    assert suspicion.state() == before
