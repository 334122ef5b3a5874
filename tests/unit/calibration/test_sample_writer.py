"""Samples that arrive batch by batch are collected in bounded memory, and hashed by content."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.facts import facts

from offramp.bundle.npz import is_mapped
from offramp.calibration.data import data_sources, sample_writer
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.hashing import hash_arrays
from offramp.calibration.data.sample_writer import SampleWriter
from offramp.calibration.data.scratch import ScratchSpace

ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)


def collected(*batches: dict[str, np.ndarray], scratch: ScratchSpace | None = None):
    with SampleWriter("data", scratch or ScratchSpace(), keys=("who",)) as writer:
        for number, batch in enumerate(batches):
            writer.append(batch, f"batch {number}")
        return writer.finish()


def test_batches_become_arrays() -> None:
    arrays, _ = collected(
        {"x": ROWS[:4], "label": np.arange(4)},
        {"x": ROWS[4:5], "label": np.array([7], np.uint8)},
    )
    np.testing.assert_array_equal(arrays["x"], ROWS[:5])
    assert arrays["label"].tolist() == [0, 1, 2, 3, 7]
    assert arrays["label"].dtype == np.int64


def test_the_hash_is_of_content_however_it_arrives() -> None:
    labels = np.arange(20)
    _, whole = collected({"x": ROWS, "label": labels})
    _, parts = collected(
        {"label": labels[:9].astype(np.int8), "x": ROWS[:9]}, {"x": ROWS[9:], "label": labels[9:]}
    )
    assert whole == parts == hash_arrays({"x": ROWS, "label": labels.astype(np.int8)})
    assert hash_arrays({"x": ROWS.T.copy().T}) == collected({"x": ROWS})[1]
    others = [
        {"x": ROWS},
        {"x": ROWS, "label": labels[::-1]},
        {"x": ROWS[::-1], "label": labels},
        {"y": ROWS, "label": labels},
        {"x": ROWS.reshape(20, 3, 1), "label": labels},
        {"x": ROWS.view(np.int32), "label": labels},
    ]
    hashes = {collected(other)[1] for other in others}
    assert len(hashes | {whole}) == len(others) + 1


def test_keys_are_kept_and_not_hashed() -> None:
    names = np.array(["ann", "bartholomew"])
    arrays, digest = collected(
        {"x": ROWS[:1], "who": names[:1]}, {"x": ROWS[1:2], "who": names[1:]}
    )
    assert arrays["who"].tolist() == names.tolist()
    assert digest == collected({"x": ROWS[:2]})[1] == hash_arrays(arrays, keys=("who",))


def test_large_arrays_go_to_an_unnamed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 100)
    monkeypatch.setattr(sample_writer, "_STEP_BYTES", 64)
    scratch = ScratchSpace(tmp_path)
    arrays, digest = collected(
        *({"x": ROWS[i : i + 3], "small": ROWS[i : i + 3, 0]} for i in range(0, 18, 3)),
        scratch=scratch,
    )
    assert is_mapped(arrays["x"])
    assert not is_mapped(arrays["small"])
    np.testing.assert_array_equal(arrays["x"], ROWS[:18])
    assert not list(tmp_path.iterdir())
    assert scratch.taken_bytes == ROWS[:18].nbytes
    assert scratch.peak_bytes == -(-ROWS[:18].nbytes // 64) * 64
    assert digest == hash_arrays({"x": ROWS[:18], "small": ROWS[:18, 0]})


def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a few batches of 1 MB, of 64 MB in total, are in memory at a time."""
    monkeypatch.setattr(data_sources, "HELD_BYTES", 2**21)
    rows, batches, alive = 2**18, 64, 0

    def batch(number: int) -> dict[str, np.ndarray]:
        return {"x": np.full((rows, 1), number, np.float32)}

    tracemalloc.start()
    try:
        with SampleWriter("data", ScratchSpace(tmp_path)) as writer:
            for number in range(batches):
                writer.append(batch(number), "here")
            arrays, _ = writer.finish()
        _, alive = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays["x"].nbytes == batches * 2**20
    assert alive < 8 * 2**20
    assert arrays["x"][::rows, 0].tolist() == list(range(batches))


def wrong_batches() -> Iterator[tuple[list[dict[str, np.ndarray]], str]]:
    good = {"x": ROWS[:2]}
    yield [], "data: there are no samples in it"
    yield [{"x": ROWS[:0]}], "data: there are no samples in it"
    yield [good, {"y": ROWS[:2]}], "batch 1: has 'y', those before had 'x'; every sample needs"
    yield [{"x": np.float32(3)}], "batch 0: 'x' is a single number, expected an array with one row"
    yield (
        [good, {"x": ROWS[:2, :2]}],
        (r"batch 1: 'x' is float32 \[2\] for each sample, expected float32 \[3\] as in "),
    )
    yield [good, {"x": ROWS[:2].astype(int)}], r"batch 1: 'x' is int64 \[3\] .* expected float32"
    yield (
        [{"x": ROWS[:2], "label": np.arange(3)}],
        (r"batch 0: arrays differ in length: \{'x': 2, 'label': 3\}; every sample needs all"),
    )


@pytest.mark.parametrize(("batches", "message"), list(wrong_batches()))
def test_batches_that_do_not_fit(batches: list[dict[str, np.ndarray]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collected(*batches)


def test_without_room_nothing_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "HELD_BYTES", 10)
    usage = type("Usage", (), {"free": 7})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=facts("7 bytes", "--max-samples")):
        collected({"x": ROWS}, scratch=ScratchSpace(tmp_path))
