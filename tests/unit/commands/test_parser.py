"""Help in two layers, one-line errors, illegal combinations, and what a shell is answered."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, tells

from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.commands.nearest import nearest
from offramp.commands.parser import LayeredParser

ILLEGAL = (
    Illegal(option="--units", other="--parts", why="both choose; give one of the two"),
    Illegal(option="--rate", without="--train joint", why="nothing else has one; leave it out"),
    Illegal(
        option="--rate",
        other="--parts",
        why="too fast; give at most 1",
        when=lambda values: float(str(values["--rate"])) > 1,
    ),
)


def make(**more: Any) -> LayeredParser:
    parser = LayeredParser(prog="cut", description="Cut a thing.", illegal=ILLEGAL, **more)
    parser.add_argument("model", metavar="MODEL", help="the model")
    parser.add_argument("--data", metavar="DATA", help="samples.\nOf any kind")
    parser.add_argument("--share", default=0.01, metavar="X", help="largest share")
    group = parser.add_argument_group("training")
    group.add_argument("--train", choices=["frozen", "joint"], default="frozen", help="what learns")
    group.add_argument("--rate", type=float, default=1e-4, help="of learning (default: slow)")
    group.add_argument("--units", help="some")
    group.add_argument("--repeats", type=int, default=1, help="times")
    group.add_argument("--parts", action="append", default=[], help="others")
    return parser


LAYERS: dict[str, Any] = {
    "short": ("--share", "--data"),
    "examples": {"cut model.onnx": "cuts it", "cut model.onnx --data d.npz": "cuts it well"},
    "commands": {"glue": "glues it again"},
}
SHORT = """\
usage: cut MODEL [options]

Cut a thing.

options that most people need:
  MODEL        the model
  --share X    largest share (default: 0.01)
  --data DATA  samples

examples:
  cut model.onnx               cuts it
  cut model.onnx --data d.npz  cuts it well

other commands:
  glue  glues it again

All 11 options, by groups: cut --help-all
"""


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_help_shows_the_options_named_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make(**LAYERS).parse_args(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == SHORT


def test_help_all_shows_every_option_by_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make(**LAYERS).parse_args(["--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("  --")] == [
        "  --help-all                show all options, by groups",
        "  --version                 show the version and end",
        "  --completion {bash,zsh,fish}",
        "  --data DATA               samples. Of any kind",
        "  --share X                 largest share (default: 0.01)",
        "  --train {frozen,joint}    what learns (default: frozen)",
        "  --rate RATE               of learning (default: slow)",
        "  --units UNITS             some",
        "  --repeats REPEATS         times (default: 1)",
        "  --parts PARTS             others",
    ]
    assert "\ntraining:\n" in shown
    assert "other commands:\n  glue  glues it again\n" in shown


def test_a_parser_without_a_short_layer_shows_everything_at_once() -> None:
    shown = make().format_help()
    assert "--units" in shown
    assert "--help-all" not in shown


def test_a_wrong_option_is_an_error_of_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make().parse_args(["model", "--train", "all"])
    assert stop.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("cut: error: argument --train: invalid choice: 'all'")
    assert second == "see cut --help"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--tarin", ("no option --tarin", "did you mean --train?")),
        ("--shard=0.1", ("no option --shard", "did you mean --share?")),
        ("--colour", ("no option --colour",)),
        ("--letion", ("no option --letion", "did you mean --completion?")),
        ("--let", ("no option --let",)),
        ("-x", ("no option -x",)),
    ],
)
def test_an_unknown_option_is_told_the_nearest_one(
    capsys: pytest.CaptureFixture[str], word: str, message: Told
) -> None:
    with pytest.raises(SystemExit) as stop:
        make().parse_args(["model", word])
    assert stop.value.code == 2
    error, remedy = capsys.readouterr().err.splitlines()
    tells(error, "cut: error: ", *message)
    assert remedy == "see cut --help"


KNOWN = ("grpc_port", "http_port", "max_batch_size", "max_queue_samples", "trust_inputs", "slo_ms")


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("max_bacth_size", ["max_batch_size"]),
        ("batch_size", ["max_batch_size"]),
        ("max_batch", ["max_batch_size"]),
        ("port", ["grpc_port", "http_port"]),
        ("queue", ["max_queue_samples"]),
        ("metrics_port", []),  # only a word of another name
        ("dynamic_batching", []),
        ("input", []),  # not the end of a word
        ("slo", ["slo_ms"]),
        ("max", ["max_batch_size", "max_queue_samples"]),
        ("ms", []),  # too short to be searched for inside names
        ("x" * 1000, []),
    ],
)
def test_a_name_means_one_that_is_similar_or_contains_it(word: str, found: list[str]) -> None:
    assert nearest(word, KNOWN) == found


def test_alternatives_are_named_where_none_is_given() -> None:
    row = Illegal(option="--rate", without="--train joint|late", why="leave it out")
    tells(row.message({"--rate": 3}), "--rate", "--train joint", "late")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--units", "a", "--parts", "b"], ("--units", "--parts", "give one")),
        (["--rate", "0.1"], ("--rate", "--train joint", "leave it out")),
        (["--rate", "1e-4"], ("--rate", "--train joint")),  # the default, but given
        (["--train", "joint", "--rate", "2", "--parts", "b"], ("--rate with --parts", "too fast")),
    ],
)
def test_illegal_combinations(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: Told
) -> None:
    with pytest.raises(SystemExit) as stop:
        make().parse_args(["model", *arguments])
    assert stop.value.code == 2
    tells(capsys.readouterr().err, "cut: error: ", *message)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--units", "a"], ["--train", "joint", "--rate", "1"], ["--parts", "b"]],
)
def test_other_combinations_are_parsed(arguments: list[str]) -> None:
    options = make().parse_args(["model", *arguments])
    assert options.share == 0.01
    assert options.rate == (1.0 if "--rate" in arguments else 1e-4)


def test_options_given_are_known_from_defaults() -> None:
    assert make().given(["model", "--share", "0.01", "--parts", "a"]) == {"--share", "--parts"}


class Level(Enum):
    HIGH = "high"


def test_an_enumeration_is_spelled_by_its_value() -> None:
    table = [Illegal(option="--level low|high", other="--flat", why="choose one")]
    refuse_illegal(table, {"--level": "none"}, {"--flat"})
    refuse_illegal(table, {}, {"--flat"})
    with pytest.raises(IllegalCombinationError, match="--level high with --flat: choose one"):
        refuse_illegal(table, {"--level": Level.HIGH}, {"--flat"})


ASKED = """
import sys
from offramp.commands.completion import complete
from offramp.commands.nearest import nearest
from offramp.commands.parser import LayeredParser
def make():
    parser = LayeredParser(prog="cut")
    parser.add_argument("model")
    parser.add_argument("--train", choices=["frozen", "joint"])
    return parser
def glue():
    parser = LayeredParser(prog="cut glue")
    parser.add_argument("--speed", choices=["slow", "fast"])
    return parser
complete(make, {"glue": glue})
print("nobody asked")
"""


def completions(tmp_path: Path, line: str) -> set[str]:
    """Return the completions of a shell, as argcomplete's code for bash requests them."""
    out = tmp_path / "completions"
    (tmp_path / "gluon.onnx").touch()
    asking = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    asking |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_SHELL": "bash"}
    asking |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env={**os.environ, **asking}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return set(out.read_text().split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cut --tr", {"--train"}),
        ("cut m.onnx --train ", {"frozen", "joint"}),
        ("cut glu", {"glue", "gluon.onnx"}),
        ("cut glue --s", {"--speed"}),
        ("cut glue --speed f", {"fast"}),
    ],
)
def test_a_shell_is_answered(tmp_path: Path, line: str, expected: set[str]) -> None:
    assert completions(tmp_path, line) == expected


def test_nothing_happens_where_no_shell_asks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "nobody asked\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell_names_the_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        make().parse_args(["--completion", shell])
    assert stop.value.code == 0
    assert "cut" in capsys.readouterr().out


def test_parsers_of_subcommands_are_layered_too() -> None:
    parser = LayeredParser(prog="cut")
    glue = parser.add_subparsers().add_parser("glue", description="Glue.", short=("--speed",))
    glue.add_argument("--speed", help="of gluing")
    assert isinstance(glue, argparse.ArgumentParser)
    assert glue.format_help().endswith("All 3 options, by groups: cut glue --help-all\n")
    assert "--completion" not in glue.format_help_all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sped=3"], ("no option --sped", "did you mean --speed?")),
        (["--speed=3", "--slow"], ("--speed with --slow", "choose one")),
    ],
)
def test_subcommands_check_their_own_options(
    words: list[str], message: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = LayeredParser(prog="cut")
    row = Illegal(option="--speed", other="--slow", why="choose one")
    glue = parser.add_subparsers().add_parser("glue", illegal=[row])
    glue.add_argument("--speed", help="of gluing")
    glue.add_argument("--slow", action="store_true", help="not fast")
    with pytest.raises(SystemExit):
        parser.parse_args(["glue", *words])
    error, remedy = capsys.readouterr().err.splitlines()
    tells(error, "cut glue: error: ", *message)
    assert remedy == "see cut glue --help"
    assert parser.parse_args(["glue", "--slow"]).slow
