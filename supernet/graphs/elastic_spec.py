"""What of a supernet is elastic: a file in TOML, and the choices that it allows.

The control tuple of SuperServe (section 4.1): depth D, expand ratio E and width multiplier W. Depth
is how many of some blocks are skipped; E and W are both the share of the output channels that some
weights keep, and differ only in which weights are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

from offramp.supernet.graphs.errors import ElasticSpecError

MOST_CHOICES: Final = 20_000
"""Subnets that are listed one by one; a search draws from more."""
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A block that a subnet may leave out: a scope, or what lies between two tensors."""

    scope: str = ""
    """What the names of its operators begin with, as the module's path in torch's exports."""
    start: str = ""
    """Else: the tensor that is read in place of ``end``."""
    end: str = ""

    def __str__(self) -> str:
        return self.scope or f"{{ from = {self.start!r}, to = {self.end!r} }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGroup:
    """Blocks that may be skipped, in the order in which they are."""

    skip: tuple[Skip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthGroup:
    """Weights whose output channels are elastic, all with the same ratio."""

    weights: tuple[str, ...]
    """Names of operators, whose weight is meant, or of initializers."""
    axis: int | None = None
    """Dimension of the output channels; ``None`` is what the operator says."""
    parts: int = 1
    """Equal parts of the output channels that are each sliced, as queries, keys and values of one
    weight are 3."""
    ratios: tuple[float, ...]
    """Rising, inside (0, 1); 1 is a choice beside them."""

    @property
    def all_ratios(self) -> tuple[float, ...]:
        """All ratios, the largest first."""
        return (1.0, *reversed(self.ratios))


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetChoice:
    """One subnet of those that a spec allows."""

    skipped: tuple[int, ...]
    """Blocks that are left out, for each depth group."""
    ratios: tuple[float, ...]
    """The share of output channels, for each width group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """What of a supernet is elastic, as a file says it; names are not looked up yet."""

    depths: tuple[DepthGroup, ...] = ()
    widths: tuple[WidthGroup, ...] = ()
    norm_layers: tuple[str, ...] | str = AUTO
    """``auto``, ``none``, or what the names of normalised layers begin with."""
    keep: int = 6
    """Operating points to keep, the full model included."""
    source: str = "spec"
    """The file's name, for messages."""

    @property
    def full(self) -> SubnetChoice:
        """The whole supernet."""
        return SubnetChoice(skipped=(0,) * len(self.depths), ratios=(1.0,) * len(self.widths))

    @property
    def smallest(self) -> SubnetChoice:
        """The subnet with the least of everything."""
        return SubnetChoice(
            skipped=tuple(len(group.skip) for group in self.depths),
            ratios=tuple(group.ratios[0] for group in self.widths),
        )

    @property
    def count(self) -> int:
        """Subnets that there are, the full one included."""
        levels = [len(d.skip) + 1 for d in self.depths] + [len(w.ratios) + 1 for w in self.widths]
        return prod(levels)

    def choices(self) -> tuple[SubnetChoice, ...]:
        """List all subnets, the largest first: by what they keep of depths times widths.

        ElasticSpecError if there are more than :data:`MOST_CHOICES`.
        """
        if self.count > MOST_CHOICES:
            raise ElasticSpecError(
                f"{self.source}: allows {self.count:,} subnets, at most {MOST_CHOICES:,} can be "
                "listed; put weights into one [[width]] that change together, or search"
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
        """Give a choice's rough size, 0 to 1: what is kept of each group, multiplied."""
        kept = (
            (len(group.skip) + 1 - n) / (len(group.skip) + 1)
            for group, n in zip(self.depths, choice.skipped, strict=True)
        )
        return prod(kept) * prod(choice.ratios)

    def neighbours(self, choice: SubnetChoice) -> Iterator[SubnetChoice]:
        """Yield the subnets that are one step away in one group."""
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
        """Refuse, by an ElasticSpecError, what is none of the choices."""
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
                f"{list(choice.ratios)} is none of its subnets; skip at most "
                f"{[len(d.skip) for d in self.depths]}, with ratios of "
                f"{[list(w.all_ratios) for w in self.widths]}"
            )

    def describe(self, choice: SubnetChoice) -> str:
        """``depth 5 of 7, width 0.5``: blocks kept of those that may be skipped, and ratios."""
        depths = " + ".join(
            f"{len(group.skip) - n} of {len(group.skip)}"
            for group, n in zip(self.depths, choice.skipped, strict=True)
        )
        widths = " + ".join(f"{ratio:g}" for ratio in choice.ratios)
        told = [f"{word} {said}" for word, said in (("depth", depths), ("width", widths)) if said]
        return ", ".join(told)


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
