"""The demo fails, and says why, where there is nothing to show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from examples import demo
from tests.unit.bundle.examples import write

from offramp.bundle import ExitPolicy


def test_a_bundle_without_an_active_exit_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, policy=ExitPolicy(version=1, active=()))
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "BUNDLE", Path("small.ee"))
    monkeypatch.setattr(demo, "serving", None)  # it must not come that far
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 1
    out = capsys.readouterr().out
    assert "small.ee has no active exit: it serves the unmodified model" in out
    assert "small.ee/report.html" in out
