"""Plans how features fit on a disk: in how many passes over the data, and for how many samples.

Heads of different candidates are independent, so candidates may be recorded and trained a few at a
time: that takes one pass of the model over the data for each group, and does not change results.
Samples are left out only if the maximum number of passes does not suffice, augmented ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.scratch import describe_bytes

MOST_PASSES = 4
"""Largest number of passes over the data to record features. Tuning, certifying and measuring take
another pass."""
FEWEST_SAMPLES = 1000
"""Smallest number of real samples to train on; heads trained on fewer would be too bad, so
compiling is refused."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """Numbers of samples that are recorded, by kind."""

    train: int
    made: int
    tune: int

    @property
    def total(self) -> int:
        """Number of samples whose features are recorded: all three kinds together."""
        return self.train + self.made + self.tune


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlan:
    """Assignment of candidates to passes."""

    groups: tuple[tuple[int, ...], ...]
    """Indices of the candidates that each pass records."""
    counts: SampleCounts
    size_bytes: int
    """Bytes of the features of the largest group, which are on the disk together."""


def plan_features(sizes: Sequence[int], counts: SampleCounts, limit_bytes: int) -> FeaturePlan:
    """Plan to record features of at most ``limit_bytes`` together.

    ``sizes`` are the bytes of one sample's features, by candidate. As few passes as possible are
    planned; if :data:`MOST_PASSES` do not suffice, samples are left out. DataError if too few would
    be left.
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
            f"training and tuning need at least {least:,} samples; their features take "
            f"{describe_bytes(largest * least)} at a time, even if recorded in {MOST_PASSES} "
            f"passes, more than the {describe_bytes(limit_bytes)} of --scratch-limit; raise it, "
            "ask for fewer exits (--candidates), or pass fewer or smaller samples"
        )
    return FeaturePlan(groups=groups, counts=kept, size_bytes=largest * kept.total)


def balanced_groups(sizes: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    """Divide candidates into at most ``groups`` runs; the largest run is as small as possible."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= groups:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """Fill groups one after another up to the size ``room``; none is empty."""
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
    """Leave out augmented samples, then real training samples; all tuning samples stay."""
    made = min(counts.made, max(most - counts.train - counts.tune, 0))
    train = min(counts.train, max(most - counts.tune, 0))
    return SampleCounts(train=train, made=made, tune=counts.tune)
