"""Every policy under one trace, measured side by side on this machine.

    python -m benchmarks.policies BUNDLE --data TEST.npz --trace azure:FILE [--share 0.8]
        [--rounds 3] [--json FILE]

In one process and without the network (what is compared is scheduling): each system is an engine of
its own, opened anew, with two streams of one thread where there are two cores. First the source
model's latency at batch 1 and its capacity are measured; the trace is rescaled to a share of that
capacity; then every system runs it under both latency objectives, 2 and 10 times the source model's
latency at batch 1, system after system in rounds. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import uvloop
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.dataset import read_dataset
from offramp.engine.core import Engine
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.tools.bench.environment import describe_environment
from offramp.tools.bench.outcomes import Summary, summarise
from offramp.tools.bench.replay import Replay
from offramp.tools.bench.simulate_command import System
from offramp.tools.bench.table import print_summaries, wide_console
from offramp.tools.bench.traces import Trace, azure, constant, gamma, poisson

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
MODEL = "model"
SLO_FACTORS = (2, 10)
MAX_BATCH = 16
DELAY_MS = 1.0
"""Of ``delay``: how long it waits for batch mates."""
SATURATED = 128
"""Requests under way when capacity is measured."""
LONE_REQUESTS = 1000


class Bench:
    """A bundle, its data, and engines of it."""

    def __init__(
        self, bundle: Path, data: Path, samples: int, *, streams: int | None = None
    ) -> None:
        """Read all; ``streams`` are as many as there are cores, unless given."""
        self.bundle = bundle
        dataset = read_dataset(data, Bundle.open(bundle).manifest.inputs)
        rows = range(min(samples, len(dataset)))
        self._samples = [
            {name: np.ascontiguousarray(array[i : i + 1]) for name, array in dataset.inputs.items()}
            for i in rows
        ]
        self._reference: NDArray[np.int64] = np.zeros(len(self._samples), np.int64)
        self.streams = streams or os.cpu_count() or 1

    async def prepare(self) -> None:
        """Ask the source model for its answers."""
        async with self._replaying("source:delay") as replay:
            self._reference = await replay.answers()

    def _replaying(self, system: str) -> _Opened:
        return _Opened(self.bundle, system, self.streams, self._samples, self._reference)

    async def lone(self, system: str) -> tuple[float, float]:
        """Mean seconds of requests sent one after the other, in all and within stages."""
        async with self._replaying(system) as replay:
            return await replay.lone()

    async def sparse(self, system: str) -> tuple[float, float]:
        """Mean seconds of requests that come 10 ms apart, in all and within stages."""
        trace = constant(100.0, 6.0)
        async with self._replaying(system) as replay:
            outcomes = await replay.replay.open_loop(trace.arrivals_s, trace.duration_s, None)
            return float(outcomes.latency_s.mean()), replay.stages_s() / len(trace.arrivals_s)

    async def capacity_rps(self, system: str, duration_s: float) -> float:
        """Answers a second with many requests under way."""
        async with self._replaying(system) as replay:
            return await replay.replay.closed_loop(SATURATED, duration_s)

    async def under(self, system: str, trace: Trace, slo_s: float) -> Summary:
        """Run a trace."""
        async with self._replaying(system) as replay:
            outcomes = await replay.replay.open_loop(trace.arrivals_s, trace.duration_s, slo_s)
        return summarise(outcomes, slo_ms=slo_s * 1e3)


class _Opened:
    """An engine while it is open, and a replay on it."""

    def __init__(
        self,
        bundle: Path,
        system: str,
        streams: int,
        samples: Sequence[dict[str, NDArray[Any]]],
        reference: NDArray[np.int64],
    ) -> None:
        parsed = System.parse(system)
        self._bundle = bundle
        self._samples = samples
        self._reference = reference
        delayed = parsed.scheduling.name == "delay"
        self._options = EngineOptions(
            mode=parsed.mode,
            streams=streams,
            threads=1,
            defaults=ModelOptions(
                scheduling=parsed.scheduling,
                max_batch_size=MAX_BATCH,
                max_queue_delay_ms=DELAY_MS if delayed else 0.0,
            ),
        )

    async def __aenter__(self) -> Self:
        self._engine = await Engine.open({MODEL: self._bundle}, self._options)
        self.replay = Replay(self._engine, MODEL, self._samples, self._reference)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.close()

    async def answers(self) -> NDArray[np.int64]:
        """The class of every sample."""
        found = []
        for sample in self._samples:
            (answer,) = (await self._engine.infer(MODEL, sample)).outputs.values()
            found.append(int(answer[0].argmax()))
        return np.array(found)

    async def lone(self) -> tuple[float, float]:
        """Mean seconds of requests sent one after the other, in all and within stages."""
        before = self.stages_s()
        times = []
        for number in range(LONE_REQUESTS):
            started_s = time.monotonic()
            await self._engine.infer(MODEL, self._samples[number % len(self._samples)])
            times.append(time.monotonic() - started_s)
        return float(np.mean(times)), (self.stages_s() - before) / LONE_REQUESTS

    def stages_s(self) -> float:
        """Seconds that stages have run."""
        return sum(stage.run_s.total for stage in self._engine.statistics()[MODEL].stages)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that the module's docstring says."""
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
    for _ in range(options.rounds):
        for factor in SLO_FACTORS:
            for system in options.systems.split(","):
                summary = await bench.under(system, trace, factor * lone_s)
                found.setdefault(f"SLO ×{factor}", {}).setdefault(system, []).append(summary)
    tables = {
        slo: {system: median_of(rows) for system, rows in systems.items()}
        for slo, systems in found.items()
    }
    for slo, rows in tables.items():
        title = f"measured, {slo} ({float(slo.split('×')[1]) * lone_s * 1e3:.2f} ms)"
        print_summaries(console, rows, title=title)
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
    """The trace that was asked for, at a mean rate."""
    kind, _, rest = str(options.trace).partition(":")
    if kind == "azure":
        return azure(Path(rest), rate)
    if kind == "gamma":
        return gamma(rate, float(rest or 1), options.duration_s, options.seed)
    return poisson(rate, options.duration_s, options.seed)


def median_of(rounds: Sequence[Summary]) -> Summary:
    """The round whose p99 is the median one, with figures that belong together."""
    ranked = sorted(rounds, key=lambda summary: summary.latency_ms.get("p99", float("inf")))
    return ranked[len(ranked) // 2]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trace", default="poisson", help="poisson, gamma:CV2 or azure:FILE")
    parser.add_argument("--share", type=float, default=0.8, help="of the source model's capacity")
    parser.add_argument("--duration-s", type=float, default=10.0, help="of drawn traces")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(measure(options))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
