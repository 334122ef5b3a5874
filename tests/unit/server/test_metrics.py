"""The exposition, read back by Prometheus' own parser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from offramp.engine.statistics import Histogram, ModelStatistics, StageStatistics
from offramp.server.fake import FakeEngine, fake_model
from offramp.server.metrics import render_metrics

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
    queued=1,
    in_flight=1,
    queue_s=Histogram(bounds=(0.1, 0.5), counts=(12, 0, 0), total=0.25),
    latency_s=Histogram(bounds=(0.1, 0.5), counts=(1, 2, 9), total=20.0),
    uptime_s=61.5,
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
    """By the labels other than ``labels`` and the model, in order of their names.

    Of two models with the same values; what is labelled by neither is counted once.
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


def test_what_models_share_is_there_once() -> None:
    for name, value in {
        "offramp_streams": 3, "offramp_streams_in_service": 2, "offramp_stream_restarts_total": 5,
    }.items():  # fmt: skip
        (sample,) = families()[name.removesuffix("_total")].samples
        assert (sample.name, sample.labels, sample.value) == (name, {}, value)


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
             "_streams", "_in_service")  # fmt: skip
    for name, family in families().items():
        assert family.documentation
        if name.startswith("offramp_"):
            assert re.fullmatch(r"[a-z_]+", name)
            assert family.type == "counter" or name.endswith(units)


def test_the_process_is_measured_too() -> None:
    known: Any = families()
    assert "process_resident_memory_bytes" in known
