"""``eeserve --self-check``: lines, exit status, report."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.golden.cases import BUNDLE as GOLDEN
from tests.unit.engine.self_check import faults

from offramp.engine.backends import Backend
from offramp.engine.self_check import run_self_check
from offramp.server import cli

COMMAND = [str(GOLDEN), "--backend", "onnxruntime", "--self-check"]


@pytest.fixture(autouse=True)
def _restored(restored_logging: None) -> None:
    """The command sets logging up."""


def with_backend(patched: pytest.MonkeyPatch, backend: Backend, **settings: float) -> None:
    """Make the command check another backend, for one second."""
    brief = functools.partial(
        run_self_check, make=lambda _models, _options: backend, **{"seconds": 1.0, **settings}
    )
    patched.setattr("offramp.engine.self_check.run_self_check", brief)


def test_the_command_says_what_passed_and_leaves_with_0(tmp_path: Path) -> None:
    """The command runs in its own process, as for users, without tensorrt and pycuda."""
    report = tmp_path / "found.json"
    code = (
        "import sys\nsys.modules['tensorrt'] = sys.modules['pycuda'] = None\n"
        "import functools\nimport offramp.engine.self_check as self_check\n"
        "self_check.run_self_check = functools.partial(self_check.run_self_check, seconds=1.0)\n"
        "from offramp.server.cli import main\nsys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, "--json", str(report)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("checking onnxruntime-cpu on ")
    assert lines[-2:] == ["12 passed, 3 skipped", f"the report is in {report}"]
    document = json.loads(report.read_text())
    assert document["passed"]
    assert document["environment"]["models"] == {"bundle": str(GOLDEN)}
    assert "--self-check" in document["environment"]["command"]
    assert {check["verdict"] for check in document["checks"]} == {"passed", "skipped"}


def test_a_fault_is_printed_and_exits_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "found.json"
    with faults.of(faults.LosesARow) as backend:
        with_backend(monkeypatch, backend)
        assert cli.main([*COMMAND, "--json", str(report)]) == 1
    told = capsys.readouterr().out.splitlines()
    (line,) = [line for line in told if line.startswith("failed")]
    assert " merge " in line
    assert "rows requested" in line
    assert told[-2] == "11 passed, 1 failed, 3 skipped: merge"
    document = json.loads(report.read_text())
    assert not document["passed"]
    assert [c["name"] for c in document["checks"] if c["verdict"] == "failed"] == ["merge"]


def test_who_asks_for_no_report_is_told_of_it_where_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with faults.of(faults.LosesARow) as backend:
        with_backend(monkeypatch, backend)
        assert cli.main(COMMAND) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("with --json FILE everything")


def test_a_check_that_does_not_end_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comes, left = threading.Event(), list[int]()
    monkeypatch.setattr(os, "_exit", left.append)
    kind = type("Never", (faults.NeverEnds,), {"comes": comes})
    with_backend(monkeypatch, faults.SlotMaker(kind), seconds=0.1, hang_timeout_s=5.0)
    report = tmp_path / "found.json"
    cli.main([*COMMAND, "--json", str(report)])
    comes.set()
    assert left == [1]
    assert "did not end within" in capsys.readouterr().out
    assert not json.loads(report.read_text())["passed"]  # it is there, whatever hangs


def test_a_bundle_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(tmp_path / "no.ee"), "--self-check"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("eeserve: ")
    assert "no.ee" in told[-1]
