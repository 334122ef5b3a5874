"""A bundle takes its place in one step, and is on the disk by then."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.unit.bundle.examples import NAMES, POLICY, everything_under, write

from offramp.bundle import Bundle, BundleNotFoundError, BundleWriteError, ExitPolicy, files
from offramp.bundle.files import write_whole

OTHER = ExitPolicy(version=2, active=())
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writer forks")


def exchanges(folder: Path) -> bool:
    """Return True if the file system of the tests can exchange names atomically."""
    for name in "ab":
        (folder / name).mkdir()
    done = files.exchange(folder / "a", folder / "b")
    for name in "ab":
        (folder / name).rmdir()
    return done


def killed_writers(folder: Path, how: str) -> list[str]:
    """Return the content found after each kill, without repetitions."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.unit.bundle.killed_writer", str(folder), how]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[str] = json.loads(done.stdout)
    assert len(found) > 40
    return [what for what, _ in itertools.groupby(found)]


@needs_fork
@pytest.mark.slow
def test_a_killed_overwriting_leaves_the_old_bundle_or_the_new_one(tmp_path: Path) -> None:
    if not exchanges(tmp_path):
        pytest.skip("the file system of the tests cannot exchange names")
    assert killed_writers(tmp_path / "here", "exchange") == ["old", "new"]


@needs_fork
@pytest.mark.slow
def test_a_killed_writing_leaves_nothing_or_the_bundle(tmp_path: Path) -> None:
    assert killed_writers(tmp_path / "here", "first") == ["none", "new"]


@needs_fork
@pytest.mark.slow
def test_where_names_cannot_be_exchanged_the_old_bundle_is_named(tmp_path: Path) -> None:
    assert killed_writers(tmp_path / "here", "rename") == ["old", "aside", "new"]


def test_folders_are_exchanged(tmp_path: Path) -> None:
    if not exchanges(tmp_path):
        pytest.skip("the file system of the tests cannot exchange names")
    for name in ("ä", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert files.exchange(tmp_path / "ä", tmp_path / "b")
    assert (tmp_path / "ä" / "b").exists()
    assert not files.exchange(tmp_path / "ä", tmp_path / "nowhere")
    assert (tmp_path / "ä" / "b").exists()


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_without_renameat2_the_old_folder_is_moved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(_: None) -> NoReturn:
        raise error

    monkeypatch.setattr("ctypes.CDLL", refuse)
    write(tmp_path)
    assert write(tmp_path, policy=OTHER, overwrite=True).policy == OTHER
    assert Bundle.open(tmp_path / "small.ee").policy == OTHER
    assert [p.name for p in tmp_path.iterdir()] == ["small.ee"]


def test_an_old_bundle_that_cannot_be_put_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    before = everything_under(tmp_path / "small.ee")
    monkeypatch.setattr(files, "exchange", lambda *_: False)
    real = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if Path(target).name == "small.ee":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        with pytest.raises(
            BundleWriteError, match="the old one cannot be put back: it is"
        ) as failed:
            write(tmp_path, policy=OTHER, overwrite=True)
    (aside,) = tmp_path.iterdir()
    assert str(aside) in str(failed.value)
    assert everything_under(aside) == before
    with pytest.raises(BundleNotFoundError, match=f"mv {aside} {tmp_path / 'small.ee'}"):
        Bundle.open(tmp_path / "small.ee")


def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Keep, in order, the paths that are synced, and those that take a place."""
    steps: list[tuple[str, str]] = []

    def sync(descriptor: int) -> None:
        steps.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def noting(function: Any) -> Any:
        def note(source: Any, *others: Any) -> Any:
            steps.append(("place", str(source)))
            return function(source, *others)

        return note

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(files, "exchange", noting(files.exchange))
    monkeypatch.setattr(os, "rename", noting(os.rename))
    monkeypatch.setattr(os, "replace", noting(os.replace))
    return steps


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names open files")


@needs_proc
@pytest.mark.parametrize("old", [False, True])
def test_a_bundle_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    if old:
        write(tmp_path)
    steps = synced(monkeypatch)
    write(tmp_path, overwrite=True)
    taken = next(index for index, (what, _) in enumerate(steps) if what == "place")
    scratch = Path(steps[taken][1])
    parts = {str(scratch / name) for name in (*NAMES, "segments", "exits", "profiles", "")}
    assert {path.rstrip("/") for _, path in steps[:taken]} == {p.rstrip("/") for p in parts}
    assert steps[-1] == ("sync", str(tmp_path))


@needs_proc
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_on_the_disk_where_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    steps = synced(monkeypatch)
    write_whole(tmp_path / "file", b"x", durable=durable)
    kinds = [what for what, _ in steps]
    assert kinds == (["sync", "place", "sync"] if durable else ["place"])
    assert not durable or steps[-1] == ("sync", str(tmp_path))


def test_a_disk_that_refuses_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    before = everything_under(tmp_path)

    def refuse(_: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(BundleWriteError, match="Input/output error"):
            write(tmp_path, policy=OTHER, overwrite=True)
    assert everything_under(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_that_syncs_no_folders_takes_bundles(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    assert write(tmp_path).policy == POLICY
    assert write(tmp_path, policy=OTHER, overwrite=True).policy == OTHER


def test_a_file_that_cannot_be_synced_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(BundleWriteError, match="Invalid argument"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_stood_at_a_name_is_found_by_that_name_alone(tmp_path: Path) -> None:
    (tmp_path / ".resnet.ee.abc_1x.old").mkdir()
    (tmp_path / ".resnet..old").mkdir()
    (tmp_path / ".resnet.file.old").touch()
    assert files.interrupted_backup(tmp_path / "resnet") is None
    assert files.interrupted_backup(tmp_path / "resnet.ee") == tmp_path / ".resnet.ee.abc_1x.old"


def test_a_bundle_in_its_place_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error is raised, even if the disk fails right after."""
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert write(tmp_path).policy == POLICY
    write_whole(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
