"""Choice of operating points: subnets on the Pareto front, with evenly spaced inference times.

SuperServe profiles subnets that are uniformly spaced on the Pareto front (sections 4.2 and 6.1);
lemma A.1 shows that the others are useless: of two subnets that take the same time, the more
accurate one has more utility for any batch. If there are few subnets, all are evaluated. If there
are many, a random sample is evaluated first, and then the neighbours of the best ones so far, as in
the evolution of Once-for-all (Cai et al. 2020, section 3.4); here each subnet is evaluated itself,
without a predictor of accuracy. Sans I/O: the caller passes ``evaluate``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan

from offramp.supernet.graphs.elastic_spec import ElasticSpec, SubnetChoice

_SAMPLED = 0.5
"""Share of the budget for random samples, before neighbours are tried."""
_TRIES = 20
"""Largest number of random draws to find one new subnet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedChoice:
    """An evaluated subnet. ValueError if a figure is NaN or out of range."""

    choice: SubnetChoice
    cost: float
    """Seconds or FLOPs of a sample, in one unit for all."""
    agreement: float
    """Share of samples with the same answer as the full model, 0 to 1."""
    accuracy: float | None = None
    """Share of samples with the labelled answer, 0 to 1; ``None`` without labels."""

    def __post_init__(self) -> None:
        if isnan(self.cost) or not 0 < self.cost < inf:
            raise ValueError(f"cost {self.cost} of {self.choice}, expected a finite number above 0")
        for name, share in (("agreement", self.agreement), ("accuracy", self.accuracy)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} {share} of {self.choice}, expected a share of 0 to 1")

    @property
    def quality(self) -> float:
        """Accuracy if known, else agreement; higher is better."""
        return self.agreement if self.accuracy is None else self.accuracy


def front(rated: Sequence[RatedChoice]) -> list[RatedChoice]:
    """Return the Pareto front of cost and quality, the cheapest choice first."""
    best, kept = -inf, []
    for candidate in sorted(rated, key=lambda r: (r.cost, -r.quality)):
        if candidate.quality > best:
            best = candidate.quality
            kept.append(candidate)
    return kept


def prune(rated: Sequence[RatedChoice], full: SubnetChoice, keep: int) -> list[RatedChoice]:
    """Choose at most ``keep`` operating points, in order of cost, with ``full`` last.

    They are on the Pareto front, and cheaper than the full model. The cheapest is always chosen,
    and the others so that the sum of squared gaps in cost is minimal, which makes gaps even.
    ValueError if ``full`` was not rated, or ``keep`` is less than 1.
    """
    whole = next((r for r in rated if r.choice == full), None)
    if whole is None or keep < 1:
        raise ValueError(f"keep {keep} of {len(rated)}: expected at least 1, the full model rated")
    smaller = [r for r in front(rated) if r.cost < whole.cost]
    return _evenly([*smaller, whole], keep)


def _evenly(points: Sequence[RatedChoice], keep: int) -> list[RatedChoice]:
    """Choose some of the points, which ascend in cost: the last, then the first, then others."""
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

    The full model is evaluated first, and the smallest subnet second. With the same seed, the same
    subnets are evaluated if ``evaluate`` returns the same results. ValueError if the budget is
    below 2.
    """
    if budget < 2:
        raise ValueError(
            f"a budget of {budget} subnets, expected at least 2: the largest and the smallest"
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
    """Draw the step of each group with equal probabilities."""
    return SubnetChoice(
        skipped=tuple(rng.randint(0, len(group.skip)) for group in spec.depths),
        ratios=tuple(rng.choice(group.all_ratios) for group in spec.widths),
    )
