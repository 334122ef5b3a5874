"""Value of forcing all samples out at an exit, computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.scheduling.helpers import table

from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import OperatingPoint, OperatingPoints, operating_points

RECORDS: dict[str, np.ndarray[Any, Any]] = {
    # The fifth sample is of another split, and would change every figure.
    "split": np.array([2, 2, 2, 2, 1]),
    "final_prediction": np.array([0, 1, 1, 0, 5]),
    "prediction": np.array([[0, 0, 0, 0, 6], [1, 1, 0, 0, 6]]),
    "confidence": np.array([[0.9, 0.8, 0.5, 0.3, 1.0], [0.2, 0.9, 0.9, 0.1, 1.0]], np.float32),
}


def measured(*exits: tuple[int, int, float], forced: bool = True) -> list[Any]:
    points = operating_points(exits, RECORDS, forced=forced)
    return [(point.deepest, point.exit, point.agreement) for point in points]


def test_whoever_is_sure_at_an_earlier_exit_has_left_there() -> None:
    """Exit 0 agrees on samples 0 and 3. From 0.8 on, 0 (agrees) and 1 (does not) leave there; at
    exit 1 forced, 2 (does not) and 3 (agrees) are left; at the end, 2 and 3 agree."""
    assert measured((0, 0, 0.8), (1, 1, 0.9), (2, MODEL_END, 0.0)) == [
        (0, 0, 0.5),
        (1, 1, 0.5),
        (2, MODEL_END, 0.5),  # of 2 and 3 only 3 is left, since 2 leaves wrongly at exit 1
    ]


def test_with_thresholds_that_nobody_reaches_an_exit_stands_for_itself() -> None:
    assert measured((0, 0, 1.1), (1, 1, 1.1), (2, MODEL_END, 0.0)) == [
        (0, 0, 0.5),
        (1, 1, 0.5),
        (2, MODEL_END, 1.0),
    ]
    assert measured((0, 0, 0.85), (1, 1, 0.85), (2, MODEL_END, 0.0)) == [
        (0, 0, 0.5),
        (1, 1, 0.75),  # 0 left rightly, 1 and 3 agree here
        (2, MODEL_END, 0.75),
    ]


def test_stages_and_exits_are_told_apart() -> None:
    assert measured((1, 1, 1.1), (4, MODEL_END, 0.0)) == [(1, 1, 0.5), (4, MODEL_END, 1.0)]


def test_without_forcing_only_the_model_as_it_is_remains() -> None:
    assert measured((0, 0, 0.85), (1, 1, 0.85), (2, MODEL_END, 0.0), forced=False) == [
        (2, MODEL_END, 0.75)
    ]


def test_without_records_nothing_is_claimed() -> None:
    nothing = {**RECORDS, "split": np.zeros(5, int)}
    points = operating_points([(0, 0, 0.5), (1, MODEL_END, 0.0)], nothing, forced=True)
    assert [point.agreement for point in points] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ((), ("differ",)),
        ((0, 0), ("differ",)),
        ((1, 0), ("Pareto", "expected [(0, 0), (0, 1)]")),
    ],
)
def test_points_must_be_in_order_and_be_some(depths: tuple[int, ...], message: Told) -> None:
    points = tuple(OperatingPoint(deepest=d, exit=d, agreement=1.0) for d in depths)
    with pytest.raises(ValueError, match=facts(*message)):
        OperatingPoints(points=points, latencies=table(first_s=1.0, more_s=1.0))
