"""The report of a load: figures, their environment, and a warning if they are doubtful."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.tools.bench.common.outcomes import (
    Outcomes,
    Summary,
    Timeline,
    hdr_table,
    summarise,
    timeline,
)
from offramp.tools.bench.load.generator import GeneratedLoad
from offramp.tools.bench.load.load_settings import LoadSettings
from offramp.tools.bench.load.metrics_poll import Reading, mean_batch_size, series

WINDOWS: Final = 60
"""Number of equal windows that a load is divided into."""

_LATE_MS, _LATE_SHARE = 1.0, 0.1
"""Figures are doubtful if the p99 of lateness exceeds this, and this share of the median
latency."""
_MAX_CAUSES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadReport:
    """Figures of a load, with what they depend on."""

    summary: Summary
    timeline: Timeline
    percentiles: Sequence[tuple[float, float, int]]
    causes: Mapping[str, int]
    """Failures by message."""
    readings: Sequence[Reading]
    """Readings of the server's metrics."""
    environment: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {
            "summary": self.summary.to_json(),
            "timeline": self.timeline.to_json(),
            "percentiles": [list(row) for row in self.percentiles],
            "causes": dict(self.causes),
            "server": series(self.readings).to_json() if self.readings else None,
            "environment": dict(self.environment),
        }

    def write_json(self, path: Path) -> None:
        """Write the report as JSON to a file."""
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def make_report(
    settings: LoadSettings,
    load: GeneratedLoad,
    outcomes: Outcomes,
    *,
    readings: Sequence[Reading],
    environment: Mapping[str, Any],
) -> LoadReport:
    """Compute the figures of requests due after the warm-up.

    ``readings`` are readings of the server's metrics; empty if these were not read. ``environment``
    describes the measured system and the machine.
    """
    kept = outcomes.drop_warm_up(settings.warm_up_s)
    summary = summarise(kept, slo_ms=settings.slo_ms)
    over_time = timeline(kept, slo_ms=settings.slo_ms, windows=WINDOWS)
    if readings:
        middle_s = settings.warm_up_s + over_time.start_s + over_time.window_s / 2
        over_time = replace(over_time, batch_size=series(readings).batch_size_at(middle_s))
        mean = mean_batch_size(readings, settings.warm_up_s, settings.duration_s)
        summary = replace(summary, mean_batch_size=mean)
    return LoadReport(
        summary=summary,
        timeline=over_time,
        percentiles=hdr_table(kept.latency_s),
        causes=load.causes,
        readings=readings,
        environment={
            **environment,
            "generator_lateness_ms": load.lateness_ms,
            "generator_cpu_us_per_request": load.cpu_us_per_request,
            "generator_peak_in_flight": load.records.peak_in_flight(),
            "measured_requests": summary.requests,
            "all_requests": len(load.records.sample),
        },
    )


def settings_json(settings: LoadSettings) -> dict[str, Any]:
    """Return the settings of a load as plain values."""
    return {"loop": settings.loop, **asdict(settings)}


def warning(report: LoadReport) -> str | None:
    """Return a warning if the generator was too late to measure the server."""
    late, latency = report.environment["generator_lateness_ms"], report.summary.latency_ms
    if late is None or not latency:
        return None
    p99, median = late["p99"], latency["p50"]
    if p99 <= _LATE_MS and p99 <= _LATE_SHARE * median:
        return None
    return (
        f"the generator was late: p99 {p99:.3g} ms, at a median latency of {median:.3g} ms. Part "
        "of the latency is its own; use more --processes, a lower rate, or another machine"
    )


def print_report(console: Console, report: LoadReport, *, title: str) -> None:
    """Print figures, and why requests failed."""
    console.print(title, style="italic", soft_wrap=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in rows(report.summary):
        table.add_row(name, value)
    console.print(table)
    for cause, count in list(report.causes.items())[:_MAX_CAUSES]:
        console.print(f"{count:,} × {escape(cause)}", soft_wrap=True)
    if len(report.causes) > _MAX_CAUSES:
        console.print(f"and {len(report.causes) - _MAX_CAUSES} other causes")


def rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the lines of a table."""
    yield "requests", f"{summary.requests:,}"
    yield "offered", f"{summary.offered_rps:,.1f}/s"
    yield "throughput", f"{summary.throughput_rps:,.1f}/s"
    if summary.slo_ms is not None:
        yield f"goodput (within {summary.slo_ms:g} ms)", f"{summary.goodput_rps:,.1f}/s"
    if summary.attainment is not None:
        yield f"attainment (within {summary.slo_ms:g} ms)", f"{summary.attainment:.2%}"
    for name, value in summary.latency_ms.items():
        yield f"latency {name}", f"{value:.3g} ms" if value < 100 else f"{value:,.0f} ms"
    agreement = summary.agreement
    yield "agreement", "unknown (--reference)" if agreement is None else f"{agreement:.2%}"
    for label, share in summary.exit_shares.items():
        yield f"answered at {label}", f"{share:.1%}"
    if summary.forced_share:
        yield "forced to an exit", f"{summary.forced_share:.2%}"
    if summary.mean_batch_size is not None:
        yield "mean batch size", f"{summary.mean_batch_size:.2f}"
    for status, count in summary.failures.items():
        if count:
            yield status, f"{count:,} ({count / summary.requests:.2%})"
