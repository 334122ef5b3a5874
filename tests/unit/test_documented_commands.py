"""Every command and every flag that README and docs print is one that the parsers take."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import methods
from benchmarks.adapt import __main__ as adapt
from benchmarks.frontier import __main__ as frontier
from tests.documents import DOCUMENTS, ROOT, path_of

from offramp.cluster.remote import eeworker
from offramp.compiler.commands.cli import COMMANDS, COMPILE
from offramp.server.arguments import make_parser
from offramp.tools.bench import cli

PARSERS = {
    "eecompile": COMPILE.parser(),
    **{f"eecompile {name}": command.parser() for name, command in COMMANDS.items()},
    "eeserve": make_parser(),
    "eeworker": eeworker.make_parser(),
    "eebench": cli.make_parser(),
}
(SUBCOMMANDS,) = [
    action
    for action in PARSERS["eebench"]._actions
    if isinstance(action, argparse._SubParsersAction)
]
PARSERS |= {f"eebench {name}": parser for name, parser in SUBCOMMANDS.choices.items()}
PARSERS |= {
    module.make_parser().prog: module.make_parser() for module in (adapt, frontier, methods)
}
FLAGS = {
    name: {flag for action in parser._actions for flag in action.option_strings}
    for name, parser in PARSERS.items()
}
NAMES = r"eecompile|eeserve|eeworker|eebench|python -m benchmarks\.(?:adapt|frontier|methods)"
LINE = re.compile(rf"^[ >]*(?:[\w-]*\$ )?(?:\S*/bin/)?((?:{NAMES}) .+)$", re.MULTILINE)
"""A command on a line of its own: in a block of code, after a prompt, or in a table of commands."""
INLINE = re.compile(rf"`((?:{NAMES})(?: [^`]*)?)`")
FLAG = re.compile(r"`(--[a-z][a-z0-9-]*)[ =`]")
SCRIPTS = {"--only"}
"""Flags of scripts that the documents name."""
PATHS = sorted(ROOT.glob("examples/paths/*.sh"))
OTHERS = {
    *("--cacert", "--fail", "--request", "--silent", "--write-out"),  # of curl
    *("--exclude", "--fixed-strings", "--quiet"),  # of tar, grep and pip
    "--model-control-mode",  # of Triton
}
"""Flags of other programs in these scripts."""


def printed(document: Path) -> Iterator[str]:
    """Yield the commands on lines of their own, continued lines joined."""
    if document.name == "CHANGELOG.md":
        return  # tells of what was, too
    text = re.sub(r"\\\n\s*", "", document.read_text(encoding="utf-8"))
    yield from LINE.findall(text)


def parser_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the parser that reads a command, and the words that it reads."""
    name = name_of(words)
    if words[0] == "eebench":  # its parser reads the subcommand, too
        name = "eebench"
    return name, words[len(name.split()) :]


def name_of(words: list[str]) -> str:
    """Return the longest name of a parser that a command begins with."""
    names = (" ".join(words[:count]) for count in (3, 2, 1))
    return next(name for name in names if name in PARSERS)


LINES = [(path_of(path), line) for path in DOCUMENTS for line in printed(path)]


@pytest.mark.parametrize(("document", "line"), LINES)
def test_a_printed_command_parses_and_its_files_exist(document: str, line: str) -> None:
    name, words = parser_of(shlex.split(line, comments=True))
    PARSERS[name].parse_args(words)
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists()


def test_commands_are_found_in_every_form() -> None:
    assert len(LINES) > 40
    assert LINE.findall("text\n    host-a$ eeserve m.ee --mode off  # off\n`eeserve x`\n") == [
        "eeserve m.ee --mode off  # off"
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=path_of)
def test_flags_in_the_text_are_those_of_the_commands(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return
    text = document.read_text(encoding="utf-8")
    for command in INLINE.findall(text):
        words = command.split()
        known = FLAGS[name_of(words)]
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", command):
            assert flag in known, f"{command}: there is no {flag}"
    anywhere = set().union(*FLAGS.values()) | SCRIPTS
    assert set(FLAG.findall(text)) - anywhere == set()


@pytest.mark.parametrize("script", PATHS, ids=path_of)
def test_scripts_have_flags_that_there_are(script: Path) -> None:
    """The scripts themselves run before a release (``make paths``)."""
    subprocess.run(["bash", "-n", script], check=True)
    flags = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", script.read_text(encoding="utf-8")))
    assert len(flags) > 5
    assert flags - set().union(*FLAGS.values()) - OTHERS == set()
