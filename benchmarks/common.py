"""The parts that several benchmarks share: their command line and timing."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def make_parser(
    doc: str | None, *, bundle: bool = False, data: bool = False
) -> argparse.ArgumentParser:
    """A parser with ``--json`` and, if wanted, a bundle and ``--data``; ``doc`` is the module's."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if bundle:
        parser.add_argument("bundle", type=Path, help="folder made by eecompile")
    if data:
        parser.add_argument("--data", type=Path, required=True, help=".npz of unseen samples")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def time_ms(action: Callable[[], object], repeat: int = 5) -> float:
    """The median milliseconds of ``repeat`` calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
