"""Samples are written from requests to the log while serving; dropped ones are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offramp.engine.learning import input_recorder as recorder_module
from offramp.engine.learning.input_recorder import InputRecorder
from offramp.engine.learning.recording_file import RecordingHeader, is_recording, read_recording
from offramp.engine.learning.recording_log import RecordingLog

HEADER = RecordingHeader(model_sha256="00", inputs=(("x", "float32"),))


def decided(answers: NDArray[Any]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isfinite(answers).all(axis=1)
    return found


def recorder_in(
    folder: Path,
    *,
    samples: int = 50,
    limit: int = 2**20,
    judge: Callable[[NDArray[Any]], NDArray[np.bool_]] = decided,
    least: int = 1,
) -> InputRecorder:
    log = RecordingLog(folder, HEADER, limit_bytes=limit)
    return InputRecorder(log, samples=samples, decided=judge, least=least, seed=1)


def rows(first: int, count: int, width: int = 4) -> dict[str, NDArray[np.float32]]:
    numbers = np.arange(first, first + count, dtype=np.float32)
    return {"x": np.repeat(numbers[:, None], width, axis=1)}


def answers(count: int) -> NDArray[np.float32]:
    return np.zeros((count, 3), np.float32)


def recorded(folder: Path) -> list[float]:
    found = read_recording(folder)
    return [float(found.sample(row)["x"][0]) for row in range(len(found))]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_the_first_samples_are_recorded_in_their_order(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    for first in range(0, 40, 4):
        recorder.observe(rows(first, 4), answers(4))
    recorder.close()
    assert recorded(tmp_path) == list(range(40))


def test_a_recording_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = recorder_in(tmp_path)
    first.observe(rows(0, 30), answers(30))
    first.close()
    second = recorder_in(tmp_path)
    assert (second.counts().recorded, second.counts().wanted) == (30, 50)
    second.observe(rows(30, 30), answers(30))
    until(lambda: second.counts().recorded == 50)
    second.close()
    assert len(set(recorded(tmp_path))) == 50


def test_what_the_model_answers_with_nan_is_left_out_and_others_take_its_place(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path, samples=6)
    said = answers(6)
    said[2, 1], said[4, 0] = np.nan, np.inf
    recorder.observe(rows(0, 6), said)
    until(lambda: recorder.counts().unanswered == 2)
    until(lambda: recorder.counts().recorded == 4)
    recorder.observe(rows(10, 2), answers(2))
    until(lambda: recorder.counts().recorded == 6)
    recorder.close()
    assert sorted(recorded(tmp_path)) == [0, 1, 3, 5, 10, 11]


def test_copies_are_recorded_once(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, samples=8)
    for _ in range(3):
        recorder.observe(rows(0, 5), answers(5))
    until(lambda: recorder.counts().copies > 0)
    recorder.observe(rows(5, 8), answers(8))
    recorder.close()
    found = recorded(tmp_path)
    assert 5 <= len(found) == len(set(found)) <= 8
    assert set(found) <= set(range(13))


@pytest.mark.parametrize(("least", "wanted"), [(20, 30), (40, 50)])
def test_inputs_that_only_repeat_make_the_sample_smaller(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    least: int,
    wanted: int,
) -> None:
    monkeypatch.setattr(recorder_module, "_JUDGED", 100)
    recorder = recorder_in(tmp_path, least=least)
    while recorder.counts().copies < 300 and recorder.counts().wanted == 50:
        recorder.observe(rows(0, 30), answers(30))
        until(lambda: not recorder._pending)
    assert (recorder.counts().recorded, recorder.counts().wanted) == (30, wanted)
    told = [record.message for record in caplog.records]
    assert any("30 samples are used instead of 50: inputs only rep" in t for t in told) == (
        wanted == 30
    )
    recorder.close()


def test_what_the_caller_does_with_its_arrays_later_does_not_matter(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    sent = rows(0, 20)
    recorder.observe(sent, answers(20))
    sent["x"][:] = -1
    recorder.close()
    assert recorded(tmp_path) == list(range(20))


def test_samples_are_dropped_rather_than_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_PENDING", 5)
    slow = threading.Event()

    def wait(said: NDArray[Any]) -> NDArray[np.bool_]:
        slow.wait()
        return decided(said)

    recorder = recorder_in(tmp_path, judge=wait)
    for first in range(0, 20, 2):
        recorder.observe(rows(first, 2), answers(2))
    assert recorder.counts().dropped == 15
    slow.set()
    until(lambda: recorder.counts().recorded == 5)
    recorder.observe(rows(100, 5), answers(5))
    until(lambda: recorder.counts().recorded == 10)
    recorder.close()
    assert recorded(tmp_path)[-5:] == [100, 101, 102, 103, 104]


def test_a_limit_on_bytes_makes_the_sample_smaller(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, samples=50, limit=4000)
    for first in range(0, 60, 2):
        recorder.observe(rows(first, 2), answers(2))
    until(lambda: recorder.counts().wanted < 50)
    counts = recorder.counts()
    assert counts.recorded == counts.wanted
    assert counts.dropped > 0
    recorder.close()
    assert len(recorded(tmp_path)) == counts.recorded


def test_errors_of_the_disk_are_told_once_and_serving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path)
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> bool:
            raise OSError(28, "No space left on device")

        patched.setattr(RecordingLog, "append", refuse)
        recorder.observe(rows(0, 3), answers(3))
        until(lambda: recorder.counts().dropped == 3)
    recorder.observe(rows(3, 3), answers(3))
    until(lambda: recorder.counts().recorded == 3)
    recorder.close()
    lines = [r.message for r in caplog.records if "cannot be recorded" in r.message]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]


def test_a_recording_can_be_removed(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.observe(rows(0, 3), answers(3))
    recorder.close(remove=True)
    assert not is_recording(tmp_path)


def test_a_smaller_number_of_samples_keeps_what_is_there(tmp_path: Path) -> None:
    first = recorder_in(tmp_path, samples=50)
    first.observe(rows(0, 40), answers(40))
    first.close()
    second = recorder_in(tmp_path, samples=30)
    assert (second.counts().recorded, second.counts().wanted) == (40, 40)
    second.close()
