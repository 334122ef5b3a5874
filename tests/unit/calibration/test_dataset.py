"""Calibration data that does not fit is refused in words that help."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts, tells

from offramp.bundle import Answer, AnswerTask, TaskKind, TensorSpec
from offramp.bundle.npz import is_mapped
from offramp.calibration.data import data_sources, dataset
from offramp.calibration.data.dataset import DataError, Dataset, InputView, read_dataset
from offramp.calibration.data.hashing import hash_arrays
from offramp.calibration.data.scratch import ScratchSpace

SPECS = (
    TensorSpec(name="input_ids", dtype="int64", shape=("batch", "sequence")),
    TensorSpec(name="scores", dtype="float32", shape=("batch", 3)),
)


def arrays(samples: int = 4, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    made = {
        "input_ids": np.arange(samples * 5, dtype=np.int64).reshape(samples, 5),
        "scores": np.ones((samples, 3), np.float32),
        **changes,
    }
    return {name: array for name, array in made.items() if array is not None}


def read(folder: Path, **changes: np.ndarray | None):
    path = folder / "data.npz"
    np.savez(path, **arrays(**changes))
    return read_dataset(path, SPECS)


def test_arrays_labels_and_hash_are_read(tmp_path: Path) -> None:
    data = read(tmp_path, label=np.array([0, 1, 2, 1], np.uint8))
    assert len(data) == 4
    for name, array in arrays().items():
        np.testing.assert_array_equal(data.inputs[name], array)
    assert data.labels is not None
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == [0, 1, 2, 1]
    given = {**arrays(), "label": np.array([0, 1, 2, 1])}
    assert data.sha256 == hash_arrays(given)


def test_the_hash_is_that_of_the_arrays_wherever_they_were_read_from(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in arrays().items():
        np.save(folder / f"{name}.npy", array)
    packed = tmp_path / "packed.npz"
    np.savez_compressed(packed, **arrays())
    hashes = {read_dataset(path, SPECS).sha256 for path in (folder, packed)}
    assert hashes == {read(tmp_path).sha256}


def test_labels_are_optional_and_go_by_two_names(tmp_path: Path) -> None:
    assert read(tmp_path).labels is None
    labels = read(tmp_path, labels=np.arange(4)).labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 2, 3]


def test_an_input_called_label_is_an_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", label=np.ones((2, 3), np.float32))
    spec = TensorSpec(name="label", dtype="float32", shape=("batch", 3))
    data = read_dataset(tmp_path / "d.npz", [spec])
    assert data.labels is None
    assert list(data.inputs) == ["label"]


def test_subsets_keep_samples_together(tmp_path: Path) -> None:
    data = read(tmp_path, label=np.arange(4)).subset(np.array([1, 3]))
    assert len(data) == 2
    assert data.inputs["input_ids"][:, 0].tolist() == [5, 15]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 3]


def nan(dtype: type = np.float32) -> np.ndarray:
    scores = np.ones((4, 3), dtype)
    scores[2, 1], scores[3, 0] = np.nan, np.inf
    return scores


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, ("'scores' is missing", "input_ids: int")),
        ({"score": np.ones(4)}, ("'score'", "'scores'")),
        ({"zzz": np.ones(4)}, ("'zzz'", "expected")),
        ({"scores": np.ones((4, 3))}, ("float64 [4, 3]", "expected scores", "astype('float32')")),
        ({"scores": np.ones((4, 2), np.float32)}, ("2 of dimension 1", "3")),
        ({"scores": np.ones(3, np.float32)}, ("float32 [3]", "expected scores")),
        ({"scores": np.ones((3, 3), np.float32)}, ("batch is 4", "'input_ids'", "3")),
        ({"samples": 0}, ("dimension 0 (batch) is empty",)),
        ({"label": np.arange(3)}, ("length", "'label': 3")),
        ({"label": np.ones(4)}, ("labels", "float64 [4]", "integers")),
        ({"label": np.ones((4, 2), int)}, ("labels", "int64 [4, 2]")),
        ({"label": np.array(list("abcd"))}, ("labels", "<U1")),
        ({"label": np.arange(4), "labels": np.arange(4)}, ("label and labels",)),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes, message: Told) -> None:
    with pytest.raises(DataError, match=facts("data.npz", *message)):
        read(tmp_path, **changes)


ANSWERS = {
    kind: Answer(output="y", classes=3, form="logits", task=AnswerTask(kind=kind))
    for kind in ("classification", "multi-label", "segmentation")
}


@pytest.mark.parametrize(
    ("kind", "labels", "told"),
    [
        ("classification", [[0], [1], [2], [0]], ("[4, 1]", "expected classes", "omit them")),
        ("multi-label", [[0, 1, 2]] * 4, ("0 to 2", "0 or 1 each", "omit")),
        ("segmentation", [[[0, 1]]] * 3, ("length", "'label': 3")),
        ("segmentation", 1, ("one number", "each sample")),
    ],
)
def test_labels_that_are_none_of_the_answer_are_refused(
    tmp_path: Path, kind: TaskKind, labels: Any, told: Told
) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4, 2), np.float32), label=np.array(labels))
    specs = (TensorSpec(name="x", dtype="float32", shape=("batch", 2)),)
    with pytest.raises(DataError, match=facts(*told)):
        read_dataset(path, specs, answer=ANSWERS[kind])


def test_labels_of_other_classes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4, 2), np.float32), label=np.array([0, 1, 5, 2]))
    specs = (TensorSpec(name="x", dtype="float32", shape=("batch", 2)),)
    assert read_dataset(path, specs, answer=ANSWERS["classification"]).labels is not None
    tells(caplog.text, "0 to 5", "classes from 0 to 2")


def test_nan_is_found_in_half_precision_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=nan(np.float16))
    spec = TensorSpec(name="x", dtype="float16", shape=("batch", 3))
    assert read_dataset(tmp_path / "d.npz", [spec]).not_finite().tolist() == [2, 3]


ONE = TensorSpec(name="image", dtype="float32", shape=("batch", 3))


def test_an_array_of_any_name_is_the_only_input(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(tmp_path / "d.npy", rows)
    np.savez(tmp_path / "d.npz", x=rows, label=np.arange(4))
    for name in ("d.npy", "d.npz"):
        found = read_dataset(tmp_path / name, [ONE])
        np.testing.assert_array_equal(found.inputs["image"], rows)
    assert found.labels is not None


def test_an_array_that_would_fit_is_named_beside_others(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3), np.float32), y=np.ones(4))
    with pytest.raises(DataError, match=facts("no input 'x'", "'x' would fit", "'image', alone")):
        read_dataset(tmp_path / "d.npz", [ONE])
    np.save(tmp_path / "two.npy", np.ones((4, 3), np.float32))
    with pytest.raises(DataError, match=r"there is no input 'two'"):
        read_dataset(tmp_path / "two.npy", SPECS)


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays(scores=np.array([{}], dtype=object)))
    with pytest.raises(DataError, match=facts("npz", "plain arrays", "allow_pickle")):
        read_dataset(tmp_path / "d.npz", SPECS)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.npz: no such file"):
        read_dataset(tmp_path / "d.npz", SPECS)


@pytest.mark.parametrize("content", [b"", b"image,label\n1,2\n", b"PK\x03\x04 broken"])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(DataError, match="not an npz file of plain arrays"):
        read_dataset(tmp_path / "d.npz", SPECS)


def test_a_folder_without_arrays(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=facts("folder", ".npy", "put one")):
        read_dataset(tmp_path, SPECS)


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random(1000))
    content = bytearray(path.read_bytes())
    content[300:400] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(DataError, match="not an npz file of plain arrays"):
        read_dataset(path, SPECS)


def test_a_zip_of_other_things(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match=r"member 'readme.txt' of the npz file is not an array"):
        read_dataset(tmp_path / "d.npz", SPECS)


def test_parts_of_a_data_set_copy_nothing_until_they_are_asked() -> None:
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    whole = Dataset(inputs={"x": x}, labels=np.arange(10), sha256="0")
    part = whole.subset(np.array([7, 1, 3])).subset(np.array([2, 0]))
    assert isinstance(part.inputs, InputView)
    assert part.inputs.whole is whole.inputs
    assert len(part) == 2
    assert list(part.inputs) == ["x"]
    np.testing.assert_array_equal(part.inputs["x"], x[[3, 7]])
    np.testing.assert_array_equal(part.take(slice(1, 2))["x"], x[[7]])
    np.testing.assert_array_equal(part.column("x", np.array([1, 0, 1])), x[[7, 3, 7]])
    assert part.rows.tolist() == part.labels.tolist() == [3, 7]
    assert [len(b["x"]) for b in whole.batches(4)] == [4, 4, 2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_data_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save, order: str
) -> None:
    path = tmp_path / "data.npz"
    made = {name: np.array(array, order=order) for name, array in arrays(samples=50).items()}
    save(path, **made, label=np.arange(50))
    held = read_dataset(path, SPECS)
    assert not any(is_mapped(array) for array in held.inputs.values())
    monkeypatch.setattr(data_sources, "HELD_BYTES", 0)
    scratch = ScratchSpace(tmp_path)
    data = read_dataset(path, SPECS, scratch=scratch)
    assert all(is_mapped(array) for array in data.inputs.values())
    compressed = save is np.savez_compressed
    headers = 3 * 128  # of label.npy and the others
    content = sum(array.nbytes for array in made.values()) + 50 * 8
    assert scratch.peak_bytes == (headers + content if compressed else 0)
    assert [place.name for place in tmp_path.iterdir()] == ["data.npz"]
    assert data.sha256 == held.sha256
    assert data.labels is not None
    assert data.labels.tolist() == list(range(50))
    rows = np.array([3, 48, 7])
    for part in (rows, slice(10, 13)):
        for name, taken in data.take(part).items():
            np.testing.assert_array_equal(taken, made[name][part])
            assert not is_mapped(taken)
            assert taken.flags.aligned
            assert taken.flags.c_contiguous
    inner = data.subset(rows)
    np.testing.assert_array_equal(inner.take(slice(1, 3))["input_ids"], made["input_ids"][[48, 7]])
    assert not is_mapped(inner.inputs["input_ids"])


def test_samples_that_hold_nan_or_infinity_are_found(tmp_path: Path) -> None:
    data = read(tmp_path, scores=nan())
    assert data.not_finite().tolist() == [2, 3]
    assert data.subset(np.array([0, 3, 1])).not_finite().tolist() == [1]
    assert read(tmp_path).not_finite().tolist() == []


def test_large_data_are_checked_as_small_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 0)
    monkeypatch.setattr(dataset, "_BLOCK_BYTES", 24)  # two samples
    assert read(tmp_path, scores=nan()).not_finite().tolist() == [2, 3]
    path = tmp_path / "data.npz"
    read(tmp_path)
    content = bytearray(path.read_bytes())
    content[-400] ^= 1  # in the scores
    path.write_bytes(content)
    with pytest.raises(DataError, match=facts("npz", "plain arrays", "CRC-32")):
        read_dataset(path, SPECS)


def test_compressed_data_without_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 0)
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **arrays())
    usage = type("Usage", (), {"free": 7})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=facts("464 bytes", "7 bytes", "savez")):
        read_dataset(path, SPECS)


def test_a_folder_of_arrays(tmp_path: Path) -> None:
    for name, array in arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "readme.txt").write_text("not read")
    bare = read_dataset(tmp_path, SPECS)
    assert bare.labels is None
    np.save(tmp_path / "label.npy", np.array([0, 1, 2, 1], np.uint8))
    data = read_dataset(tmp_path, SPECS)
    for name, array in arrays().items():
        assert is_mapped(data.inputs[name])
        np.testing.assert_array_equal(data.inputs[name], array)
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 1]
    assert data.sha256 != bare.sha256
    assert data.sha256 == read_dataset(tmp_path, SPECS).sha256
    np.save(tmp_path / "scores.npy", 2 * arrays()["scores"])
    assert data.sha256 != read_dataset(tmp_path, SPECS).sha256


def test_inputs_with_slashes_in_their_names_lie_in_folders(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/x.npy", np.ones((3, 2), np.float32))
    spec = TensorSpec(name="in/x", dtype="float32", shape=("batch", 2))
    assert list(read_dataset(tmp_path, [spec]).inputs) == ["in/x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ("scores.npy", "plain array")),
        (b"\x93NUMPY\x01\x00", ("scores.npy", "plain array")),
        (None, ("'scores' is missing",)),
    ],
)
def test_a_folder_with_a_damaged_array(
    tmp_path: Path, content: bytes | None, message: Told
) -> None:
    np.save(tmp_path / "input_ids.npy", arrays()["input_ids"])
    if content is not None:
        (tmp_path / "scores.npy").write_bytes(content)
    with pytest.raises(DataError, match=facts(*message)):
        read_dataset(tmp_path, SPECS)


def test_a_folder_with_an_array_that_is_cut_short(tmp_path: Path) -> None:
    for name, array in arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    place = tmp_path / "scores.npy"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(DataError, match=facts("scores.npy", "float32 [4, 3]", "47")):
        read_dataset(tmp_path, SPECS)
