"""Strict reader of a supernet's elastic parts from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.supernet.graphs.elastic_spec import (
    AUTO,
    NONE,
    DepthGroup,
    ElasticSpec,
    Skip,
    WidthGroup,
)
from offramp.supernet.graphs.errors import ElasticSpecError

_KEYS: Final = {
    "depth": {"skip"},
    "width": {"weights", "axis", "parts", "ratios"},
    "norm": {"layers"},
    "points": {"keep"},
}


def read_spec(path: Path) -> ElasticSpec:
    """Read a supernet's elastic parts from a TOML file.

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

    A block of ``skip`` is a scope (operators' names up to a slash), or the tensors around it: ``{
    from = "relu_3", to = "relu_6" }``. For ``axis`` and ``parts`` of a width see
    :class:`WidthGroup`; ``layers`` may also be a list of scopes, or ``"none"``.

    ElasticSpecError if the file cannot be read or is malformed.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ElasticSpecError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ElasticSpecError(f"{path}: is not TOML ({error})") from error
    return parse_spec(content, str(path))


def parse_spec(content: Mapping[str, Any], source: str) -> ElasticSpec:
    """Read a spec from a file's content; ElasticSpecError as for :func:`read_spec`."""
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
        """Return the items of a list of tables, with a name for each in messages."""
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
                raise self.wrong(key, name, "each name once: it occurs twice")
            seen.add(name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
