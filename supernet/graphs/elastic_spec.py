"""Elastic parts of a supernet: the content of a TOML file, and the choices that it allows.

The choices correspond to the control tuple of SuperServe (section 4.1): depth D, expand ratio E and
width multiplier W. Depth is the number of skipped blocks. E and W are both the share of output
channels that weights keep; they differ only in which weights these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from offramp.supernet.graphs.errors import ElasticSpecError

MOST_CHOICES: Final = 20_000
"""Largest number of subnets that are listed; from a larger number, a search draws samples."""
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A block that a subnet may omit: a scope, or the operators between two tensors."""

    scope: str = ""
    """Prefix of the names of the block's operators, such as the module's path in torch's exports.
    """
    start: str = ""
    """Tensor that is read in place of ``end``; empty if a scope names the block."""
    end: str = ""

    def __str__(self) -> str:
        return self.scope or f"{{ from = {self.start!r}, to = {self.end!r} }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGroup:
    """Blocks that may be skipped, in the order in which they are skipped."""

    skip: tuple[Skip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthGroup:
    """Weights whose output channels are elastic, all with the same ratio."""

    weights: tuple[str, ...]
    """Names of initializers, or of operators with a weight."""
    axis: int | None = None
    """Dimension of the output channels; ``None`` for the usual dimension of the operator."""
    parts: int = 1
    """Number of equal parts of the output channels that are sliced separately: 3 for queries, keys
    and values in one weight."""
    ratios: tuple[float, ...]
    """Ascending ratios in (0, 1); 1 is always allowed, too."""

    @property
    def all_ratios(self) -> tuple[float, ...]:
        """All ratios, the largest first."""
        return (1.0, *reversed(self.ratios))


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetChoice:
    """One subnet that a spec allows."""

    skipped: tuple[int, ...]
    """Number of omitted blocks, for each depth group."""
    ratios: tuple[float, ...]
    """Share of output channels, for each width group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """Elastic parts of a supernet, as in a file; names are not resolved yet."""

    depths: tuple[DepthGroup, ...] = ()
    widths: tuple[WidthGroup, ...] = ()
    norm_layers: tuple[str, ...] | str = AUTO
    """Normalising layers: ``auto``, ``none``, or prefixes of the layers' names."""
    keep: int = 6
    """Number of operating points to keep, including the full model."""
    source: str = "spec"
    """Name of the file, for messages."""

    @property
    def full(self) -> SubnetChoice:
        """The whole supernet, as a choice."""
        return SubnetChoice(skipped=(0,) * len(self.depths), ratios=(1.0,) * len(self.widths))

    @property
    def smallest(self) -> SubnetChoice:
        """The smallest subnet in every group."""
        return SubnetChoice(
            skipped=tuple(len(group.skip) for group in self.depths),
            ratios=tuple(group.ratios[0] for group in self.widths),
        )

    @property
    def count(self) -> int:
        """Number of subnets, including the full one."""
        levels = [len(d.skip) + 1 for d in self.depths] + [len(w.ratios) + 1 for w in self.widths]
        return prod(levels)

    def choices(self) -> tuple[SubnetChoice, ...]:
        """Return all subnets, the largest first, by the product of kept depths and widths.

        ElasticSpecError if there are more than :data:`MOST_CHOICES`.
        """
        if self.count > MOST_CHOICES:
            raise ElasticSpecError(
                f"{self.source}: allows {self.count:,} subnets, but at most {MOST_CHOICES:,} can "
                "be listed; put weights that change together into one [[width]], or use the search"
            )
        depths = [range(len(group.skip) + 1) for group in self.depths]
        widths = [group.all_ratios for group in self.widths]
        found = [
            SubnetChoice(skipped=skipped, ratios=ratios)
            for skipped in product(*depths)
            for ratios in product(*widths)
        ]
        return tuple(sorted(found, key=self.size, reverse=True))  # stable

    def size(self, choice: SubnetChoice) -> float:
        """Return a choice's approximate size, 0 to 1: the product of the groups' kept shares."""
        kept = (
            (len(group.skip) + 1 - n) / (len(group.skip) + 1)
            for group, n in zip(self.depths, choice.skipped, strict=True)
        )
        return prod(kept) * prod(choice.ratios)

    def neighbours(self, choice: SubnetChoice) -> Iterator[SubnetChoice]:
        """Yield the subnets that differ by one step in one group."""
        for index, group in enumerate(self.depths):
            for number in (choice.skipped[index] - 1, choice.skipped[index] + 1):
                if 0 <= number <= len(group.skip):
                    skipped = _replaced(choice.skipped, index, number)
                    yield SubnetChoice(skipped=skipped, ratios=choice.ratios)
        for index, width in enumerate(self.widths):
            place = width.all_ratios.index(choice.ratios[index])
            for other in (place - 1, place + 1):
                if 0 <= other < len(width.all_ratios):
                    ratios = _replaced(choice.ratios, index, width.all_ratios[other])
                    yield SubnetChoice(skipped=choice.skipped, ratios=ratios)

    def check(self, choice: SubnetChoice) -> None:
        """Raise ElasticSpecError for a choice that is not allowed."""
        fits = len(choice.skipped) == len(self.depths) and len(choice.ratios) == len(self.widths)
        fits = fits and all(
            0 <= n <= len(d.skip) for n, d in zip(choice.skipped, self.depths, strict=True)
        )
        fits = fits and all(
            r in w.all_ratios for r, w in zip(choice.ratios, self.widths, strict=True)
        )
        if not fits:
            raise ElasticSpecError(
                f"{self.source}: skipping {list(choice.skipped)} with ratios "
                f"{list(choice.ratios)} is not one of its subnets; skip at most "
                f"{[len(d.skip) for d in self.depths]}, with ratios of "
                f"{[list(w.all_ratios) for w in self.widths]}"
            )

    def describe(self, choice: SubnetChoice) -> str:
        """Describe a choice, for instance ``depth 5 of 7, width 0.5``.

        Depth is the number of kept blocks, of those that may be skipped; width is the ratio.
        """
        depths = " + ".join(
            f"{len(group.skip) - n} of {len(group.skip)}"
            for group, n in zip(self.depths, choice.skipped, strict=True)
        )
        widths = " + ".join(f"{ratio:g}" for ratio in choice.ratios)
        told = [f"{word} {said}" for word, said in (("depth", depths), ("width", widths)) if said]
        return ", ".join(told)


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
