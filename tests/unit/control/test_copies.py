"""A client that repeats one sample teaches the controller nothing about the others."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.certify.population import Population, feed, policy_of, synthetic, synthetic_costs

from offramp.certify import MODEL_END
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.evidence_window import EvidenceWindow
from offramp.engine.control.shift import ShiftGuard

EPSILON = 0.01
PROMISED = policy_of({0: 0.99, 1: 0.98, 2: 0.98}, promised=EPSILON)
COPIES = 0.9
"""Share of the load that is one sample."""


@pytest.fixture(scope="module")
def population() -> Population:
    """Return so many samples that hardly any is drawn twice."""
    return synthetic(0, size=1_000_000)


def controller_of(population: Population, *, release: bool) -> CertifiedController:
    records = population.records(np.random.default_rng(0), tune=2_000, certify=10)
    guard = ShiftGuard(records["confidence"])
    settings = CertifiedSettings(release=release)
    return CertifiedController(PROMISED, synthetic_costs(), records, settings, guard=guard)


class Load:
    """Samples of a population, of which a share is one that exits are surest of."""

    def __init__(self, population: Population, window: EvidenceWindow | None) -> None:
        self._population, self._window = population, window
        self._copied = int(population.confidence.sum(axis=0).argmax())
        self._rng = np.random.default_rng(1)
        self._sent = 0

    def serve(self, controller: CertifiedController, samples: int, chunk: int = 64) -> float:
        """Serve so many; returns the disagreement of those that are no copies."""
        wrong = others = 0
        for _ in range(0, samples, chunk):
            policy, rng = controller.policy, self._rng
            rows = rng.integers(self._population.size, size=chunk)
            rows[rng.random(chunk) < COPIES] = self._copied
            numbers = np.arange(self._sent, self._sent + chunk)
            self._sent += chunk
            admitted = np.ones(chunk, np.bool_)
            if self._window is not None:
                admitted = self._window.admit(numbers, [(row, "") for row in rows.tolist()])
            q = controller.audit_probability
            seen = self._population.serve(policy, rows[admitted], q=q, rng=rng)
            controller.observe(seen)
            if (job := controller.take_job()) is not None:
                controller.finish(job, job.run())
            mine = rows[rows != self._copied]
            at = self._population.answered_at(policy, mine)
            early = at != MODEL_END
            wrong += int((~self._population.agrees[at, mine] & early).sum())
            others += len(mine)
        return wrong / others


@pytest.mark.parametrize("release", [False, True])
def test_the_others_keep_the_bound_before_during_and_after_restarts(
    population: Population, release: bool
) -> None:
    load = Load(population, EvidenceWindow())
    controller = controller_of(population, release=release)
    shares = [load.serve(controller, 40_000) for _ in range(2)]
    for _ in range(2):
        state = controller.state()
        controller = controller_of(population, release=release)
        controller.restore(state)
        shares += [load.serve(controller, 10_000), load.serve(controller, 30_000)]
    assert max(shares) <= 1.5 * EPSILON, shares


def test_copies_would_teach_thresholds_that_are_wrong_for_the_others(
    population: Population,
) -> None:
    """The window prevents this."""
    load = Load(population, None)
    controller = controller_of(population, release=True)
    load.serve(controller, 20_000)
    assert load.serve(controller, 20_000) > 1.5 * EPSILON


def test_without_copies_nothing_changes(population: Population) -> None:
    one, other = (controller_of(population, release=False) for _ in range(2))
    rows = np.random.default_rng(2)
    feed(one, population, 20_000, rng=rows)
    window, numbers = EvidenceWindow(), np.random.default_rng(2)
    asked = 0
    for _ in range(0, 20_000, 64):
        drawn = numbers.integers(population.size, size=64)
        admitted = window.admit(np.arange(asked, asked + 64), [(r, "") for r in drawn.tolist()])
        asked += 64
        seen = population.serve(other.policy, drawn, q=other.audit_probability, rng=numbers)
        other.observe(seen.take(admitted))
        if (job := other.take_job()) is not None:
            other.finish(job, job.run())
    assert one.policy == other.policy
    assert abs(one.status().observed - other.status().observed) < 0.03 * 20_000
    assert one.status().evidence is other.status().evidence
