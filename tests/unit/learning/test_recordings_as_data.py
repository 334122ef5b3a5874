"""Recordings as data of the compiler: the samples in their order, in one shape."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import facts, tells

from offramp.bundle import TensorSpec
from offramp.calibration.data import data_sources
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data import PreprocessingSpec, find_source
from offramp.engine.learning.recording_file import LOG_NAME, RecordingHeader
from offramp.engine.learning.recording_log import RecordingLog

IMAGE = TensorSpec(name="x", dtype="float32", shape=("batch", 2, 2))
TOKENS = TensorSpec(name="ids", dtype="int64", shape=("batch", "tokens"))
MASK = TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "tokens"))


def record(folder: Path, specs: list[TensorSpec], samples: list[dict[str, NDArray[Any]]]) -> None:
    header = RecordingHeader(
        model_sha256="00", inputs=tuple((spec.name, spec.dtype) for spec in specs)
    )
    log = RecordingLog(folder, header, limit_bytes=2**24)
    for slot, sample in enumerate(samples):
        arrays = [sample[spec.name] for spec in specs]
        assert log.append(slot, slot + 1, [(a.shape, a.tobytes()) for a in arrays])
    log.close()


def load(folder: Path, specs: list[TensorSpec]) -> tuple[dict[str, NDArray[Any]], str]:
    source = find_source(str(folder), PreprocessingSpec())
    assert source.name == str(folder)
    return source.load(specs, ScratchSpace())


def images(count: int) -> list[dict[str, NDArray[Any]]]:
    return [{"x": np.full((2, 2), n + 1, np.float32)} for n in range(count)]


def text(*ids: int) -> dict[str, NDArray[Any]]:
    return {"ids": np.array(ids, np.int64), "attention_mask": np.ones(len(ids), np.int64)}


@pytest.mark.parametrize("held_bytes", [2**26, 64])
def test_samples_are_read_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", held_bytes)
    record(tmp_path, [IMAGE], images(150))
    arrays, digest = load(tmp_path, [IMAGE])
    np.testing.assert_array_equal(arrays["x"], np.stack([s["x"] for s in images(150)]))
    assert arrays["x"].dtype == np.float32
    assert digest == load(tmp_path, [IMAGE])[1]


def test_a_learn_folder_is_a_recording_whatever_else_is_in_it(tmp_path: Path) -> None:
    record(tmp_path, [IMAGE], images(3))
    (tmp_path / "learning.json").write_text("{}")
    (tmp_path / "1.ee").mkdir()
    (tmp_path / "1.ee" / "records.npz").write_bytes(b"")
    arrays, _ = load(tmp_path, [IMAGE])
    np.testing.assert_array_equal(arrays["x"], np.stack([s["x"] for s in images(3)]))


def test_samples_of_different_length_are_padded_where_a_mask_says_what_counts(
    tmp_path: Path,
) -> None:
    record(tmp_path, [TOKENS, MASK], [text(5, 6), text(7), text(1, 2, 3)])
    arrays, _ = load(tmp_path, [TOKENS, MASK])
    np.testing.assert_array_equal(arrays["ids"], [[5, 6, 0], [7, 0, 0], [1, 2, 3]])
    np.testing.assert_array_equal(arrays["attention_mask"], [[1, 1, 0], [1, 0, 0], [1, 1, 1]])


def test_without_a_mask_those_of_the_most_frequent_shape_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [{"ids": text(*ids)["ids"]} for ids in ((5, 6), (7,), (1, 2), (8, 9))]
    record(tmp_path, [TOKENS], samples)
    arrays, _ = load(tmp_path, [TOKENS])
    np.testing.assert_array_equal(arrays["ids"], [[5, 6], [1, 2], [8, 9]])
    (line,) = [record.message for record in caplog.records]
    tells(line, "3 of 4 samples", "[[2]]", "no mask")


def test_samples_far_beyond_all_others_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = images(20)
    samples[7]["x"][0, 0] = 1e30
    samples[9]["x"][:] = 0
    record(tmp_path, [IMAGE], samples)
    arrays, _ = load(tmp_path, [IMAGE])
    assert len(arrays["x"]) == 19
    assert arrays["x"].max() == 20
    (line,) = [record.message for record in caplog.records]
    assert "1 of 20 samples are left out" in line


def test_samples_with_nan_are_samples_where_the_model_answered_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    samples = images(5)
    samples[1]["x"][0, 0] = np.nan
    record(tmp_path, [IMAGE], samples)
    assert np.isnan(load(tmp_path, [IMAGE])[0]["x"]).sum() == 1
    assert not caplog.records


def test_an_empty_recording_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [IMAGE], [])
    with pytest.raises(DataError, match=facts("no sample", "eeserve --learn")):
        load(tmp_path, [IMAGE])


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=facts("recording", "damaged")):
        load(tmp_path, [IMAGE])
