"""How options are added to a group of the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, Protocol

from offramp.engine.options import EngineOptions, ModelOptions


class Adder(Protocol):
    """Adds an option; ``how`` is what ``add_argument`` takes beside."""

    def __call__(self, flag: str, text: str, **how: Any) -> None:
        """Add it, told with its default unless there is none."""
        ...


def setting_adder(group: argparse._ArgumentGroup, defaults: EngineOptions | ModelOptions) -> Adder:
    """Add options that a configuration file may set too.

    Where one is not given, it is absent from the namespace, so that the file counts; its name
    there is the name of the field.
    """

    def add(flag: str, text: str, **how: Any) -> None:
        field = how.pop("dest", _destination(flag))
        text = _with_default(text, getattr(defaults, field))
        group.add_argument(flag, dest=field, default=argparse.SUPPRESS, help=text, **how)

    return add


def settings_in(
    given: argparse.Namespace, kind: type[EngineOptions | ModelOptions]
) -> dict[str, Any]:
    """What the command line says about the fields of ``kind``, by their names."""
    return {f.name: getattr(given, f.name) for f in fields(kind) if hasattr(given, f.name)}


def option_adder(group: argparse._ArgumentGroup, defaults: object) -> Adder:
    """Add options that are set on the command line alone; defaults are read from an object."""

    def add(flag: str, text: str, **how: Any) -> None:
        default = getattr(defaults, _destination(flag))
        group.add_argument(flag, default=default, help=_with_default(text, default), **how)

    return add


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _with_default(text: str, default: object) -> str:
    return text if default is None else f"{text} (default: {default})"
