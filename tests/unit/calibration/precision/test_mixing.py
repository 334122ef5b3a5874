"""A copy is quantised where that was measured to pay, throughout where nothing speaks for less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offramp.calibration.choose.selection import Candidates
from offramp.calibration.precision.kinds import Mix, best_mix, mixed_cost
from offramp.engine.control.costs import CostModel

SEGMENTS = 5
FLOAT32 = CostModel(
    source_ms=20.0,
    segments_ms=(4.0,) * SEGMENTS,
    stages_ms=(0.2,) * 4,
    after_segment=(0, 1, 2, 3),
    exits_ms=(0.1,) * 4,
)


def int8(*segments_ms: float) -> CostModel:
    """Times of a copy, taken where the source model took half as long as it did otherwise."""
    return CostModel(
        source_ms=10.0,
        segments_ms=(*segments_ms, 10.0),
        stages_ms=(0.5,) * 5,
        after_segment=(0, 1, 2, 3, 4),
        exits_ms=(0.05,) * 5,
        source_begins=SEGMENTS,
    )


def candidates(samples: int = 2000) -> Candidates:
    """Half of the samples are sure at the first exit, more at each that follows."""
    rng = np.random.default_rng(0)
    hardness = rng.random(samples)
    easy = [hardness < share for share in (0.5, 0.6, 0.7, 0.8, 0.98)]
    confidence = [
        np.where(sure, rng.uniform(0.9, 1, samples), rng.uniform(0.4, 0.6, samples))
        for sure in easy
    ]
    agrees = [sure | (rng.random(samples) < 0.5) for sure in easy]
    return Candidates(
        np.array(confidence, np.float32),
        np.array(agrees),
        max_disagreement=0.05,
        confidence_level=0.9,
    )


def test_costs_are_those_of_each_segments_precision_at_one_pace() -> None:
    cost = mixed_cost(FLOAT32, int8(0.5, 0.6, 0.7, 0.8, 0.9), Mix(1, 4))
    assert cost.segments_ms == (2.0, 0.6, 0.7, 0.8, 2.0, 10.0)
    assert cost.stages_ms == (0.1, 0.5, 0.5, 0.5, 0.5)
    assert (cost.exits_ms, cost.source_ms) == ((0.05,) * 5, 10.0)
    assert cost.source_begins == SEGMENTS


@pytest.mark.parametrize(
    ("times", "mix"),
    [
        ((5.0, 4.0, 0.5, 0.5, 0.5), Mix(2, 5)),
        ((0.5, 0.5, 0.5, 3.5, 8.0), Mix(0, 3)),
        ((0.5, 0.5, 0.5, 0.5, 0.5), None),
        ((1.99, 0.5, 0.5, 0.5, 0.5), None),
    ],
    ids=["slow at first", "slow at last", "fast throughout", "too little to gain"],
)
def test_slow_segments_at_the_ends_stay_float32(times: tuple[float, ...], mix: Mix | None) -> None:
    found = candidates()
    cost = replace(int8(*times), stages_ms=(0.1,) * 5)
    assert best_mix(found, found.choose(cost), FLOAT32, cost) == mix


def test_a_copy_of_which_no_exit_pays_may_still_pay_in_part() -> None:
    found, cost = candidates(), int8(30.0, 0.5, 0.5, 0.5, 0.5)
    assert found.choose(cost) == ()
    assert best_mix(found, (), FLOAT32, cost) == Mix(1, 5)


def test_words() -> None:
    assert Mix(0, 5).describe(5) == "int8 throughout"
    assert Mix(2, 5).describe(5) == "int8 in segments 2 to 4, float32 in the others"
    assert Mix(2, 3).describe(5) == "int8 in segment 2, float32 in the others"
