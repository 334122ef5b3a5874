"""Every policy under one trace, compared on this machine.

    python -m benchmarks.policies BUNDLE --data TEST.npz --trace azure:FILE [--share 0.8]
        [--rounds 3] [--json FILE]

All systems run in one process, without the network. Each system is a new engine, with as many
streams of one thread as there are cores. The sender shares the engine's event loop, and the
sender's own lateness is reported.

First the source model's latency at batch 1 and its capacity are measured; the trace is rescaled to
a share of that capacity. Then every system runs the trace without deadlines, so that all requests
are answered and quantiles of latency can be compared. Every system also runs it under two latency
objectives, 2 and 10 times the source model's latency at batch 1: there quantiles are of answered
requests only, and attainment and goodput are the result. Systems run one after another, in rounds;
every figure is the median over rounds. ``source:delay`` has the same largest batch as the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from benchmarks.common import make_parser
from benchmarks.replay import Replay, single_samples
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import read_dataset
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.tools.bench.common.outcomes import Summary, summarise
from offramp.tools.bench.common.output import (
    describe_environment,
    print_summaries,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import Trace, azure, constant, gamma, poisson
from offramp.tools.bench.simulate_command import SystemUnderTest

SYSTEMS = (
    "source:clockwork",
    "source:delay",
    "run-through",
    "refill",
    "rebatch",
    "slackfit",
    "clockwork",
    "delay",
    "max-accuracy",
    "max-batch",
    "cheapest",
)
PATIENT = ("source:clockwork", "source:delay", "run-through", "refill", "rebatch", "delay")
"""Systems whose run without deadlines is meaningful."""
MODEL = "model"
SLO_FACTORS = (2, 10)
MAX_BATCH = 16
DELAY_MS = 1.0
"""Time in ms that ``delay`` waits for more samples of a batch."""
SATURATED = 128
"""Number of requests in flight while capacity is measured."""
LONE_REQUESTS = 1000


class Bench:
    """A bundle, its data, and engines of it."""

    def __init__(
        self, bundle: Path, data: Path, samples: int, *, streams: int | None = None
    ) -> None:
        """Read the bundle and the data; ``streams`` is by default the number of cores."""
        self.bundle = bundle
        dataset = read_dataset(data, Bundle.open(bundle).manifest.inputs)
        self._samples = single_samples(dataset, samples)
        self._reference: NDArray[np.int64] = np.zeros(len(self._samples), np.int64)
        self.streams = streams or os.cpu_count() or 1
        self.lateness_ms: list[dict[str, float]] = []
        """Lateness of the sender itself, one entry per run."""

    def median_lateness_ms(self) -> dict[str, float]:
        """Medians of the sender's lateness over the runs so far."""
        names = self.lateness_ms[0]
        return {n: float(np.median([late[n] for late in self.lateness_ms])) for n in names}

    async def prepare(self) -> None:
        """Run the source model, whose answers are the reference."""
        async with self._replaying("source:delay") as replay:
            self._reference = await replay.answers()

    def judge_by(self, labels: NDArray[np.int64]) -> None:
        """Compare answers with labels instead: then figures called agreement are accuracy."""
        self._reference = labels[: len(self._samples)]

    @asynccontextmanager
    async def _replaying(self, system: str) -> AsyncIterator[Replay]:
        """Yield a replay on an open engine."""
        parsed = SystemUnderTest.parse(system)
        options = EngineOptions(
            mode=parsed.mode,
            streams=self.streams,
            threads=1,
            defaults=ModelOptions(
                scheduling=parsed.scheduling,
                max_batch_size=MAX_BATCH,
                max_queue_delay_ms=DELAY_MS if parsed.scheduling.name == "delay" else 0.0,
            ),
        )
        async with await Engine.open({MODEL: self.bundle}, options) as engine:
            yield Replay(engine, MODEL, self._samples, self._reference)

    async def lone(self, system: str) -> tuple[float, float]:
        """Return mean seconds of requests sent one after the other: in total, and within stages."""
        async with self._replaying(system) as replay:
            return await replay.lone(LONE_REQUESTS)

    async def sparse(self, system: str) -> tuple[float, float]:
        """Return mean seconds of requests that come 10 ms apart: in total, and within stages."""
        trace = constant(100.0, 6.0)
        async with self._replaying(system) as replay:
            outcomes = await replay.open_loop(trace.arrivals_s, trace.duration_s, None)
            return float(outcomes.latency_s.mean()), replay.stages_s() / len(trace.arrivals_s)

    async def capacity_rps(self, system: str, duration_s: float) -> float:
        """Return answers per second with many requests in flight."""
        async with self._replaying(system) as replay:
            return await replay.closed_loop(SATURATED, duration_s)

    async def under(self, system: str, trace: Trace, slo_s: float | None) -> Summary:
        """Run a trace on a system; return its figures."""
        async with self._replaying(system) as replay:
            outcomes = await replay.open_loop(trace.arrivals_s, trace.duration_s, slo_s)
            self.lateness_ms.append(replay.lateness_ms())
        return summarise(outcomes, slo_ms=None if slo_s is None else slo_s * 1e3)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of the module's docstring."""
    bench = Bench(options.bundle, options.data, options.samples)
    await bench.prepare()
    lone_s, _ = await bench.lone("source:clockwork")
    console = wide_console()
    capacity = {
        system: float(
            np.median([await bench.capacity_rps(system, 3.0) for _ in range(options.rounds)])
        )
        for system in ("source:delay", "run-through")
    }
    ratio = capacity["run-through"] / capacity["source:delay"]
    trace = make_trace(options, options.share * capacity["source:delay"])
    console.print(
        f"source model: {lone_s * 1e3:.2f} ms at batch 1, {capacity['source:delay']:.0f}/s at "
        f"saturation; leave mode {capacity['run-through']:.0f}/s, ×{ratio:.2f}"
    )
    console.print(f"trace: {trace.name}, {trace.rate:.0f}/s for {trace.duration_s:.1f} s")
    found: dict[str, dict[str, list[Summary]]] = {}
    systems = options.systems.split(",")
    for _ in range(options.rounds):
        for system in (system for system in systems if system in PATIENT):
            summary = await bench.under(system, trace, None)
            found.setdefault("no deadline", {}).setdefault(system, []).append(summary)
        for factor in SLO_FACTORS:
            for system in systems:
                summary = await bench.under(system, trace, factor * lone_s)
                name = f"SLO ×{factor}, {factor * lone_s * 1e3:.2f} ms"
                found.setdefault(name, {}).setdefault(system, []).append(summary)
    tables = {
        slo: {system: median_of(rows) for system, rows in rows_of.items()}
        for slo, rows_of in found.items()
    }
    for slo, rows in tables.items():
        print_summaries(console, rows, title=f"measured, {slo}")
    console.print(f"the sender itself was late by, in ms: {bench.median_lateness_ms()}")
    return {
        "measured": True,
        "source_batch1_ms": lone_s * 1e3,
        "capacity_rps": capacity,
        "throughput_ratio": ratio,
        "trace": {"name": trace.name, "rate": trace.rate, "duration_s": trace.duration_s},
        "tables": {
            slo: {system: summary.to_json() for system, summary in rows.items()}
            for slo, rows in tables.items()
        },
        "attainment_of_each_round": {
            slo: {system: [row.attainment for row in rows] for system, rows in rows_of.items()}
            for slo, rows_of in found.items()
        },
        "sender_lateness_ms": bench.median_lateness_ms(),
        "environment": describe_environment(
            streams=bench.streams,
            threads=1,
            max_batch_size=MAX_BATCH,
            rounds=options.rounds,
            share_of_source_capacity=options.share,
            seed=options.seed,
        ),
    }


def make_trace(options: argparse.Namespace, rate: float) -> Trace:
    """Return the requested trace, at a mean rate."""
    kind, _, rest = str(options.trace).partition(":")
    if kind == "azure":
        return azure(Path(rest), rate)
    if kind == "gamma":
        return gamma(rate, float(rest or 1), options.duration_s, options.seed)
    return poisson(rate, options.duration_s, options.seed)


def median_of(rounds: Sequence[Summary]) -> Summary:
    """Return the median of every figure."""
    documents = [summary.to_json() for summary in rounds]
    return Summary(**{name: _median([d[name] for d in documents]) for name in documents[0]})


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _median([value.get(name, 0) for value in known]) for name in names}
    return type(known[0])(np.median(known))


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--trace", default="poisson", help="poisson, gamma:CV2 or azure:FILE")
    parser.add_argument(
        "--share",
        type=float,
        default=0.8,
        help="mean rate as a share of the source model's capacity",
    )
    parser.add_argument(
        "--duration-s", type=float, default=10.0, help="seconds of the drawn traces"
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(measure(options))
    write_json(options.json, document)


if __name__ == "__main__":
    main()
