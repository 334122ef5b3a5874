"""Several models on one device: whose turn it is."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np
import pytest
from tests.facts import facts
from tests.unit.scheduling.helpers import all_exit, scheduler, table

from offramp.engine.scheduling import (
    DeviceScheduler,
    DropCause,
    Dropped,
    Idle,
    Run,
    Submission,
    Wait,
)
from offramp.engine.scheduling.decisions import Decision


class Device:
    """A device on virtual time, whose models' stages last a given time."""

    def __init__(self, lasts_s: dict[str, float], *, streams: int = 1, **weights: float) -> None:
        made = {
            name: scheduler(
                latencies=table(stages=1, size=1, first_s=s, more_s=0.0), streams=streams
            )
            for name, s in lasts_s.items()
        }
        self.scheduler = DeviceScheduler(made, weights=weights)
        self.lasts_s = lasts_s
        self.now_s = 0.0
        self.ends: list[tuple[float, int, str]] = []
        self.idle = list(range(streams))
        self.used_s = dict.fromkeys(lasts_s, 0.0)
        self.numbers = iter(range(10**9))

    def keep_busy(self, *models: str) -> None:
        """Keep samples waiting for each of these models."""
        for name in models:
            while self.scheduler.model(name).queued < 2:
                self.scheduler.submit(name, Submission(next(self.numbers)), self.now_s)

    def start(self) -> list[str]:
        """Start runs on all idle streams; return their models."""
        got = []
        for stream in list(self.idle):
            task = self.scheduler.next(stream, self.now_s)
            if isinstance(task, Run):
                self.idle.remove(stream)
                end_s = self.now_s + self.lasts_s[task.model]
                heapq.heappush(self.ends, (end_s, stream, task.model))
                got.append(task.model)
        return got

    def finish(self) -> None:
        """Go on to the next end of a run."""
        self.now_s, stream, name = heapq.heappop(self.ends)
        outcome = self.scheduler.update(stream, np.ones(1, np.bool_), self.now_s)
        assert outcome.released.tolist() == [0]
        self.used_s[name] += self.lasts_s[name]
        self.idle.append(stream)

    def serve(self, runs: int, *models: str) -> list[str]:
        """Run so many stages while these models always have something waiting."""
        order = []
        for _ in range(runs):
            self.keep_busy(*models)
            order += self.start()
            self.finish()
        return order


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_busy_models_share_the_time_by_weight(weight: float, streams: int) -> None:
    """Time is shared, not runs: a stage of one takes eight times as long."""
    device = Device({"slow": 2.0, "quick": 0.25}, streams=streams, slow=1.0, quick=weight)
    device.serve(10_000, "slow", "quick")
    share = device.used_s["quick"] / sum(device.used_s.values())
    assert share == pytest.approx(weight / (1 + weight), abs=0.02)


def test_a_model_that_was_away_has_saved_nothing_up() -> None:
    device = Device({"a": 1.0, "b": 1.0})
    device.serve(100, "a")
    order = device.serve(20, "a", "b")
    assert Counter(order) == {"a": 10, "b": 10}


def test_nor_has_it_if_it_comes_back_while_nobody_is_there() -> None:
    device = Device({"a": 1.0, "b": 1.0})
    device.serve(100, "a")
    while device.start():
        device.finish()
    device.keep_busy("b")
    device.keep_busy("a")
    assert Counter(device.serve(20, "a", "b")) == {"a": 10, "b": 10}


def test_a_burst_of_one_model_does_not_keep_another_waiting() -> None:
    device = Device({"a": 1.0, "b": 1.0})
    for _ in range(60):
        device.scheduler.submit("a", Submission(next(device.numbers)), 0.0)
    device.serve(5)
    for _ in range(10):
        device.scheduler.submit("b", Submission(next(device.numbers)), device.now_s)
        assert "b" in device.serve(2)
    assert device.used_s["b"] == 10.0


def test_a_batch_goes_on_to_its_end_and_its_stages_are_charged() -> None:
    made = {n: scheduler(latencies=table(first_s=1.0, more_s=0.0)) for n in ("a", "b")}
    device = DeviceScheduler(made)
    for name in made:
        device.submit(name, Submission(1), 0.0)
        device.submit(name, Submission(2), 0.0)
    seen = []
    for now_s in range(6):
        task = device.next(0, float(now_s))
        assert isinstance(task, Run)
        seen.append((task.model, task.stage))
        device.update(0, all_exit(task) if task.stage == 2 else ~all_exit(task), now_s + 1)
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


def test_the_time_of_a_batch_that_failed_is_charged() -> None:
    device = Device({"a": 1.0, "b": 1.0})
    device.keep_busy("a", "b")
    assert device.start() == ["a"]
    device.scheduler.failed(0, 10.0)
    device.ends, device.idle, device.now_s = [], [0], 10.0
    order = device.serve(10, "a", "b")
    assert order == ["b"] * 10


def test_failing_without_a_batch_does_nothing() -> None:
    device = Device({"a": 1.0})
    device.scheduler.failed(0, 1.0)
    assert isinstance(device.scheduler.next(0, 1.0), Idle)
    assert device.scheduler.model("a").retried == 0
    device.keep_busy("a")
    assert device.start() == ["a"]


def test_a_stream_waits_for_the_model_that_is_ready_first() -> None:
    made = {"a": scheduler(max_delay_s=5.0), "b": scheduler(max_delay_s=2.0), "c": scheduler()}
    device = DeviceScheduler(made)
    assert isinstance(device.next(0, 0.0), Idle)
    device.submit("a", Submission(1), 0.0)
    assert device.next(0, 0.0) == Wait(5.0)
    device.submit("b", Submission(1), 1.0)
    assert device.next(0, 1.0) == Wait(3.0)
    assert device.waiting
    device.flush()
    assert isinstance(device.next(0, 1.0), Run)


def test_a_model_with_nothing_ready_leaves_the_device_to_others() -> None:
    made = {"a": scheduler(max_delay_s=5.0), "b": scheduler()}
    device = DeviceScheduler(made)
    device.submit("a", Submission(1), 0.0)
    device.submit("b", Submission(1), 0.0)
    task = device.next(0, 0.0)
    assert isinstance(task, Run)
    assert task.model == "b"


def test_a_suspended_stream_is_out_of_service_for_every_model() -> None:
    made = {"a": scheduler(streams=2), "b": scheduler(streams=2)}
    device = DeviceScheduler(made)
    device.suspend(1)
    for name in made:
        device.submit(name, Submission(1), 0.0)
        task = device.next(0, 0.0)
        assert isinstance(task, Run)
        device.failed(0, 0.0)
        again = device.next(0, 0.0)  # alone, and so on the stream that it failed on
        assert isinstance(again, Run)
        assert again.model == name
        device.update(0, np.ones(1, np.bool_), 0.0)
    device.resume(1)
    device.submit("a", Submission(2), 0.0)
    assert isinstance(device.next(0, 0.0), Run)
    device.failed(0, 0.0)
    assert isinstance(device.next(0, 0.0), Idle)
    assert isinstance(device.next(1, 0.0), Run)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_are_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match=facts("weight of a", "above 0")):
        DeviceScheduler({"a": scheduler()}, weights={"a": weight})


def test_a_model_that_is_added_shares_the_device_from_where_the_others_are() -> None:
    device = Device({"a": 1.0})
    device.serve(100, "a")
    device.lasts_s["b"] = device.used_s["b"] = 1.0
    device.scheduler.add("b", scheduler(latencies=table(stages=1, size=1, first_s=1.0, more_s=0.0)))
    assert Counter(device.serve(20, "a", "b")) == {"a": 10, "b": 10}
    with pytest.raises(ValueError, match="the weight of c is 0"):
        device.scheduler.add("c", scheduler(), weight=0.0)


def test_a_model_that_is_added_finds_streams_as_they_are() -> None:
    device = DeviceScheduler({"a": scheduler(streams=3)})
    device.suspend(1)
    device.suspend(2)
    device.resume(2)
    device.suspend(0, "a")
    added, later = scheduler(streams=3, max_delay_s=5.0), scheduler(streams=3, max_delay_s=5.0)
    device.add("b", added)
    assert [added.suspends(stream) for stream in range(3)] == [False, True, False]
    device.submit("b", Submission(1), 0.0)
    assert device.next(0, 0.0) == Wait(5.0)
    device.flush("b")
    assert isinstance(device.next(0, 0.0), Run)
    device.add("c", scheduler(streams=3, max_delay_s=5.0))
    device.submit("c", Submission(1), 0.0)
    assert device.next(2, 0.0) == Wait(5.0)
    device.flush()
    device.add("d", later)
    device.submit("d", Submission(1), 0.0)
    assert isinstance(device.next(2, 0.0), Run)


def test_a_model_is_removed_once_no_batch_of_it_is_on_a_stream() -> None:
    device = DeviceScheduler({"a": scheduler(), "b": scheduler()})
    device.submit("a", Submission(1), 0.0)
    assert isinstance(device.next(0, 0.0), Run)
    assert (device.runs("a"), device.runs("b")) == (True, False)
    with pytest.raises(AssertionError, match=facts("a", "on a stream")):
        device.remove("a")
    device.update(0, np.ones(1, np.bool_), 1.0)
    device.remove("a")
    assert not device.waiting
    device.submit("b", Submission(2), 1.0)
    task = device.next(0, 1.0)
    assert isinstance(task, Run)
    assert task.model == "b"


def test_samples_dropped_by_a_decision_are_reported_under_the_name_of_their_model() -> None:
    device = DeviceScheduler({"a": scheduler(), "b": scheduler()})
    device.submit("a", Submission(1, deadline_s=1.0), 0.0)
    device.submit("b", Submission(2, deadline_s=1.0), 0.0)
    device.submit("b", Submission(3), 0.0)
    task = device.next(0, 2.0)
    assert isinstance(task, Run)
    assert task.model == "b"
    assert dropped(task) == {"a": [1], "b": [2]}
    device.update(0, ~all_exit(task), 3.0)
    device.submit("b", Submission(4, deadline_s=4.0), 3.0)
    task = device.next(0, 5.0)
    assert isinstance(task, Run)
    assert (task.model, task.stage) == ("b", 1)
    assert dropped(task) == {"b": [4]}
    device.update(0, all_exit(task), 6.0)
    device.submit("a", Submission(5, deadline_s=7.0), 6.0)
    idle = device.next(0, 8.0)
    assert isinstance(idle, Idle)
    assert dropped(idle) == {"a": [5]}


def dropped(decision: Decision) -> dict[str, list[int]]:
    """Return the expired requests that a decision reports, by model."""
    found: dict[str, list[int]] = {}
    for outcome in decision.outcomes:
        for sample in outcome.dropped:
            assert sample == Dropped(sample.request, 1, DropCause.EXPIRED)
            found.setdefault(outcome.model, []).append(sample.request)
    return found
