"""The page of all commands and their options, generated from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Final

from offramp.cluster.remote import eeworker
from offramp.compiler.commands.arguments import Command
from offramp.compiler.commands.cli import COMMANDS, COMPILE
from offramp.server.arguments import make_parser
from offramp.tools.bench import cli as eebench

_HEAD: Final = """\
# Commands and their options

This page is made of the commands themselves. `COMMAND --help` shows the options that most people
need, `COMMAND --help-all` all of them. The [configuration file](operations.md#settings) of
`eeserve` takes the same options.
"""
_SENTENCES: Final = re.compile(r"\s*\n\s*")


def page() -> str:
    """Return the page on commands, as Markdown."""
    return "\n".join([_HEAD, *(line for name in parsers() for line in _section(name))])


def parsers() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command and subcommand, by its command line."""
    compiling: Mapping[str, Command] = COMMANDS
    bench = eebench.make_parser()
    (parts,) = (a for a in bench._actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001
    return {
        "eecompile": COMPILE.parser(),
        **{f"eecompile {name}": command.parser() for name, command in compiling.items()},
        "eeserve": make_parser(),
        "eeworker": eeworker.make_parser(),
        **{f"eebench {name}": parser for name, parser in parts.choices.items()},
    }


def _section(command: str) -> Iterator[str]:
    parser = parsers()[command]
    yield f"## `{command}`\n"
    yield f"```text\n{parser.format_usage().strip()}\n```\n"
    yield f"{_prose(parser.description)}\n"
    for group in parser._action_groups:  # noqa: SLF001 - argparse has no other way to its groups
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS]  # noqa: SLF001
        if not shown:
            continue
        title = group.title or "options"
        yield f"**{title[0].upper()}{title[1:]}**\n"
        if group.description:
            yield f"{_prose(group.description)}\n"
        yield "| option | what it does |\n|---|---|"
        yield from (f"| {_names(action)} | {_help(action, parser)} |" for action in shown)
        yield ""
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    if not action.option_strings:
        return _code(value)
    return ", ".join(_code(f"{flag} {value}".strip()) for flag in action.option_strings)


def _value(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
        return "COMMAND"
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()  # noqa: SLF001 - it inserts the defaults
    return _plain(formatter._expand_help(action))  # noqa: SLF001


def _prose(text: str | None) -> str:
    """Return a description: paragraphs as they are, indented lines as code."""
    parts = re.split(r"\n\s*\n", (text or "").strip("\n"))
    return "\n\n".join(
        f"```text\n{part}\n```" if re.search(r"^\s", part, re.MULTILINE) else _plain(part)
        for part in parts
    )


def _plain(text: str) -> str:
    """Return text in which Markdown and HTML syntax is escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", _SENTENCES.sub(" ", text.strip()))


def _code(text: str) -> str:
    return f"`{text}`"  # inside code, the table extension does not end a cell at |
