"""Serialisation of frozen dataclasses to plain JSON values and back, strictly.

Only what the schema of a bundle needs: nested dataclasses, homogeneous tuples, ``dict[str, str]``,
literals, optionals and scalars. Unknown and missing fields are errors, so that a bundle of
another version is never half understood.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from typing import Any, Literal, TypeVar

from offramp.bundle.errors import BundleSchemaError

_T = TypeVar("_T")


def json_key(key: str) -> Any:
    """Declare a field whose key in JSON is not its name."""
    return dataclasses.field(metadata={"key": key})


def _key(field: dataclasses.Field[Any]) -> str:
    key: str = field.metadata.get("key", field.name)
    return key


def to_plain(value: Any) -> Any:
    """Give dataclasses as dicts and tuples as lists, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(f): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[_T], value: Any, where: str) -> _T:
    """Build a frozen dataclass from what ``json.loads`` gave.

    ``where`` is the file's name, then the path inside it. A ``BundleSchemaError`` names the field,
    what was found and what was expected.
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
        return {k: _convert(arguments[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if origin is Literal:
        _expect(value in arguments, where, f"one of {', '.join(map(repr, arguments))}", value)
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    return _convert_scalar(kind, value, where)


def _convert_dataclass(cls: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    names = {_key(f): f.name for f in dataclasses.fields(cls)}
    unknown, missing = sorted(value.keys() - names), sorted(names.keys() - value)
    if unknown or missing:
        raise BundleSchemaError(
            f"{where}: unknown fields {unknown}, missing fields {missing}; "
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
    raise BundleSchemaError(f"{where}: {value!r} is not expected here")


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    _expect(type(value) is kind, where, f"a value of type {kind.__name__}", value)
    if kind is float:
        _expect(math.isfinite(value), where, "a finite number", value)
    return value


def _expect(holds: bool, where: str, expected: str, value: Any) -> None:  # noqa: FBT001
    if not holds:
        raise BundleSchemaError(f"{where}: expected {expected}, found {value!r:.100}")
