"""The engine's statistics as Prometheus metrics; counts continue when a model is replaced.

Names follow Prometheus's conventions: base units in the name (seconds, ratio), and ``_total`` for
counters. Labels are the served model's name, and the place of an answer as named in plans
(``exit 3``, ``final``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from offramp.engine.common.extensions import extensions_for
from offramp.engine.control.controller import Evidence
from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.learning_status import LearningStatus
from offramp.engine.requests.statistics import (
    FAILURE_CAUSES,
    CountersSnapshot,
    Histogram,
    ModelStatistics,
)
from offramp.engine.serving.totals import totals_of
from offramp.server.common.served import ServedEngine
from offramp.server.pages.status import exits_in_use

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class EngineCollector(Collector):
    """Collector that reads an engine's metrics from one snapshot per scrape; it has no counters."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, each with every model."""
        statistics = self._engine.statistics()
        models = list(statistics.items())
        totals = [(name, totals_of(model)) for name, model in models]
        yield _info(models)
        yield from families(CounterMetricFamily, _COUNTERS, totals)
        yield _failures(totals)
        yield from families(GaugeMetricFamily, _SAMPLES, totals)
        yield from families(GaugeMetricFamily, _GAUGES, models)
        yield from _device(statistics.values())
        yield from families(HistogramMetricFamily, _HISTOGRAMS, totals)
        stages = [((name, s.label), s) for name, model in totals for s in model.stages]
        for kind, readings in _STAGE_METRICS:
            yield from families(kind, readings, stages, labels=("model", "exit"))
        for extension in extensions_for("server"):
            yield from extension.families(models)
        if learning := [(name, model.learning) for name, model in models if model.learning]:
            yield from families(GaugeMetricFamily, _LEARNING_GAUGES, learning)
            yield from families(CounterMetricFamily, _LEARNING_COUNTERS, learning)
            yield _phases(learning)
        variants = [((name, v.name), v) for name, model in totals for v in model.variants]
        if variants:
            yield from families(CounterMetricFamily, _VARIANTS, variants, ("model", "variant"))
        # a promise needs an exit in use
        promises = [
            (model.name, model.policy.promise)
            for model in self._engine.models()
            if model.policy.promise and exits_in_use(statistics[model.name])
        ]
        yield from families(GaugeMetricFamily, _PROMISE, promises)
        control = [(name, model.control) for name, model in models if model.control]
        if control:
            observed = [(name, model) for name, model in totals if statistics[name].control]
            yield from families(GaugeMetricFamily, _CONTROL_GAUGES, control)
            yield _evidence(control)
            yield from families(CounterMetricFamily, _CONTROL_COUNTERS, control)
            yield from families(GaugeMetricFamily, _AUDITING, observed)
            yield from families(CounterMetricFamily, _LOST, observed)


class RefusalCollector(Collector):
    """Collector of refused or failed requests, by status code and reason."""

    def __init__(self, refused: Mapping[tuple[str, str], int]) -> None:
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """Yield one family with all pairs, starting at 0 so that rate() sees the first event."""
        family = CounterMetricFamily(
            "offramp_refused_requests",
            "Requests that were refused or failed, by gRPC status code and reason.",
            labels=["code", "reason"],
        )
        for pair, count in self._refused.items():
            family.add_metric(pair, count)
        yield family


class FailedLoads(Collector):
    """Collector of the number of model versions that could not be loaded."""

    def __init__(self, versions: int) -> None:
        self._versions = versions

    def collect(self) -> Iterator[Metric]:
        """Yield the number, 0 if all could be loaded."""
        yield GaugeMetricFamily(
            "offramp_failed_loads",
            "Versions of models whose newest file could not be loaded.",
            value=self._versions,
        )


def render_metrics(
    engine: ServedEngine,
    refused: Mapping[tuple[str, str], int] = MappingProxyType({}),
    *,
    failed_loads: int = 0,
) -> bytes:
    """Return the page at ``/metrics`` in the Prometheus text format.

    ``refused`` counts requests by status code and reason; ``failed_loads`` is the number of model
    versions whose newest file could not be loaded.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    registry.register(RefusalCollector(refused))
    registry.register(FailedLoads(failed_loads))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


Readings: TypeAlias = Mapping[str, tuple[str, str]]
"""Documentation of a metric and the attribute that has its value, by the metric's name."""

_COUNTERS: Final[Readings] = {
    "offramp_requests": ("Requests accepted.", "requests"),
    "offramp_samples": ("Samples accepted.", "samples"),
    "offramp_retried": ("Samples of failed batches that were retried.", "retried"),
    "offramp_resumed": (
        "Samples of batches that resumed their stage on another worker after theirs was lost.",
        "resumed",
    ),
    "offramp_unseen_length_samples": (
        "Samples of a length that the calibration data did not contain.",
        "unseen_lengths",
    ),
    "offramp_padded_samples": ("Samples that were padded to share a batch.", "padded"),
    "offramp_padded_positions": ("Positions added by padding.", "padded_positions"),
}
_VARIANTS: Final[Readings] = {
    "offramp_variant_answered_samples": (
        "Samples that a variant of the model answered.",
        "answered",
    ),
    "offramp_variant_forced_samples": (
        "Samples that a variant answered without a certificate.",
        "forced",
    ),
    "offramp_variant_audited_samples": (
        "Samples that both a variant and, for comparison, the full model answered.",
        "audited",
    ),
    "offramp_variant_disagreed_samples": (
        "Compared samples on which variant and full model disagreed.",
        "disagreed",
    ),
}
_SAMPLES: Final[Readings] = {
    "offramp_queued_samples": ("Samples in the queue.", "queued"),
    "offramp_in_flight_samples": (
        "Samples past the queue that have no answer yet.",
        "in_flight",
    ),
}
_GAUGES: Final[Readings] = {
    "offramp_model_version": ("Version of the model, 1 until it is replaced.", "version"),
    "offramp_policy_version": ("Version of the active exit policy.", "policy_version"),
    "offramp_uptime_seconds": ("Time since the model was loaded.", "uptime_s"),
}
_PROMISE: Final[Readings] = {
    "offramp_promise_max_disagreement_ratio": (
        "Certified largest disagreement with the unmodified model.",
        "max_disagreement",
    ),
    "offramp_promise_confidence_ratio": (
        "Probability that the certificate holds.",
        "confidence_level",
    ),
    "offramp_promise_certify_samples": (
        "Samples that the certificate was computed from.",
        "certify_samples",
    ),
    "offramp_promise_certify_errors": (
        "Certification samples on which exits disagreed with the unmodified model.",
        "certify_errors",
    ),
}
_CONTROL_GAUGES: Final[Readings] = {
    "offramp_disagreement_constraint_ratio": (
        "Largest tolerated share of answers that differ from the unmodified model's.",
        "max_disagreement",
    ),
    "offramp_disagreement_estimate_ratio": (
        "Unbiased estimate of the disagreement; absent while there are few samples.",
        "disagreement",
    ),
    "offramp_disagreement_upper_bound_ratio": (
        "Upper confidence bound on the disagreement; 1 at first.",
        "disagreement_upper_bound",
    ),
    "offramp_disagreement_confidence_ratio": (
        "Confidence level of the upper bound and the certificate.",
        "confidence_level",
    ),
    "offramp_audit_probability_ratio": (
        "Probability that a sample answered early is audited: runs on to be compared.",
        "audit_probability",
    ),
}
_CONTROL_COUNTERS: Final[Readings] = {
    "offramp_observed": ("Samples that the controller has observed.", "observed"),
    "offramp_audited": ("Audited samples: answered early, then run on to be compared.", "audited"),
    "offramp_disagreed": (
        "Audited samples on which the exit disagreed with the unmodified model.",
        "disagreed",
    ),
    "offramp_drift_alarms": ("Drift alarms of the controller.", "alarms"),
    "offramp_tunings": ("Completed threshold tunings.", "tunings"),
    "offramp_exit_adjustments": ("Changes of the set of exits in use.", "adjustments"),
}
_AUDITING: Final[Readings] = {
    "offramp_auditing_samples": ("Answered samples that still run on.", "auditing")
}
_LOST: Final[Readings] = {
    "offramp_lost_feedback": (
        "Audited samples whose final answer was lost.",
        "lost_feedback",
    ),
    "offramp_out_of_range_samples": (
        "Samples with inputs outside the calibration range, answered by the whole model.",
        "out_of_range",
    ),
    "offramp_discounted_samples": ("Copies of samples, excluded from the evidence.", "discounted"),
}
_HISTOGRAMS: Final[Readings] = {
    "offramp_queue_duration_seconds": ("Time to first dispatch, per request part.", "queue_s"),
    "offramp_request_duration_seconds": (
        "Time from submission to the response, per request.",
        "latency_s",
    ),
}
_STAGE_COUNTERS: Final[Readings] = {
    "offramp_answers": ("Samples answered, by the exit that answered.", "answered"),
    "offramp_forced": (
        "Samples that were forced out at the exit, below its threshold, to be in time.",
        "forced",
    ),
}
_STAGE_GAUGES: Final[Readings] = {
    "offramp_exit_threshold_ratio": (
        "Lowest confidence that leaves at the exit; 2 if nothing leaves there.",
        "threshold",
    )
}
_STAGE_HISTOGRAMS: Final[Readings] = {
    "offramp_batch_size": ("Rows per run of the stage that ends at the exit.", "batch_size"),
    "offramp_stage_duration_seconds": ("Time per run of the stage that ends at the exit.", "run_s"),
}
_STAGE_METRICS: Final = (
    (CounterMetricFamily, _STAGE_COUNTERS),
    (GaugeMetricFamily, _STAGE_GAUGES),
    (HistogramMetricFamily, _STAGE_HISTOGRAMS),
)


_LEARNING_GAUGES: Final[Readings] = {
    "offramp_learning_recorded_samples": ("Inputs on disk.", "recorded"),
    "offramp_learning_wanted_samples": ("Inputs needed to compile exits.", "wanted"),
    "offramp_learning_recording_bytes": ("Bytes of the recorded inputs.", "size_bytes"),
    "offramp_learning_failures": ("Consecutive failed compilations.", "failures"),
}
_LEARNING_COUNTERS: Final[Readings] = {
    "offramp_learning_dropped": (
        "Inputs that were drawn but not recorded, because the disk was too slow or full.",
        "dropped",
    ),
    "offramp_learning_attempts": ("Compilations started.", "attempts"),
}


def families(
    kind: type[Any],
    readings: Readings,
    known: Iterable[tuple[str | tuple[str, ...], Any]],
    labels: tuple[str, ...] = ("model",),
) -> Iterator[Metric]:
    """Yield one family per reading, with each model's or stage's value; ``None`` is left out."""
    for name, (documentation, attribute) in readings.items():
        family = kind(name, documentation, labels=labels)
        for key, facts in known:
            where, value = [key] if isinstance(key, str) else key, getattr(facts, attribute)
            if isinstance(value, Histogram):
                bounds = [*map(repr, map(float, value.bounds)), "+Inf"]
                buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                family.add_metric(where, buckets=buckets, sum_value=value.total)
            elif value is not None:
                family.add_metric(where, value)
        yield family


_Models = Iterable[tuple[str, ModelStatistics]]


def _info(models: _Models) -> Metric:
    family = InfoMetricFamily("offramp_model", "How a model is served.", labels=["model"])
    for name, model in models:
        family.add_metric(
            [name], {"mode": model.mode, "backend": model.backend, "scheduling": model.scheduling}
        )
    return family


def _failures(totals: Iterable[tuple[str, CountersSnapshot]]) -> Metric:
    family = CounterMetricFamily(
        "offramp_failures", "Samples without an answer, by cause.", labels=["model", "cause"]
    )
    for name, total in totals:
        for cause in FAILURE_CAUSES:  # at 0 first, so that rate() sees the first event
            family.add_metric([name, cause], total.failed.get(cause, 0))
    return family


def _device(models: Iterable[ModelStatistics]) -> Iterator[Metric]:
    """Yield metrics of the device, which models share: without labels, so that sums are right."""
    shared = next(iter(models), None)
    if shared is None:
        return
    yield GaugeMetricFamily(
        "offramp_streams", "Batches that can run at the same time.", value=shared.streams
    )
    yield GaugeMetricFamily(
        "offramp_streams_in_service",
        "Streams that can run batches.",
        value=shared.streams_in_service,
    )
    yield CounterMetricFamily(
        "offramp_stream_restarts",
        "Restarts of streams after failures.",
        value=shared.restarts,
    )
    if shared.workers:
        yield GaugeMetricFamily(
            "offramp_workers",
            "Worker processes that can run stages.",
            value=shared.workers_in_service,
        )
        yield CounterMetricFamily(
            "offramp_worker_restarts",
            "Worker processes started to replace lost ones.",
            value=shared.worker_restarts,
        )
    if shared.parallel_below is not None:
        yield GaugeMetricFamily(
            "offramp_parallel_below",
            "A batch may start only while each running batch has fewer samples than this.",
            value=shared.parallel_below,
        )


def _evidence(known: Iterable[tuple[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "offramp_evidence",
        "1 for the evidence for the exits in use: certified while serving, calibrated before, "
        "cautious (no exit answers), suspicious (more disagrees than the constraint allows), or "
        "none; 0 for the others.",
        labels=["model", "evidence"],
    )
    for name, control in known:
        for evidence in Evidence:
            family.add_metric([name, evidence.value], float(control.evidence is evidence))
    return family


def _phases(known: Iterable[tuple[str, LearningStatus]]) -> Metric:
    family = GaugeMetricFamily(
        "offramp_learning_phase",
        "1 for the present phase of learning, 0 for the others.",
        labels=["model", "phase"],
    )
    for name, status in known:
        for phase in Phase:
            family.add_metric([name, phase.value], float(status.phase == phase.value))
    return family
