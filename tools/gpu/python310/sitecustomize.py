"""Features of Python 3.11 that our code needs, for Python 3.10, the last with TensorRT 8.6.0.

``setup.sh`` adds this folder to Python's path if it has to use Python 3.10, and Python imports it
at startup. It is for compiler, engine and bundle on a GPU machine, not for serving: server and
clients need features that cannot be added (``asyncio.timeout``, ``except*``).
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import importlib.util
import sys
import typing
from typing import Any


class StrEnum(str, enum.Enum):  # noqa: UP042 - it is what takes its place
    """Backport from Python 3.11: a member formats as its value."""

    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        """Return the formatted value."""
        return str.__format__(self, format_spec)

    @staticmethod
    def _generate_next_value_(name: str, *_: object) -> str:
        return name.lower()


def file_digest(file: Any, algorithm: str) -> Any:
    """Return the hash of an open file; backport from Python 3.11."""
    digest = hashlib.new(algorithm)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


_dataclass: Any = dataclasses.dataclass


def dataclass(cls: Any = None, /, *, weakref_slot: bool = False, **options: Any) -> Any:
    """Backport from Python 3.11: with ``weakref_slot`` the class has no slots here."""
    if weakref_slot:
        options["slots"] = False
    return _dataclass(cls, **options)


def _add() -> None:
    dataclasses.dataclass = dataclass
    if importlib.util.find_spec("tomllib") is None and importlib.util.find_spec("tomli"):
        sys.modules["tomllib"] = importlib.import_module("tomli")
    additions = (
        (enum, "StrEnum", StrEnum),
        (datetime, "UTC", datetime.timezone.utc),  # noqa: UP017 - it is what that alias is made of
        (hashlib, "file_digest", file_digest),
        (typing, "Self", typing.Any),
        (typing, "LiteralString", str),
        (typing, "Never", typing.NoReturn),
        (typing, "assert_never", _assert_never),
    )
    for module, name, value in additions:
        if not hasattr(module, name):
            setattr(module, name, value)


def _assert_never(value: object) -> typing.NoReturn:
    raise AssertionError(f"Expected code to be unreachable, but got: {value!r}")


if sys.version_info < (3, 11):  # noqa: UP036 - another than the project's
    _add()
