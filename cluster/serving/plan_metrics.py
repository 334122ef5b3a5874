"""Batch profiles, and the plan of a split model, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from offramp.cluster.serving.cluster_statistics import plan_of, profile_of
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.stages.plan import exit_label
from offramp.server.pages.metrics import Readings, families

_PLAN_COUNTERS: Final[Readings] = {
    "offramp_plan_changes": ("Changes of the plan that a model is split by.", "changes"),
    "offramp_plan_changes_given_up": ("Changes of plans that were given up.", "given_up"),
}
_PLAN_GAUGES: Final[Readings] = {
    "offramp_plan_predicted_rows_per_second": (
        "Rate of the active plan at full load, predicted under the last forecast.",
        "rate_rps",
    ),
}
_SPLIT_GAUGES: Final[Readings] = {
    "offramp_split_workers": ("Workers that run a split of the active plan.", "workers"),
    "offramp_split_workers_in_service": ("Workers of the split that are in service.", "in_service"),
    "offramp_split_workers_slow": (
        "Workers of the split that get less work, as others of their type are faster.",
        "slowed",
    ),
}


def cluster_families(models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
    """Yield metrics of plans and batch profiles, of all models."""
    yield from _going_on(models)
    plans = [(name, plan) for name, model in models if (plan := plan_of(model)) is not None]
    if plans:
        yield from families(CounterMetricFamily, _PLAN_COUNTERS, plans)
        yield from families(GaugeMetricFamily, _PLAN_GAUGES, plans)
        splits = [
            ((name, f"{s.first_segment}-{s.last_segment}"), s)
            for name, plan in plans
            for s in plan.splits
        ]
        yield from families(GaugeMetricFamily, _SPLIT_GAUGES, splits, ("model", "segments"))


def _going_on(models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
    """Yield the batch profile's last window, observed and forecast, by exit."""
    kept = GaugeMetricFamily(
        "offramp_batch_profile_windows",
        "Windows of the batch profile that are kept.",
        labels=["model"],
    )
    observed = GaugeMetricFamily(
        "offramp_exit_going_on_share",
        "Share of the rows answered in the last window that continued after the exit.",
        labels=["model", "exit"],
    )
    forecast = GaugeMetricFamily(
        "offramp_exit_going_on_share_forecast",
        "Conservative forecast of that share, made before the window began.",
        labels=["model", "exit"],
    )
    for name, model in models:
        status = profile_of(model)
        if status is None:
            continue
        kept.add_metric([name], status.windows)
        for exit_index, share, expected in status.shares():
            where = [name, exit_label(exit_index)]
            observed.add_metric(where, share)
            if expected is not None:
                forecast.add_metric(where, expected)
    yield from (family for family in (kept, observed, forecast) if family.samples)
