"""The simulator: exact instants on a small model, and the same again with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import Latencies, OperatingPoint, OperatingPoints, StageTable
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.simulated_model import Behaviour, SimulatedVariant
from offramp.tools.bench.simulation import SimulatedLoad, SimulatedOutcomes, draw_load, simulate

SECONDS = [[0.0, 1.0, 1.5], [0.0, 2.0, 3.0]]
"""Times of two stages, for batches of one and of two."""
BEHAVIOUR = Behaviour(
    exits=(5, MODEL_END),
    leaves_at=np.array([0, 1]),
    agrees=np.array([[False, True], [True, True]]),
)
"""Record 0 leaves at exit 5 and disagrees there, record 1 runs to the end."""


def run(
    load: SimulatedLoad,
    policy: str = "delay",
    *,
    streams: int = 1,
    max_queue: int = 100,
    runs_on: Sequence[bool] | None = None,
    losing_s: Sequence[float] = (),
    behaviour: Behaviour = BEHAVIOUR,
) -> SimulatedOutcomes:
    latencies = Latencies(SECONDS)
    points = OperatingPoints(
        points=(
            OperatingPoint(deepest=0, exit=5, agreement=0.5),
            OperatingPoint(deepest=1, exit=MODEL_END, agreement=1.0),
        ),
        latencies=latencies,
    )
    scheduler = make_scheduler(
        PolicyName.parse(policy), points, max_batch_size=2, max_queue=max_queue, streams=streams
    )
    drawn = None if runs_on is None else np.array(runs_on)
    return simulate(
        behaviour, scheduler, SECONDS, load, streams=streams, runs_on=drawn, losing_s=losing_s
    )


def load(*requests: tuple[float, int], slo_s: float = float("inf")) -> SimulatedLoad:
    arrivals, records = zip(*requests, strict=True)
    return SimulatedLoad(
        arrivals_s=np.array(arrivals), records=np.array(records), slo_s=slo_s, duration_s=20.0
    )


@pytest.mark.parametrize(("first_runs_on", "third_s"), [(False, 3.0), (True, 4.8)])
def test_an_answered_request_continues_without_waiting_clients(
    *, first_runs_on: bool, third_s: float
) -> None:
    """The first is answered at 1.0; the second starts then, and from 4.0 the first runs on."""
    requests = load((0.0, 0), (0.5, 1), (4.2, 1))
    found = run(requests, runs_on=[first_runs_on, True, True])
    np.testing.assert_allclose(found.latency_s, [1.0, 3.5, third_s])
    assert found.exit.tolist() == [5, MODEL_END, MODEL_END]


def test_requests_batch_leave_and_run_on_at_exact_instants() -> None:
    """The first runs alone until 3.0; the others wait, and share stage 0 until 4.5."""
    found = run(load((0.0, 1), (0.5, 0), (0.5, 1)))
    np.testing.assert_allclose(found.latency_s, [3.0, 4.0, 6.0])
    assert found.exit.tolist() == [MODEL_END, 5, MODEL_END]
    assert found.agrees.tolist() == [1, 0, 1]
    assert found.batch_size is not None
    assert found.batch_size.tolist() == [1, 2, 2]
    assert not found.forced.any()


def test_two_streams_run_side_by_side() -> None:
    """The second stream takes the second request immediately, and the third at 1.5."""
    found = run(load((0.0, 1), (0.5, 0), (0.5, 1)), streams=2)
    np.testing.assert_allclose(found.latency_s, [3.0, 1.0, 4.0])


def test_what_a_lost_stream_ran_is_tried_on_another_one() -> None:
    """Stream 1 runs the first request until it is lost at 1.25; stream 0 is free at 3.5."""
    found = run(load((0.0, 1), (0.5, 1)), streams=2, losing_s=[1.25])
    np.testing.assert_allclose(found.latency_s, [6.5, 3.0])
    whole = run(load((0.0, 1), (0.5, 1)), streams=2)
    np.testing.assert_allclose(whole.latency_s, [3.0, 3.0])


def test_an_idle_stream_that_is_lost_takes_nothing_with_it() -> None:
    found = run(load((0.0, 1), (3.5, 1), (3.6, 1)), streams=2, losing_s=[3.25])
    np.testing.assert_allclose(found.latency_s, [3.0, 3.0, 5.9])


def test_without_any_stream_left_nobody_is_answered() -> None:
    found = run(load((0.0, 1), (4.0, 1)), losing_s=[1.0])
    assert not found.answered.any()


def test_accuracy_is_of_the_answered_and_known_with_labels_only() -> None:
    right = np.array([[True, False], [False, True]])
    labelled = replace(BEHAVIOUR, right=right)
    requests = load((0.0, 0), (5.0, 1), (10.0, 1))
    assert run(requests, behaviour=labelled).accuracy == 1.0
    assert run(requests, "cheapest", behaviour=labelled).accuracy == pytest.approx(1 / 3)
    assert run(requests).accuracy is None


def test_what_has_no_room_is_rejected_and_what_is_late_expires() -> None:
    found = run(load((0.0, 1), (0.1, 1), (0.2, 1), slo_s=2.5), max_queue=1)
    assert found.status.tolist() == [Status.OK, Status.EXPIRED, Status.REJECTED]
    np.testing.assert_array_equal(found.latency_s, [3.0, np.nan, np.nan])  # late, but answered


def test_who_has_to_leave_below_its_threshold_is_marked() -> None:
    found = run(load((0.0, 1), (10.0, 0)), "cheapest")
    assert found.forced.tolist() == [True, False]
    assert found.exit.tolist() == [5, 5]


@pytest.mark.parametrize("policy", ["run-through", "refill", "slackfit"])
def test_the_same_seed_gives_the_same_result(policy: str) -> None:
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1.0, 500))
    drawn = draw_load(arrivals_s, 1000.0, 2, slo_s=8.0, seed=3)
    first, again = run(drawn, policy, streams=2), run(drawn, policy, streams=2)
    np.testing.assert_array_equal(first.latency_s, again.latency_s)
    np.testing.assert_array_equal(first.status, again.status)
    assert np.count_nonzero(first.answered) > 100
    other = draw_load(arrivals_s, 1000.0, 2, slo_s=8.0, seed=4)
    assert (drawn.records != other.records).any()


FAST = [[0.0, 0.5, 0.75]]
"""Times of variant 1, which has one stage."""


def run_variants(load: SimulatedLoad, policy: str) -> SimulatedOutcomes:
    """The model above without its exit, and a variant that is right about record 1 only."""
    latencies = Latencies(SECONDS, smaller=[StageTable(FAST)])
    points = OperatingPoints(
        points=(
            OperatingPoint(variant=1, deepest=0, exit=MODEL_END, agreement=0.5),
            OperatingPoint(deepest=1, exit=MODEL_END, agreement=1.0),
        ),
        latencies=latencies,
    )
    smaller = SimulatedVariant(
        behaviour=Behaviour(
            exits=(MODEL_END,), leaves_at=np.array([0, 0]), agrees=np.array([[False, True]])
        ),
        seconds=FAST,
    )
    scheduler = make_scheduler(PolicyName.parse(policy), points, max_batch_size=2)
    return simulate(BEHAVIOUR, scheduler, SECONDS, load, streams=1, smaller=[smaller])


def test_variants_take_their_own_time_and_are_told_apart() -> None:
    """3.2 s are enough for the full model, alone. The second waits for it until 5.0, and has
    0.7 s then: enough for variant 1."""
    found = run_variants(load((0.0, 1), (2.5, 0), (9.0, 0), slo_s=3.2), "max-accuracy")
    np.testing.assert_allclose(found.latency_s, [3.0, 1.0, 1.0])
    assert found.variant.tolist() == [0, 1, 0]
    assert found.exit.tolist() == [MODEL_END, MODEL_END, 5]
    assert found.agrees.tolist() == [1, 0, 0]
    assert found.forced.tolist() == [False, True, False], "a variant is outside the promise"


def test_with_one_variant_all_answers_are_the_full_models() -> None:
    found = run_variants(load((0.0, 1), (0.1, 1), slo_s=3.2), "clockwork")
    assert found.variant[found.answered].tolist() == [0]
    nothing = run_variants(load((0.0, 1), slo_s=0.2), "cheapest")
    assert not nothing.answered.any()
