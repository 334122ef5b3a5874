"""The exposition, read back by Prometheus' own parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    stages=(
        StageStatistics(
            label="exit 2",
            threshold=0.875,
            answered=30,
            batch_size=Histogram(bounds=(1, 2, 4), counts=(5, 0, 6, 1), total=40),
            run_s=Histogram(bounds=(0.1, 0.5), counts=(11, 1, 0), total=1.5),
        ),
        StageStatistics(
            label="final",
            threshold=0.0,
            answered=10,
            batch_size=Histogram(bounds=(1, 2, 4), counts=(10, 0, 0, 0), total=10),
            run_s=Histogram(bounds=(0.1, 0.5), counts=(10, 0, 0), total=0.5),
        ),
    ),
    requests=12,
    samples=45,
    answered=40,
    failed={"cancelled": 1, "expired": 2, "rejected": 0, "backend_error": 0},
    queued=1,
    in_flight=1,
    queue_s=Histogram(bounds=(0.1, 0.5), counts=(12, 0, 0), total=0.25),
    latency_s=Histogram(bounds=(0.1, 0.5), counts=(1, 2, 9), total=20.0),
    uptime_s=61.5,
)


class Engine(FakeEngine):
    def statistics(self) -> Mapping[str, ModelStatistics]:
        return {model.name: STATISTICS for model in self.served}


def families(name: str = "fake") -> dict[str, Metric]:
    text = render_metrics(Engine(served=(fake_model(name),))).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """By the labels other than ``labels`` and the model, in order of their names."""
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
    assert values("offramp_failures_total") == {
        ("cancelled",): 1, ("expired",): 2, ("rejected",): 0, ("backend_error",): 0,
    }  # fmt: skip


def test_gauges() -> None:
    assert values("offramp_queued_samples") == {(): 1}
    assert values("offramp_in_flight_samples") == {(): 1}
    assert values("offramp_policy_version") == {(): 3}
    assert values("offramp_uptime_seconds") == {(): 61.5}
    assert values("offramp_exit_threshold_ratio") == {("exit 2",): 0.875, ("final",): 0.0}
    assert values("offramp_model_info") == {("onnxruntime-cpu", "leave"): 1}


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
    (sample,) = families(HOSTILE)["offramp_requests"].samples
    assert sample.labels == {"model": HOSTILE}


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_ratio", "_samples", "_errors", "_size", "_version", "_info")
    for name, family in families().items():
        assert family.documentation
        if name.startswith("offramp_"):
            assert re.fullmatch(r"[a-z_]+", name)
            assert family.type == "counter" or name.endswith(units)


def test_the_process_is_measured_too() -> None:
    known: Any = families()
    assert "process_resident_memory_bytes" in known
