"""Which subnets become operating points: those on the Pareto front, spread over time.

SuperServe profiles subnets that are uniformly spaced on the Pareto front (sections 4.2 and 6.1);
lemma A.1 says why others need not be looked at: of two that take the same time, the one that is
more accurate is of more use to any batch. Few subnets are all evaluated. Of many, as evolution in
Once-for-all does (Cai et al. 2020, section 3.4), a random sample is, and then what is one step away
from the best so far; but each is evaluated itself, not by a predictor of accuracy. Sans I/O:
``evaluate`` is the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan

from offramp.supernet.graphs.elastic_spec import ElasticSpec, SubnetChoice

_SAMPLED = 0.5
"""Share of the budget that is drawn at random, before neighbours are tried."""
_TRIES = 20
"""Draws for each subnet that is to be new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedChoice:
    """A subnet that was evaluated. ValueError if a figure is no number or out of range."""

    choice: SubnetChoice
    cost: float
    """Seconds or FLOPs of a sample, in one unit for all."""
    agreement: float
    """Share of samples on which it answers as the full model does, 0 to 1."""
    accuracy: float | None = None
    """Share of samples that it answers as they are labelled, where they are."""

    def __post_init__(self) -> None:
        if isnan(self.cost) or not 0 < self.cost < inf:
            raise ValueError(f"cost {self.cost} of {self.choice}, expected a finite number above 0")
        for name, share in (("agreement", self.agreement), ("accuracy", self.accuracy)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} {share} of {self.choice}, expected a share of 0 to 1")

    @property
    def quality(self) -> float:
        """What more of is better: accuracy where it is known, else agreement."""
        return self.agreement if self.accuracy is None else self.accuracy


def front(rated: Sequence[RatedChoice]) -> list[RatedChoice]:
    """Give those that no other beats in both cost and quality, the cheapest first."""
    best, kept = -inf, []
    for candidate in sorted(rated, key=lambda r: (r.cost, -r.quality)):
        if candidate.quality > best:
            best = candidate.quality
            kept.append(candidate)
    return kept


def prune(rated: Sequence[RatedChoice], full: SubnetChoice, keep: int) -> list[RatedChoice]:
    """Choose at most ``keep`` operating points, the cheapest first and ``full`` the last.

    They are on the Pareto front, without what costs as much as the full model; of these the
    cheapest is chosen, and others so that the squares of the gaps in cost have the least sum, which
    makes gaps even. ValueError if ``full`` was not rated, or ``keep`` is less than 1.
    """
    whole = next((r for r in rated if r.choice == full), None)
    if whole is None or keep < 1:
        raise ValueError(f"keep {keep} of {len(rated)}: expected at least 1, the full model rated")
    smaller = [r for r in front(rated) if r.cost < whole.cost]
    return _evenly([*smaller, whole], keep)


def _evenly(points: Sequence[RatedChoice], keep: int) -> list[RatedChoice]:
    """Choose some of points that rise in cost, the first and the last among them (or the last)."""
    if len(points) <= keep:
        return list(points)
    if keep == 1:
        return [points[-1]]
    count = len(points)
    least = [0.0] + [inf] * (count - 1)
    before: list[list[int]] = []
    for _ in range(keep - 1):
        chosen, reached = [0] * count, [inf] * count
        for end in range(1, count):
            for start in range(end):
                found = least[start] + (points[end].cost - points[start].cost) ** 2
                if found < reached[end]:
                    reached[end], chosen[end] = found, start
        before.append(chosen)
        least = reached
    places = [count - 1]
    for chosen in reversed(before):
        places.append(chosen[places[-1]])
    return [points[place] for place in reversed(places)]


def search(
    spec: ElasticSpec,
    evaluate: Callable[[SubnetChoice], RatedChoice],
    *,
    budget: int,
    seed: int = 0,
) -> list[RatedChoice]:
    """Evaluate subnets, each at most once: all if ``budget`` allows, else the promising ones.

    The full model is the first and the smallest subnet the second; the same seed tries the same
    subnets, as long as ``evaluate`` gives the same. ValueError if the budget is below 2.
    """
    if budget < 2:
        raise ValueError(
            f"a budget of {budget} subnets, expected at least 2: the largest, smallest"
        )
    if spec.count <= budget:
        return [evaluate(choice) for choice in spec.choices()]
    rng = random.Random(seed)  # noqa: S311
    rated: dict[SubnetChoice, RatedChoice] = {}

    def rate(choice: SubnetChoice) -> None:
        if choice not in rated and len(rated) < budget:
            rated[choice] = evaluate(choice)

    rate(spec.full)
    rate(spec.smallest)
    for _ in range(_TRIES * budget):
        if len(rated) >= _SAMPLED * budget:
            break
        rate(_draw(spec, rng))
    while len(rated) < budget:
        near = [n for r in front(list(rated.values())) for n in spec.neighbours(r.choice)]
        new = list(dict.fromkeys(n for n in near if n not in rated))
        if not new:  # the front has no neighbours left
            new = [
                choice
                for choice in (_draw(spec, rng) for _ in range(_TRIES))
                if choice not in rated
            ]
        if not new:
            break
        rate(rng.choice(new))
    return list(rated.values())


def _draw(spec: ElasticSpec, rng: random.Random) -> SubnetChoice:
    """Draw each group's step with the same probability."""
    return SubnetChoice(
        skipped=tuple(rng.randint(0, len(group.skip)) for group in spec.depths),
        ratios=tuple(rng.choice(group.all_ratios) for group in spec.widths),
    )
