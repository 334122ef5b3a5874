"""What of a supernet is elastic: a file in TOML, and the choices that it allows.

The control tuple of SuperServe (section 4.1): depth D, expand ratio E and width multiplier W. Depth
is how many of some blocks are skipped; E and W are both the share of the output channels that some
weights keep, and differ only in which weights are named.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from offramp.compiler.errors import ElasticSpecError

MOST_CHOICES: Final = 20_000
"""Subnets that are listed one by one; a search draws from more."""
AUTO, NONE = "auto", "none"
_KEYS: Final = {
    "depth": {"skip"},
    "width": {"weights", "axis", "parts", "ratios"},
    "norm": {"layers"},
    "points": {"keep"},
}


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


def read_spec(path: Path) -> ElasticSpec:
    """Read what of a supernet is elastic from a file in TOML.

    ::

        [[depth]]
        skip = ["/blocks/blocks.2", "/blocks/blocks.1"]  # in the order in which they are dropped
        [[width]]
        weights = ["/blocks/blocks.0/conv1/Conv"]
        ratios = [0.25, 0.5]
        [norm]
        layers = "auto"
        [points]
        keep = 6

    A block of ``skip`` is a scope, that is the beginning of operators' names up to a slash, or the
    tensors around it: ``{ from = "relu_3", to = "relu_6" }``. ``axis`` and ``parts`` of a width are
    those of :class:`WidthGroup`; ``layers`` may be a list of scopes, or ``"none"``.

    ElasticSpecError if the file cannot be read or says what no spec says.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ElasticSpecError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ElasticSpecError(f"{path}: is no TOML ({error})") from error
    return parse_spec(content, str(path))


def parse_spec(content: Mapping[str, Any], source: str) -> ElasticSpec:
    """Check what a file holds; ElasticSpecError as :func:`read_spec`."""
    reader = _Reader(source)
    reader.check_keys("", content, set(_KEYS))
    depths = tuple(map(reader.depth, *reader.tables("depth", content)))
    widths = tuple(map(reader.width, *reader.tables("width", content)))
    if not depths and not widths:
        raise reader.wrong("", "no [[depth]] and no [[width]]", "at least one of them")
    scopes = [str(skip) for group in depths for skip in group.skip]
    reader.check_unique("depth.skip", scopes)
    reader.check_unique("width.weights", [name for group in widths for name in group.weights])
    norm, points = reader.table("norm", content), reader.table("points", content)
    layers = norm.get("layers", AUTO)
    if layers not in (AUTO, NONE):
        expected = "'auto', 'none' or a list of scopes"
        layers = reader.names("norm.layers", layers, expected)
    keep = points.get("keep", ElasticSpec.__dataclass_fields__["keep"].default)
    if not _is_int(keep) or keep < 1:
        raise reader.wrong("points.keep", keep, "a whole number of at least 1")
    return ElasticSpec(depths=depths, widths=widths, norm_layers=layers, keep=keep, source=source)


@dataclass(frozen=True, slots=True)
class _Reader:
    source: str

    def wrong(self, key: str, value: Any, expected: str) -> ElasticSpecError:
        place = f"{self.source}: {key} = " if key else f"{self.source}: "
        told = value if isinstance(value, str) and not key else repr(value)
        return ElasticSpecError(f"{place}{told}, expected {expected}")

    def check_keys(self, place: str, table: Mapping[str, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                told = ", ".join(sorted(known))
                raise self.wrong(f"{place}{key}", table[key], f"no such key: known are {told}")

    def tables(self, key: str, content: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        """Give the places and the items of a list of tables."""
        found = content.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise self.wrong(key, found, f"tables that begin with [[{key}]]")
        places = [f"{key}[{i}]." if len(found) > 1 else f"{key}." for i in range(len(found))]
        for place, item in zip(places, found, strict=True):
            self.check_keys(place, item, _KEYS[key])
        return places, found

    def table(self, key: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        found = content.get(key, {})
        if not isinstance(found, dict):
            raise self.wrong(key, found, f"a table that begins with [{key}]")
        self.check_keys(f"{key}.", found, _KEYS[key])
        return found

    def depth(self, place: str, table: Mapping[str, Any]) -> DepthGroup:
        key, expected = f"{place}skip", "a list of scopes, or of { from = TENSOR, to = TENSOR }"
        found = table.get("skip")
        if not isinstance(found, list) or not found:
            raise self.wrong(key, found, expected)
        return DepthGroup(skip=tuple(self._skip(key, item, expected) for item in found))

    def _skip(self, key: str, item: Any, expected: str) -> Skip:
        if isinstance(item, str) and item.strip("/"):
            return Skip(scope=item.rstrip("/"))
        if isinstance(item, dict) and set(item) == {"from", "to"}:
            start, end = item["from"], item["to"]
            if isinstance(start, str) and isinstance(end, str) and start and end:
                return Skip(start=start, end=end)
        raise self.wrong(key, item, expected)

    def width(self, place: str, table: Mapping[str, Any]) -> WidthGroup:
        expected = "a list of names of operators or initializers"
        weights = self.names(f"{place}weights", table.get("weights"), expected)
        axis, parts = table.get("axis"), table.get("parts", 1)
        if axis is not None and (not _is_int(axis) or axis < 0):
            raise self.wrong(f"{place}axis", axis, "a dimension of the weights, from 0")
        if not _is_int(parts) or parts < 1:
            raise self.wrong(f"{place}parts", parts, "a whole number of at least 1")
        ratios = self._ratios(f"{place}ratios", table.get("ratios"))
        return WidthGroup(weights=weights, axis=axis, parts=parts, ratios=ratios)

    def _ratios(self, key: str, found: Any) -> tuple[float, ...]:
        expected = "different numbers between 0 and 1, for instance [0.25, 0.5]"
        if not isinstance(found, list) or not found:
            raise self.wrong(key, found, expected)
        if not all(isinstance(r, float) and 0 < r < 1 for r in found):
            raise self.wrong(key, found, f"{expected}; 1 is always a choice")
        if len(set(found)) < len(found):
            raise self.wrong(key, found, expected)
        return tuple(sorted(found))

    def names(self, key: str, found: Any, expected: str) -> tuple[str, ...]:
        good = isinstance(found, list) and found and all(isinstance(n, str) and n for n in found)
        if not good:
            raise self.wrong(key, found, expected)
        self.check_unique(key, found)
        return tuple(found)

    def check_unique(self, key: str, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self.wrong(key, name, "each name once: it is there twice")
            seen.add(name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
