"""The output of ``eebench``: tables, JSON documents, the environment of a measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offramp.engine.common.environment import common_facts, package_version
from offramp.tools.bench.common.outcomes import Summary

_PACKAGES = ("offramp", "onnxruntime", "numpy", "grpcio", "protobuf")


def describe_environment(**settings: Any) -> dict[str, Any]:
    """Return hardware, versions, command and settings of a measurement, as JSON values."""
    return {
        **common_facts({name: package_version(name) or "source tree" for name in _PACKAGES}),
        **settings,
    }


def check_outputs(*paths: Path | None) -> None:
    """Raise ValueError if an output file cannot be written; call it before long work."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(
                f"{path} cannot be written: {what}; name a file in a folder that exists"
            )


def write_json(path: Path | None, document: Any) -> None:
    """Write a result, if a file was requested."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


_WIDTH = 90
_QUANTILES = ("p50", "p95", "p99", "p99.9")


def wide_console(width: int = _WIDTH) -> Console:
    """Return a console that never cuts tables, even in a file or a narrow pipe."""
    return Console(width=max(Console().width, width))


def figure_table(
    title: str, caption: str, columns: Sequence[str], *, names: Sequence[str]
) -> Table:
    """Return an empty table of figures; the columns in ``names`` contain names instead."""
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, justify="left" if name in names else "right", no_wrap=True)
    return table


def warn_of_calibration_data(console: Console) -> None:
    """Warn that a measurement used the data that the bundle was calibrated on."""
    console.print(
        "[bold red]This is the data that the bundle was calibrated on:[/] agreement on it "
        "says nothing about unseen data. Give --data that the compiler never saw.",
        soft_wrap=True,
    )


def print_summaries(
    console: Console, summaries: Mapping[str, Summary], *, title: str, caption: str = ""
) -> None:
    """Print one line for each run."""
    table = figure_table(
        title,
        "Milliseconds of the answered; answers in time per second; shares. forced: left below the "
        f"exit's threshold; lost: not answered. {caption}",
        ("policy", *_QUANTILES, "attained", "goodput", "agree", "forced", "lost"),
        names=("policy",),
    )
    for name, summary in summaries.items():
        latencies = [summary.latency_ms.get(quantile) for quantile in _QUANTILES]
        table.add_row(
            name,
            *("–" if value is None else f"{value:.3g}" for value in latencies),
            _share(summary.attainment, 4),
            f"{summary.goodput_rps:,.0f}",
            _share(summary.agreement, 3),
            _share(summary.forced_share, 3),
            _share(sum(summary.failures.values()) / max(summary.requests, 1), 3),
        )
    console.print(table)


def _share(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
