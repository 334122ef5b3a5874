"""The state of learning in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from offramp.engine.learning.lifecycle import Phase
from offramp.engine.requests.statistics import ModelStatistics

_GAUGES: Final = {
    "recorded_samples": ("Inputs that are recorded now.", "recorded"),
    "wanted_samples": ("Inputs that exits are compiled from.", "wanted"),
    "recording_bytes": ("Bytes of the recorded inputs.", "size_bytes"),
    "failures": ("Compilations that failed in a row.", "failures"),
}
_COUNTERS: Final = {
    "dropped": (
        "Inputs that were drawn and not recorded, as the disk was too slow or full.",
        "dropped",
    ),
    "attempts": ("Compilations that were begun.", "attempts"),
}


def learning_families(statistics: Mapping[str, ModelStatistics]) -> Iterator[Metric]:
    """Yield the metrics of all models that learn; nothing where none does."""
    known = [(name, model.learning) for name, model in statistics.items() if model.learning]
    if not known:
        return
    for kind, readings in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for metric, (text, field) in readings.items():
            family = kind(f"offramp_learning_{metric}", text, labels=["model"])
            for name, status in known:
                family.add_metric([name], getattr(status, field))
            yield family
    phases = GaugeMetricFamily(
        "offramp_learning_phase",
        "1 for the phase that learning is in, 0 for the others.",
        labels=["model", "phase"],
    )
    for name, status in known:
        for phase in Phase:
            phases.add_metric([name, phase.value], float(status.phase == phase.value))
    yield phases
