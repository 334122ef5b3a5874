"""Proposals for other exits: when, which, to whom, and how often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fakes import policy_of

from offramp.bundle import NEVER
from offramp.certify import MODEL_END, UNKNOWN, Observations
from offramp.engine.control.adjustment import JUDGED_BY, ExitProposals, representative
from offramp.engine.control.costs import CostModel

COSTS = CostModel(
    source_ms=8.0,
    segments_ms=(2.0, 2.0, 2.0, 2.0),
    stages_ms=(0.05,) * 3,
    after_segment=(0, 1, 2),
    exits_ms=(0.05, 0.05, 0.05),
)
"""An exit adds 0.1 ms: an overhead of 1.25 %."""


class Considered:
    """A controller that notes what is proposed to it, and agrees or not."""

    def __init__(self, *, agrees: bool = True, options: Any = None, **thresholds: float) -> None:
        self.policy = policy_of(1, **thresholds)
        self.proposing = ExitProposals(COSTS, **{"max_overhead": 0.03, **(options or {})})
        self.agrees = agrees
        self.alarms = 0
        self.proposals: list[tuple[int, ...]] = []

    def observe(self, seen: Observations) -> None:
        exits = self.proposing.propose(seen, self.policy, alarms=self.alarms)
        if exits is not None:
            self.proposals.append(exits)
            if self.agrees:
                self.proposing.accepted(exits)


def chunk(*confidences: float, count: int = 64, q: float = 1.0) -> Observations:
    """Samples that ran to the end past three exits with these confidences; NaN: not in use."""
    confidence = np.repeat(np.array(confidences, np.float32)[:, None], count, axis=1)
    known = ~np.isnan(confidence)
    return Observations(
        confidence=confidence,
        prediction=np.where(known, 1, UNKNOWN).astype(np.int32),
        answered_at=np.full(count, MODEL_END),
        final=np.ones(count, np.int32),
        audit_probability=np.full(count, q),
        policy_version=np.ones(count, np.int64),
        forced=np.zeros(count, np.bool_),
    )


def test_the_exit_before_the_best_is_proposed_once_enough_was_seen() -> None:
    controller = Considered(e1=0.5)
    controller.observe(chunk(np.nan, 0.9, np.nan, count=127))
    assert controller.proposals == []
    controller.observe(chunk(np.nan, 0.9, np.nan, count=1))
    assert controller.proposals == [(0, 1)]


def test_what_was_proposed_is_not_proposed_again_for_a_while() -> None:
    controller = Considered(e1=0.5, options={"again_after": 1024})
    for _ in range(8):
        controller.observe(chunk(np.nan, 0.9, np.nan, count=128))
    assert controller.proposals == [(0, 1)]
    controller.observe(chunk(np.nan, 0.9, np.nan, count=128))
    assert controller.proposals == [(0, 1), (0, 1)]
    controller.alarms = 1
    controller.observe(chunk(np.nan, 0.9, np.nan, count=128))  # forgets what was seen before
    controller.observe(chunk(np.nan, 0.9, np.nan, count=128))
    assert controller.proposals == [(0, 1)] * 3


def test_a_proposal_that_comes_at_a_bad_time_is_made_again() -> None:
    controller = Considered(e1=0.5, agrees=False)
    for _ in range(3):
        controller.observe(chunk(np.nan, 0.9, np.nan, count=128))
    assert controller.proposals == [(0, 1)] * 3


def test_exits_that_lose_time_are_proposed_to_go() -> None:
    controller = Considered(e0=0.95, e2=0.5)
    controller.observe(chunk(0.1, np.nan, 0.9, count=128))
    # exit 0 lets nothing leave; nothing lies behind exit 2 to be tried instead
    assert controller.proposals == [(2,)]


def test_nothing_is_proposed_while_nothing_answers() -> None:
    controller = Considered(e0=NEVER, e1=NEVER)
    controller.observe(chunk(0.9, 0.9, np.nan, count=512))
    assert controller.proposals == []


def test_the_budget_is_kept() -> None:
    controller = Considered(e1=0.5, options={"max_overhead": 0.02})
    controller.observe(chunk(np.nan, 0.9, np.nan, count=512))
    assert controller.proposals == []  # one exit is all that fits, and a lone one is the best


def test_samples_count_by_what_they_stand_for() -> None:
    confidence = np.array([[0.1, 0.2, 0.3]], np.float32)
    weight = np.array([1.0, 2.0, 5.0])
    values, counts = np.unique(representative(confidence, weight, 16), return_counts=True)
    np.testing.assert_allclose(values, [0.1, 0.2, 0.3], rtol=1e-6)
    assert counts.tolist() == [2, 4, 10]
    assert representative(confidence, weight, JUDGED_BY).shape == (1, JUDGED_BY)


def test_a_negative_ramp_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_overhead is"):
        ExitProposals(COSTS, max_overhead=-0.1)
