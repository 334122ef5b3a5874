"""Subnets of a module: blocks that may be skipped, and layers of elastic width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDepth:
    """Blocks of one resolution or width that may be skipped, in the order of skipping."""

    skip: tuple[str, ...]
    """Names of modules in ``named_modules``; each returns the shape of its first argument. A subnet
    that skips n blocks skips the first n."""

    def __post_init__(self) -> None:
        if not self.skip or len(set(self.skip)) < len(self.skip):
            raise ValueError(f"skip is {self.skip}: name one block or more, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWidth:
    """Layers that compute only a first part of their output channels, the same share in each."""

    layers: tuple[str, ...]
    """Names of ``Conv2d`` or ``Linear`` modules in ``named_modules``."""
    ratios: tuple[float, ...]
    """Ascending shares in (0, 1), in addition to 1; channels × ratio is a whole number."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers is {self.layers}: name one layer or more, each once")
        rising = sorted(set(self.ratios))
        if not rising or list(self.ratios) != rising or rising[0] <= 0 or rising[-1] >= 1:
            raise ValueError(
                f"ratios is {self.ratios}: use rising numbers in (0, 1); 1 itself is implied"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticChoice:
    """A subnet of an :class:`ElasticSpace`."""

    skipped: tuple[int, ...]
    """Number of skipped blocks, for each entry of the space's ``depth``."""
    ratios: tuple[float, ...]
    """Share of the channels, for each entry of the space's ``width``; 1 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpace:
    """The subnets of a module: every combination of its depths and widths."""

    depth: tuple[ElasticDepth, ...] = ()
    width: tuple[ElasticWidth, ...] = ()

    def __post_init__(self) -> None:
        for kind, groups in (
            ("block", [group.skip for group in self.depth]),
            ("layer", [group.layers for group in self.width]),
        ):
            names = [name for group in groups for name in group]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{kind} {twice[0]} is in two groups: name it in one of them")
        if not self.depth and not self.width:
            raise ValueError(
                "a space without depth and width has one subnet: name blocks or layers"
            )

    def largest(self) -> ElasticChoice:
        """Return the choice that is the whole module."""
        return ElasticChoice(skipped=(0,) * len(self.depth), ratios=(1.0,) * len(self.width))

    def smallest(self) -> ElasticChoice:
        """Return the subnet that skips all blocks that may be skipped, with the smallest widths."""
        return ElasticChoice(
            skipped=tuple(len(group.skip) for group in self.depth),
            ratios=tuple(group.ratios[0] for group in self.width),
        )

    def random(self, generator: torch.Generator) -> ElasticChoice:
        """Draw each depth and each width independently and uniformly."""

        def draw(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        return ElasticChoice(
            skipped=tuple(draw(len(group.skip) + 1) for group in self.depth),
            ratios=tuple((*group.ratios, 1.0)[draw(len(group.ratios) + 1)] for group in self.width),
        )

    def choices(self) -> Iterator[ElasticChoice]:
        """Yield every subnet, the largest first and the smallest last."""
        depths = product(*(range(len(group.skip) + 1) for group in self.depth))
        for skipped in depths:
            for ratios in product(*((1.0, *reversed(group.ratios)) for group in self.width)):
                yield ElasticChoice(skipped=skipped, ratios=ratios)

    def skipped_blocks(self, choice: ElasticChoice) -> frozenset[str]:
        """Return the names of the blocks that a subnet skips."""
        self.check(choice)
        pairs = zip(self.depth, choice.skipped, strict=True)
        return frozenset(name for group, count in pairs for name in group.skip[:count])

    def ratio_by_layer(self, choice: ElasticChoice) -> dict[str, float]:
        """Return the share of output channels that a subnet computes, by name of the layer."""
        self.check(choice)
        pairs = zip(self.width, choice.ratios, strict=True)
        return {name: ratio for group, ratio in pairs for name in group.layers}

    def check(self, choice: ElasticChoice) -> None:
        """Raise ValueError unless the choice is a subnet of this space."""
        if len(choice.skipped) != len(self.depth) or len(choice.ratios) != len(self.width):
            raise ValueError(
                f"{choice} is not a subnet of {len(self.depth)} depths and {len(self.width)} "
                "widths: use a number for each"
            )
        for group, count in zip(self.depth, choice.skipped, strict=True):
            if not 0 <= count <= len(group.skip):
                raise ValueError(f"skipped {count} of {group.skip}: skip 0 to {len(group.skip)}")
        for width, ratio in zip(self.width, choice.ratios, strict=True):
            if ratio not in (*width.ratios, 1.0):
                raise ValueError(f"ratio {ratio} is not one of {(*width.ratios, 1.0)}")
