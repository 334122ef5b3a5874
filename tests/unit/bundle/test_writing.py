"""A bundle is whole or absent, and nothing is replaced that was not meant to be."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from tests.unit.bundle.examples import FILES, POLICY, everything_under, write

from offramp.bundle import (
    Bundle,
    BundleExistsError,
    BundleIntegrityError,
    BundleSchemaError,
    BundleWriteError,
    ExitPolicy,
    files,
)
from offramp.bundle.writing import check_target

OTHER = ExitPolicy(version=2, active=())


def test_folders_above_are_made(tmp_path: Path) -> None:
    assert write(tmp_path / "a" / "b").path == tmp_path / "a" / "b" / "small.ee"


def test_the_bundle_is_readable_for_others(tmp_path: Path) -> None:
    assert write(tmp_path).path.stat().st_mode & 0o777 == 0o755


def test_a_bundle_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    before = everything_under(tmp_path)
    with pytest.raises(BundleExistsError, match="--overwrite"):
        write(tmp_path, policy=OTHER)
    assert everything_under(tmp_path) == before

    files = {**FILES, "report.html": b"new"}
    replaced = write(tmp_path, policy=OTHER, files=files, overwrite=True)
    assert replaced.policy == OTHER
    assert Bundle.open(tmp_path / "small.ee").read("report.html") == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["small.ee"]


def test_a_damaged_bundle_can_be_replaced(tmp_path: Path) -> None:
    (write(tmp_path).path / "source.onnx").unlink()
    assert write(tmp_path, overwrite=True) == Bundle.open(tmp_path / "small.ee")


@pytest.mark.parametrize("content", [{}, {"photo.jpg": b"x"}, {"manifest.json": b"{}"}])
def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path, content) -> None:
    folder = tmp_path / "small.ee"
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    with pytest.raises(BundleExistsError, match="is not a bundle"):
        write(tmp_path, overwrite=True)
    assert everything_under(folder) == content


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "small.ee").write_bytes(b"mine")
    with pytest.raises(BundleExistsError, match="is not a bundle"):
        write(tmp_path, overwrite=True)
    assert everything_under(tmp_path) == {"small.ee": b"mine"}


def test_a_link_is_never_replaced(tmp_path: Path) -> None:
    real = write(tmp_path / "real").path
    (tmp_path / "small.ee").symlink_to(real)
    with pytest.raises(BundleExistsError, match="is not a bundle"):
        write(tmp_path, overwrite=True)
    (tmp_path / "small.ee").unlink()
    (tmp_path / "small.ee").symlink_to("nowhere")
    with pytest.raises(BundleExistsError, match="is not a bundle"):
        write(tmp_path, overwrite=True)


def test_a_file_where_a_folder_has_to_be_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleExistsError, match="file is not a folder"):
        check_target(tmp_path / "file" / "deeper" / "small.ee", overwrite=False)


def test_a_content_in_pieces_is_written_as_if_it_were_whole(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    parted = {name: (bytes([byte]) for byte in content) for name, content in FILES.items()}
    pieces = write(tmp_path / "pieces", files=parted)
    assert pieces.manifest == whole.manifest
    assert everything_under(pieces.path) == everything_under(whole.path)


def test_a_piece_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"the "
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(BundleWriteError, match="Input/output error"):
        write(tmp_path, files={**FILES, "source.onnx": pieces()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("fails_after", range(0, 10, 3))
def test_a_failing_disk_leaves_nothing_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, fails_after: int
) -> None:
    if old:
        write(tmp_path)
    before = everything_under(tmp_path)
    real, written = Path.open, []

    def failing(self: Path, mode: str = "r", *rest: Any, **named: Any) -> IO[Any]:
        if "w" in mode:
            if len(written) == fails_after:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(self)
        return real(self, mode, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", failing)
        with pytest.raises(BundleWriteError, match="No space left on device"):
            write(tmp_path, policy=OTHER, overwrite=True)

    assert everything_under(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["small.ee"] * old


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_the_old_bundle_survives_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(tmp_path)
    before = everything_under(tmp_path)
    real = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if Path(target).name == "small.ee" and not self.name.endswith(".old"):
            raise error
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        patched.setattr(files, "exchange", lambda *_: False)
        with pytest.raises((BundleWriteError, KeyboardInterrupt)):
            write(tmp_path, policy=OTHER, overwrite=True)

    assert everything_under(tmp_path) == before
    assert Bundle.open(tmp_path / "small.ee").policy == POLICY


def test_what_would_not_open_is_not_written(tmp_path: Path) -> None:
    beyond = replace(POLICY, active=(replace(POLICY.active[0], exit=3),))
    with pytest.raises(BundleSchemaError, match="beyond"):
        write(tmp_path, policy=beyond)
    with pytest.raises(BundleIntegrityError, match=r"exits/00.onnx"):
        write(tmp_path, files={k: v for k, v in FILES.items() if k != "exits/00.onnx"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../outside", "/tmp/offramp-outside", "a\\b"])
def test_nothing_is_written_outside_the_bundle(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleIntegrityError, match="leaves the bundle"):
        write(tmp_path, files={**FILES, name: b""})
    assert list(tmp_path.iterdir()) == []
    assert not Path("/tmp/offramp-outside").exists()
