"""Workers that take as long as a device: what they take, which rows travel, what they answer."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.clusters import ROW_BYTES, cluster_of
from benchmarks.e3 import EasyMix
from benchmarks.emulated import emulated_cluster, goodput_emulated
from tests.fakes import fake_plan, script

from offramp.testing.backend import SCRIPT
from offramp.testing.emulated_worker import EmulatedBackend, EmulatedDevice

DEVICE = EmulatedDevice(
    segments_s=((0.0, 1.0, 2.0), (0.0, 3.0, 5.0)),
    exits_s=((0.0, 0.5, 0.75),),
    link_s=0.25,
    row_s=4.0,
)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace sleeping by virtual time; return the durations."""
    now_s, found = [0.0], []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    return found


def test_a_device_is_read_as_it_was_written(tmp_path: Path) -> None:
    DEVICE.write(tmp_path / "device.json")
    read = EmulatedDevice.read(tmp_path / "device.json")
    exit_, end = fake_plan([0.9]).stages
    assert [read.stage_s(exit_, rows) for rows in (1, 2)] == [1.5, 2.75]
    assert [read.stage_s(end, rows) for rows in (1, 2)] == [3.0, 5.0]


def test_a_device_may_be_slower_for_a_time(tmp_path: Path) -> None:
    (tmp_path / "slowdown").write_text("4.0")
    slow = EmulatedDevice(segments_s=DEVICE.segments_s, slowdown=str(tmp_path / "slowdown"))
    _, end = fake_plan([0.9]).stages
    assert slow.stage_s(end, 2) == 20.0
    (tmp_path / "slowdown").write_text("1.0")
    assert slow.stage_s(end, 2) == 5.0


def test_rows_of_another_device_are_waited_for_and_become_its_own(slept: list[float]) -> None:
    exit_, end = fake_plan([0.9]).stages
    first, second = EmulatedBackend(DEVICE, 0), EmulatedBackend(DEVICE, 1)
    fresh = script([0.95, 0.6, 0.0], [0.5, 0.6, 0.0])
    fresh[:, -1] = 0
    here = first.open_slot()
    result = here.run(first.prepare(exit_), here.upload({SCRIPT: fresh}))
    assert slept == [2.75], "nothing travels that comes from a client"
    np.testing.assert_array_equal(result.answer, fresh[:, 0])
    assert result.carry is not None
    carried = result.carry.tensors[SCRIPT]  # type: ignore[attr-defined]
    assert carried[:, -1, 0].tolist() == [1.0, 1.0]
    there = second.open_slot()
    moved = np.concatenate([carried[:1], fresh[:1]])
    last = there.run(second.prepare(end), there.upload({SCRIPT: moved}))
    assert slept[1:] == [4.25, 5.0], "one row travels"
    np.testing.assert_array_equal(last.answer, moved[:, 1])
    here.upload({SCRIPT: carried})
    assert len(slept) == 3, "what it had itself is there"


def test_a_split_model_is_served_by_emulated_devices() -> None:
    cluster = cluster_of({"V100": 2})
    mix = EasyMix(0.8, cluster, 8)
    with emulated_cluster(cluster, row_bytes=ROW_BYTES, stretch=1.0) as emulated:
        for name in ("run-through", "dedicated"):
            found = goodput_emulated(
                emulated,
                mix.systems[name],
                mix.depths,
                slo_s=60.0,
                under_way=32,
                duration_s=0.5,
                batches_per_worker=2,
            )
            assert found > 0
