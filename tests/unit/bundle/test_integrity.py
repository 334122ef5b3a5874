"""A bundle that is not the one that was written is refused, with the file's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.bundle.examples import (
    FILES,
    NAMES,
    PROFILE,
    graph,
    replace_file,
    rewrite_manifest,
    write,
)

from offramp.bundle import Bundle, BundleIntegrityError, BundleNotFoundError, BundleSchemaError


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    written = write(tmp_path)
    opened = Bundle.open(tmp_path / "small.ee")

    assert opened == written
    assert {name: opened.read(name) for name in FILES} == FILES
    assert opened.profile() == PROFILE
    assert [entry.path for entry in opened.manifest.files] == sorted([*FILES, "policy.json"])
    assert {p.name for p in tmp_path.iterdir()} == {"small.ee"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_changed_byte_is_noticed(tmp_path: Path, name: str, where: str) -> None:
    root = write(tmp_path).path
    content = bytearray((root / name).read_bytes())
    place = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[where]
    content[place] ^= 0x2A  # the line end of manifest.sha256 becomes a blank
    (root / name).write_bytes(content)

    with pytest.raises(BundleIntegrityError, match=name.replace("manifest.json", "manifest")):
        Bundle.open(root)


def test_a_large_file_is_checked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp.bundle.files._PIECE_BYTES", 3)
    root = write(tmp_path).path
    assert Bundle.open(root).read("source.onnx") == FILES["source.onnx"]
    (root / "source.onnx").write_bytes(FILES["source.onnx"][:-1] + b"!")
    with pytest.raises(BundleIntegrityError, match=r"source.onnx was altered"):
        Bundle.open(root)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [0, -1])
def test_a_truncated_file_is_noticed(tmp_path: Path, name: str, keep: int) -> None:
    root = write(tmp_path).path
    content = (root / name).read_bytes()
    (root / name).write_bytes(content[:keep])
    with pytest.raises(BundleIntegrityError, match=name.replace("manifest.json", "manifest")):
        Bundle.open(root)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    root = write(tmp_path).path
    (root / name).unlink()
    error = BundleNotFoundError if name == "manifest.json" else BundleIntegrityError
    with pytest.raises(error, match=name):
        Bundle.open(root)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_leaves_the_bundle_is_refused_even_to_the_same_content(
    tmp_path: Path, name: str
) -> None:
    root = write(tmp_path).path
    outside = tmp_path / "outside"
    (root / name).rename(outside)
    (root / name).symlink_to(outside)
    with pytest.raises(BundleIntegrityError, match=name):
        Bundle.open(root)


def test_a_linked_folder_that_leaves_the_bundle_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path).path
    (root / "exits").rename(tmp_path / "elsewhere")
    (root / "exits").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(BundleIntegrityError, match="exits"):
        Bundle.open(root)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path).path
    (root / "report.html").unlink()
    (root / "report.html").symlink_to(root / "report.html")
    with pytest.raises(BundleIntegrityError, match=r"report.html"):
        Bundle.open(root)


def test_a_pipe_in_place_of_a_file_is_refused_and_does_not_block(tmp_path: Path) -> None:
    root = write(tmp_path).path
    (root / "report.html").unlink()
    os.mkfifo(root / "report.html")
    with pytest.raises(BundleIntegrityError, match=r"report.html is not a regular file"):
        Bundle.open(root)


@pytest.mark.parametrize("name", ["extra.bin", "segments/02.onnx", ".hidden", "a/b/c"])
def test_a_foreign_file_is_refused(tmp_path: Path, name: str) -> None:
    root = write(tmp_path).path
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"")
    with pytest.raises(BundleIntegrityError, match=f"{name} does not belong"):
        Bundle.open(root)


@pytest.mark.parametrize("target", [".", "nowhere"])
def test_a_foreign_link_is_refused(tmp_path: Path, target: str) -> None:
    root = write(tmp_path).path
    (root / "extra").symlink_to(target)
    with pytest.raises(BundleIntegrityError, match="extra does not belong"):
        Bundle.open(root)


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "segments/../../secret",
        "/etc/hostname",
        "segments\\00.onnx",
        "..\\secret",
        "",
    ],
)
def test_a_path_that_leaves_the_bundle_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(graph("an exit"))  # of the content that the manifest tells
    root = write(tmp_path).path

    def point_elsewhere(plain: dict) -> None:
        next(e for e in plain["files"] if e["path"] == "exits/00.onnx")["path"] = path

    rewrite_manifest(root, point_elsewhere)
    with pytest.raises(BundleIntegrityError, match="leaves the bundle"):
        Bundle.open(root)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "a\nb"])
def test_a_path_that_is_no_text_is_refused(tmp_path: Path, path: str) -> None:
    root = write(tmp_path).path

    def point_elsewhere(plain: dict) -> None:
        next(e for e in plain["files"] if e["path"] == "exits/00.onnx")["path"] = path

    rewrite_manifest(root, point_elsewhere)
    with pytest.raises(BundleSchemaError, match="expected text without control characters"):
        Bundle.open(root)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["segments"][1].update(file="segments/09.onnx"), "segments/09.onnx"),
        (lambda m: m["exits"][0].update(file="../exit.onnx"), "exit.onnx"),
        (lambda m: m["source"].update(file="manifest.onnx"), "manifest.onnx"),
    ],
)
def test_a_part_without_a_hash_is_refused(tmp_path: Path, change, named: str) -> None:
    root = write(tmp_path).path
    rewrite_manifest(root, change)
    with pytest.raises(BundleIntegrityError, match=f"lists no hash for .*{named}"):
        Bundle.open(root)


def test_a_file_that_changes_after_opening_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    bundle = write(tmp_path)
    (bundle.path / "exits/00.onnx").write_bytes(graph("an EXIT"))
    with pytest.raises(BundleIntegrityError, match=r"exits/00.onnx was altered"):
        bundle.read("exits/00.onnx")


@pytest.mark.parametrize("name", ["manifest.json", "../small.ee/report.html", "nothing"])
def test_only_listed_files_are_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleIntegrityError, match="not part of this bundle"):
        write(tmp_path).read(name)


def test_a_profile_of_another_device_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleIntegrityError, match=r"profiles/h200.json is not part"):
        write(tmp_path).profile("h200")


def test_pickles_in_the_records_are_not_loaded(tmp_path: Path) -> None:
    root = write(tmp_path).path
    replace_file(root, "records.npz", b"\x80\x04K\x01.")  # a pickle of 1
    with pytest.raises(BundleSchemaError, match="File is not a zip file"):
        Bundle.open(root).records()


def test_no_bundle_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(BundleNotFoundError, match=r"eecompile MODEL.onnx"):
            Bundle.open(place)
