"""Prometheus metrics and status page section of generating models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from jinja2 import Template
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from offramp.commands.pages import page_template
from offramp.engine.requests.statistics import ModelStatistics
from offramp.generation.serving.text_status import TextStatus, text_status
from offramp.server.pages.metrics import Readings, families

_STATUS_GAUGES: Final[Readings] = {
    "offramp_text_cache_bytes": ("Memory of the caches of all slots.", "cache_bytes"),
    "offramp_text_layers_run_ratio": ("Mean share of the layers that a token ran.", "layers_run"),
}
_STATUS_HISTOGRAMS: Final[Readings] = {
    "offramp_text_first_token_seconds": (
        "Time from a request to the first token of its answer.",
        "first_token_s",
    ),
}
_SLOT_GAUGES: Final[Readings] = {
    "offramp_text_slots": ("Sequences that have cache memory at a time.", "slots"),
    "offramp_text_slots_in_use": ("Slots that hold a sequence, audits included.", "slots_in_use"),
    "offramp_text_queued_sequences": ("Sequences that wait for a slot.", "queued"),
}
_AUDIT_COUNTERS: Final[Readings] = {
    "offramp_text_audits": ("Answers that were compared with the full model's.", "texts"),
    "offramp_text_audits_differing": ("Those of them that differed anywhere.", "differing"),
    "offramp_text_audited_tokens": ("Tokens that were compared after the same text.", "tokens"),
    "offramp_text_audit_edits": (
        "Sum of the edit distances of audited answers, each 0 to 1 by the longer answer's tokens.",
        "edits",
    ),
    "offramp_text_audits_skipped": (
        "Answers that were drawn for an audit, but too many waited.",
        "skipped",
    ),
    "offramp_text_audits_lost": ("Audits that failed.", "lost"),
}
_PROMISE: Final[Readings] = {
    "offramp_text_promise_bound_ratio": ("Bound of the risk that was certified.", "bound"),
    "offramp_text_promise_confidence_ratio": (
        "Probability that the certificate holds.",
        "confidence_level",
    ),
}


def text_families(models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
    """Yield the metrics of all generating models."""
    known = [(name, status) for name, model in models if (status := text_status(model)) is not None]
    if not known:
        return
    yield from families(GaugeMetricFamily, _STATUS_GAUGES, known)
    yield from families(HistogramMetricFamily, _STATUS_HISTOGRAMS, known)
    slots = [(name, status.statistics) for name, status in known]
    yield from families(GaugeMetricFamily, _SLOT_GAUGES, slots)
    audits = [(name, status.statistics.audits) for name, status in known]
    yield from families(CounterMetricFamily, _AUDIT_COUNTERS, audits)
    promises = [
        ((name, status.evidence.risk), status.evidence)
        for name, status in known
        if status.evidence is not None
    ]
    yield from families(GaugeMetricFamily, _PROMISE, promises, ("model", "risk"))
    yield _ends(known)


def text_section(statistics: ModelStatistics) -> str | None:
    """Return the section of the status page of a generating model; ``None`` for other models."""
    status = text_status(statistics)
    return None if status is None else _template().render(figures=_figures(status))


def _ends(known: Sequence[tuple[str, TextStatus]]) -> Metric:
    family = CounterMetricFamily(
        "offramp_text_sequences", "Sequences by the reason why they ended.", labels=["model", "end"]
    )
    for name, status in known:
        for end, count in status.statistics.counts.ended.items():
            family.add_metric([name, end.value], count)
    return family


def _figures(status: TextStatus) -> list[tuple[str, str]]:
    """Return the figures that the page shows: pairs of a value and its description."""
    found, audits, first = status.statistics, status.statistics.audits, status.first_token_s
    figures = [
        (f"{found.slots_in_use} of {found.slots}", f"slots of {status.length} tokens in use"),
        (f"{found.queued:,}", "sequences wait for a slot"),
        (f"{status.cache_bytes / 2**20:,.1f} MiB", "of caches"),
        (f"{sum(found.counts.ended.values()):,}", "sequences ended"),
        (f"{100 * status.layers_run:.1f} %", "of the layers run for a token, on average"),
        (f"{first.quantile(0.5) * 1e3:.1f} ms" if first.count else "–", "to the first token, p50"),
        (f"{audits.texts:,}", "answers audited"),
    ]
    if audits.texts:
        differing = audits.differing_tokens / max(audits.tokens, 1)
        figures += [
            (f"{100 * audits.differing / audits.texts:.2f} %", "differ from the full model's"),
            (f"{100 * differing:.3f} %", "of their tokens differ after the same text"),
            (f"{100 * audits.edits / audits.texts:.2f} %", "edit distance, on average"),
        ]
    return figures


@cache
def _template() -> Template:
    return page_template("text_status.html", "offramp.generation")
