"""The benchmark of exits and subnets: which points it measures, and how it compares them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.frontier.measurement import FrontierPoint
from benchmarks.subnets import DROPS, EqualQuality, MeasuredPoint, at_equal_worth, choose
from tests.unit.calibration.test_trade_offs import OF_FULL, OF_SUBNET, full, subnet

from offramp.bundle import Ratio
from offramp.calibration.choose.trade_offs import TRADE_OFF_KINDS, TradeOff, TradeOffKind
from offramp.certify import MODEL_END


def measured(
    ways: tuple[TradeOffKind, ...], busy: float, agreement: float, accuracy: float | None
) -> MeasuredPoint:
    point = TradeOff(
        variant=0,
        active=(),
        deepest=0,
        cost=0.5,
        agreement=agreement,
        accuracy=accuracy,
        early=0.0,
    )
    time = Ratio(value=busy, half_width=0.01)
    figures = FrontierPoint(
        batch_size=8,
        samples=100,
        busy_ms_per_sample=1.0,
        busy=time,
        mean=time,
        disagreement=1 - agreement,
        accuracy=accuracy,
        exit_shares={},
        round_busy_ms=(1.0,),
    )
    return MeasuredPoint(ways=ways, chosen=point, counted=point, measured=figures)


def points(*, labels: bool = True) -> list[MeasuredPoint]:
    def right(value: float) -> float | None:
        return value if labels else None

    return [
        measured(TRADE_OFF_KINDS, 1.0, 1.0, right(0.9)),
        measured(("exits", "both"), 0.5, 0.99, right(0.895)),
        measured(("subnets",), 0.4, 0.95, right(0.88)),
        measured(("both",), 0.36, 0.95, right(0.88)),
        measured(("handing-on",), 0.3, 1.0, right(0.9)),
    ]


def at(rows: list[EqualQuality], worth: str, drop: float) -> EqualQuality:
    (row,) = [row for row in rows if (row.worth, row.drop) == (worth, drop)]
    return row


def test_groups_are_compared_by_their_fastest_point_that_is_good_enough() -> None:
    rows = at_equal_worth(points(), 8)
    alike = at(rows, "accuracy", 0.0)
    assert alike.times == {"exits": 1.0, "subnets": 1.0, "both": 1.0, "handing on too": 0.3}
    lossy = at(rows, "accuracy", 0.02)
    assert lossy.times == {"exits": 0.5, "subnets": 0.4, "both": 0.36, "handing on too": 0.3}
    assert lossy.gain("both") == pytest.approx(0.9)
    assert lossy.gain("handing on too") == pytest.approx(0.75)
    assert at(rows, "agreement", 0.02).times["subnets"] == 1.0
    assert len(rows) == 2 * len(DROPS)


def test_both_may_take_what_either_alone_has() -> None:
    without = [p for p in points() if p.ways != ("both",)]
    assert at(at_equal_worth(without, 8), "accuracy", 0.02).times["both"] == 0.4


def test_without_labels_only_agreement_is_compared() -> None:
    assert {row.worth for row in at_equal_worth(points(labels=False), 8)} == {"agreement"}


def test_points_are_chosen_of_each_way_and_the_full_model_comes_first() -> None:
    near = replace(subnet(), variant=1)
    chosen = choose([(full(), OF_FULL), (near, OF_SUBNET)], 4)
    first = chosen[0].chosen
    assert (first.variant, first.deepest, first.active) == (0, MODEL_END, ())
    assert chosen[0].ways == TRADE_OFF_KINDS
    keys = [(p.chosen.variant, p.chosen.deepest, p.chosen.active) for p in chosen]
    assert len(set(keys)) == len(keys), "each is measured once"
    for way in TRADE_OFF_KINDS:
        assert any(way in p.ways for p in chosen[1:]), way
    for point in chosen:
        assert not (point.ways == ("exits",) and point.chosen.variant)
