"""Learning on the command line, in the configuration file, on the status page and in metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.facts import Told, tells
from tests.unit.server.test_metrics import STATISTICS, Engine
from tests.unit.server.test_status import Text

from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.requests.learning_status import LearningStatus
from offramp.server.arguments.command_line import parse_arguments
from offramp.server.pages.metrics import render_metrics
from offramp.server.pages.status import render_status, view_learning

STATUS = LearningStatus(
    phase="waiting",
    text="compiling failed: no <memory>; again at 14:02",
    recorded=3412,
    wanted=12000,
    dropped=7,
    copies=5,
    unanswered=2,
    size_bytes=3 * 2**20,
    attempts=4,
    failures=1,
    reason="no <memory>",
)


def test_learning_is_off_unless_it_is_asked_for() -> None:
    assert parse_arguments(["m.onnx"]).engine.learning is None
    assert parse_arguments(["m.onnx", "--learn"]).engine.learning == LearnOptions()


def test_its_options_arrive() -> None:
    line = "m.onnx --learn --learn-samples 2000 --learn-folder here --learn-gib 0.5 --learn-keep"
    assert parse_arguments(line.split()).engine.learning == LearnOptions(
        samples=2000, folder=Path("here"), max_gib=0.5, keep=True
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--learn-samples 0", ("'0'", "whole number from 1 on")),
        ("--learn-gib 0", ("'0'", "number above 0")),
    ],
)
def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str], words: str, told: Told) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["m.onnx", "--learn", *words.split()])
    tells(capsys.readouterr().err, *told)


def test_a_configuration_file_may_ask_for_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        '[learning]\nsamples = 5000\nfolder = "learned"\nmax_gib = 2\n'
        '[models.a]\npath = "a.onnx"\n[models.b]\npath = "b.onnx"\nlearn = false\n'
    )
    engine = parse_arguments(["--config", str(path)]).engine
    assert engine.learning == LearnOptions(samples=5000, folder=tmp_path / "learned", max_gib=2.0)
    assert (engine.of("a").learn, engine.of("b").learn) == (True, False)
    overruled = parse_arguments(["--config", str(path), "--learn", "--learn-samples", "6000"])
    assert overruled.engine.learning == LearnOptions(
        samples=6000, folder=tmp_path / "learned", max_gib=2.0
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("samples = 0", ("[learning]", "samples 0", "1 to")),
        ("sample = 3", ("[learning]", "'sample'", "'samples'")),
        ("keep = 1", ("[learning] keep is 1 (an integer)", "true or false")),
    ],
)
def test_what_is_wrong_in_the_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: Told
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f"[learning]\n{text}\n")
    with pytest.raises(SystemExit):
        parse_arguments(["m.onnx", "--config", str(path)])
    tells(capsys.readouterr().err, *told)


def test_the_page_tells_how_far_it_is() -> None:
    page = render_status(Engine(now=replace(STATISTICS, learning=STATUS)))
    text = Text(page).text
    assert "Learning: compiling failed: no <memory>; again at 14:02." in text
    for words in ("3,412 recorded inputs", "12,000 wanted", "7 drawn, but not recorded", "3.0 MiB"):
        assert words in text
    assert "Learning" not in Text(render_status(Engine(now=STATISTICS))).text


def test_a_failure_alarms_and_progress_does_not() -> None:
    assert view_learning(None) is None
    failed = view_learning(STATUS)
    assert failed is not None
    assert failed["alarming"]
    going = view_learning(replace(STATUS, phase="compiling", failures=0, dropped=0))
    assert going is not None
    assert not going["alarming"]
    assert not any(figure.alarming for figure in going["figures"])


def test_metrics_tell_phase_and_counts() -> None:
    text = render_metrics(Engine(now=replace(STATISTICS, learning=STATUS))).decode()
    found = {
        (sample.name, sample.labels.get("phase")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("offramp_learning")
    }
    assert found["offramp_learning_recorded_samples", None] == 3412
    assert found["offramp_learning_wanted_samples", None] == 12000
    assert found["offramp_learning_recording_bytes", None] == 3 * 2**20
    assert found["offramp_learning_dropped_total", None] == 7
    assert found["offramp_learning_attempts_total", None] == 4
    assert found["offramp_learning_failures", None] == 1
    phases = {phase: value for (name, phase), value in found.items() if phase}
    assert phases.pop("waiting") == 1
    assert set(phases.values()) == {0}
    assert "offramp_learning" not in render_metrics(Engine(now=STATISTICS)).decode()
