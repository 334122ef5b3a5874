"""A bundle whose files are held is read though its path names another bundle, or none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.bundle.examples import FILES, replace_file
from tests.unit.bundle.test_weights import CONTENT, FILE, model, stored

from offramp.bundle import Bundle, BundleIntegrityError
from offramp.bundle import stored_graphs as held_module
from offramp.bundle.graph_weights import WEIGHTS


def _remove(bundle: Path) -> None:
    shutil.rmtree(bundle)


def _replace(bundle: Path) -> None:
    """Replace a bundle as the compiler does: the new one is renamed into its place."""
    old = bundle.rename(bundle.with_name("old"))
    bundle.mkdir()
    (bundle / WEIGHTS).write_bytes(b"\1" + CONTENT[1:])
    shutil.rmtree(old)


def _move(bundle: Path) -> None:
    bundle.rename(bundle.with_name("moved"))


@pytest.mark.parametrize("small_bytes", [0, 64])
@pytest.mark.parametrize("change", [_remove, _replace, _move])
def test_a_held_bundle_is_read_whatever_is_at_its_path(
    tmp_path: Path,
    change: Callable[[Path], None],
    small_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_module, "_SMALL_BYTES", small_bytes)
    bundle = Bundle.open(stored(tmp_path).path).held()
    assert bundle.weight_folder() == bundle.path.resolve()
    change(bundle.path)
    assert [bundle.read(FILE) for _ in range(2)] == [model().SerializeToString()] * 2
    assert bundle.weight_folder() is None, "there are others, or none"
    for name, content in FILES.items():
        if name != FILE and name in {entry.path for entry in bundle.manifest.files}:
            assert bundle.read(name) == content


def test_a_link_that_moves_leaves_the_bundle_where_it_was(tmp_path: Path) -> None:
    first = stored(tmp_path).path
    link = tmp_path / "current.ee"
    link.symlink_to(first)
    bundle = Bundle.open(link).held()
    (tmp_path / "empty").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "empty")
    assert bundle.weight_folder() == bundle.folder == first.resolve()
    assert bundle.read(FILE) == model().SerializeToString()


def test_a_file_that_is_written_in_place_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "_SMALL_BYTES", 0)
    bundle = Bundle.open(stored(tmp_path).path).held()
    (bundle.path / "source.onnx").write_bytes(b"another")
    with pytest.raises(BundleIntegrityError, match=r"source\.onnx"):
        bundle.read("source.onnx")


def test_a_bundle_that_changed_before_it_was_held_is_refused(tmp_path: Path) -> None:
    bundle = Bundle.open(stored(tmp_path).path)
    replace_file(bundle.path, "source.onnx", b"another")
    with pytest.raises(BundleIntegrityError, match=r"source\.onnx"):
        bundle.held()


def test_nothing_stays_open_once_a_bundle_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_module, "_SMALL_BYTES", 0)
    bundle = Bundle.open(stored(tmp_path).path).held()
    held = bundle._held
    assert held is not None
    descriptors = list(held._open.values())
    assert len(descriptors) == len(bundle.manifest.files)
    del bundle, held
    for descriptor in descriptors:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)
