"""Features are recorded in a folder that is always deleted, and never shared."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from offramp.compiler.common.resources import PREFIX, feature_folder, sweep

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_there_and_then_it_is_not(tmp_path: Path) -> None:
    with feature_folder() as folder:
        (folder / "0.npy").write_bytes(b"features")
        assert folder.parent == tmp_path
        assert folder.name.startswith(f"{PREFIX}{os.getpid()}-")
    with pytest.raises(KeyboardInterrupt), feature_folder():
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_works_in_stays(tmp_path: Path) -> None:
    with feature_folder() as one, feature_folder() as two:
        (one / "0.npy").write_bytes(b"features")
        sweep()
        assert sorted(tmp_path.iterdir()) == sorted([one, two])


HOLDER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from offramp.compiler.common.resources import feature_folder
with feature_folder() as folder:
    (folder / "0.npy").write_bytes(b"features")
    print("held", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            sweep()
            assert len(list(tmp_path.glob("*/0.npy"))) == 1
        finally:
            holder.kill()
    sweep()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").touch()
    (tmp_path / f"{PREFIX}1-link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}1-file").touch()
    (tmp_path / f"{PREFIX}abc_defg").mkdir()  # of an older version, perhaps at work
    stranger = tmp_path / f"{PREFIX}1-stranger"
    stranger.mkdir()
    before = sorted(tmp_path.rglob("*"))
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    sweep()
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sweep()
    assert sorted(tmp_path.rglob("*")) == [place for place in before if place != stranger]


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = tempfile.mkdtemp, []

    def swept_at_once(*arguments: str, **options: str) -> str:
        made.append(real(*arguments, **options))
        if len(made) < 3:
            sweep()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    with feature_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert len(made) == 3


def test_without_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with feature_folder() as folder:
        sweep()
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
