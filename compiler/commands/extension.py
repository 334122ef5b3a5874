"""What an extension adds to ``eecompile``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from rich.console import Console

from offramp.engine.common.extensions import extensions_for


class Command(NamedTuple):
    """A subcommand of ``eecompile``: its parser, and the function that runs it."""

    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace, Console], int]
    summary: str
    """A line for the list of commands."""


class CompilerExtension(Protocol):
    """The object ``EXTENSION`` of an extension's module ``for_compiler``."""

    commands: Mapping[str, Command]
    """By name."""


def commands_of_extensions() -> dict[str, Command]:
    """Return the subcommands that the extensions add."""
    return {
        name: command
        for extension in extensions_for("compiler")
        for name, command in extension.commands.items()
    }
