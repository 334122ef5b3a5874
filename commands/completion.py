"""Shell completion, by argcomplete: the shell calls the command to get completions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

SHELLS: Final = ("bash", "zsh", "fish")


def shell_code(command: str, shell: str) -> str:
    """Return the code that a shell must evaluate to complete a command."""
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415 - only when needed

    return shellcode([command], shell=shell)


def complete(
    parser: Callable[[], argparse.ArgumentParser],
    commands: Mapping[str, Callable[[], argparse.ArgumentParser]] | None = None,
) -> None:
    """Answer a shell's request for completions, and end the process; return if there is none.

    Args:
        parser: Function that makes the parser of the command.
        commands: Functions that make the parsers of subcommands, for subcommands that the command
            selects by its first argument, without argparse.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete  # noqa: PLC0415 - only when needed

    named = commands or {}
    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in named:
        asked = argparse.ArgumentParser()
        make: Any = lambda **_: named[words[1]]()  # noqa: E731 - in place of a parser class
        asked.add_subparsers(parser_class=make).add_parser(words[1])
    else:
        asked = parser()
        if named:
            place: Any = next(a for a in asked._actions if not a.option_strings)  # noqa: SLF001
            place.completer = _commands_and_files(named)
    argcomplete.autocomplete(asked)


def _commands_and_files(commands: Iterable[str]) -> Callable[..., list[str]]:
    from argcomplete.completers import FilesCompleter  # noqa: PLC0415 - only when needed

    def complete_place(prefix: str, **_: object) -> list[str]:
        return [*(c for c in commands if c.startswith(prefix)), *FilesCompleter()(prefix)]

    return complete_place
