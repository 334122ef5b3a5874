"""The compiling process: its priority, its progress, and the report of its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offramp.compiler.common.progress import SILENT, STAGES, FileProgress, stage_of
from offramp.engine.common import environment
from offramp.engine.learning import compilation
from offramp.engine.learning.compilation import (
    IdleShare,
    describe_end,
    missing_packages,
    priority_for,
    read_progress,
)
from offramp.engine.learning.compile_worker import IDLE, NICE

PRIORITY = """
import os, sys
from offramp.engine.learning.compile_worker import leave_processor
leave_processor(sys.argv[1])
print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(not hasattr(subprocess.os, "SCHED_IDLE"), reason="Linux alone has SCHED_IDLE")
@pytest.mark.parametrize(("priority", "idle"), [(IDLE, "True"), (NICE, "False")])
def test_a_compilation_leaves_the_processor_to_others(priority: str, idle: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PRIORITY, priority], capture_output=True, text=True, check=True
    )
    is_idle, niceness = said.stdout.split()
    assert is_idle == idle
    if priority == NICE:
        assert int(niceness) >= 10


def test_it_may_take_a_share_where_the_machine_is_never_idle() -> None:
    assert priority_for(None) == IDLE
    assert priority_for(0.25) == IDLE
    assert priority_for(0.2) == NICE


def test_the_idle_share_is_that_since_the_last_look(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1000 0 1000 8000 500 0 0 0 0 0\ncpu0 1 2 3\n")
    idle = IdleShare(stat)
    stat.write_text("cpu  1100 0 1100 8100 500 0 0 0 0 0\n")
    idle.update()
    assert idle.share is None, "too short a time"
    stat.write_text("cpu  1300 0 1100 8500 600 0 0 100 0 0\n")
    idle.update()
    assert idle.share == pytest.approx(600 / 1100)


@pytest.mark.parametrize("content", [None, "", "intr 5 6", "cpu x y"])
def test_where_the_system_does_not_tell_nothing_is_known(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
    idle = IdleShare(tmp_path / "stat")
    idle.update()
    assert idle.share is None


def test_cores_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = environment.available_cores()
    monkeypatch.setattr(environment, "_core_limit", None)
    for asked, found in ((1, 1), (0, 1), (cores + 5, cores)):
        environment.limit_cores(asked)
        assert environment.available_cores() == found


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    progress = FileProgress(path, SILENT, pause_s=0.0)
    with progress.step("Read the data", 4) as advance:
        advance(1)
        found = read_progress(path)
        assert found is not None
        assert found.describe() == "step 2 of 9: Read the data, 25 %"
        with path.open("a") as file:
            file.write('{"step": 3, "st')  # a line that is being written
        assert read_progress(path) == found
    with path.open("a") as file:
        file.write("\n")
    with progress.step("Train 24 heads", 10) as advance:
        threads = [threading.Thread(target=advance, args=(2,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = read_progress(path)
        assert found is not None
        assert found.describe() == "step 6 of 9: Train 24 heads, 100 %"
    with progress.step("Record features (2 of 2)", 1):
        found = read_progress(path)
        assert found is not None
        assert found.step == 6, "it never goes back"
    progress.close()


def test_without_progress_nothing_is_told(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none") is None
    (tmp_path / "empty").write_text("")
    assert read_progress(tmp_path / "empty") is None
    (tmp_path / "other").write_text("hello\n")
    assert read_progress(tmp_path / "other") is None


def test_every_stage_is_found_by_its_steps() -> None:
    assert len(STAGES) == 9
    for number, beginnings in enumerate(STAGES, 1):
        for beginning in beginnings:
            assert stage_of(f"{beginning} and more") == number
    assert stage_of("Bake a cake") is None


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (1, "eecompile: too little data", "too little data (exit status 1)"),
        (-15, "anything", "its process was ended by SIGTERM"),
        (-99, "anything", "its process was ended by signal 99"),
        (0, "anything", "it wrote no complete bundle"),
    ],
)
def test_the_end_of_a_compilation_is_told(status: int, said: str, told: str) -> None:
    assert describe_end(status, said) == told


def test_packages_are_looked_for_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages() == []
    monkeypatch.setattr(compilation, "_NEEDED", ("onnx", "there_is_no_such_package"))
    assert missing_packages() == ["there_is_no_such_package"]
