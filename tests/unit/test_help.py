"""The help of every command: it fits on a screen, and defaults are shown once, by meaning."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping

import pytest

import offramp
from offramp.cluster.remote import eeworker
from offramp.commands.parser import LayeredParser
from offramp.compiler.commands.cli import COMMANDS, COMPILE
from offramp.server import arguments
from offramp.tools.bench import cli

MOST_LINES = 45
PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "eecompile": COMPILE.parser,
    **{f"eecompile {name}": command.parser for name, command in COMMANDS.items()},
    "eeserve": arguments.make_parser,
    "eeworker": eeworker.make_parser,
    "eebench": cli.make_parser,
}
"""The parser of every command; those of argparse's subcommands are found in it."""
EMPTY_DEFAULT = re.compile(r"\((?:.*, )?default: *(?:None|\[\]|\(\)|False|True|==SUPPRESS==)?\)")


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from walk(below)


ALL = {parser.prog: parser for make in PARSERS.values() for parser in walk(make())}


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", ALL)
def test_the_short_help_fits_on_a_screen(name: str) -> None:
    shown = ALL[name].format_help().splitlines()
    assert len(shown) <= MOST_LINES, f"{name} --help has {len(shown)} lines: name fewer in `short`"
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("name", ALL)
def test_the_full_help_shows_every_option(name: str) -> None:
    parser = ALL[name]
    assert isinstance(parser, LayeredParser)
    shown = parser.format_help_all()
    long = {line.strip() for line in shown.splitlines() if len(line) > 80}
    assert long <= {", ".join(action.option_strings) for action in parser._actions}
    for action in parser._actions:
        for flag in action.option_strings:
            assert (flag in shown) == (action.help != argparse.SUPPRESS)


@pytest.mark.parametrize("name", ALL)
def test_defaults_are_shown_once_by_meaning(name: str) -> None:
    parser = ALL[name]
    formatter = parser._get_formatter()
    for action in parser._actions:
        assert action.help, f"{name} {action.dest} has no help"
        shown = " ".join(formatter._format_action(action).split())
        assert shown.count("default:") <= 1, shown
        assert not EMPTY_DEFAULT.search(shown), shown


@pytest.mark.parametrize(
    "shown",
    ["(default: None)", "(default: [])", "(default: )", "(default: ())", "(x, default: None)"],
)
def test_what_counts_as_an_empty_default(shown: str) -> None:
    assert EMPTY_DEFAULT.search(shown)
    assert not EMPTY_DEFAULT.search("(default: none)")
    assert not EMPTY_DEFAULT.search("(default: 8)")


@pytest.mark.parametrize("name", ["eecompile", "eeserve", "eeworker", "eebench"])
def test_every_command_shows_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ALL[name].parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"offramp {offramp.__version__}\n"
