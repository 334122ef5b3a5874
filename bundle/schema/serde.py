"""Strict serialisation of frozen dataclasses to plain JSON values and back.

It supports only what the schema of a bundle needs: nested dataclasses, homogeneous tuples,
``dict[str, str]``, literals, optionals and scalars. Unknown and missing fields are errors, so that
a bundle of another version is never partly understood.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
import sys
import types
import typing
import unicodedata
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeVar

from offramp.bundle.schema.errors import BundleSchemaError

_T = TypeVar("_T")

_MOST_INTEGER: Final = 2**53
"""Largest integer: beyond it JSON readers differ, and numpy's types overflow."""
_SHA256: Final = re.compile("[0-9a-f]{64}")
_UNPRINTABLE: Final = frozenset({"Cc", "Cs"})
"""Categories of control characters, which could forge lines of a log, and of surrogates."""


def json_key(key: str) -> Any:
    """Return a field whose key in JSON differs from its name."""
    return dataclasses.field(metadata={"key": key})


LEFT_OUT: Final = types.MappingProxyType({"left out": True})
"""Metadata of a field that is not written to JSON if it has its default value."""


def _may_lack(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("left out", False))


def _key(field: dataclasses.Field[Any]) -> str:
    key: str = field.metadata.get("key", field.name)
    return key


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        said = [(f, v) for f, v in held if not (_may_lack(f) and v == f.default)]
        return {_key(f): to_plain(v) for f, v in said}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[_T], value: Any, where: str) -> _T:
    """Build a frozen dataclass from the result of ``json.loads``.

    ``where`` is the file's name, then the path inside it. A ``BundleSchemaError`` names the field,
    the value found and the value expected.
    """
    result: _T = _convert(cls, value, where)
    return result


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(typing.cast("type", kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        for key in value:
            _check_text(key, where)
        return {k: _convert(arguments[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if origin is Literal:
        _expect(value in arguments, where, f"one of {', '.join(map(repr, arguments))}", value)
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    return _convert_scalar(kind, value, where)


def _convert_dataclass(cls: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    fields = dataclasses.fields(cls)
    names = {_key(f): f.name for f in fields}
    needed = {_key(f) for f in fields if not _may_lack(f)}
    unknown, missing = sorted(value.keys() - names), sorted(needed - value.keys())
    if unknown or missing:
        raise BundleSchemaError(
            f"{where}: unknown fields {unknown!s:.200}, missing fields {missing}; "
            "the bundle was written by another version, compile the model again"
        )
    hints = typing.get_type_hints(cls)
    converted = {
        names[key]: _convert(hints[names[key]], v, f"{where}.{key}") for key, v in value.items()
    }
    try:
        return cls(**converted)
    except (ValueError, TypeError) as error:
        raise BundleSchemaError(f"{where}: {error}") from error


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    for kind in arguments:
        if kind is not type(None):
            try:
                return _convert(kind, value, where)
            except BundleSchemaError:
                if kind is arguments[-1] or arguments[-1] is type(None):
                    raise
    raise BundleSchemaError(f"{where}: {_shown(value)} is not expected here")


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    _expect(type(value) is kind, where, f"a value of type {kind.__name__}", value)
    if kind is float:
        _expect(math.isfinite(value), where, "a finite number", value)
    if kind is int:
        _expect(abs(value) <= _MOST_INTEGER, where, f"an integer within ±{_MOST_INTEGER}", value)
    if kind is str:
        _check_text(value, where)
    return value


def _check_text(text: str, where: str) -> None:
    plain = text.isprintable() or not any(unicodedata.category(c) in _UNPRINTABLE for c in text)
    _expect(plain, where, "text without control characters", text)


def _expect(holds: bool, where: str, expected: str, value: Any) -> None:  # noqa: FBT001
    if not holds:
        raise BundleSchemaError(f"{where}: expected {expected}, found {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a shortened text of a value, without reading more of it than is shown."""
    return f"{reprlib.repr(value):.100}"


def check_numbers(
    facts: object,
    *names: str,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raise ValueError if numbers in fields of a dataclass are out of range.

    ``least`` and ``most`` are included in the range, ``above`` and ``below`` are not. ``None``
    passes, tuples are checked element by element, and values that are not finite never pass.
    """
    for name in names:
        for number in _numbers(getattr(facts, name)):
            if not (least <= number <= most and above < number < below and math.isfinite(number)):
                raise ValueError(
                    f"{name} has {number!r:.50}, expected "
                    f"{_range(least=least, most=most, above=above, below=below)}"
                )


def check_hash(sha256: str) -> None:
    """Raise ValueError unless the text is a SHA-256 of lower-case hexadecimal digits."""
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"sha256 {sha256!r:.80} is not 64 hexadecimal digits")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif value is not None:
        yield value


def _range(**bounds: float) -> str:
    words = {"least": "at least", "above": "more than", "most": "at most", "below": "less than"}
    named = [f"{words[k]} {bounds[k]:g}" for k in words if math.isfinite(bounds[k])]
    return " and ".join(named) or "a finite number"
