"""How features fit on a disk: in how many passes over the data, and of how many samples.

Heads of one candidate know nothing of another's, so candidates may be recorded and trained a few at
a time: that costs a pass of the model over the data for each group, and changes no result. Only
where the most passes do not suffice are samples left out, made ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.scratch import describe_bytes

MOST_PASSES = 4
"""Over the data, to record features. Tuning, certifying and measuring take one more together."""
FEWEST_SAMPLES = 1000
"""Real ones to train on, below which heads are rather refused than trained badly."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """How many samples are recorded of each kind."""

    train: int
    made: int
    tune: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.train + self.made + self.tune


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlan:
    """What is recorded in which pass."""

    groups: tuple[tuple[int, ...], ...]
    """Candidates, by pass."""
    counts: SampleCounts
    size_bytes: int
    """Of the features of the largest group, which are on the disk at once."""


def plan_features(sizes: Sequence[int], counts: SampleCounts, limit_bytes: int) -> FeaturePlan:
    """Plan to record features of at most so many bytes at once.

    ``sizes`` are, by candidate, the bytes of one sample's features. As few passes as possible are
    made; after :data:`MOST_PASSES` samples are left out. DataError where too few would be left.
    """
    for passes in range(1, MOST_PASSES + 1):
        groups = balanced_groups(sizes, passes)
        largest = max((sum(sizes[i] for i in group) for group in groups), default=0)
        if largest * counts.total <= limit_bytes:
            size_bytes = largest * counts.total
            return FeaturePlan(groups=groups, counts=counts, size_bytes=size_bytes)
    kept = _kept(counts, limit_bytes // largest)
    if kept.train < min(counts.train, FEWEST_SAMPLES):
        least = min(counts.train, FEWEST_SAMPLES) + counts.tune
        raise DataError(
            f"features of {least:,} samples, the fewest to train and tune on, take "
            f"{describe_bytes(largest * least)} at once in {MOST_PASSES} passes, more than the "
            f"{describe_bytes(limit_bytes)} of --scratch-limit; raise it, ask for fewer exits "
            "(--candidates), or give fewer or smaller samples"
        )
    return FeaturePlan(groups=groups, counts=kept, size_bytes=largest * kept.total)


def balanced_groups(sizes: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    """Divide candidates into at most so many runs of neighbours, the largest as small as can be."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= groups:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """Fill groups one after another, each as far as it has room; none is empty."""
    groups: list[list[int]] = []
    free = -1
    for index, size in enumerate(sizes):
        if size > free:
            groups.append([])
            free = room
        groups[-1].append(index)
        free -= size
    return tuple(map(tuple, groups))


def _kept(counts: SampleCounts, most: int) -> SampleCounts:
    """Leave out made samples, then real ones that train; those that tune all stay."""
    made = min(counts.made, max(most - counts.train - counts.tune, 0))
    train = min(counts.train, max(most - counts.tune, 0))
    return SampleCounts(train=train, made=made, tune=counts.tune)
