"""The learn folder: which model it is of, and which bundles are in it."""

from __future__ import annotations

from pathlib import Path

import onnx
from tests import models

from offramp.compiler.frontend.source_file import load_source
from offramp.engine.learning.learning_folder import LearnFolder, folder_of, model_sha256


def test_the_hash_of_a_model_is_the_compilers(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.mlp(), path)
    assert model_sha256(path) == load_source(path)[1]


def test_the_hash_of_a_model_covers_the_files_that_hold_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        models.mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    before = model_sha256(path)
    assert before == load_source(path)[1]
    weights = bytearray((tmp_path / "weights.bin").read_bytes())
    weights[5] ^= 1
    (tmp_path / "weights.bin").write_bytes(weights)
    assert model_sha256(path) != before


def test_files_outside_the_models_folder_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(
        models.mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    path.write_bytes(proto.SerializeToString())
    digests = set()
    for content in (b"one", b"two"):
        (tmp_path / "secret").write_bytes(content)
        digests.add(model_sha256(path))
    assert len(digests) == 1


def test_what_is_no_model_has_a_hash_too(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff\xff no protobuf")
    assert len(model_sha256(path)) == 64


def test_folders_are_named_after_the_model(tmp_path: Path) -> None:
    assert folder_of(Path("a/m.onnx"), "x", None) == Path("a/m.learn")
    assert folder_of(Path("a/model"), "x", None) == Path("a/model.learn")
    assert folder_of(Path("a/m.onnx"), "x/y", tmp_path) == tmp_path / "x_y.learn"


def test_bundles_are_numbered_and_removed_with_what_is_beside_them(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "m.learn")
    assert folder.next_number() == 1
    for name in ("1.ee", "2.ee", ".3.ee.x1", "1.ee.m@host.state.npz", "10.ee.measured.json"):
        (folder.path / name).mkdir()
    (folder.path / "notes.txt").write_text("not ours")
    assert folder.next_number() == 11
    folder.remove_others(2)
    assert sorted(p.name for p in folder.path.iterdir()) == ["2.ee", "lock", "notes.txt"]
    assert folder.open_bundle(2) is None, "it has no manifest"
    assert folder.open_bundle(0) is None
    folder.release()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = LearnFolder(tmp_path / "m.learn"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    (folder.path / "1.ee").symlink_to(elsewhere)
    folder.remove_others()
    assert (elsewhere / "file").exists()
    assert not (folder.path / "1.ee").is_symlink()
    folder.release()


def test_a_folder_of_others_rights_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "m.learn").mkdir(mode=0o755)
    LearnFolder(tmp_path / "m.learn").release()
    assert (tmp_path / "m.learn").stat().st_mode & 0o777 == 0o700


def test_recordings_are_removed_whole(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "m.learn")
    for name in ("inputs.log", "inputs.log.new", "learning.json"):
        (folder.path / name).write_text("")
    folder.remove_recording()
    assert sorted(p.name for p in folder.path.iterdir()) == ["learning.json", "lock"]
    folder.release()
