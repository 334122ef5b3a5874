"""Predicted times and savings, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bundle.cascades import CASCADE_PROFILE, cascade_manifest
from tests.unit.bundle.examples import PROFILE

from offramp.calibration.choose.selection import net_savings_alone
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.engine.control.costs import CostModel

COST = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 5.0),
    stages_ms=(0.25, 0.25),
    after_segment=(0, 1),
    exits_ms=(0.5, 1.0),
)


@pytest.mark.parametrize(
    ("active", "latency"),
    [
        ((), [10.0]),
        ((0,), [2.0 + 0.75, 10.0 + 0.75]),
        ((1,), [5.0 + 1.25, 10.0 + 1.25]),
        ((0, 1), [2.0 + 0.75, 5.0 + 0.75 + 1.25, 10.0 + 0.75 + 1.25]),
    ],
)
def test_latency_until_each_exit_pays_for_all_exits_before(active, latency: list[float]) -> None:
    assert COST.latency_ms(active).tolist() == latency
    assert COST.overhead(active) == pytest.approx(latency[-1] / 10 - 1)


def test_a_column_of_the_profile() -> None:
    cost = CostModel.at(PROFILE, 8, [0], [0.5])
    assert cost == CostModel(
        source_ms=20.0,
        segments_ms=(5.0, 15.0),
        stages_ms=(0.25,),
        after_segment=(0,),
        exits_ms=(0.5,),
    )
    assert CostModel.at(PROFILE, 3, [0], [0.5]) == cost  # the next larger size
    assert CostModel.at(PROFILE, 1, [0], [0.25]).source_ms == 4.0


# One exit after half of a model of 8 ms, at 1 ms: 5 ms for who leaves, 9 ms for who stays.
ALONE = CostModel(
    source_ms=8.0, segments_ms=(4.0, 4.0), stages_ms=(0.25,), after_segment=(0,), exits_ms=(0.75,)
)


def savings_if(leaving: float) -> float:
    """Return the savings for a share that leaves."""
    return 1 - (leaving * 5 + (1 - leaving) * 9) / 8


def alone(confidence: list[float], agrees: list[int], max_disagreement: float) -> float:
    return net_savings_alone(
        np.array(confidence, np.float32), np.array(agrees, np.bool_), ALONE, 0, max_disagreement
    )


@pytest.mark.parametrize(
    ("confidence", "agrees", "bound", "leaving"),
    [
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 1, 1], 0.01, 1.0),
        ([0.6, 0.7, 0.8, 0.9], [1, 1, 0, 1], 0.01, 0.25),  # down to just above the error
        ([0.6, 0.7, 0.8, 0.9], [1, 1, 0, 1], 0.25, 1.0),  # one error is allowed
        ([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 1], 0.25, 0.75),
        ([0.6, 0.7, 0.8, 0.9], [1, 1, 1, 0], 0.01, 0.0),  # the surest is wrong: exit costs 1 ms
        # samples of one confidence leave together or not at all
        ([0.9, 0.8, 0.8, 0.8], [1, 1, 1, 0], 0.01, 0.25),
        ([0.9, 0.8, 0.8, 0.8], [1, 0, 1, 1], 0.01, 0.25),
        ([0.9, 0.8, 0.8, 0.8], [1, 1, 1, 0], 0.25, 1.0),
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 1, 0], 0.01, 0.0),
        ([0.9, 0.9, 0.5, 0.5], [0, 1, 0, 1], 0.25, 0.5),
        # what is no number never leaves
        ([float("nan"), 0.9, 0.8, 0.7], [1, 1, 1, 1], 0.01, 0.75),
        ([float("nan")] * 4, [1, 1, 1, 1], 0.01, 0.0),
    ],
)
def test_savings_of_one_exit(
    confidence: list[float], agrees: list[int], bound: float, leaving: float
) -> None:
    assert alone(confidence, agrees, bound) == pytest.approx(savings_if(leaving))


def test_the_bound_is_not_lost_to_rounding() -> None:
    """0.29 · 100 is 28.999… in floating point, but 29 of 100 errors are within 0.29."""
    confidence = np.linspace(1, 0.5, 100).tolist()
    agrees = [0] * 29 + [1] * 71
    assert alone(confidence, agrees, 0.29) == pytest.approx(savings_if(1.0))


@given(
    st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.7, 1.0]), st.booleans()), min_size=1),
    st.floats(0, 0.9),
)
def test_it_is_the_best_threshold_within_the_bound(samples, bound: float) -> None:
    confidence = np.array([c for c, _ in samples], np.float32)
    agrees = np.array([a for _, a in samples])
    possible = [savings_if(0)]
    for threshold in np.unique(confidence):
        leaves = confidence >= threshold
        if (leaves & ~agrees).sum() / len(samples) <= bound:
            possible.append(savings_if(leaves.mean()))
    assert alone(confidence.tolist(), agrees.tolist(), bound) == pytest.approx(max(possible))


# A quantised model of 2 + 3 ms, then the source model of 10 ms.
CASCADE = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 10.0),
    stages_ms=(0.25, 0.25),
    after_segment=(0, 1),
    exits_ms=(0.5, 0.0),
    source_begins=2,
)


@pytest.mark.parametrize(
    ("active", "latency"),
    [
        ((), [10.0]),
        ((0,), [2.0 + 0.75, 2.0 + 0.75 + 10.0]),  # what lies behind the exit does not run
        ((1,), [5.0 + 0.25, 5.0 + 0.25 + 10.0]),
        ((0, 1), [2.0 + 0.75, 5.0 + 0.75 + 0.25, 5.0 + 0.75 + 0.25 + 10.0]),
    ],
)
def test_in_a_cascade_the_source_model_comes_after_the_last_exit(
    active, latency: list[float]
) -> None:
    assert CASCADE.latency_ms(active).tolist() == latency
    assert CASCADE.overhead(active) == pytest.approx(latency[-1] / 10 - 1)


def test_the_quantised_model_is_surely_overhead() -> None:
    """Heads and borders add 1 ms in all; that is known to within 0.5 ms, the segments are known."""
    unsure = replace(CASCADE, unsure=0.05)
    assert unsure.sure_overhead((0, 1)) == pytest.approx((5.0 + 1.0 * (1 - 0.5)) / 10)
    assert unsure.sure_overhead((0,)) == pytest.approx((2.0 + 0.75 * (1 - 0.5)) / 10)
    free = replace(CASCADE, exits_ms=(0.0, 0.0), stages_ms=(0.0, 0.0))
    assert free.sure_overhead((1,)) == pytest.approx(0.5)
    assert CASCADE.sure_overhead(()) == 0.0


def test_what_leaving_a_cascade_avoids_and_an_exit_of_it_adds() -> None:
    """The last exit's own are the segments between the exit before it and itself: 3 ms."""
    assert CASCADE.avoided_ms((0, 1)).tolist() == [3.0 + 10.0, 10.0 - 3.0]
    assert CASCADE.added_ms((0, 1)).tolist() == [0.75, 0.25 + 3.0]
    assert CASCADE.avoided_ms((1,)).tolist() == [10.0 - 5.0]
    assert CASCADE.added_ms((1,)).tolist() == [0.25 + 5.0]
    assert COST.avoided_ms((0, 1)).tolist() == [8.0, 5.0]
    assert COST.added_ms((1,)).tolist() == [1.25]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_the_utility_of_the_last_exit_is_what_is_lost_without_it(places: list[int]) -> None:
    """The cost for samples that leave there is excluded, as in Apparate."""
    counts = np.bincount(places, minlength=3)
    utility = counts[1] * CASCADE.avoided_ms((0, 1))[1] - counts[2] * CASCADE.added_ms((0, 1))[1]
    with_it = counts @ CASCADE.latency_ms((0, 1))
    without = np.array([counts[0], counts[1] + counts[2]]) @ CASCADE.latency_ms((0,))
    assert utility - counts[1] * 0.25 == pytest.approx(without - with_it)


def test_a_manifest_of_a_cascade_says_where_the_source_begins() -> None:
    cost = CostModel.of(cascade_manifest(), CASCADE_PROFILE, 8)
    assert cost.source_begins == 2
    assert cost.latency_ms((1,)).tolist() == [5.0 + 0.25, 5.0 + 0.25 + 20.0]
    times = StageTimes.of(cascade_manifest(), CASCADE_PROFILE)
    # a full batch to exit 0; then it begins anew, and behind the own answer too
    assert times.stages_ms((0,), 8)[:, 8].tolist() == [2.0 + 0.75, 20.0]
    assert times.stages_ms((0, 1), 8)[:, 8].tolist() == [2.0 + 0.75, 3.0 + 0.25, 20.0]
    assert times.source_ms(8) == 20.0
    late = times.matrix(after=0, candidates=[1], rows=8, interval=8)
    assert late.ms.tolist() == [[3.25, 3.25 + 20.0]]
    assert late.limit_ms == 20.0
