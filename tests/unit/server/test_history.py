"""The history of served models: exact figures of scripted statistics, events, bounds, JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from offramp.engine.control.controller import ControlStatus, Evidence
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.requests.statistics import Histogram, ModelStatistics
from offramp.server.pages.events import ChangeKind, ModelChange, changes_between, readiness_change
from offramp.server.pages.history import EVENTS, POINTS, History, HistoryRecorder, ModelHistory
from offramp.testing.engine import FakeEngine, fake_control

START = FakeEngine().statistics()["fake"]
BOUNDS = (0.1, 0.2)


def latency(*counts: int) -> Histogram:
    return Histogram(bounds=BOUNDS, counts=counts, total=0.0)


def snapshot(
    requests: int = 0,
    samples: int = 0,
    answers: Sequence[int] = (0, 0),
    latencies: Sequence[int] = (0, 0, 0),
    **others: Any,
) -> ModelStatistics:
    stages = tuple(
        dataclasses.replace(stage, answered=answered)
        for stage, answered in zip(START.stages, answers, strict=True)
    )
    return dataclasses.replace(
        START, requests=requests, samples=samples, stages=stages,
        latency_s=latency(*latencies), **others,
    )  # fmt: skip


def history_of(*snapshots: ModelStatistics, every_s: float = 5.0) -> ModelHistory:
    """The history of snapshots that were taken from 100 s on."""
    history = ModelHistory(snapshots[0], ready=True, now_s=100.0)
    for number, statistics in enumerate(snapshots[1:], 1):
        history.record(statistics, ready=True, now_s=100.0 + every_s * number)
    return history


def changes(before: ModelStatistics, now: ModelStatistics) -> list[tuple[str, str, bool]]:
    found = changes_between(before, now)
    return [(change.kind.value, change.text, change.warning) for change in found]


def test_the_first_snapshot_is_where_counting_begins() -> None:
    assert not history_of(snapshot(requests=70)).points


def test_a_point_has_the_differences_of_the_counters() -> None:
    first = snapshot(70, 100, (60, 40), (50, 20, 0), failed={"cancelled": 4})
    second = snapshot(90, 150, (90, 50), (60, 30, 0), failed={"cancelled": 4, "backend_error": 10})
    (point,) = history_of(first, second).points
    assert (point.start_s, point.end_s) == (100.0, 105.0)
    assert (point.requests_per_s, point.samples_per_s, point.failed_per_s) == (4.0, 10.0, 2.0)
    assert point.answers == {"exit 0": 30, "final": 10}
    assert (point.share("exit 0"), point.share("final")) == (0.75, 0.25)
    assert point.latency_p50_s == pytest.approx(0.1)  # 10 of 20 are in the first bucket
    assert point.latency_p99_s == pytest.approx(0.198)  # 19.8 of 20: 9.8 of 10 in the second
    assert (point.disagreement, point.upper_bound, point.constraint) == (None, None, None)


def test_rates_are_of_the_time_that_an_interval_took() -> None:
    (point,) = history_of(snapshot(), snapshot(requests=50), every_s=12.5).points
    assert point.requests_per_s == 4.0


def test_an_idle_interval_has_neither_latency_nor_shares() -> None:
    busy = snapshot(70, 100, (60, 40), (50, 20, 0))
    (point,) = history_of(busy, busy).points
    assert (point.requests_per_s, point.latency_p50_s, point.latency_p99_s) == (0.0, None, None)
    assert (point.answers, point.share("final")) == ({}, None)


def test_agreement_is_that_of_the_interval_s_end() -> None:
    control = fake_control(Evidence.CERTIFIED)
    unsure = dataclasses.replace(control, disagreement=None, disagreement_upper_bound=1.0)
    first, second = history_of(
        snapshot(), snapshot(control=unsure), snapshot(control=control)
    ).points
    assert (first.disagreement, first.upper_bound, first.constraint) == (None, None, 0.01)
    assert (second.disagreement, second.upper_bound, second.constraint) == (0.0024, 0.0083, 0.01)


def test_counts_go_on_when_a_model_is_replaced() -> None:
    old = snapshot(70, 100, (60, 40), (50, 20, 0), uptime_s=90.0)
    last = snapshot(80, 110, (65, 45), (60, 20, 0))
    new = snapshot(5, 10, (8, 2), (0, 5, 0), version=2, earlier=last, uptime_s=3.0)
    history = history_of(old, new)
    (point,) = history.points
    assert (point.requests_per_s, point.samples_per_s) == (3.0, 4.0)  # 10 + 5, 10 + 10
    assert point.answers == {"exit 0": 13, "final": 7}
    assert point.latency_p50_s == pytest.approx(0.075)  # 7.5 of 15: 7.5 of 10 in the first bucket
    (event,) = history.events
    assert (event.time_s, event.change.text) == (
        105.0,
        "version 2 replaced version 1",
    )


def test_a_model_that_was_loaded_again_counts_from_zero() -> None:
    old = snapshot(70, 100, (60, 40), (50, 20, 0), uptime_s=90.0)
    new = snapshot(20, 20, (15, 5), (20, 0, 0), failed={"cancelled": 5}, uptime_s=3.0)
    history = history_of(old, new)
    (point,) = history.points
    assert (point.requests_per_s, point.samples_per_s, point.failed_per_s) == (4.0, 4.0, 1.0)
    assert point.answers == {"exit 0": 15, "final": 5}
    assert point.latency_p50_s == pytest.approx(0.05)
    assert [e.change.text for e in history.events] == ["the model was unloaded and loaded again"]


def test_no_rate_is_negative_if_a_model_is_loaded_again_and_replaced_at_once() -> None:
    old = snapshot(70, 100, (60, 40), (50, 20, 0), failed={"cancelled": 9})
    (point,) = history_of(
        old, snapshot(1, 2, (2, 0), (0, 1, 0), version=2, earlier=snapshot())
    ).points
    rates = (point.requests_per_s, point.samples_per_s, point.failed_per_s)
    assert (*rates, point.answers, point.latency_p50_s) == (0.0, 0.0, 0.0, {}, None)


def test_points_and_events_are_bounded() -> None:
    snapshots = [snapshot(requests=n, policy_version=n) for n in range(POINTS + 21)]
    history = history_of(*snapshots)
    assert (len(history.points), len(history.events)) == (POINTS, EVENTS) == (180, 100)
    assert history.points[0].start_s == 100.0 + 20 * 5
    assert history.events[-1].change.text == "exit policy 200 replaced exit policy 199"


def test_places_come_in_depth_order_and_only_where_they_answered() -> None:
    assert history_of(snapshot(), snapshot(answers=(0, 3))).places() == ["final"]
    assert history_of(snapshot(), snapshot(answers=(1, 3))).places() == ["exit 0", "final"]
    gone = dataclasses.replace(START.stages[0], label="exit 9", answered=7)
    before = dataclasses.replace(snapshot(uptime_s=9.0), stages=(gone, *START.stages))
    again = snapshot(answers=(0, 3), uptime_s=1.0)
    assert history_of(snapshot(), before, again).places() == ["exit 9", "final"]


def test_what_is_unloaded_is_forgotten() -> None:
    history = History()
    for second in (0, 5):
        history.record({"a": START, "b": START}, ready={"a": True, "b": True}, refused=0,
                       now_s=second, unix_s=second)  # fmt: skip
    history.record({"b": START}, ready={"b": True}, refused=0, now_s=10, unix_s=10)
    assert {name: len(model.points) for name, model in history.models.items()} == {"b": 2}


CONTROL = fake_control(Evidence.CERTIFIED)


def alarmed(count: int) -> ControlStatus:
    return dataclasses.replace(CONTROL, alarms=count, state="recovering")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({}, {}, []),
        (
            {"control": CONTROL},
            {"control": alarmed(1)},
            [("drift", "drift alarm; the controller is now recovering", True)],
        ),
        (
            {"control": alarmed(1)},
            {"control": alarmed(3)},
            [("drift", "2 drift alarms; the controller is now recovering", True)],
        ),
        ({}, {"control": alarmed(3)}, []),
        ({}, {"policy_version": 8}, [("policy", "exit policy 8 replaced exit policy 7", False)]),
        (
            {"version": 2, "control": alarmed(3)},
            {"version": 3, "policy_version": 1, "control": alarmed(9)},
            [("version", "version 3 replaced version 2", False)],
        ),
        ({"version": 3}, {}, [("version", "the model was unloaded and loaded again", False)]),
        (
            {"streams": 2, "streams_in_service": 2},
            {"streams": 2},
            [("streams", "1 of 2 streams in service, 2 before", True)],
        ),
        (
            {"workers": 3, "workers_in_service": 1},
            {"workers": 3, "workers_in_service": 3},
            [("streams", "3 of 3 workers in service, 1 before", False)],
        ),
    ],
)
def test_differences_become_events(
    before: dict[str, Any], now: dict[str, Any], found: list[Any]
) -> None:
    assert changes(snapshot(**before), snapshot(**now)) == found


def test_phases_of_learning_become_events() -> None:
    recording = LearningStatus(phase="recording", text="recorded 3 of 12", recorded=3, wanted=12)
    further = dataclasses.replace(recording, text="recorded 9 of 12", recorded=9)
    stopped = dataclasses.replace(recording, phase="stopped", text="stopped: the disk is full")
    first, second, third, plain = (
        snapshot(learning=learning) for learning in (recording, further, stopped, None)
    )
    assert changes(plain, first) == [("learning", "learning: recorded 3 of 12", False)]
    assert changes(first, second) == []
    assert changes(second, third) == [("learning", "learning: stopped: the disk is full", True)]
    assert changes(third, plain) == []


def test_readiness_becomes_an_event() -> None:
    history = ModelHistory(START, ready=True, now_s=0.0)
    for second, ready in ((5.0, True), (10.0, False), (15.0, False), (20.0, True)):
        history.record(START, ready=ready, now_s=second)
    assert [(e.time_s, e.change) for e in history.events] == [
        (10.0, ModelChange(kind=ChangeKind.READINESS, text="the model is not ready", warning=True)),
        (20.0, ModelChange(kind=ChangeKind.READINESS, text="the model is ready")),
    ]
    assert [*readiness_change(before=False, now=False)] == []


def test_json_has_the_points_with_times_of_the_wall_clock() -> None:
    history = History()
    for number, statistics in enumerate(
        (snapshot(), snapshot(10, 20, (15, 5), (10, 0, 0), policy_version=8, control=CONTROL))
    ):
        history.record({"fake": statistics}, ready={"fake": True}, refused=3 * number,
                       now_s=50.0 + 5 * number, unix_s=1_800_000_000.0 + 5 * number)  # fmt: skip
    assert json.loads(json.dumps(history.to_json(), allow_nan=False)) == {
        "unix_s": 1_800_000_005.0,
        "interval_s": 5.0,
        "refused": [{"unix_s": 1_800_000_005.0, "refused_per_s": 0.6}],
        "models": {
            "fake": {
                "points": [
                    {
                        "unix_s": 1_800_000_005.0,
                        "interval_s": 5.0,
                        "requests_per_s": 2.0,
                        "samples_per_s": 4.0,
                        "failed_per_s": 0.0,
                        "latency_p50_s": 0.05,
                        "latency_p99_s": pytest.approx(0.099),
                        "shares": {"exit 0": 0.75, "final": 0.25},
                        "disagreement": 0.0024,
                        "disagreement_upper_bound": 0.0083,
                        "max_disagreement": 0.01,
                    }
                ],
                "events": [
                    {
                        "unix_s": 1_800_000_005.0,
                        "kind": "policy",
                        "text": "exit policy 8 replaced exit policy 7",
                        "warning": False,
                    }
                ],
            }
        },
    }


def test_a_recorder_reads_engine_readiness_and_refusals() -> None:
    engine, refused = FakeEngine(), {("UNAVAILABLE", "draining"): 0, ("CANCELLED", "left"): 2}
    recorder = HistoryRecorder(engine, refused)
    recorder.record()
    engine.unready.add("fake")
    refused["UNAVAILABLE", "draining"] = 5
    recorder.record()
    (point,) = recorder.history.refused
    assert point.refused_per_s * (point.end_s - point.start_s) == pytest.approx(5)
    assert [e.change.text for e in recorder.history.models["fake"].events] == [
        "0 of 1 streams in service, 1 before",
        "the model is not ready",
    ]
