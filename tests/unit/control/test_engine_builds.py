"""Building engines while serving: once, within a budget, less and less often after failures."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.engine.control.engine_builds import (
    SAVED_UP_S,
    BuildBudget,
    BuildDecisions,
    BuildRequest,
)

BUDGET = BuildBudget(share=0.1, settle_s=60.0, pause_s=300.0, longest_s=1800.0)
HOUR = 3600.0


def test_a_build_is_asked_for_once_stages_have_settled() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    assert decisions.start(0.0) is None
    decisions.want("m", ["02-03", "00-01-exit1"], 10.0)
    assert decisions.start(69.9) is None
    assert decisions.start(70.0) == BuildRequest(model="m", units=("00-01-exit1", "02-03"))
    decisions.want("m", ["02-03", "00-01-exit1"], 75.0)
    assert decisions.start(500.0) is None  # one at a time
    decisions.ended(500.0, succeeded=True)
    decisions.want("m", [], 500.0)
    assert decisions.start(10 * HOUR) is None


def test_exits_that_come_and_go_are_not_built() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    for turn in range(100):
        decisions.want("m", ["02-03"] if turn % 2 else ["01-03"], 50.0 * turn)
        assert decisions.start(50.0 * turn + 49.0) is None


def test_a_stage_that_joins_others_is_waited_for() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("m", ["a"], 0.0)
    decisions.want("m", ["a", "b"], 30.0)
    assert decisions.start(89.0) is None
    assert decisions.start(90.0) == BuildRequest(model="m", units=("a", "b"))


def test_the_model_that_waits_longest_comes_first() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("late", ["b"], 10.0)
    decisions.want("early", ["a"], 5.0)
    first = decisions.start(1000.0)
    assert first is not None
    assert first.model == "early"
    decisions.ended(1001.0, succeeded=True)
    decisions.want("early", [], 1001.0)
    second = decisions.start(1001.0)
    assert second is not None
    assert second.model == "late"


def test_failures_are_paused_after_and_a_stage_is_tried_twice() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("m", ["a"], 0.0)
    assert decisions.start(60.0)
    decisions.ended(70.0, succeeded=False)
    assert decisions.start(369.9) is None
    assert decisions.start(370.0)
    decisions.ended(380.0, succeeded=False)
    decisions.want("m", ["a", "b"], 380.0)
    assert decisions.start(380.0 + 599.9) is None  # twice as long
    assert decisions.start(380.0 + 600.0) == BuildRequest(model="m", units=("b",))
    decisions.ended(1000.0, succeeded=True)
    decisions.want("m", ["a"], 1000.0)
    assert decisions.start(100 * HOUR) is None


def test_what_was_built_and_still_lacks_is_built_once_more_after_a_while() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("m", ["a"], 0.0)
    assert decisions.start(60.0)
    decisions.ended(100.0, succeeded=True)
    assert decisions.start(159.9) is None
    assert decisions.start(160.0)


def test_a_build_without_end_is_overdue() -> None:
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("m", ["a"], 0.0)
    assert decisions.start(60.0)
    assert not decisions.overdue(1860.0)
    assert decisions.overdue(1860.1)
    decisions.ended(1861.0, succeeded=False)
    assert not decisions.overdue(9999.0)


def test_a_long_build_is_paid_off_before_the_next() -> None:
    """360 s are there at the start; a build of 1,000 s leaves a debt, paid off at 0.1 a second."""
    decisions = BuildDecisions(BUDGET, 0.0)
    decisions.want("m", ["a"], 0.0)
    assert decisions.start(60.0)
    decisions.ended(1060.0, succeeded=True)
    decisions.want("m", ["b"], 1060.0)
    # left at 1,060 s: 360 + 0.1 · 1,000 (earned while it ran) − 1,000 = −540
    assert decisions.start(1060.0 + 5400.0 - 1.0) is None
    assert decisions.start(1060.0 + 5400.0 + 1.0)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_budget_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match=r"expected above 0 and at most 1"):
        BuildBudget(share=share)


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.01, 1.0),
    builds=st.lists(st.tuples(st.floats(0.0, 3000.0), st.booleans()), min_size=1, max_size=30),
)
def test_builds_keep_to_the_budget(share: float, builds: list[tuple[float, bool]]) -> None:
    """However long they take and however they end, and though new stages come all the time."""
    budget = BuildBudget(share=share, settle_s=1.0)
    decisions, now_s, taken_s, numbers = BuildDecisions(budget, 0.0), 0.0, 0.0, itertools.count()
    for took_s, succeeded in builds:
        for number in numbers:
            assert number < 100_000, "never started again"
            decisions.want("m", [f"u{number}"], now_s)
            now_s += 600.0
            if decisions.start(now_s):
                break
        # exactly the docstring: before this one, no more than what was earned and saved up
        assert taken_s <= share * (now_s + SAVED_UP_S) + 1e-6
        now_s += took_s
        taken_s += took_s
        decisions.ended(now_s, succeeded=succeeded)
