"""Trade-offs of exits and subnets, on records that are small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.facts import facts

from offramp.bundle import ActiveExit
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.trade_offs import (
    TRADE_OFF_KINDS,
    RecordedVariant,
    TradeOff,
    accuracy_quality,
    cheapest_at,
    front_of,
    same_samples,
    trade_offs,
)
from offramp.certify import MODEL_END
from offramp.engine.control.costs import CostModel

FINAL = [0, 1, 2, 0, 1]
LABELS = [0, 1, 2, 0, 2]


def records(
    confidence: list[list[float]], prediction: list[list[int]], labels: list[int] | None = LABELS
) -> ExitRecords:
    return ExitRecords(
        confidence=np.array(confidence, np.float32),
        prediction=np.array(prediction, np.int32),
        final_prediction=np.array(FINAL, np.int32),
        final_confidence=np.ones(len(FINAL), np.float32),
        labels=None if labels is None else np.array(labels),
    )


OF_FULL = records(
    [[0.9, 0.8, 0.2, 0.9, 0.1], [0.9, 0.9, 0.9, 0.9, 0.3]],
    [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]],
)
"""Exit 0 is right of samples 0, 1 and 3, exit 1 of all but the last."""
OF_SUBNET = records(
    [[0.9, 0.1, 0.1, 0.9, 0.1], [0.8, 0.8, 0.2, 0.8, 0.8]],
    [[0, 0, 0, 0, 2], [0, 1, 0, 0, 2]],
)
"""A subnet that agrees for samples 0, 1 and 3; for sample 4 it is right, and the full model is
not.
"""


def full(tune: ExitRecords = OF_FULL) -> RecordedVariant:
    """Segments of 2, 2 and 6 ms, exits of 0.5 ms and borders of 0.5 ms."""
    cost = CostModel(
        source_ms=10.0,
        segments_ms=(2.0, 2.0, 6.0),
        stages_ms=(0.5, 0.5),
        after_segment=(0, 1),
        exits_ms=(0.5, 0.5),
    )
    return RecordedVariant(variant=0, name="full model", tune=tune, cost=cost)


def subnet() -> RecordedVariant:
    """Segments of 1 and 2 ms, then the model; an exit after the first, its own answer last."""
    cost = CostModel(
        source_ms=10.0,
        segments_ms=(1.0, 2.0, 10.0),
        stages_ms=(0.25, 0.25),
        after_segment=(0, 1),
        exits_ms=(0.25, 0.25),
        source_begins=2,
    )
    return RecordedVariant(variant=1, name="half", tune=OF_SUBNET, cost=cost)


def found(point: TradeOff) -> tuple[float, float, float | None, float]:
    accuracy = None if point.accuracy is None else round(point.accuracy, 9)
    return round(point.cost, 9), round(point.agreement, 9), accuracy, round(point.early, 9)


def test_the_full_model_as_it_is_costs_all_and_agrees_with_itself() -> None:
    assert found(full().judge((), MODEL_END, OF_FULL)) == (1.0, 1.0, 0.8, 0.0)


def test_thresholds_of_the_full_model_are_counted_and_its_time_is_put_together() -> None:
    """Samples 0, 1 and 3 leave at 3 ms, the others end at 10 + 1 ms."""
    point = full().judge([ActiveExit(exit=0, threshold=0.5)], MODEL_END, OF_FULL)
    assert found(point) == ((3 * 3 + 2 * 11) / 50, 1.0, 0.8, 0.6)


def test_at_the_deepest_exit_all_that_is_left_leaves() -> None:
    """Samples 2 and 4 leave at exit 1, after 2 + 2 ms and two exits of 1 ms each."""
    point = full().judge([ActiveExit(exit=0, threshold=0.5)], 1, OF_FULL)
    assert found(point) == ((3 * 3 + 2 * 6) / 50, 0.8, 0.8, 0.6)
    assert point.active[-1] == ActiveExit(exit=1, threshold=0.0)


def test_a_subnet_ends_at_its_own_answer() -> None:
    one = subnet()
    assert (one.end, one.own_exits) == (1, 1)
    whole = one.judge((), one.end, OF_SUBNET)
    assert found(whole) == (0.35, 0.6, 0.8, 0.0)
    early = one.judge([ActiveExit(exit=0, threshold=0.5)], one.end, OF_SUBNET)
    assert found(early) == ((2 * 1.5 + 3 * 4) / 50, 0.6, 0.8, 0.4)


def test_what_a_subnet_is_not_sure_of_can_be_handed_on_to_the_full_model() -> None:
    """Sample 2 runs the subnet in 3.5 ms, then the model."""
    point = subnet().judge([ActiveExit(exit=1, threshold=0.5)], MODEL_END, OF_SUBNET)
    assert found(point) == ((4 * 3.5 + 13.5) / 50, 0.8, 1.0, 0.8)


def test_paths_of_thresholds_are_judged_as_each_of_their_levels_is_by_itself() -> None:
    one = full()
    along = list(one.along_paths(OF_FULL, sets=[(0, 1)]))
    assert {p.deepest for p in along} == {0, 1, MODEL_END}
    assert len([p for p in along if p.deepest == 0]) == 1, "nothing is before it"
    for point in along:
        before = [a for a in point.active if a.exit != point.deepest]
        again = one.judge(before, point.deepest, OF_FULL)
        assert again.cost == pytest.approx(point.cost, rel=1e-12), "sums in another order"
        assert replace(again, cost=point.cost) == point


def test_sets_of_exits_are_each_alone_those_in_use_and_what_saves_most() -> None:
    rng = np.random.default_rng(0)
    sure = np.where(rng.random(2000) < 0.7, 0.99, 0.3).astype(np.float32)
    final = rng.integers(0, 5, 2000).astype(np.int32)
    unlike = np.where(sure > 0.5, final, (final + 1) % 5).astype(np.int32)
    tune = ExitRecords(
        confidence=np.stack([sure, sure]),
        prediction=np.stack([unlike, unlike]),
        final_prediction=final,
        final_confidence=sure,
        labels=None,
    )
    one = full(tune)
    assert one.exit_sets() == ((), (0,), (1,)), "the second brings nothing behind the first"
    assert replace(one, in_use=(0, 1)).exit_sets() == ((0,), (0, 1), (1,))
    late = replace(subnet(), tune=replace(tune, prediction=np.stack([unlike, unlike])))
    assert late.exit_sets() == ((), (0,)), "its own answer is its end, no exit before it"


def test_each_way_has_the_full_model_and_what_it_is_named_after() -> None:
    judged = [(full(), OF_FULL), (subnet(), OF_SUBNET)]
    of_way = {way: trade_offs(judged, way) for way in TRADE_OFF_KINDS}
    assert {p.variant for p in of_way["exits"]} == {0}
    assert [found(p) for p in of_way["subnets"]] == [(1.0, 1.0, 0.8, 0.0)] * 2 + [
        (0.35, 0.6, 0.8, 0.0)
    ]
    assert {p.variant for p in of_way["both"]} == {0, 1}
    assert all(p.deepest == MODEL_END for p in of_way["handing-on"])
    assert any(p.variant == 1 for p in of_way["handing-on"])
    for way in TRADE_OFF_KINDS:
        best = cheapest_at(of_way[way], 1.0)
        assert best is not None
        assert best.cost <= 1.0


def test_the_first_variant_has_to_be_the_full_model() -> None:
    with pytest.raises(ValueError, match=facts("variant 1", "full model, variant 0")):
        trade_offs([(subnet(), OF_SUBNET)], "both")


def point(cost: float, agreement: float, accuracy: float | None = None) -> TradeOff:
    return TradeOff(
        variant=0, active=(), deepest=0, cost=cost, agreement=agreement, accuracy=accuracy, early=0
    )


def test_a_front_is_what_nothing_dominates() -> None:
    points = [point(0.5, 0.9), point(0.3, 0.8), point(0.5, 0.85), point(0.6, 0.9), point(1, 1)]
    assert [p.cost for p in front_of(points)] == [0.3, 0.5, 1]
    labelled = [point(0.5, 0.9, 0.95), point(0.6, 1.0, 0.94), point(0.7, 0.8, 0.96)]
    assert [p.cost for p in front_of(labelled, accuracy_quality)] == [0.5, 0.7]


def test_the_cheapest_at_a_level_reaches_it() -> None:
    points = [point(0.5, 0.9), point(0.3, 0.8), point(0.4, 0.9)]
    best = cheapest_at(points, 0.9)
    assert best is not None
    assert best.cost == 0.4
    assert cheapest_at(points, 0.95) is None


def test_records_of_other_samples_are_told_from_those_of_the_same() -> None:
    same = [(full(), OF_FULL), (subnet(), OF_SUBNET)]
    assert same_samples(same)
    other = replace(OF_SUBNET, final_prediction=OF_SUBNET.final_prediction[::-1])
    assert not same_samples([same[0], (subnet(), other)])
    fewer = replace(OF_SUBNET, final_prediction=OF_SUBNET.final_prediction[:3])
    assert not same_samples([same[0], (subnet(), fewer)])
