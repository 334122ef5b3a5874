"""Combinations of options that ``eecompile`` refuses: every row of its tables."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.facts import Told, facts

from offramp.commands.combinations import Illegal
from offramp.commands.parser import LayeredParser
from offramp.compiler.commands.cli import COMMANDS, COMPILE
from offramp.compiler.common import options
from offramp.compiler.common.errors import OptionsConflictError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.data.reading_options import OPTIONS
from offramp.compiler.steps.compile import compile_model
from offramp.supernet.combinations import COMBINATIONS
from offramp.supernet.subnets import ElasticSource

VALUES: Final[Mapping[str, str]] = {
    "--batch-profiles": "1",
    "--buckets": "sequence=8",
    "--candidates": "3",
    "--confidence": "0.9",
    "--copies-within": "0",
    "--criterion": "patience",  # the strangest: on the host, and depends on earlier exits
    "--custom-ops": "ops.so",
    "--data": "data.npz",
    "--elastic": "spec.toml",
    "--exits": "25%",
    "--group": "person",
    "--joint-rate": "0.001",
    "--kserve": "s3://bucket/models",
    "--max-class-disagreement": "0.05",
    "--max-disagreement": "0.02",
    "--max-overhead": "0.1",
    "--max-violations": "0.05",
    "--min-gain": "0",
    "--name": "fashion",
    "--optimization-level": "1",
    "--parts": "stages",
    "--rehearsal-batch": "8",
    "--simplify-limit": "9",
    "--triton": "models",
    "--units": "00-01",
    "--workspace": "1",
    "--preprocessing": "spec.toml",
    **{option.flag: "column" for option in OPTIONS},
    **dict.fromkeys(("--mean", "--std", "--scale", "--crop-share"), "0.5"),
    **dict.fromkeys(("--max-tokens", "--max-samples"), "8"),
    "--image-size": "224,224",
    "--layout": "nchw",
    "--resize": "crop",
    "--resample": "nearest",
}
"""Values of options that take one."""
ELASTIC = ElasticSource(Path("spec.toml"))
PLACES: Final[Mapping[str, list[str]]] = {
    "": ["model.onnx"],
    "supernet": ["model.onnx", "--elastic", "spec.toml", "--data", "data.npz"],
    "build": ["model.ee"],
    "export": ["model.ee"],
}
ROWS: Final = [
    *(("", row) for row in options.COMPILE),
    *(("supernet", row) for row in COMBINATIONS),
    *(("build", row) for row in options.BUILD),
    *(("export", row) for row in options.EXPORT),
]


def spelled(option: str) -> list[str]:
    flag, _, values = option.partition(" ")
    if values:
        return [flag, values.split("|")[0]]
    return [flag, VALUES[flag]] if flag in VALUES else [flag]


def parser_of(command: str) -> LayeredParser:
    parser = COMMANDS[command].parser() if command else COMPILE.parser()
    assert isinstance(parser, LayeredParser)
    return parser


def arguments(command: str, *options: str | None) -> list[str]:
    given = [word for option in options if option for word in spelled(option)]
    needs_none = [word for word in PLACES[command] if not word.startswith("--")]
    return [*(PLACES[command] if command == "supernet" else needs_none), *given]


@pytest.mark.parametrize(
    ("command", "row"), ROWS, ids=lambda each: getattr(each, "option", each or "compile")
)
def test_each_row_is_refused_with_its_remedy(
    command: str, row: Illegal, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(arguments(command, row.option, row.other))
    assert stop.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{parser.prog}: error: --")
    assert second == f"see {parser.prog} --help"
    if command != "supernet":  # whose --elastic is always there
        parser.parse_args(arguments(command, row.other or row.option, row.without))


@pytest.mark.parametrize(("command", "row"), ROWS, ids=lambda each: getattr(each, "option", each))
def test_each_message_names_both_options_and_a_remedy(command: str, row: Illegal) -> None:
    parser = parser_of(command)
    given = arguments(command, row.option, row.other)
    options, _ = ArgumentParser.parse_known_args(parser, given)
    message = row.message(parser.values(options))
    for option in (row.option, row.other or row.without):
        assert str(option).partition(" ")[0] in message
    remedies = ("leave", "choose", "give", "take", "add", "use", "compile", "name", "omit")
    assert any(f"{remedy} " in row.why for remedy in remedies), row.why


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"heads": "bridges", "precision": "int8"}, ("--heads bridges", "--precision int8")),
        ({"heads": "both", "criterion": "margin"}, ("--criterion", "--heads both")),
        ({"teach": "labels"}, ("--teach labels", "--train joint")),
        ({"train": "joint", "precision": "auto"}, ("--train joint", "--precision auto")),
        ({"criterion": "patience", "selection": "pame"}, ("--criterion", "--selection pame")),
        ({"variants": ELASTIC, "train": "joint"}, ("--elastic", "--train joint")),
    ],
)
def test_options_from_python_are_refused_before_anything_is_read(
    tmp_path: Path, given: dict[str, Any], told: Told
) -> None:
    options = CompileOptions.of(
        model=tmp_path / "nowhere.onnx", data=tmp_path / "no.npz", output=tmp_path / "m.ee", **given
    )
    with pytest.raises(OptionsConflictError, match=facts(*told)):
        compile_model(options)


@pytest.mark.parametrize(
    "given",
    [
        ["--criterion", "entropy", "--backend", "tensorrt"],
        ["--criterion", "probability", "--heads", "bridges"],
        ["--criterion", "entropy", "--precision", "int8"],
        ["--criterion", "learned", "--selection", "pame"],
        ["--train", "joint", "--teach", "labels", "--joint-rate", "1e-4"],
        ["--data", "random", "--seed", "3", "--epochs", "1"],
    ],
)
def test_what_goes_together_is_accepted(given: list[str]) -> None:
    parser_of("").parse_args(["model.onnx", *given])


@pytest.mark.parametrize("parts", ["source,stages", "segments,source,stages"])
def test_choosing_a_precision_takes_source_and_stages(parts: str) -> None:
    parser_of("build").parse_args(["model.ee", "--precision", "auto", "--parts", parts])


def test_a_command_line_that_names_no_option_twice_is_not_refused() -> None:
    makers: list[Callable[[], Any]] = [COMPILE.parser, COMMANDS["build"].parser]
    for make in makers:
        make().parse_args(["model"])
