"""Summaries of several runs as one table."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from offramp.tools.bench.outcomes import Summary

_WIDTH = 90
_QUANTILES = ("p50", "p95", "p99", "p99.9")


def wide_console() -> Console:
    """A console on which the table is never cut, even into a file or a narrow pipe."""
    console = Console()
    return Console(width=max(console.width, _WIDTH))


def print_summaries(
    console: Console, summaries: Mapping[str, Summary], *, title: str, caption: str = ""
) -> None:
    """Print a line a run."""
    table = Table(
        title=title,
        title_justify="left",
        caption="Milliseconds of the answered; answers in time per second; shares. forced: left "
        f"below the exit's threshold; lost: not answered. {caption}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for name in (*_QUANTILES, "attained", "goodput", "agree", "forced", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(name, *_cells(summary))
    console.print(table)


def _cells(summary: Summary) -> list[str]:
    latencies = [_figure(summary.latency_ms.get(name)) for name in _QUANTILES]
    lost = sum(summary.failures.values()) / max(summary.requests, 1)
    return [
        *latencies,
        _share(summary.attainment, 4),
        f"{summary.goodput_rps:,.0f}",
        _share(summary.agreement, 3),
        _share(summary.forced_share, 3),
        _share(lost, 3),
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _share(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
