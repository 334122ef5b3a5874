"""Selection of subnets that become operating points."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import facts

from offramp.supernet.graphs import ElasticSpec, RatedChoice, SubnetChoice, prune, search
from offramp.supernet.graphs.elastic_spec import DepthGroup, Skip, WidthGroup
from offramp.supernet.graphs.search import front


def rated(index: int, cost: float, quality: float, accuracy: float | None = None) -> RatedChoice:
    choice = SubnetChoice(skipped=(index,), ratios=())
    return RatedChoice(choice=choice, cost=cost, agreement=quality, accuracy=accuracy)


FULL = SubnetChoice(skipped=(0,), ratios=())


def test_the_front_has_what_nothing_beats() -> None:
    points = [
        rated(0, 10, 1.0),
        rated(1, 8, 0.7),
        rated(2, 5, 0.9),
        rated(3, 5, 0.8),  # as fast, and worse
        rated(4, 6, 0.9),  # as good, and slower
        rated(5, 2, 0.5),
    ]
    assert [r.choice.skipped[0] for r in front(points)] == [5, 2, 0]


def test_accuracy_counts_where_it_is_known() -> None:
    better = rated(1, 5, 0.9, accuracy=0.80)
    worse = rated(2, 4, 0.95, accuracy=0.70)
    assert front([better, worse]) == [worse, better]
    assert better.quality == 0.80
    assert front([rated(1, 5, 0.9), rated(2, 4, 0.95)]) == [rated(2, 4, 0.95)]


def test_gaps_in_time_are_even_and_the_full_model_is_always_kept() -> None:
    points = [rated(10 - i, i, i / 10) for i in range(1, 11)]
    points = [*points[:-1], rated(0, 10, 1.0)]
    assert [r.cost for r in prune(points, FULL, 4)] == [1, 4, 7, 10]
    assert [r.cost for r in prune(points, FULL, 1)] == [10]
    assert [r.cost for r in prune(points, FULL, 2)] == [1, 10]
    assert [r.cost for r in prune(points, FULL, 99)] == list(range(1, 11))


def test_a_full_model_that_is_beaten_stays_and_slower_ones_do_not() -> None:
    points = [rated(0, 10, 0.9), rated(1, 4, 0.95), rated(2, 12, 1.0)]
    assert [r.choice.skipped[0] for r in prune(points, FULL, 3)] == [1, 0]


@given(
    costs=st.lists(st.integers(1, 60), min_size=1, max_size=9, unique=True),
    keep=st.integers(1, 6),
)
def test_no_other_choice_is_more_even(costs: list[int], keep: int) -> None:
    costs = sorted(costs)
    points = [rated(len(costs) - 1 - i, c, (i + 1) / len(costs)) for i, c in enumerate(costs)]
    found = [int(r.cost) for r in prune(points, FULL, keep)]
    assert len(found) == min(keep, len(costs))
    assert found[-1] == costs[-1]
    assert set(found) <= set(costs)
    if keep > 1:
        assert found[0] == costs[0]
        inner = combinations(costs[1:-1], len(found) - 2) if len(found) > 2 else [()]
        assert uneven(found) == min(uneven([costs[0], *i, costs[-1]]) for i in inner)


def uneven(costs: list[int]) -> int:
    return sum((b - a) ** 2 for a, b in pairwise(costs))


def test_figures_that_are_none_are_refused() -> None:
    for cost in (0.0, -1.0, nan, inf):
        with pytest.raises(ValueError, match="expected a finite number above 0"):
            rated(0, cost, 0.5)
    with pytest.raises(ValueError, match=facts("agreement 1.5", "0 to 1")):
        rated(0, 1, 1.5)
    with pytest.raises(ValueError, match=facts("accuracy nan", "0 to 1")):
        rated(0, 1, 0.5, accuracy=nan)
    with pytest.raises(ValueError, match=facts("keep 3 of 1", "at least 1")):
        prune([rated(1, 1, 0.5)], FULL, 3)
    with pytest.raises(ValueError, match="keep 0 of 1"):
        prune([rated(0, 1, 0.5)], FULL, 0)


SPEC = ElasticSpec(
    depths=tuple(DepthGroup(skip=tuple(Skip(scope=f"/{g}{i}") for i in range(4))) for g in "ab"),
    widths=tuple(WidthGroup(weights=(w,), ratios=(0.25, 0.5, 0.75)) for w in "cde"),
)
"""1,600 subnets."""


class Evaluator:
    """Costs are known, and so is what each group is worth."""

    def __init__(self) -> None:
        self.asked: list[SubnetChoice] = []

    def __call__(self, choice: SubnetChoice) -> RatedChoice:
        self.asked.append(choice)
        lost = sum(
            weight * n for weight, n in zip((0.01, 0.06), choice.skipped, strict=True)
        ) + sum(weight * (1 - r) for weight, r in zip((0.02, 0.1, 0.3), choice.ratios, strict=True))
        return RatedChoice(choice=choice, cost=SPEC.size(choice), agreement=1 - lost)


def test_few_subnets_are_all_evaluated() -> None:
    small = ElasticSpec(depths=SPEC.depths)
    asked = Evaluator()
    asked_of = search(small, lambda c: rated(0, small.size(c), small.size(c)), budget=25)
    assert len(asked_of) == small.count == 25
    assert asked.asked == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_many_the_front_is_found_with_a_part_of_them(seed: int) -> None:
    evaluate = Evaluator()
    found = search(SPEC, evaluate, budget=200, seed=seed)
    assert [r.choice for r in found] == evaluate.asked
    assert len(set(evaluate.asked)) == len(evaluate.asked) == 200
    assert evaluate.asked[:2] == [SPEC.full, SPEC.smallest]
    every = front([Evaluator()(choice) for choice in SPEC.choices()])
    drawn = front([Evaluator()(c) for c in evaluate.asked[:100]])

    def lost(points: list[RatedChoice]) -> float:
        """Return the mean distance below the true front of the best point of no higher cost."""
        best = [max(p.quality for p in points if p.cost <= e.cost) for e in every]
        return sum(e.quality - b for e, b in zip(every, best, strict=True)) / len(every)

    assert lost(front(found)) < 0.5 * lost(drawn)
    assert lost(front(found)) < 0.02


def test_the_same_seed_tries_the_same() -> None:
    one, other, third = Evaluator(), Evaluator(), Evaluator()
    search(SPEC, one, budget=50, seed=4)
    search(SPEC, other, budget=50, seed=4)
    search(SPEC, third, budget=50, seed=5)
    assert one.asked == other.asked != third.asked


def test_a_search_budget_covers_the_largest_and_the_smallest_subnet() -> None:
    evaluate = Evaluator()
    search(SPEC, evaluate, budget=2)
    assert evaluate.asked == [SPEC.full, SPEC.smallest]
    with pytest.raises(ValueError, match=facts("1 subnets", "at least 2")):
        search(SPEC, evaluate, budget=1)
