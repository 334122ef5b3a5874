"""The exposition, read back by Prometheus' own parser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from offramp.bundle import NEVER
from offramp.cluster.planning.batch_profile import ProfileStatus
from offramp.cluster.serving.plan_status import PlanStatus, SplitStatus
from offramp.engine.control.controller import Evidence
from offramp.engine.requests.statistics import Histogram, ModelStatistics, StageStatistics
from offramp.server.pages.metrics import render_metrics
from offramp.testing.engine import FakeEngine, fake_control, fake_model

HOSTILE = 'a"b\\c\nd'

STATISTICS = ModelStatistics(
    mode="leave",
    backend="onnxruntime-cpu",
    policy_version=3,
    scheduling="slackfit",
    streams=3,
    streams_in_service=2,
    restarts=5,
    parallel_below=None,
    stages=(
        StageStatistics(
            label="exit 2",
            threshold=0.875,
            answered=30,
            forced=4,
            batch_size=Histogram(bounds=(1, 2, 4), counts=(5, 0, 6, 1), total=40),
            run_s=Histogram(bounds=(0.1, 0.5), counts=(11, 1, 0), total=1.5),
        ),
        StageStatistics(
            label="final",
            threshold=0.0,
            answered=10,
            forced=0,
            batch_size=Histogram(bounds=(1, 2, 4), counts=(10, 0, 0, 0), total=10),
            run_s=Histogram(bounds=(0.1, 0.5), counts=(10, 0, 0), total=0.5),
        ),
    ),
    requests=12,
    samples=45,
    answered=40,
    failed={"cancelled": 1, "expired": 2, "hopeless": 0, "backend_error": 0},
    retried=6,
    unseen_lengths=7,
    padded=13,
    padded_positions=21,
    queued=1,
    in_flight=1,
    queue_s=Histogram(bounds=(0.1, 0.5), counts=(12, 0, 0), total=0.25),
    latency_s=Histogram(bounds=(0.1, 0.5), counts=(1, 2, 9), total=20.0),
    uptime_s=61.5,
)


PLAN = PlanStatus(
    splits=(
        SplitStatus(
            first_segment=0,
            last_segment=1,
            devices=(("fast", 2), ("slow", 1)),
            in_service=2,
            slow=1,
            excluded=1,
        ),
        SplitStatus(
            first_segment=2,
            last_segment=5,
            devices=(("fast", 1),),
            in_service=1,
            slow=0,
            excluded=0,
        ),
    ),
    spare=1,
    batch_size=8,
    rate_rps=1234.5,
    latency_s=0.0125,
    shares=((0, 0.5, 0.25), (2, 0.3, None)),
    changes=4,
    given_up=1,
    changing=False,
    reason="a change would gain 1.0%, less than 10%",
    changed_s=125.0,
    changed_for="better by 12.0%",
)


@dataclass(slots=True, kw_only=True)
class Engine(FakeEngine):
    now: ModelStatistics = STATISTICS

    def statistics(self) -> Mapping[str, ModelStatistics]:
        return {model.name: self.now for model in self.served}


def families(name: str = "fake", now: ModelStatistics = STATISTICS) -> dict[str, Metric]:
    models = (fake_model(name), fake_model("other"))
    text = render_metrics(Engine(served=models, now=now)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """Return values by the labels other than ``labels`` and the model, in order of their names.

    Two models have the same values; metrics without a model label count once.
    """
    hidden = {"model", *labels}
    return {
        tuple(value for key, value in sorted(sample.labels.items()) if key not in hidden)
        : sample.value
        for family in families().values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }  # fmt: skip


def test_counters() -> None:
    assert values("offramp_answers_total") == {("exit 2",): 30, ("final",): 10}
    assert values("offramp_requests_total") == {(): 12}
    assert values("offramp_samples_total") == {(): 45}
    assert values("offramp_forced_total") == {("exit 2",): 4, ("final",): 0}
    assert values("offramp_retried_total") == {(): 6}
    assert values("offramp_unseen_length_samples_total") == {(): 7}
    assert values("offramp_padded_samples_total") == {(): 13}
    assert values("offramp_padded_positions_total") == {(): 21}
    assert values("offramp_failures_total") == {
        ("cancelled",): 1, ("expired",): 2, ("hopeless",): 0, ("backend_error",): 0,
        ("rejected",): 0, ("stopped",): 0,
    }  # fmt: skip


def test_gauges() -> None:
    assert values("offramp_queued_samples") == {(): 1}
    assert values("offramp_in_flight_samples") == {(): 1}
    assert values("offramp_policy_version") == {(): 3}
    assert values("offramp_uptime_seconds") == {(): 61.5}
    assert values("offramp_exit_threshold_ratio") == {("exit 2",): 0.875, ("final",): 0.0}
    assert values("offramp_model_info") == {("onnxruntime-cpu", "leave", "slackfit"): 1}


def test_the_plan_of_a_split_model() -> None:
    assert not any("plan" in name or "split" in name for name in families())
    seen = families(now=dataclasses.replace(STATISTICS, extensions={"plan": PLAN}))
    assert {
        name: {s.labels.get("segments"): s.value for s in family.samples}
        for name, family in seen.items()
        if "plan" in name or "split" in name
    } == {
        "offramp_plan_changes": {None: 4.0},
        "offramp_plan_changes_given_up": {None: 1.0},
        "offramp_plan_predicted_rows_per_second": {None: 1234.5},
        "offramp_split_workers": {"0-1": 3.0, "2-5": 1.0},
        "offramp_split_workers_in_service": {"0-1": 2.0, "2-5": 1.0},
        "offramp_split_workers_slow": {"0-1": 2.0, "2-5": 0.0},
    }


def test_the_last_window_of_the_batch_profile_beside_its_forecast() -> None:
    assert not any("going_on" in name or "batch_profile" in name for name in families())
    status = ProfileStatus(window_s=120.0, windows=0)
    first = families(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": status}))
    assert "offramp_exit_going_on_share" not in first
    assert {s.value for s in first["offramp_batch_profile_windows"].samples} == {0.0}
    status = ProfileStatus(
        window_s=120.0,
        windows=7,
        going_on=(0.75, None, 0.25),  # exit 1 was off
        forecast=(0.8, 0.8, 0.5),
        method="last value",
    )
    seen = families(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": status}))
    expected = {
        "offramp_batch_profile_windows": {None: 7.0},
        "offramp_exit_going_on_share": {"exit 0": 0.75, "exit 2": 0.25},
        "offramp_exit_going_on_share_forecast": {"exit 0": 0.8, "exit 2": 0.5},
    }
    for name, by_exit in expected.items():
        samples = [s for s in seen[name].samples if s.labels["model"] == "fake"]
        assert {s.labels.get("exit"): s.value for s in samples} == by_exit
    without = dataclasses.replace(status, forecast=None)
    seen = families(now=dataclasses.replace(STATISTICS, extensions={"batch_profile": without}))
    assert "offramp_exit_going_on_share" in seen
    assert "offramp_exit_going_on_share_forecast" not in seen


def test_what_models_share_is_there_once() -> None:
    for name, value in {
        "offramp_streams": 3, "offramp_streams_in_service": 2, "offramp_stream_restarts_total": 5,
    }.items():  # fmt: skip
        (sample,) = families()[name.removesuffix("_total")].samples
        assert (sample.name, sample.labels, sample.value) == (name, {}, value)


def test_the_number_of_failed_loads_is_there_once() -> None:
    page = render_metrics(FakeEngine(), failed_loads=2).decode()
    assert "\nofframp_failed_loads 2.0\n" in page


def test_workers_are_there_where_stages_run_in_them() -> None:
    assert "offramp_workers" not in families()
    now = dataclasses.replace(
        STATISTICS, workers=3, workers_in_service=2, worker_restarts=7, resumed=11
    )
    found = families(now=now)
    samples = [found[name].samples[0] for name in ("offramp_workers", "offramp_worker_restarts")]
    assert [(s.labels, s.value) for s in samples] == [({}, 2), ({}, 7)]
    assert found["offramp_resumed"].samples[0].value == 11


def test_the_limit_of_parallel_batches_is_there_where_it_limits() -> None:
    assert "offramp_parallel_below" not in families()
    limited = families(now=dataclasses.replace(STATISTICS, parallel_below=12))
    (sample,) = limited["offramp_parallel_below"].samples
    assert (sample.labels, sample.value) == ({}, 12)


def test_the_promise() -> None:
    assert values("offramp_promise_max_disagreement_ratio") == {(): 0.01}
    assert values("offramp_promise_confidence_ratio") == {(): 0.95}
    assert values("offramp_promise_certify_samples") == {(): 5000}
    assert values("offramp_promise_certify_errors") == {(): 12}


def test_exits_that_answer_nothing_promise_nothing() -> None:
    onlooker, end = (dataclasses.replace(s, threshold=NEVER) for s in STATISTICS.stages)
    idle = dataclasses.replace(STATISTICS, stages=(onlooker, end))
    assert not families(now=idle)["offramp_promise_confidence_ratio"].samples


CONTROLLED = dataclasses.replace(
    STATISTICS, mode="audit", auditing=9, lost_feedback=8, control=fake_control(Evidence.CERTIFIED)
)


def test_control_is_absent_where_nothing_is_observed() -> None:
    assert not [name for name in families() if "disagree" in name.replace("promise_max_dis", "")]
    assert "offramp_evidence" not in families()


def test_control() -> None:
    read = {
        (sample.name, sample.labels.get("evidence")): sample.value
        for family in families(now=CONTROLLED).values()
        for sample in family.samples
    }
    for name, value in {
        "offramp_disagreement_constraint_ratio": 0.01,
        "offramp_disagreement_estimate_ratio": 0.0024,
        "offramp_disagreement_upper_bound_ratio": 0.0083,
        "offramp_disagreement_confidence_ratio": 0.95,
        "offramp_audit_probability_ratio": 0.05,
        "offramp_observed_total": 12400,
        "offramp_audited_total": 412,
        "offramp_disagreed_total": 1,
        "offramp_drift_alarms_total": 0,
        "offramp_tunings_total": 3,
        "offramp_exit_adjustments_total": 2,
        "offramp_auditing_samples": 9,
        "offramp_lost_feedback_total": 8,
    }.items():
        assert read[name, None] == value, name
    evidence = {kind: value for (name, kind), value in read.items() if kind}
    assert evidence == {
        "certified": 1,
        "calibrated": 0,
        "cautious": 0,
        "suspicious": 0,
        "none": 0,
    }


def test_an_estimate_that_there_is_not_is_absent() -> None:
    unknown = dataclasses.replace(CONTROLLED, control=fake_control(Evidence.CALIBRATED))
    assert not families(now=unknown)["offramp_disagreement_estimate_ratio"].samples
    (bound, _) = families(now=unknown)["offramp_disagreement_upper_bound_ratio"].samples
    assert bound.value == 1.0


def test_histograms_are_cumulative() -> None:
    assert values("offramp_batch_size_bucket", exit="exit 2") == {
        ("1.0",): 5, ("2.0",): 5, ("4.0",): 11, ("+Inf",): 12,
    }  # fmt: skip
    assert values("offramp_batch_size_sum", exit="exit 2") == {(): 40}
    assert values("offramp_stage_duration_seconds_count") == {("exit 2",): 12, ("final",): 10}
    assert values("offramp_request_duration_seconds_bucket") == {
        ("0.1",): 1, ("0.5",): 3, ("+Inf",): 12,
    }  # fmt: skip
    assert values("offramp_queue_duration_seconds_sum") == {(): 0.25}


def test_a_hostile_name_stays_a_label() -> None:
    sample, _ = families(HOSTILE)["offramp_requests"].samples
    assert sample.labels == {"model": HOSTILE}


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_ratio", "_samples", "_errors", "_size", "_version", "_info",
             "_streams", "_in_service", "_evidence", "_loads")  # fmt: skip
    for name, family in families(now=CONTROLLED).items():
        assert family.documentation
        if name.startswith("offramp_"):
            assert re.fullmatch(r"[a-z_]+", name)
            assert family.type == "counter" or name.endswith(units)


def test_the_process_is_measured_too() -> None:
    known: Any = families()
    assert "process_resident_memory_bytes" in known


def test_counts_go_on_when_a_model_is_replaced() -> None:
    second = dataclasses.replace(STATISTICS, version=2, earlier=STATISTICS)
    known = families(now=second)

    def of(family: str, sample: str, **labels: str) -> float:
        where = {"model": "fake", **labels}
        (value,) = (
            s.value for s in known[family].samples if s.name == sample and s.labels == where
        )
        return value

    assert of("offramp_requests", "offramp_requests_total") == 24
    assert of("offramp_failures", "offramp_failures_total", cause="expired") == 4
    assert of("offramp_answers", "offramp_answers_total", exit="exit 2") == 60
    assert of("offramp_request_duration_seconds", "offramp_request_duration_seconds_sum") == 40.0
    assert of("offramp_in_flight_samples", "offramp_in_flight_samples") == 2
    assert of("offramp_policy_version", "offramp_policy_version") == 3
    assert of("offramp_model_version", "offramp_model_version") == 2
