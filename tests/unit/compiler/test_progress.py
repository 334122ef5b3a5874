"""Progress where standard error is a log, and where it is a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.facts import steps_of, without_steps

from offramp.compiler.common.progress import TerminalProgress

LONG = f"Train [exit 0] {'and on ' * 20}".strip()


@pytest.mark.parametrize("dumb", [False, True], ids=["file", "dumb terminal"])
def test_a_log_gets_a_line_as_each_step_begins(dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if dumb:
        monkeypatch.setenv("TERM", "dumb")
    written = io.StringIO()
    with TerminalProgress(Console(file=written, width=80, force_terminal=dumb)) as progress:
        assert written.getvalue() == ""
        with progress.step("Read the data", 4) as advance:
            assert steps_of(written.getvalue()) == ["Read the data"]
            advance(1)
        with progress.step(LONG, 1):
            assert steps_of(written.getvalue()) == ["Read the data", LONG]
    assert steps_of(written.getvalue()) == ["Read the data", LONG]
    assert without_steps(written.getvalue()) == ""


def test_a_failure_keeps_the_lines_before_it() -> None:
    written = io.StringIO()
    with (
        pytest.raises(ValueError, match="no room"),
        TerminalProgress(Console(file=written)) as progress,
        progress.step("Read the data", 1),
    ):
        raise ValueError("no room")
    assert steps_of(written.getvalue()) == ["Read the data"]


def test_a_terminal_gets_a_bar_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    written = io.StringIO()
    with TerminalProgress(Console(file=written, width=100, force_terminal=True)) as progress:
        for title in ("Read the data", "Write the bundle"):
            with progress.step(title, 2):
                pass
    assert steps_of(written.getvalue()) == []
    for title in ("Read the data", "Write the bundle"):
        assert title in written.getvalue()
    assert "━" in written.getvalue()
