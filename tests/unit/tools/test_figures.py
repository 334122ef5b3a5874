"""Tables of README and docs are those of the results, and results can be measured again."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks import large_models, planner
from tests.facts import tells

from offramp.tools import figures
from offramp.tools.tables.rows import Table


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


def test_tables_are_those_of_the_results() -> None:
    marked = [page for page in figures.pages() if "<!-- table:" in page.read_text()]
    assert "README.md" in {page.name for page in marked}
    for page in marked:
        assert figures.filled(page.read_text()) == page.read_text(), f"{page}: make figures"


def test_every_table_is_in_a_page() -> None:
    text = "".join(page.read_text() for page in figures.pages())
    assert [name for name in figures.TABLES if f"<!-- table: {name} -->" not in text] == []


def test_every_result_is_named_by_a_page() -> None:
    """A result that no page names or shows is of no use to a reader: delete it."""
    text = "".join(page.read_text() for page in figures.pages())
    names = {path.stem for path in figures.RESULTS.glob("*.json")}
    assert sorted(name for name in names if f"{name}.json" not in text) == []


@pytest.mark.parametrize("name", figures.TABLES)
def test_rows_of_a_table_have_a_cell_for_each_column(name: str) -> None:
    made = figures.TABLES[name]
    heading, *rows = made.rows(*map(figures.read_result, made.results))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(heading)}
    assert not any("|" in cell or "\n" in cell for row in rows for cell in row)


def test_pictures_are_those_of_the_results() -> None:
    plans, sizes = (figures.read_result(name) for name in ("planner", "large_models"))
    docs = figures.ROOT / "docs"
    drawn = planner.plot(plans["rows"], plans["segments"])
    assert (docs / "planner.svg").read_text() == f"{drawn}\n"
    assert (docs / "large_models.svg").read_text() == f"{large_models.plot(sizes['rows'])}\n"


@pytest.mark.parametrize("picture", sorted((figures.ROOT / "docs").glob("*.svg")), ids=str)
def test_pictures_fit_dark_pages(picture: Path) -> None:
    """Text has colours for dark pages, and no card hides the page's own ground."""
    text = picture.read_text()
    assert "prefers-color-scheme" in text
    assert not re.search(r'<rect width="\d+" height="[\d.]+"( rx="\d+")? fill="#fff', text)


def test_a_table_is_written_between_its_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[Sequence[str]]:
        yield "a", "b"
        yield "1", "2"

    monkeypatch.setattr(figures, "TABLES", {"x": Table(rows, ())})
    page = "before\n<!-- table: x -->\nold\n<!-- end -->\nafter"
    wanted = "before\n<!-- table: x -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- end -->\nafter"
    assert figures.filled(page) == wanted
    assert figures.filled(wanted) == wanted
    with pytest.raises(KeyError):
        figures.filled("<!-- table: y -->\n<!-- end -->")


@pytest.mark.parametrize(
    ("recorded", "module"),
    [
        ("eebench compare demo/fashion.ee --json x.json", "offramp.tools.bench.cli"),
        ("cli.py adapt demo/fashion.ee", "offramp.tools.bench.cli"),
        ("front.py --triton x", "benchmarks.front"),
        ("python -m tests.chaos --minutes 60", "tests.chaos"),
    ],
)
def test_recorded_commands_run_in_the_sources(results: Path, recorded: str, module: str) -> None:
    (results / "x.json").write_text(json.dumps({"environment": {"command": recorded}}))
    command = figures.command_of("x")
    assert command[:3] == [sys.executable, "-m", module]
    assert command[3:] == recorded.split()[-len(command[3:]) :]


def test_missing_inputs_are_made_before_their_readers(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(command: Sequence[str], **_: object) -> None:
        made.append(command[-1])
        (results / made[-1]).mkdir(parents=True)

    monkeypatch.setattr(figures.subprocess, "run", make)
    figures.prepare(["also=demo/vit.ee", "demo/small/vit/test.npz"])
    assert made == ["demo/small", "demo/vit.ee"]


@pytest.mark.parametrize("content", [[], {"environment": [{"command": "front.py"}]}])
def test_a_result_without_one_command_is_refused(results: Path, content: object) -> None:
    (results / "x.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"x\.json"):
        figures.command_of("x")


def test_measuring_goes_on_after_a_failure(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the end the results that are not new are listed, with status 1."""
    for name, command in (("a", "python -c 'raise SystemExit(3)'"), ("c", "python -c 'print(7)'")):
        (results / f"{name}.json").write_text(json.dumps({"environment": {"command": command}}))
    (results / "b.json").write_text("[]")
    monkeypatch.setattr(figures, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(figures, "pages", list)
    monkeypatch.setattr(sys, "argv", ["figures", "--measure"])
    with pytest.raises(SystemExit) as ended:
        figures.main()
    tells(str(ended.value), "a: ", "status 3", "b: b.json")
    assert "c:" not in str(ended.value)
    assert "\n7\n" in capfd.readouterr().out


def test_nothing_is_measured_on_a_busy_machine_or_twice(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (results / "x.json").write_text(json.dumps({"environment": {"command": "front.py"}}))
    ran: list[list[str]] = []
    monkeypatch.setattr(figures.subprocess, "run", lambda command, **_: ran.append(command))
    monkeypatch.setattr(figures, "busy_cores", lambda: 1.5)
    refused = figures.measure(["x", "y"], busy=False)
    assert list(refused) == ["x", "y"]
    tells(refused["y"], "1.50", "0.3", "--busy")
    assert ran == []
    assert list(figures.measure(["typo"], busy=True)) == ["typo"]
    figures.measure(["x"], busy=True)
    monkeypatch.setattr(figures, "busy_cores", lambda: 0.1)
    figures.measure(["x"], busy=False)
    assert ran == [[sys.executable, "-m", "benchmarks.front"]] * 2
    with (
        figures.measuring_alone(),
        pytest.raises(SystemExit, match="another process"),
        figures.measuring_alone(),
    ):
        pass


def test_busy_cores_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(_seconds: float) -> None:
        began = time.process_time()
        while time.process_time() < began + 0.1:
            pass

    monkeypatch.setattr(figures.time, "sleep", spin)
    monkeypatch.setattr("offramp.engine.learning.compilation._LEAST_TICKS", 1)
    assert 0 < figures.busy_cores() <= (os.cpu_count() or 1) + 0.1


def test_what_is_read_is_made_first(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(figures.subprocess, "run", lambda words, **_: ran.append(" ".join(words)))
    figures.prepare(["methods.py", "--bundle", "x=demo/fashion.ee", "other.ee"])
    assert [command.split()[2] for command in ran] == ["offramp.compiler.commands.cli"]
    (results / "demo/fashion.ee").mkdir(parents=True)
    figures.prepare(["demo/fashion.ee"])
    assert len(ran) == 1
    figures.prepare(["demo/minilm/test.npz"])
    assert ran[1].endswith("tools.zoo.minilm_sentiment --output demo/minilm")
