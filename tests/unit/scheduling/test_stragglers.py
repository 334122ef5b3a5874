"""Stragglers: detection relative to streams of their kind, exclusion, and return."""

from __future__ import annotations

import pytest

from offramp.engine.scheduling.stragglers import (
    LONGEST_PAUSE_S,
    PAUSE_S,
    WINDOW,
    ReplicaStatus,
    StragglerMonitor,
)

NEVER = float("inf")


def run(monitor: StragglerMonitor, ratios: dict[int, float], windows: int = 1) -> None:
    for _ in range(windows * WINDOW):
        for stream, ratio in ratios.items():
            monitor.observe(stream, ratio, 10.0)


def statuses(monitor: StragglerMonitor, streams: int) -> list[str]:
    return [monitor.status(stream).name for stream in range(streams)]


def test_a_slow_replica_goes_down_by_one_standing_after_every_window() -> None:
    monitor = StragglerMonitor(["gpu"] * 3)
    run(monitor, {0: 1.0, 1: 1.1, 2: 2.3})
    assert statuses(monitor, 3) == ["USUAL", "USUAL", "REDUCED"]
    assert monitor.probe_s(2) == NEVER
    run(monitor, {0: 1.0, 1: 1.1, 2: 2.3})
    assert statuses(monitor, 3) == ["USUAL", "USUAL", "EXCLUDED"]
    assert monitor.probe_s(2) == 10.0 + PAUSE_S


def test_twice_the_median_of_its_kind_is_the_limit() -> None:
    """The median of 1.0, 1.1 and what it takes itself is 1.1."""
    monitor = StragglerMonitor(["gpu"] * 3)
    run(monitor, {0: 1.0, 1: 1.1, 2: 2.19})
    assert statuses(monitor, 3) == ["USUAL"] * 3


def test_other_kinds_and_replicas_without_a_window_say_nothing() -> None:
    monitor = StragglerMonitor(["gpu", "cpu", "gpu"])
    run(monitor, {0: 9.0, 1: 1.0})
    assert statuses(monitor, 2) == ["USUAL"] * 2
    monitor.observe(2, 1.0, 0.0)
    run(monitor, {0: 9.0})
    assert statuses(monitor, 1) == ["USUAL"]


def test_one_slow_run_among_usual_ones_says_nothing() -> None:
    monitor = StragglerMonitor(["gpu"] * 2)
    run(monitor, {0: 1.0, 1: 1.0})
    for number in range(5 * WINDOW):
        monitor.observe(1, 50.0 if number % 3 == 0 else 1.0, 0.0)
    assert statuses(monitor, 2) == ["USUAL"] * 2


def test_who_is_no_longer_slow_gets_all_its_work_again() -> None:
    monitor = StragglerMonitor(["gpu"] * 2)
    run(monitor, {0: 1.0, 1: 3.0})
    assert statuses(monitor, 2) == ["USUAL", "REDUCED"]
    run(monitor, {1: 1.5})
    assert statuses(monitor, 2) == ["USUAL"] * 2


def test_an_excluded_replica_is_probed_ever_more_seldom_until_a_batch_is_not_slow() -> None:
    monitor = StragglerMonitor(["gpu"] * 2)
    run(monitor, {0: 1.0, 1: 3.0}, windows=2)
    pauses = []
    for _ in range(8):
        monitor.observe(1, 3.0, 100.0)
        pauses.append(monitor.probe_s(1) - 100.0)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, LONGEST_PAUSE_S]
    monitor.observe(1, 1.2, 200.0)
    assert statuses(monitor, 2) == ["USUAL", "REDUCED"]
    run(monitor, {1: 1.2})
    assert statuses(monitor, 2) == ["USUAL"] * 2
    run(monitor, {1: 3.0}, windows=2)
    assert monitor.probe_s(1) == 10.0 + PAUSE_S, "the pause is as short as at first again"


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="factor 1: expected more than 1"):
        StragglerMonitor([], factor=1.0)
    with pytest.raises(ValueError, match="window 0: expected at least 1 run"):
        StragglerMonitor([], window=0)
    assert ReplicaStatus.USUAL < ReplicaStatus.REDUCED < ReplicaStatus.EXCLUDED
