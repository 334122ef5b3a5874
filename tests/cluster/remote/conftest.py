"""Shared fixtures of tests of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.testing.scripted_worker import FAULTS


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what goes wrong in workers."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv(FAULTS, str(folder))
    return folder
