"""Scores: settling, violations, savings and certificates, on traces made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.adapt.replay import Change, ReplayedJob, ReplayTrace
from benchmarks.adapt.scores import SegmentScore, course, hindsight, risks, score
from benchmarks.adapt.sequence import SampleSequence
from tests.unit.tools.adapt_cases import (
    COSTS,
    FOUR,
    Scripted,
    in_order,
    policy_of,
    population,
    repeated,
)

from offramp.certify import MODEL_END
from offramp.engine.control.controller import ControlStatus, Evidence

AGGRESSIVE = policy_of(1, {0: 0.5, 1: 0.5})
"""Wrong on every fourth sample of FOUR."""
CONSERVATIVE = policy_of(2, {1: 0.5})
"""Never wrong there."""
CHUNK = 100


def status(**changed: Any) -> ControlStatus:
    return replace(Scripted().status(), **changed)


def trace_of(
    sequence: SampleSequence, *parts: tuple[int, Any], statuses: Any = None, **changed: Any
) -> ReplayTrace:
    """Serve under policies that come into force at samples."""
    count = len(sequence)
    starts = [at for at, _ in parts]
    policy = np.searchsorted(starts, np.arange(count), side="right") - 1
    wrong = np.zeros(count, np.bool_)
    given = {
        "answered_at": np.full(count, MODEL_END),
        "agrees": ~wrong,
        "audited": wrong,
        "latency_ms": np.full(count, 4.0),
        "compute_ms": np.full(count, 5.0),
        "policy": policy,
        "changes": tuple(Change(at=at, policy=p) for at, p in parts),
        "chunk": CHUNK,
        "statuses": tuple(statuses or [status()] * -(-count // CHUNK)),
        "tunings": (),
        "events": (),
        "source_ms": 10.0,
        **changed,
    }
    return ReplayTrace(**given)


def judge(
    sequence: SampleSequence, trace: ReplayTrace, place: int = 0, bound: float = 0.1
) -> SegmentScore:
    return score(sequence, trace, max_disagreement=bound).segments[place]


@pytest.fixture(scope="module")
def sequence() -> SampleSequence:
    return in_order(("first", repeated(FOUR, 1000)), ("second", repeated(FOUR, 500)))


def test_risk_is_that_of_the_policy_in_force_in_its_segment() -> None:
    other = population([[0.9, 0.9], [0.9, 0.9]], [[1, 1], [1, 1]], [2, 1])
    sequence = in_order(("a", FOUR), ("b", other))
    trace = trace_of(sequence, (0, AGGRESSIVE), (2, CONSERVATIVE), (5, AGGRESSIVE))
    assert risks(sequence, trace).tolist() == [0.25, 0.25, 0, 0, 0.5, 0.5]


def test_settling_counts_from_the_segments_start(sequence: SampleSequence) -> None:
    trace = trace_of(
        sequence,
        (0, CONSERVATIVE),
        (1000, AGGRESSIVE),
        (3000, CONSERVATIVE),
        (4200, AGGRESSIVE),
        (4300, CONSERVATIVE),
    )
    first = judge(sequence, trace)
    assert first.settled_after == 3000
    assert first.settled is not None
    assert first.settled.samples == 1000
    assert first.settled.risk == 0
    assert first.whole.above == pytest.approx(0.5)
    assert first.whole.risk == pytest.approx(0.125)
    assert judge(sequence, trace, 1).settled_after == 300
    always = judge(sequence, trace_of(sequence, (0, CONSERVATIVE)))
    assert (always.settled_after, always.whole.above) == (0, 0)
    never = judge(sequence, trace_of(sequence, (0, CONSERVATIVE), (3999, AGGRESSIVE)))
    assert (never.settled_after, never.settled) == (None, None)


def test_a_risk_of_the_constraint_itself_is_kept(sequence: SampleSequence) -> None:
    assert judge(sequence, trace_of(sequence, (0, AGGRESSIVE)), bound=0.25).settled_after == 0
    assert judge(sequence, trace_of(sequence, (0, AGGRESSIVE)), bound=0.2499).settled_after is None


def test_windows_of_answers(sequence: SampleSequence) -> None:
    """100 wrong answers from 1500 on: with 10 % allowed, 101 in a window are too many."""
    agrees = np.ones(6000, np.bool_)
    agrees[1500:1601] = False
    first = judge(sequence, trace_of(sequence, (0, CONSERVATIVE), agrees=agrees))
    assert first.whole.agreement == pytest.approx(1 - 101 / 4000)
    assert first.worst_window == pytest.approx(1 - 101 / 1000)
    # starts 700 (to 1,699) to 1500 hold all of them
    assert first.windows_below == pytest.approx(9 / 31)
    assert first.windows_settled_after == 1600
    agrees[1500] = True
    first = judge(sequence, trace_of(sequence, (0, CONSERVATIVE), agrees=agrees))
    assert (first.windows_below, first.windows_settled_after) == (0, 0)
    agrees[3900:] = False
    assert judge(sequence, trace_of(sequence, (0, CONSERVATIVE), agrees=agrees)).windows_below == 0
    agrees[3899] = False
    last = judge(sequence, trace_of(sequence, (0, CONSERVATIVE), agrees=agrees))
    assert last.windows_settled_after is None


def test_savings_are_of_the_source_models_time(sequence: SampleSequence) -> None:
    late = np.concatenate([np.full(4000, 4.0), np.full(2000, 16.0)])
    audited = np.arange(6000) % 10 == 0
    trace = trace_of(sequence, (0, CONSERVATIVE), latency_ms=late, audited=audited)
    whole = score(sequence, trace, max_disagreement=0.1).whole
    assert whole.latency_savings == pytest.approx(0.2)
    assert whole.compute_savings == pytest.approx(0.5)
    assert whole.audited == pytest.approx(0.1)
    assert judge(sequence, trace, 1).whole.latency_savings == pytest.approx(-0.6)


def test_certificates_are_held_against_the_truth(sequence: SampleSequence) -> None:
    sure = status(evidence=Evidence.CERTIFIED, disagreement_upper_bound=0.1)
    statuses = [status()] * 10 + [sure] * 50
    trace = trace_of(sequence, (0, AGGRESSIVE), (2000, CONSERVATIVE), statuses=statuses)
    first = judge(sequence, trace)
    assert first.certified == pytest.approx(0.75)
    assert first.certified_wrongly == pytest.approx(0.25)
    assert first.bound_wrong == pytest.approx(0.25)
    second = judge(sequence, trace, 1)
    assert (second.certified, second.certified_wrongly, second.bound_wrong) == (1, 0, 0)


def test_accuracy_is_of_the_answers_given() -> None:
    sequence = in_order(("all", FOUR))
    trace = trace_of(sequence, (0, AGGRESSIVE), answered_at=np.array([0, 1, 0, MODEL_END]))
    first = judge(sequence, trace)
    assert (first.accuracy, first.source_accuracy) == (0.5, 0.75)
    bare = population([[0.9], [0.9]], [[1], [1]], [1])
    unlabelled = in_order(("all", bare))
    first = judge(unlabelled, trace_of(unlabelled, (0, AGGRESSIVE)))
    assert (first.accuracy, first.source_accuracy) == (None, None)


def test_a_segment_shorter_than_a_window_is_one() -> None:
    sequence = in_order(("all", FOUR))
    agrees = np.array([True, True, False, True])
    first = judge(sequence, trace_of(sequence, (0, AGGRESSIVE), agrees=agrees))
    assert (first.worst_window, first.windows_below) == (0.75, 1.0)
    line = course(sequence, trace_of(sequence, (0, AGGRESSIVE), agrees=agrees))
    assert line.ends.tolist() == [4]
    assert line.agreement.tolist() == [0.75]


def test_counts_and_times(sequence: SampleSequence) -> None:
    tunings = tuple(
        ReplayedJob(purpose="t", taken_at=0, arrived_at=1, took_ms=float(ms)) for ms in (1, 2, 9)
    )
    last = status(alarms=3, adjustments=2)
    statuses = [status()] * 59 + [last]
    trace = trace_of(
        sequence, (0, CONSERVATIVE), (10, AGGRESSIVE), tunings=tunings, statuses=statuses
    )
    found = score(sequence, trace, max_disagreement=0.1)
    assert (found.policies, found.tunings, found.alarms, found.adjustments) == (2, 3, 3, 2)
    assert found.tuning_ms == pytest.approx((2.0, 8.3, 9.0))
    assert (
        score(sequence, trace_of(sequence, (0, CONSERVATIVE)), max_disagreement=0.1).tuning_ms
        is None
    )


def test_the_course_is_a_mean_over_windows(sequence: SampleSequence) -> None:
    agrees = np.ones(6000, np.bool_)
    agrees[:100] = False
    trace = trace_of(sequence, (0, AGGRESSIVE), (1000, policy_of(2, {1: 2.0})), agrees=agrees)
    line = course(sequence, trace)
    assert line.ends[:3].tolist() == [1000, 1100, 1200]
    assert line.ends[-1] == 6000
    assert line.agreement[:2].tolist() == [0.9, 1.0]
    assert line.risk[0] == pytest.approx(0.25)
    assert line.risk[1] == pytest.approx(0.225)
    np.testing.assert_allclose(line.latency_savings, 0.6)
    np.testing.assert_allclose(line.compute_savings, 0.5)
    assert line.changed_at.tolist() == [0, 1000]
    np.testing.assert_array_equal(line.thresholds, [[0.5, 0.5], [np.nan, 2.0]])


def test_hindsight_tunes_on_each_segment_within_the_constraint() -> None:
    """Exit 1 is always right; exit 0 of the first sample, and of the third less surely not."""
    sequence = in_order(("first", FOUR), ("second", repeated(FOUR, 2)))
    strict = hindsight(sequence, COSTS, [0, 1], 0.0)
    assert [best.agreement for best in strict] == [1.0, 1.0]
    # exit 0 from 0.9 on: one answer after 3 ms of 10, the others after 7
    assert strict[0].latency_savings == pytest.approx(1 - (3 + 7 + 7 + 7) / 40)
    loose = hindsight(sequence, COSTS, [0, 1], 0.25)
    assert [best.agreement for best in loose] == [0.75, 0.75]
    assert loose[0].latency_savings == pytest.approx(1 - (3 + 7 + 3 + 7) / 40)
    (only,) = hindsight(in_order(("all", FOUR)), COSTS, [0], 0.0)
    assert only.latency_savings == pytest.approx(1 - (3 + 11 + 11 + 11) / 40)
