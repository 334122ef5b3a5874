"""Combinations of settings that eeserve refuses, row by row, of command line and file alike."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from tests.facts import tells

from offramp.commands.combinations import Illegal
from offramp.engine.models.learning_options import LearnOptions
from offramp.server.arguments import make_parser, parse_arguments
from offramp.server.arguments.combinations import combinations
from offramp.server.arguments.configuration import key_of

GIVEN = {
    "--answer": "logits",
    "--task": "regression",
    "--audit-budget": "0.1", "--cluster": "ray", "--confidence": "0.9", "--controller": "certified",
    "--criterion-module": "mine.py:sure", "--custom-ops": "lib.so", "--device": "cuda:1",
    "--engine-build-minutes": "0", "--forecast": "ewma", "--json": "found.json",
    "--max-disagreement": "0.02",
    "--learn": None, "--learn-folder": "there", "--learn-gib": "1", "--learn-keep": None,
    "--learn-samples": "9000", "--max-queue-delay-ms": "0", "--max-source-share": "0.5",
    "--never-beyond-compiled": None,
    "--no-cuda-graphs": None, "--no-state": None, "--plan": "plan.json", "--precision": "fp16",
    "--profile-window-s": "60", "--ramp-budget": "0.1", "--ray-address": "head:6379",
    "--threads": "1", "--trust-inputs": None, "--uncertified-exits": None,
}  # fmt: skip
"""For each option of the table a value, which may be the default."""
EVERY = combinations()
LEARNING = ("--learn-samples", "--learn-folder", "--learn-gib", "--learn-keep")
KEYS = {action.dest for action in make_parser().options()} - {
    "criterion_module", "custom_ops", "json", "plan", "learn_folder", "learn_gib", "learn_keep",
    "learn_samples", "ray_address", "self_check",
}  # fmt: skip
"""Options that a configuration file may set."""
SPELLED = {"slackfit": "slackfit", "fixed": "fixed:2"}


def words(flag: str) -> list[str]:
    return [flag] if GIVEN[flag] is None else [f"{flag}={GIVEN[flag]}"]


def cases() -> list[tuple[Illegal, str]]:
    """Every row with each value of the option that excludes it."""
    found: list[tuple[Illegal, str]] = []
    for row in EVERY:
        _, _, values = (row.other or "").partition(" ")
        found += itertools.product([row], values.split("|"))
    return found


def other_words(row: Illegal, value: str) -> list[str]:
    """Return the arguments that accompany the row's option."""
    if row.other is None:
        return []
    flag, _, _ = row.other.partition(" ")
    if value:
        return [f"{flag}={SPELLED.get(value, value)}"]
    return words(flag) if flag in GIVEN else [flag]


def identify(part: object) -> str:
    return part.option if isinstance(part, Illegal) else str(part)


@pytest.mark.parametrize(("row", "value"), cases(), ids=identify)
def test_a_row_is_refused_on_the_command_line(
    row: Illegal, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for order in (1, -1):
        given = [*words(row.option), *other_words(row, value)][::order]
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(["m.ee", *given])
        assert stopped.value.code == 2
        flag, _, _ = (row.other or "").partition(" ")
        other = f"with {flag} {value}".rstrip() if row.other else f"without {row.without}"
        tells(
            capsys.readouterr().err,
            f"eeserve: error: {row.option} {other}",
            f"{row.why}",
            "see eeserve --help",
        )


@pytest.mark.parametrize("row", EVERY, ids=identify)
def test_a_row_says_what_to_do(row: Illegal) -> None:
    assert re.search("omit |leave (it|one of them) out|choose --", row.why)
    assert " " not in row.option


@pytest.mark.parametrize(
    "flag", sorted({row.option for row in EVERY} - {"--ray-address", "--plan"})
)
def test_each_option_of_the_table_is_taken_elsewhere(flag: str) -> None:
    others = {
        "--json": ["--self-check"],
        "--audit-budget": ["--mode=audit"],
        "--max-queue-delay-ms": ["--policy=refill"],
        "--precision": ["--backend=tensorrt"],
        **{option: ["--learn"] for option in LEARNING},
    }
    assert parse_arguments(["m.onnx", *words(flag), *others.get(flag, [])]).models


def write(path: Path, *settings: tuple[str, str], model: str = "") -> Path:
    """Write a file with settings by key, each in the table where it may be."""
    engine = [f"{key} = {value}" for key, value in settings if key in ENGINE]
    defaults = [f"{key} = {value}" for key, value in settings if key not in ENGINE]
    text = ["[engine]", *engine, "[defaults]", *defaults, "[models.m]", 'path = "m.ee"', model]
    (path / "serve.toml").write_text("\n".join(text))
    return path / "serve.toml"


ENGINE = {
    "mode", "backend", "device", "precision", "graphs", "threads", "engine_build_minutes",
    "forecast", "keep_state", "profile_window_s", "uncertified_exits",
}  # fmt: skip
IN_FILES = [(row, value) for row, value in cases() if row.other and row.option in {
    "--audit-budget", "--confidence", "--controller", "--device", "--engine-build-minutes",
    "--forecast", "--max-disagreement", "--max-queue-delay-ms", "--max-source-share",
    "--never-beyond-compiled",
    "--no-cuda-graphs", "--no-state", "--precision", "--profile-window-s", "--ramp-budget",
    "--threads", "--trust-inputs", "--uncertified-exits",
}]  # fmt: skip


def setting(flag: str, value: str | None) -> tuple[str, str]:
    """A key of the file and what it is set to, for an option."""
    action = next(a for a in make_parser().options() if flag in a.option_strings)
    if value is None:
        return key_of(action.dest), str(action.const).lower()
    return key_of(action.dest), value if value.replace(".", "").isdigit() else f'"{value}"'


@pytest.mark.parametrize(("row", "value"), IN_FILES, ids=identify)
def test_a_row_is_refused_in_a_file(
    row: Illegal, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert row.other is not None
    flag, _, _ = row.other.partition(" ")
    key, set_to = setting(row.option, GIVEN[row.option])
    other = setting(flag, SPELLED.get(value, value))
    file = write(tmp_path, (key, set_to), other)
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([f"--config={file}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = f"eeserve: {file}: [engine] and [defaults]: {key} with {other[0]} {value}: "
    assert line.startswith(told)
    assert "--" not in line


def test_every_row_that_a_file_can_have_is_tried_there() -> None:
    flags = {flag: a.dest for a in make_parser().options() for flag in a.option_strings}
    possible = {
        row.option for row in EVERY if flags[row.option] in KEYS - {"learning"} and row.other
    }
    assert {row.option for row, _ in IN_FILES} == possible


def test_a_file_that_fits_one_mode_is_taken_in_every_mode(tmp_path: Path) -> None:
    file = write(tmp_path, ("controller", '"static"'), ("audit_budget", "0.1"))
    for mode in ("audit", "release", "leave", "off"):
        engine = parse_arguments([f"--config={file}", f"--mode={mode}"]).engine
        assert (engine.mode.value, engine.defaults.controller) == (mode, "static")


def test_the_command_line_and_the_file_may_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, ("mode", '"off"'))
    with pytest.raises(SystemExit):
        parse_arguments([f"--config={file}", "--controller=static"])
    told = capsys.readouterr().err
    tells(told, "eeserve: error: --controller", "--mode off")
    overruled = [f"--config={file}", "--mode=audit", "--controller=static"]
    assert parse_arguments(overruled).engine.defaults.controller == "static"


def test_a_table_of_a_model_is_checked_with_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, ("mode", '"leave"'), model="trust_inputs = true")
    with pytest.raises(SystemExit):
        parse_arguments([f"--config={file}"])
    told = capsys.readouterr().err
    tells(told, f"eeserve: {file}", "[models.m] and [engine]", "trust_inputs", "mode leave")


def test_learning_is_asked_for_by_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model="[learning]\nsamples = 7000")
    words = ["other.onnx", f"--config={file}", "--learn-gib=2", "--learn-keep"]
    assert parse_arguments(words).engine.learning == LearnOptions(
        samples=7000, max_gib=2.0, keep=True
    )
    file = write(tmp_path, ("mode", '"off"'), model="[learning]")
    with pytest.raises(SystemExit):
        parse_arguments([f"--config={file}"])
    told = capsys.readouterr().err
    tells(told, f"eeserve: {file}", "[engine] and [defaults]", "learning with mode off")


def test_learning_and_answers_are_for_onnx_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--learn", "--answer=logits"]
    assert parse_arguments(["a.ee", "b.onnx", *both]).engine.learning == LearnOptions()
    for model, told in (
        ("answer = 'logits'", ("[models.m] and [engine]", "answer without MODEL.onnx")),
        ("[learning]", ("[engine] and [defaults]", "learning without MODEL.onnx")),
    ):
        file = write(tmp_path, model=model)
        with pytest.raises(SystemExit):
            parse_arguments([f"--config={file}"])
        tells(capsys.readouterr().err, f"eeserve: {file}", *told)
    text = file.read_text().replace("m.ee", "m.onnx").replace("[learning]", "answer = 'x'")
    file.write_text(f"{text}\n[models.n]\npath = 'n.ee'\n[learning]\n")
    engine = parse_arguments([f"--config={file}"]).engine
    assert (engine.learning, engine.of("m").answer) == (LearnOptions(), "x")


def test_the_value_that_a_setting_has_anyway_is_no_setting(tmp_path: Path) -> None:
    file = write(tmp_path, ("mode", '"off"'), ("keep_state", "true"), ("trust_inputs", "false"))
    assert parse_arguments([f"--config={file}"]).engine.keep_state
