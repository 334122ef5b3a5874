"""Samples unlike those of calibration: no exit answers them, and the controller is not told."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes import ScriptedController, policy_of, script
from tests.unit.engine.serving import until, with_engine

from offramp.bundle import InputRange, InputRanges
from offramp.certify import MODEL_END
from offramp.engine.core import Engine
from offramp.engine.requests.input_guard import MARGIN, InputGuard
from offramp.testing.backend import SCRIPT, FakeBackend


def guard_of(**ranges: tuple[float, float]) -> InputGuard:
    found = [InputRange(name=n, lowest=low, highest=high) for n, (low, high) in ranges.items()]
    return InputGuard(InputRanges(inputs=tuple(found)))


def test_ranges_are_those_of_all_parts_together() -> None:
    first = {"x": [[1.0, 3.0]], "y": [[5]], "no number": [[np.nan]], "same": [[1, 1]]}
    second = {"x": [[-2.0, 0.0]], "y": [[7]], "no number": [[0.0]], "same": [[1, 1]]}
    parts = [{name: np.array(rows) for name, rows in part.items()} for part in (first, second)]
    ranges = InputRanges.of(*parts)
    assert [(seen.name, seen.lowest, seen.highest) for seen in ranges.inputs] == [
        ("x", -2.0, 3.0),
        ("y", 5.0, 7.0),
    ]


def test_a_little_beyond_is_in_range_and_far_beyond_or_no_number_is_not() -> None:
    guard = guard_of(x=(0.0, 1.0))
    rows = np.zeros((6, 2, 2), np.float32)
    rows[1, 1, 1] = 1.0 + MARGIN
    rows[2, 0, 0] = -MARGIN
    rows[3, 1, 0] = 1.01 + MARGIN
    rows[4, 0, 1] = np.nan
    rows[5, 1, 1] = -np.inf
    assert guard.in_range({"x": rows}).tolist() == [True, True, True, False, False, False]


def test_what_calibration_had_beside_finite_numbers_is_in_range() -> None:
    """An imputer in the graph takes NaN; a mask that is added, -infinity."""
    seen = np.array([[0.0, np.nan], [1.0, 2.0]], np.float32)
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]], np.float32)
    ranges = InputRanges.of({"x": seen, "mask": mask, "y": mask + 1}, {"y": seen})
    assert [(r.name, r.lowest, r.highest, r.beyond) for r in ranges.inputs] == [
        ("x", 0.0, 2.0, ("nan",)),
        ("y", 0.0, 2.0, ("-inf", "nan")),
    ]
    rows = np.array([[np.nan, 1.0], [np.nan, np.nan], [np.inf, 1.0], [-np.inf, 1.0], [9.0, np.nan]])
    given = {"x": rows.astype(np.float32), "mask": rows, "y": np.zeros((5, 2), np.float32)}
    assert InputGuard(ranges).in_range(given).tolist() == [True, True, False, False, False]


@pytest.mark.filterwarnings("error")
def test_ranges_may_be_wider_than_the_dtype() -> None:
    rows = np.array([[0.0, 60_000.0]], np.float16)
    assert guard_of(x=(-60_000.0, 60_000.0)).in_range({"x": rows}).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.bool_])
def test_every_dtype_can_be_looked_at(dtype: type) -> None:
    rows = np.array([[0, 1], [1, 1]]).astype(dtype)
    assert guard_of(x=(0.0, 1.0)).in_range({"x": rows}).all()


def test_every_input_counts_and_those_unknown_are_trusted() -> None:
    inputs = {"x": np.array([[0.0], [9.0]]), "y": np.array([[0], [0]]), "other": np.ones((2, 0))}
    assert guard_of(x=(0, 1), y=(0, 0)).in_range(inputs).tolist() == [True, False]
    assert guard_of(y=(0, 0)).in_range(inputs).all()


def served(guard: InputGuard | None) -> tuple[list[int], list[int], int]:
    """Exits of three samples, of which the second is out of range; who is observed; the count."""
    controller = ScriptedController(policy_of(1, e0=0.9))
    found: list[tuple[list[int], list[int], int]] = []

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        rows = script([0.95, 0.2], [7.0, 0.4], [0.95, 0.6])
        result = await engine.infer("fake", {SCRIPT: rows})
        expected = 3 if guard is None else 2
        await until(lambda: sum(map(len, controller.seen)) >= expected)
        answered = [int(at) for seen in controller.seen for at in seen.answered_at]
        count = engine.statistics()["fake"].out_of_range
        assert engine.statistics()["fake"].lost_feedback == 0
        found.append((result.exits.tolist(), answered, count))

    with_engine(body, controller=controller, guard=guard)
    return found[0]


def test_who_is_out_of_range_runs_to_the_end_and_is_no_evidence() -> None:
    exits, answered, count = served(guard_of(**{SCRIPT: (-1.0, 2.0)}))
    assert exits == [0, MODEL_END, 0]
    assert answered == [0, 0]
    assert count == 1


def test_where_inputs_are_trusted_all_are_alike() -> None:
    exits, answered, count = served(None)
    assert exits == [0, 0, 0]
    assert answered == [0, 0, 0]
    assert count == 0
