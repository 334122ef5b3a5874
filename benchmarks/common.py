"""The parts that several benchmarks share: their command line, timing, and memory."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.tools.bench.common.bench_flags import look_up

CHART_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#30475e}.grid{stroke:#dde5ec}.axis{stroke:#8899aa}"
    "path{fill:none}.measured{stroke-width:2.5}.linear{stroke-dasharray:4 4}"
    "@media(prefers-color-scheme:dark){text{fill:#d5dee6}.grid{stroke:#38424c}"
    '[stroke="#30475e"]{stroke:#9fb6cc}}'
)
"""Style of the charts that benchmarks draw for the docs, on light and on dark pages."""


def make_parser(
    doc: str | None, *, bundle: bool = False, data: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with ``--json`` and, if asked, a bundle and ``--data``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if bundle:
        parser.add_argument("bundle", type=Path, help="folder made by eecompile")
    if data:
        parser.add_argument("--data", type=Path, required=True, help=".npz of unseen samples")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the argparse type of names separated by commas; it refuses names not in ``known``."""
    names = dict.fromkeys(known)

    def parse(text: str) -> list[str]:
        try:
            return list(look_up("experiment", text.split(","), names))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def time_ms(action: Callable[[], object], repeat: int = 5) -> float:
    """Return the median milliseconds of ``repeat`` calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def in_a_process(module: str, *arguments: str) -> Any:
    """Run a module in its own process; return its output, parsed as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def memory_mib() -> dict[str, float]:
    """Return this process's MiB: ``pss``, ``anonymous`` (part of it), ``rss``, and ``peak``."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    lines += Path("/proc/self/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    wanted = {"Pss": "pss", "Pss_Anon": "anonymous", "Rss": "rss", "VmHWM": "peak"}
    return {our: int(told[their].split()[0]) / 1024 for their, our in wanted.items()}


def described(plan: ClusterPlan) -> str:
    """Return one line with the segments of a plan and their devices by type."""
    parts = [
        f"{s.first_segment}-{s.last_segment}: "
        + "+".join(f"{r.count} {r.device_type}" for r in s.replicas)
        for s in plan.splits
    ]
    return ", ".join(parts)
