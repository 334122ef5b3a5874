"""Ramp adjustment, rule by rule, against numbers worked out by hand (Apparate 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp.bundle.schema.policy import NEVER
from offramp.engine.control.adjustment import (
    Adjustment,
    Reason,
    adjust,
    measure_utilities,
    upper_bound_ms,
)
from offramp.engine.control.costs import CostModel

COSTS = CostModel(
    source_ms=80.0,
    segments_ms=(10.0,) * 8,
    stages_ms=(0.5,) * 7,
    after_segment=tuple(range(7)),
    exits_ms=(0.5,) * 7,
)
"""Exit i lies 10 (i + 1) ms into a model of 80 ms; leaving there avoids 70 − 10 i, passing it
costs 1: one exit in use is an overhead of 1/80."""


def costing(**added_ms: float) -> CostModel:
    """COSTS, but passing exit eN costs so many ms."""
    exits_ms = [added_ms.get(f"e{i}", 1.0) - 0.5 for i in range(7)]
    return replace(COSTS, exits_ms=tuple(exits_ms))


def leaving(*counts: int, samples: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return confidences with these numbers of leaving samples per exit, at thresholds of 0.5."""
    confidence = np.zeros((len(counts), samples), dtype=np.float32)
    ends = np.cumsum(counts)
    for row, end, count in zip(confidence, ends, counts, strict=True):
        row[end - count : end] = 0.9
    return confidence


def adjusted(counts: Sequence[int], active: Sequence[int], **options: Any) -> Adjustment:
    """Adjust after so many of 100 samples left at each exit in use."""
    given_ = {"costs": COSTS, "max_overhead": 1.0, **options}
    confidence = leaving(*counts, samples=100)
    return adjust(confidence, active, [0.5] * len(active), **given_)


def test_utility_is_time_avoided_less_time_added() -> None:
    found = measure_utilities(leaving(3, 5, samples=10), [0.5, 0.5], (1, 4), COSTS)
    assert found.counts.tolist() == [3, 5, 2]
    # 3 samples avoid 60 ms each, 7 pass at 1 ms; 5 avoid 30 ms, 2 pass
    assert found.utility_ms.tolist() == pytest.approx([3 * 60 - 7, 5 * 30 - 2])
    assert found.mean_ms == pytest.approx((3 * 21 + 5 * 52 + 2 * 82) / 10)


def test_an_exit_that_only_looks_on_loses_what_it_adds_to_everyone() -> None:
    found = measure_utilities(leaving(4, samples=10), [NEVER], (2,), COSTS)
    assert found.utility_ms.tolist() == [-10.0]


def test_the_upper_bound_of_a_candidate() -> None:
    assert upper_bound_ms(4, 3, 80, COSTS) == 3 * 30 - 77


def test_figure_12_the_candidate_that_could_win_the_most_is_tried() -> None:
    # utilities: 20·70−80 = 1320, 1·40−79 = −39, 2·20−77 = −37. Intervals {1, 2}, {4}, {6};
    # 80 samples get there. Exit 1: 1 leaves as at exit 3: 60−79 = −19. Exit 4: 2 as at exit 5,
    # and 1 of exit 3: 90−77 = 13. Exit 6: 3 of earlier deactivations: 30−77 = −47.
    found = adjusted([20, 1, 2], [0, 3, 5])
    assert found.utility_ms == (1320.0, -39.0, -37.0)
    assert found.deactivated == (3, 5)
    assert (found.active, found.tried, found.reason) == ((0, 4), 4, Reason.HARMFUL)
    assert found.thresholds == (0.5, NEVER)


def test_later_candidates_follow_where_all_in_the_middle_would_lose() -> None:
    # Exit 4: 2·30−78 = −18, exit 6: 2·10−78 = −58, exit 1: −19; behind exit 1 comes exit 2,
    # which costs little: 1·50−79·0.1 = 42.1
    assert adjusted([20, 1, 1], [0, 3, 5], costs=costing(e2=0.1)).tried == 2
    found = adjusted([20, 1, 1], [0, 3, 5])
    assert (found.active, found.tried, found.reason) == ((0,), None, Reason.HARMFUL)


def test_candidates_start_in_the_middle_and_never_go_earlier() -> None:
    # Exit 6 lets 8 leave: 80−92·1 < 0. Interval {0 … 5}: exit 2 is the earlier middle,
    # 8·50−92 = 308; exits 0 and 1 could win more, but are not asked.
    found = adjusted([8], [6])
    assert found.utility_ms == (-12.0,)
    assert (found.active, found.tried) == ((2,), 2)


def test_candidates_before_the_latest_useful_exit_are_not_considered() -> None:
    # Exit 1 loses (1·60−99), exit 4 wins; behind it {5, 6}: exit 5 with 1 sample of exit 1: loses
    found = adjusted([1, 50], [1, 4])
    assert found.utility_ms == (-39.0, 50 * 30 - 49)
    assert (found.active, found.tried) == ((4,), None)
    # with 1 sample left to pass exit 5, the one sample of exit 1 is enough: 20−0 > 0
    assert adjusted([1, 98], [1, 4]).tried == 5


def test_a_candidate_beyond_the_budget_is_passed_over() -> None:
    # Exit 0 keeps 20. Exit 3 costs 20: 10·40−70·20 < 0, exit 5: 2·20−68 < 0. Of 80 samples:
    # exit 1 at 3 ms 10·60−70·3 = 390, exit 4 at 3 ms 12·30−68·3 = 156, exit 6 12·10−68 = 52.
    costs = costing(e3=20, e1=3, e4=3)
    assert adjusted([20, 10, 2], [0, 3, 5], costs=costs).tried == 1
    assert adjusted([20, 10, 2], [0, 3, 5], costs=costs, max_overhead=2.5 / 80).tried == 6
    assert adjusted([20, 10, 2], [0, 3, 5], costs=costs, max_overhead=1.5 / 80).tried is None


def test_no_winner_at_all_opens_the_whole_model() -> None:
    # Exit 1: 1·60−99 = −39, exit 4: 1·30−98 = −68. Intervals {0}, {2, 3}, {5, 6}; of 100 samples:
    # exit 0 1·70−99 = −29; exit 2 2·50−98 = 2; exit 5 2·20−98 < 0
    found = adjusted([1, 1], [1, 4])
    assert (found.active, found.deactivated, found.tried) == ((2,), (1, 4), 2)


def test_tuning_that_makes_every_exit_useful_keeps_them_all() -> None:
    confidence = np.array([[0.875] * 4 + [0.25] * 6, [0.875] * 10], dtype=np.float32)
    # exit 1 is new: −10, all leave at exit 3; tuned, it takes 4 of them
    found = adjust(
        confidence,
        (1, 3),
        (NEVER, 0.5),
        COSTS,
        max_overhead=1.0,
        retune=lambda: np.array([0.75, 0.5]),
    )
    assert found.utility_ms == (4 * 60 - 6.0, 6 * 40.0)
    assert (found.active, found.thresholds) == ((1, 3), (0.75, 0.5))
    assert (found.reason, found.tuned, found.tried) == (Reason.RETUNED, True, None)


def test_tuning_that_saves_less_is_not_taken() -> None:
    # tuned: nobody leaves at exit 3 any more, which harms; exit 1 goes, exit 3 stays as it was
    found = adjusted([0, 60], [1, 3], retune=lambda: np.array([0.5, 0.95]))
    assert found.utility_ms == (-100.0, 60 * 40 - 40)
    assert (found.deactivated, found.active[:1], found.tuned) == ((1,), (3,), True)
    assert found.thresholds[0] == 0.5


def test_after_a_tuning_the_losers_under_the_new_thresholds_go() -> None:
    confidence = leaving(0, 10, samples=10)
    confidence[0, :9] = 0.75
    # exit 0 is new; tuned, it takes 9 of 10: 9·70−1; exit 5 is passed by the last: −1
    found = adjust(
        confidence,
        (0, 5),
        (NEVER, 0.5),
        COSTS,
        max_overhead=1.0,
        retune=lambda: np.array([0.75, NEVER]),
    )
    assert found.utility_ms == (629.0, -1.0)
    assert (found.deactivated, found.active[0], found.thresholds[0]) == ((5,), 0, 0.75)


def test_useful_exits_are_not_tuned() -> None:
    def refuse() -> Any:
        raise AssertionError("tuned without need")

    assert not adjusted([50, 30], [2, 5], retune=refuse).tuned


def test_a_useless_exit_that_costs_nothing_may_stay() -> None:
    # all left before exit 5: its utility is 0
    found = adjusted([100, 0], [2, 5])
    assert found.utility_ms == (5000.0, 0.0)
    assert found.reason is Reason.PROBED_BEFORE_BEST


@pytest.mark.parametrize(
    ("counts", "active", "tried"),
    [
        ([50, 30], [2, 5], 1),  # 50·50−50 against 30·20−20
        ([20, 60], [2, 5], 4),  # 20·50−80 = 920 against 60·20−20 = 1180
        ([20, 60], [2, 3], 1),  # the best is 3; 2 is taken, so the place before the next best
        ([50, 30], [0, 4], 3),  # nothing lies before the best
        ([50, 30], [0, 1], None),
    ],
)
def test_with_budget_an_exit_is_added_just_before_the_best(
    counts: list[int], active: list[int], tried: int | None
) -> None:
    found = adjusted(counts, active)
    assert found.tried == tried
    assert set(found.active) == {*active, tried} - {None}
    assert found.deactivated == ()
    assert found.reason is (Reason.STEADY if tried is None else Reason.PROBED_BEFORE_BEST)
    assert dict(zip(found.active, found.thresholds, strict=True)) == {
        e: NEVER if e == tried else 0.5 for e in found.active
    }


@pytest.mark.parametrize(
    ("counts", "active", "after"),
    [
        ([50, 30], [2, 5], (2, 4)),  # the worst is 5
        ([20, 60], [2, 5], (1, 5)),  # the worst is 2
        ([50, 30, 10], [1, 3, 4], (1, 2, 4)),  # the worst is 4, but 3 is taken: 3 goes to 2
        ([50], [3], (3,)),  # the best one is never shifted
        ([50, 30], [2, 3], (2, 3)),  # the worst has no place, the best is never shifted
        ([20, 70], [0, 3], (0, 3)),  # the worst is at the start: 20·70−80 against 70·40−10
    ],
)
def test_without_budget_the_worst_is_shifted_earlier(
    counts: list[int], active: list[int], after: tuple[int, ...]
) -> None:
    found = adjusted(counts, active, max_overhead=COSTS.overhead(active))
    assert found.active == after
    changed = after != tuple(active)
    assert found.reason is (Reason.SHIFTED_WORST if changed else Reason.STEADY)
    assert found.deactivated == tuple(sorted({*active} - {*after}))
    assert (NEVER in found.thresholds) == changed


def test_probing_keeps_the_budget_where_exits_cost_differently() -> None:
    budget = COSTS.overhead([2, 5])
    # exit 4 costs more than exit 5, so 5 cannot be shifted; nor is there another to shift
    found = adjusted([50, 30], [2, 5], costs=costing(e4=1.5), max_overhead=budget)
    assert found.reason is Reason.STEADY


def test_a_lowered_budget_drops_the_least_useful() -> None:
    # 30·60−70 = 1730, 40·40−30 = 1570, 20·20−10 = 390
    found = adjusted([30, 40, 20], [1, 3, 5], max_overhead=2.5 / 80)
    assert (found.active, found.deactivated, found.tried) == ((1, 3), (5,), None)
    assert found.reason is Reason.OVER_BUDGET
    assert adjusted([30, 40, 20], [1, 3, 5], max_overhead=0.0).active == ()


def test_without_exits_the_middle_one_is_tried() -> None:
    found = adjusted([], [])
    assert (found.active, found.tried, found.reason) == ((3,), 3, Reason.EMPTY)
    cheap_late = costing(e3=2, e4=2)
    assert adjusted([], [], costs=cheap_late, max_overhead=1.5 / 80).tried == 5
    assert adjusted([], [], max_overhead=0.0).active == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"active": (3, 1)}, "must increase"),
        ({"active": (1, 7)}, "within 0 to 6"),
        ({"thresholds": (0.5,)}, "1 thresholds do not fit 2"),
        ({"confidence": leaving(1, samples=10)}, r"expected \[2, samples\]"),
        ({"confidence": leaving(0, 0, samples=0)}, "samples to judge by"),
        ({"confidence": np.full((2, 3), np.nan, dtype=np.float32)}, "holds NaN"),
        ({"max_overhead": -0.1}, "max_overhead must be at least 0"),
        ({"max_overhead": np.nan}, "max_overhead must be at least 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(changed: dict[str, Any], message: str) -> None:
    fine = {
        "confidence": leaving(1, 2, samples=10),
        "active": (1, 3),
        "thresholds": (0.5, 0.5),
        "costs": COSTS,
    }
    adjust(**fine)
    with pytest.raises(ValueError, match=message):
        adjust(**{**fine, **changed})


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    exits = draw(st.integers(1, 7))
    ms = st.floats(0.01, 20)
    segments = draw(st.lists(ms, min_size=exits + 1, max_size=exits + 1))
    active = sorted(draw(st.sets(st.integers(0, exits - 1))))
    samples = draw(st.integers(1, 12))
    level = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])
    flat = draw(st.lists(level, min_size=len(active) * samples, max_size=len(active) * samples))
    threshold = st.sampled_from([0.2, 0.5, 0.8, 1.0, NEVER])
    row = st.lists(threshold, min_size=len(active), max_size=len(active))
    tuned = draw(st.one_of(st.none(), row))
    return {
        "confidence": np.array(flat, dtype=np.float32).reshape(len(active), samples),
        "active": active,
        "thresholds": draw(row),
        "costs": CostModel(
            source_ms=sum(segments),
            segments_ms=tuple(segments),
            stages_ms=(draw(ms),) * exits,
            after_segment=tuple(range(exits)),
            exits_ms=tuple(draw(st.lists(ms, min_size=exits, max_size=exits))),
        ),
        "max_overhead": draw(st.floats(0, 2)),
        "retune": None if tuned is None else lambda: np.array(tuned),
    }


@given(situation=situations())
@settings(max_examples=500, deadline=None)
def test_every_decision_is_valid_within_budget_and_heeds_the_utilities(
    situation: dict[str, Any],
) -> None:
    before, costs = situation["active"], situation["costs"]
    found = adjust(**situation)
    assert found == adjust(**situation)
    assert list(found.active) == sorted(set(found.active))
    assert all(0 <= e < costs.exits for e in found.active)
    assert costs.overhead(found.active) <= situation["max_overhead"]
    kept = set(found.active) - {found.tried}
    assert kept | set(found.deactivated) == set(before)
    assert not kept & set(found.deactivated)
    assert found.tried not in before
    thresholds = dict(zip(found.active, found.thresholds, strict=True))
    assert found.tried is None or thresholds[found.tried] == NEVER
    utility = dict(zip(before, found.utility_ms, strict=True))
    assert all(utility[e] >= 0 for e in kept)
    fits = costs.overhead([e for e in before if utility[e] >= 0]) <= situation["max_overhead"]
    if fits and max(utility.values(), default=-1) >= 0:
        assert max(utility.values()) in [utility[e] for e in kept]
    if found.reason is not Reason.SHIFTED_WORST and fits:
        assert kept == {e for e in before if utility[e] >= 0}
    if not found.tuned:
        deployed = dict(zip(before, situation["thresholds"], strict=True))
        assert all(thresholds[e] == deployed[e] for e in kept)


@given(situation=situations())
@settings(max_examples=200, deadline=None)
def test_thresholds_that_were_tuned_never_cost_time(situation: dict[str, Any]) -> None:
    confidence, active, costs = (situation[k] for k in ("confidence", "active", "costs"))
    found = adjust(**situation)
    deployed = measure_utilities(confidence, situation["thresholds"], active, costs)
    if set(active) <= set(found.active):
        by_exit = dict(zip(found.active, found.thresholds, strict=True))
        now = measure_utilities(confidence, [by_exit[e] for e in active], active, costs)
        assert now.mean_ms <= deployed.mean_ms


CASCADE = CostModel(
    source_ms=80.0,
    segments_ms=(10.0, 10.0, 10.0, 80.0),
    stages_ms=(0.5,) * 3,
    after_segment=(0, 1, 2),
    exits_ms=(0.5,) * 3,
    source_begins=3,
)
"""A quantised model of 30 ms with an exit after each segment, followed by one of 80 ms."""


def test_the_last_exit_of_a_cascade_pays_for_what_runs_for_it_alone() -> None:
    found = measure_utilities(leaving(3, 5, samples=10), [0.5, 0.5], (0, 2), CASCADE)
    # 3 samples avoid 20 + 80 ms, 7 pass at 1 ms; 5 avoid 80 ms but run 20 more, 2 pass at 21 ms
    assert found.utility_ms.tolist() == pytest.approx([3 * 100 - 7, 5 * 60 - 2 * 21])
    assert found.mean_ms == pytest.approx((3 * 11 + 5 * 32 + 2 * 112) / 10)
    assert upper_bound_ms(2, 5, 7, CASCADE, (0,)) == 5 * 60 - 2 * 21
    assert upper_bound_ms(2, 5, 7, CASCADE) == 5 * 50 - 2 * 31


def test_a_cascade_drops_an_exit_that_costs_more_than_it_saves() -> None:
    """The last exit's 20 ms are lost to all but one that leaves there: 60 − 69 · 21."""
    found = adjusted([30, 1], [0, 2], costs=CASCADE, max_overhead=2.0)
    assert found.utility_ms == (30 * 100 - 70, 60 - 69 * 21)
    assert (found.active, found.deactivated) == ((0,), (2,))
