"""Recordings are read as they were written, even if the file is changed in between."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import facts

from offramp.engine.learning import recording_log
from offramp.engine.learning.recording_file import (
    LOG_NAME,
    RecordingError,
    RecordingHeader,
    is_recording,
    read_recording,
    record_bytes,
    shapes_by_count,
)
from offramp.engine.learning.recording_log import RecordingFullError, RecordingLog

HEADER = RecordingHeader(model_sha256="ab" * 32, inputs=(("x", "float32"), ("mask", "int64")))
LIMIT = 2**20


def sample(number: int, length: int = 3) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(number)
    return {
        "x": rng.standard_normal((length, 2)).astype(np.float32),
        "mask": np.full(length, number, np.int64),
    }


def written(arrays: dict[str, NDArray[Any]]) -> list[tuple[tuple[int, ...], bytes]]:
    return [(array.shape, array.tobytes()) for array in arrays.values()]


def open_log(folder: Path, *, limit: int = LIMIT, header: RecordingHeader = HEADER) -> RecordingLog:
    return RecordingLog(folder, header, limit_bytes=limit)


def fill(folder: Path, numbers: range) -> None:
    log = open_log(folder)
    for number in numbers:
        assert log.append(number, number + 1, written(sample(number)))
    log.close()


def numbers_in(folder: Path) -> list[int]:
    """Numbers of the samples in a recording, each of which is checked."""
    found = read_recording(folder)
    numbers = []
    for row in range(len(found)):
        arrays = found.sample(row)
        number = int(arrays["mask"][0])
        for name, array in sample(number, len(arrays["mask"])).items():
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].dtype == array.dtype
        numbers.append(number)
    return numbers


def test_samples_are_read_back_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for slot, number in ((2, 20), (0, 10), (1, 30), (0, 40)):
        assert log.append(slot, number, written(sample(number)))
    assert (log.seen, log.live.keys()) == (40, {0, 1, 2})
    log.close()
    assert numbers_in(tmp_path) == [20, 30, 40]
    assert read_recording(tmp_path).header == HEADER


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    fill(tmp_path, range(5))
    log = open_log(tmp_path)
    assert (log.seen, len(log.live), log.lost) == (5, 5, 0)
    assert not log.append(7, 9, written(sample(3))), "the same sample is kept already"
    assert log.append(7, 9, written(sample(100)))
    log.close()
    assert numbers_in(tmp_path) == [0, 1, 2, 3, 4, 100]


def test_a_replaced_sample_may_come_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for number in (1, 2, 1):
        assert log.append(0, number, written(sample(number)))
    log.close()
    assert numbers_in(tmp_path) == [1]


def test_inputs_of_one_number_and_of_any_type_are_kept(tmp_path: Path) -> None:
    kinds = ("bool", "uint8", "int32", "float16", "float64")
    header = RecordingHeader(model_sha256="", inputs=tuple((kind, kind) for kind in kinds))
    log = RecordingLog(tmp_path, header, limit_bytes=LIMIT)
    arrays = {kind: np.array(1, kind) for kind in kinds}
    assert log.append(0, 1, written(arrays))
    log.close()
    found = read_recording(tmp_path).sample(0)
    assert {name: (a.dtype, a.shape, a.item()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.item()) for name, a in arrays.items()
    }


def test_whatever_is_cut_off_only_the_last_sample_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    path = tmp_path / LOG_NAME
    whole = path.read_bytes()
    one = record_bytes([((3, 2), 4), ((3,), 8)])
    begin = len(whole) - 4 * one
    for size in range(begin, len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = (size - begin) // one
        if kept:
            assert numbers_in(tmp_path) == list(range(kept))
        log = open_log(tmp_path)
        assert len(log.live) == kept
        assert log.append(9, 50, written(sample(50)))
        log.close()
        assert numbers_in(tmp_path) == [*range(kept), 50]


def test_a_log_that_lost_its_beginning_is_begun_again(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    path = tmp_path / LOG_NAME
    whole = path.read_bytes()
    for size in range(1, len(whole) - 4 * record_bytes([((3, 2), 4), ((3,), 8)])):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordingError, match="damaged; remove it"):
            read_recording(tmp_path)
        log = open_log(tmp_path)
        assert not log.live
        log.close()


def test_flipped_bits_cost_the_sample_that_has_them_or_those_after(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    path = tmp_path / LOG_NAME
    whole = path.read_bytes()
    begin = len(whole) - 4 * record_bytes([((3, 2), 4), ((3,), 8)])
    rng = np.random.default_rng(5)
    for at in range(begin, len(whole)):
        torn = bytearray(whole)
        torn[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(torn)
        numbers = numbers_in(tmp_path)
        damaged = (at - begin) * 4 // (len(whole) - begin)
        assert damaged not in numbers
        assert numbers[:damaged] == list(range(damaged))
        log = open_log(tmp_path)
        assert log.lost == 1
        log.close()


def test_another_model_or_other_inputs_begin_again(tmp_path: Path) -> None:
    for header in (
        RecordingHeader(model_sha256="cd" * 32, inputs=HEADER.inputs),
        RecordingHeader(model_sha256=HEADER.model_sha256, inputs=HEADER.inputs[:1]),
    ):
        fill(tmp_path, range(3))
        log = open_log(tmp_path, header=header)
        assert not log.live
        log.remove()
    assert not is_recording(tmp_path)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    fill(tmp_path, range(1))
    path = tmp_path / LOG_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    open_log(tmp_path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    (tmp_path / LOG_NAME).symlink_to(other)
    with pytest.raises(OSError, match="symbolic"):
        open_log(tmp_path)
    with pytest.raises(OSError, match="symbolic"):
        read_recording(tmp_path)
    assert other.read_bytes() == b""


def test_somebody_elses_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RecordingError, match=facts("user", "user 12345", "name a folder")):
        open_log(tmp_path)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    assert not is_recording(tmp_path)
    with pytest.raises(RecordingError, match=facts(LOG_NAME, "name a folder")):
        read_recording(tmp_path)
    (tmp_path / LOG_NAME).write_bytes(b"")
    with pytest.raises(RecordingError, match="is empty; let eeserve --learn record"):
        read_recording(tmp_path)
    (tmp_path / LOG_NAME).unlink()
    (tmp_path / LOG_NAME).mkdir()
    with pytest.raises(OSError, match="directory"):
        open_log(tmp_path)


def test_the_folder_takes_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_log, "_SLACK_BYTES", 0)
    log, one = open_log(tmp_path, limit=8000), record_bytes([((3, 2), 4), ((3,), 8)])
    room = (int(0.45 * 8000) - len(HEADER.encode())) // one
    for number in range(room):
        assert log.append(number, number + 1, written(sample(number)))
    with pytest.raises(RecordingFullError, match="bytes"):
        log.append(room, room, written(sample(room)))
    most = 0
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        nonlocal most
        most = max(most, sum(file.stat().st_size for file in tmp_path.iterdir()))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    for number in range(1000, 1300):
        assert log.append(number % room, number, written(sample(number)))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 8000
    assert 0 < most <= 8000, "the log was rewritten, and both were within the limit"
    log.close()
    assert sorted(numbers_in(tmp_path)) == list(range(1300 - room, 1300))
    reopened = open_log(tmp_path, limit=8000)
    assert (len(reopened.live), reopened.seen) == (room, 1299)
    reopened.close()


def test_a_rewriting_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    (tmp_path / f"{LOG_NAME}.new").write_bytes(b"half")
    log = open_log(tmp_path)
    assert len(log.live) == 3
    assert [file.name for file in tmp_path.iterdir()] == [LOG_NAME]
    log.close()


def test_a_full_disk_loses_the_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    assert log.append(0, 1, written(sample(0)))
    original = os.pwrite

    def half(descriptor: int, content: memoryview, offset: int) -> int:
        if len(content) < 40:
            raise OSError(28, "No space left on device")
        return original(descriptor, content[:20], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="No space left"):
            log.append(1, 2, written(sample(1)))
    assert log.append(2, 3, written(sample(2)))
    log.close()
    assert numbers_in(tmp_path) == [0, 2]


def test_samples_are_grouped_by_their_shapes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for slot, length in enumerate((3, 5, 5, 4, 5, 3)):
        assert log.append(slot, slot, written(sample(slot, length)))
    log.close()
    found = read_recording(tmp_path)
    rows = {shapes[1][0]: each for shapes, each in shapes_by_count(found).items()}
    assert list(rows.items()) == [(5, [1, 2, 4]), (3, [0, 5]), (4, [3])]


def test_a_shape_that_a_sample_does_not_have_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(0, 1, [((9, 9), b"1234"), ((1,), b"12345678")])
    log.close()
    with pytest.raises(RecordingError, match=facts("sample 0", "shape")):
        read_recording(tmp_path).sample(0)
