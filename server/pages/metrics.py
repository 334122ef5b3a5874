"""The engine's statistics in Prometheus' terms; counts go on when a model is replaced.

Names follow its conventions: base units in the name (seconds, ratio), ``_total`` on what only
grows. Labels are the served model's name, and the place that an answer came from as plans name it
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
    """The metrics of an engine, read from one snapshot per scrape; it counts nothing itself."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All families, each with every model."""
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
        # without an exit in use there is nothing to promise
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
    """The requests that were refused or failed, by status code and reason."""

    def __init__(self, refused: Mapping[tuple[str, str], int]) -> None:
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """The one family; each pair from 0 on, or the first event would go unseen by rate()."""
        family = CounterMetricFamily(
            "offramp_refused_requests",
            "Requests that were refused or failed, by gRPC status code and reason.",
            labels=["code", "reason"],
        )
        for pair, count in self._refused.items():
            family.add_metric(pair, count)
        yield family


def render_metrics(
    engine: ServedEngine, refused: Mapping[tuple[str, str], int] = MappingProxyType({})
) -> bytes:
    """The page at ``/metrics``, in the text format that every Prometheus reads.

    ``refused`` counts requests by status code and reason.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    registry.register(RefusalCollector(refused))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


Readings: TypeAlias = Mapping[str, tuple[str, str]]
"""Metrics by name: their documentation, and the attribute that they are read from."""

_COUNTERS: Final[Readings] = {
    "offramp_requests": ("Requests accepted.", "requests"),
    "offramp_samples": ("Samples accepted.", "samples"),
    "offramp_retried": ("Samples of failed batches that were tried again.", "retried"),
    "offramp_resumed": (
        "Samples of batches that went on with their stage elsewhere, as their worker was lost.",
        "resumed",
    ),
    "offramp_unseen_length_samples": (
        "Samples of a length that the calibration data never had.",
        "unseen_lengths",
    ),
    "offramp_padded_samples": ("Samples that were padded to share a batch.", "padded"),
    "offramp_padded_positions": ("Positions that were added to them.", "padded_positions"),
}
_VARIANTS: Final[Readings] = {
    "offramp_variant_answered_samples": (
        "Samples that a variant of the model answered.",
        "answered",
    ),
    "offramp_variant_forced_samples": (
        "Samples that a variant answered and no certificate covers.",
        "forced",
    ),
    "offramp_variant_audited_samples": (
        "Samples that a variant answered, and the full model for comparison.",
        "audited",
    ),
    "offramp_variant_disagreed_samples": (
        "Samples that a variant answered unlike the full model, of those compared.",
        "disagreed",
    ),
}
_SAMPLES: Final[Readings] = {
    "offramp_queued_samples": ("Samples waiting now.", "queued"),
    "offramp_in_flight_samples": (
        "Samples accepted that neither wait for stage 0 nor have left.",
        "in_flight",
    ),
}
_GAUGES: Final[Readings] = {
    "offramp_model_version": ("Version of the model, 1 until it is replaced.", "version"),
    "offramp_policy_version": ("Version of the exit policy in force.", "policy_version"),
    "offramp_uptime_seconds": ("Time since the model was loaded.", "uptime_s"),
}
_PROMISE: Final[Readings] = {
    "offramp_promise_max_disagreement_ratio": (
        "Largest disagreement with the unmodified model that was certified.",
        "max_disagreement",
    ),
    "offramp_promise_confidence_ratio": (
        "Probability that the certificate holds.",
        "confidence_level",
    ),
    "offramp_promise_certify_samples": (
        "Samples that the certificate rests on.",
        "certify_samples",
    ),
    "offramp_promise_certify_errors": (
        "Those of them answered unlike the unmodified model.",
        "certify_errors",
    ),
}
_CONTROL_GAUGES: Final[Readings] = {
    "offramp_disagreement_constraint_ratio": (
        "Largest tolerated share of answers unlike the unmodified model's.",
        "max_disagreement",
    ),
    "offramp_disagreement_estimate_ratio": (
        "That share under the policy in force, estimated without bias; absent after few samples.",
        "disagreement",
    ),
    "offramp_disagreement_upper_bound_ratio": (
        "That share is not above it, with the confidence of the model's control; 1 at first.",
        "disagreement_upper_bound",
    ),
    "offramp_disagreement_confidence_ratio": (
        "Confidence of upper bound and certificate.",
        "confidence_level",
    ),
    "offramp_audit_probability_ratio": (
        "Probability that a sample answered early runs on to be compared.",
        "audit_probability",
    ),
}
_CONTROL_COUNTERS: Final[Readings] = {
    "offramp_observed": ("Samples that control has seen.", "observed"),
    "offramp_audited": ("Samples answered early that ran on to be compared.", "audited"),
    "offramp_disagreed": ("Those of them answered unlike the unmodified model.", "disagreed"),
    "offramp_drift_alarms": ("Alarms that the data are no longer what they were.", "alarms"),
    "offramp_tunings": ("Threshold tunings finished.", "tunings"),
    "offramp_exit_adjustments": ("Changes of the set of exits in use.", "adjustments"),
}
_AUDITING: Final[Readings] = {
    "offramp_auditing_samples": ("Samples that have their answer and run on.", "auditing")
}
_LOST: Final[Readings] = {
    "offramp_lost_feedback": (
        "Samples that ran on, and whose final answer was lost to control.",
        "lost_feedback",
    ),
    "offramp_out_of_range_samples": (
        "Samples that the whole model answered, as their inputs are unlike those of calibration.",
        "out_of_range",
    ),
    "offramp_discounted_samples": ("Samples that are no evidence: copies.", "discounted"),
}
_HISTOGRAMS: Final[Readings] = {
    "offramp_queue_duration_seconds": ("Time until first dispatch, per request part.", "queue_s"),
    "offramp_request_duration_seconds": (
        "Time from submission to the response, per request.",
        "latency_s",
    ),
}
_STAGE_COUNTERS: Final[Readings] = {
    "offramp_answers": ("Samples answered, by the exit that answered.", "answered"),
    "offramp_forced": (
        "Samples that had to leave at the exit, below its threshold, to be in time.",
        "forced",
    ),
}
_STAGE_GAUGES: Final[Readings] = {
    "offramp_exit_threshold_ratio": (
        "Least confidence to leave with; 2 where nothing leaves.",
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
    "offramp_learning_recorded_samples": ("Inputs that are recorded now.", "recorded"),
    "offramp_learning_wanted_samples": ("Inputs that exits are compiled from.", "wanted"),
    "offramp_learning_recording_bytes": ("Bytes of the recorded inputs.", "size_bytes"),
    "offramp_learning_failures": ("Compilations that failed in a row.", "failures"),
}
_LEARNING_COUNTERS: Final[Readings] = {
    "offramp_learning_dropped": (
        "Inputs that were drawn and not recorded, as the disk was too slow or full.",
        "dropped",
    ),
    "offramp_learning_attempts": ("Compilations that were begun.", "attempts"),
}


def families(
    kind: type[Any],
    readings: Readings,
    known: Iterable[tuple[str | tuple[str, ...], Any]],
    labels: tuple[str, ...] = ("model",),
) -> Iterator[Metric]:
    """One family a reading, with the value of each model or stage; ``None`` is left out."""
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
        for cause in FAILURE_CAUSES:  # from 0 on, or the first event would go unseen by rate()
            family.add_metric([name, cause], total.failed.get(cause, 0))
    return family


def _device(models: Iterable[ModelStatistics]) -> Iterator[Metric]:
    """The device's metrics, which each model tells: without a label, for sums to be right."""
    shared = next(iter(models), None)
    if shared is None:
        return
    yield GaugeMetricFamily(
        "offramp_streams", "Batches that can run at the same time.", value=shared.streams
    )
    yield GaugeMetricFamily(
        "offramp_streams_in_service",
        "Those of the streams that can run something now.",
        value=shared.streams_in_service,
    )
    yield CounterMetricFamily(
        "offramp_stream_restarts",
        "Times that a stream was started anew after failures.",
        value=shared.restarts,
    )
    if shared.workers:
        yield GaugeMetricFamily(
            "offramp_workers",
            "Worker processes that are there to run stages.",
            value=shared.workers_in_service,
        )
        yield CounterMetricFamily(
            "offramp_worker_restarts",
            "Worker processes that were started in place of one that was lost.",
            value=shared.worker_restarts,
        )
    if shared.parallel_below is not None:
        yield GaugeMetricFamily(
            "offramp_parallel_below",
            "Samples that each running batch must have fewer of for another one to start.",
            value=shared.parallel_below,
        )


def _evidence(known: Iterable[tuple[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "offramp_evidence",
        "1 for what stands behind the exits in use: certified while serving, calibrated before, "
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
        "1 for the phase that learning is in, 0 for the others.",
        labels=["model", "phase"],
    )
    for name, status in known:
        for phase in Phase:
            family.add_metric([name, phase.value], float(status.phase == phase.value))
    return family
