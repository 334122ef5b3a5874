"""Comparison of the simulator with real runs: same trace, same bundle.

    python -m benchmarks.simulator BUNDLE --data TEST.npz [--json FILE]

Each trace is run three times: by the real engine in this process, by a real ``eeserve`` loaded over
loopback by ``eebench load``, and by the simulator. Engine and server have one stream of one thread;
the other core is for the sender.

Two constants are measured beforehand and passed to the simulator, which cannot know them. One is
the factor of stage times over the profile when requests follow each other. The other is the time of
a request on its way to the scheduler and back: the latency of requests 10 ms apart minus the
simulated latency, once for the engine and once for the server. It includes the cold caches and
sleeping cores of such requests. Nothing is fitted to the compared runs. The number of simulated
requests per second is printed first.

In the JSON file, ``slowdown`` and ``way_ms`` are the two constants, ``error`` is the simulated
latency divided by the measured one, minus 1, and ``exit_share_error`` is the largest difference
between the shares of samples that leave at an exit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from benchmarks.common import make_parser
from benchmarks.policies import MAX_BATCH, Bench

from offramp.bundle import Bundle
from offramp.engine.models.deployment import STAGE_OVERHEAD_S
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import scheduler_of
from offramp.tools.bench.common.outcomes import Outcomes, Summary, summarise
from offramp.tools.bench.common.output import describe_environment, write_json
from offramp.tools.bench.common.traces import Trace, constant, poisson
from offramp.tools.bench.simulate_command import SystemUnderTest
from offramp.tools.bench.simulated_model import SimulatedModel, model_of
from offramp.tools.bench.simulation import draw_load, simulate

POLICIES = ("run-through", "source:clockwork")
LOADS = (0.3, 0.6)
"""Shares of the server's throughput at saturation."""
QUANTILES = ("p50", "p90", "p99")
SLO_S = 0.05
DURATION_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """The time of a request on its way to the scheduler and back."""

    name: str
    seconds: float


class Twin:
    """A system that is measured, with its simulation."""

    def __init__(self, policy: str, bundle: Path) -> None:
        """Read the bundle, to simulate it under a policy."""
        self.system = SystemUnderTest.parse(policy)
        self._bundle = Bundle.open(bundle)
        self._options = ModelOptions(scheduling=self.system.scheduling, max_batch_size=MAX_BATCH)
        self.slowdown = 1.0

    def model(self) -> SimulatedModel:
        """Return the simulated model at the current slowdown."""
        return model_of(
            self._bundle,
            self.system.mode,
            self._options,
            stage_overhead_s=STAGE_OVERHEAD_S,
            slowdown=self.slowdown,
        )

    def simulated(self, trace: Trace, slo_s: float) -> Summary:
        """Run a trace on virtual time."""
        return summarise(self.run(trace, slo_s)[0], slo_ms=slo_s * 1e3)

    def run(self, trace: Trace, slo_s: float) -> tuple[Outcomes, float]:
        """Run a trace on virtual time; also return the seconds of real time."""
        model = self.model()
        scheduler = scheduler_of(model.points, self._options, streams=1)
        records = model.behaviour.leaves_at.size
        load = draw_load(trace.arrivals_s, trace.duration_s, records, slo_s=slo_s, seed=1)
        started_s = time.perf_counter()
        outcomes = simulate(model.behaviour, scheduler, model.seconds, load, streams=1)
        return outcomes, time.perf_counter() - started_s

    def lone_s(self) -> float:
        """Return the simulated mean latency of requests that come one at a time."""
        lone = constant(1.0, 4000.0)
        return self.simulated(lone, float("inf")).latency_ms["mean"] / 1e3


async def compare(policy: str, options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """Compare measured and simulated runs of one policy; return a row for each load."""
    twin = Twin(policy, options.bundle)
    _, stages_s = await bench.lone(policy)
    twin.slowdown = stages_s / twin.lone_s()
    lone_s, _ = await bench.sparse(policy)
    engine = Way("engine", lone_s - twin.lone_s())
    rows = []
    with serving(policy, options.bundle) as address:
        sparse = ["--trace", "constant", "--rate", "100", "--duration-s", "6"]
        lone_ms = load(address, options, sparse)["latency_ms"]["mean"]
        server = Way("server", lone_ms / 1e3 - twin.lone_s())
        saturated = load(address, options, ["--closed-loop", "64", "--duration-s", "5"])
        for share in LOADS:
            rate = round(share * saturated["throughput_rps"])
            trace = poisson(rate, DURATION_S, 1)
            measured = (await bench.under(policy, trace, SLO_S)).to_json()
            rows.append(row(policy, rate, engine, measured, twin))
            arguments = ["--rate", str(rate), "--duration-s", str(DURATION_S), "--seed", "1"]
            measured = load(address, options, [*arguments, "--slo-ms", str(SLO_S * 1e3)])
            rows.append(row(policy, rate, server, measured, twin))
    return rows


def row(
    policy: str, rate: float, way: Way, measured: Mapping[str, Any], twin: Twin
) -> dict[str, Any]:
    """Return measured figures next to the simulated ones."""
    simulated = twin.simulated(poisson(rate, DURATION_S, 1), SLO_S - way.seconds).to_json()
    measured_ms = {q: measured["latency_ms"][q] for q in QUANTILES}
    simulated_ms = {q: simulated["latency_ms"][q] + way.seconds * 1e3 for q in QUANTILES}
    labels = set(measured["exit_shares"]) | set(simulated["exit_shares"])
    apart = [
        abs(measured["exit_shares"].get(label, 0.0) - simulated["exit_shares"].get(label, 0.0))
        for label in labels
    ]
    return {
        "policy": policy,
        "rate": rate,
        "measured_on": way.name,
        "way_ms": way.seconds * 1e3,
        "slowdown": twin.slowdown,
        "measured_ms": measured_ms,
        "simulated_ms": simulated_ms,
        "error": {q: simulated_ms[q] / measured_ms[q] - 1 for q in QUANTILES},
        "measured_attainment": measured["attainment"],
        "simulated_attainment": simulated["attainment"],
        "exit_share_error": max(apart),
    }


def speeds(bundle: Path) -> dict[str, float]:
    """Return the simulated requests per second of one core, by policy and load."""
    found = {}
    for policy in POLICIES:
        twin = Twin(policy, bundle)
        capacity = 1.0 / twin.lone_s()
        for share in (0.5, 1.0, 3.0):
            trace = poisson(share * capacity, 2e5 / (share * capacity), 1)
            took_s, batch = [], None
            for _ in range(3):
                outcomes, seconds = twin.run(trace, SLO_S)
                took_s.append(seconds)
                batch = summarise(outcomes, slo_ms=None).mean_batch_size
            name = f"{policy} at {share * capacity:.0f}/s (mean batch {batch:.1f})"
            found[name] = trace.arrivals_s.size / float(np.median(took_s))
    return found


def load(address: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Send a real load to a server; return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        fixed = ["--model", "model", "--data", str(options.data), "--json", str(path)]
        fixed += ["--warm-up-s", "0"]
        command = [sys.executable, "-m", "offramp.tools.bench.cli", "load", address]
        subprocess.run([*command, *fixed, *arguments], check=True, capture_output=True)
        found: dict[str, Any] = json.loads(path.read_text())["summary"]
        return found


@contextmanager
def serving(policy: str, bundle: Path) -> Iterator[str]:
    """Serve the bundle as ``model``; yield the server's address."""
    system = SystemUnderTest.parse(policy)
    command = [sys.executable, "-m", "offramp.server.cli", "--model", f"model={bundle}"]
    command += ["--policy", str(system.scheduling), "--mode", system.mode.value]
    command += ["--max-batch-size", str(MAX_BATCH), "--streams", "1", "--threads", "1"]
    command += ["--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                found = re.search(r"gRPC on (\S+),", line)
                if found:
                    yield found[1]
                    return
            raise RuntimeError("eeserve ended before it was ready")
        finally:
            process.terminate()
            process.communicate()


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all policies."""
    bench = Bench(options.bundle, options.data, 2000, streams=1)
    await bench.prepare()
    return [row for policy in POLICIES for row in await compare(policy, options, bench)]


def main() -> None:
    """Measure, simulate, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    options = parser.parse_args()
    speed = speeds(options.bundle)
    for name, value in speed.items():
        print(f"{name:50} {value:10,.0f} requests/s simulated")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(options))
    for found in rows:
        latencies = "  ".join(
            f"{q} {found['measured_ms'][q]:.2f}/{found['simulated_ms'][q]:.2f} "
            f"({found['error'][q]:+.0%})"
            for q in QUANTILES
        )
        print(
            f"{found['policy']:17} {found['rate']:5.0f}/s {found['measured_on']}: "
            f"measured/simulated ms {latencies}  exit shares apart {found['exit_share_error']:.3f}"
        )
    if options.json is not None:
        document = {
            "rows": rows,
            "simulated_requests_per_second": speed,
            "environment": describe_environment(max_batch_size=MAX_BATCH, slo_ms=SLO_S * 1e3),
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
