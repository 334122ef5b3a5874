"""The simulator against the real server: same trace, same bundle, and how far they are apart.

    python -m benchmarks.simulator BUNDLE --data TEST.npz [--json FILE]

A real ``eeserve`` (one stream of one thread) is loaded by a real ``eebench load`` over loopback, on
the other core; ``eebench simulate`` gets the same trace. Two constants are measured first and given
to the simulation, since it knows nothing of them: what the server spends on a stage beyond its graph
(``benchmarks.executor``; an option here), and what a request spends on its way to the scheduler and
back, which is the latency of requests sent one at a time less what is simulated for them. Nothing is
fitted to the runs that are compared. Also: how many requests a second are simulated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offramp.tools.bench.environment import describe_environment

POLICIES = ("run-through", "slackfit", "source:clockwork")
LOADS = (0.3, 0.6, 0.85)
"""Shares of the throughput at saturation."""
QUANTILES = ("p50", "p90", "p99")
MAX_BATCH, SLO_MS = "16", 50.0
DURATION_S = "15"


def main() -> None:
    """Measure, simulate, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--stage-overhead-us", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for policy in POLICIES for row in compare(policy, options)]
    for row in rows:
        latencies = "  ".join(
            f"{q} {row['measured_ms'][q]:.2f}/{row['simulated_ms'][q]:.2f} ({row['error'][q]:+.0%})"
            for q in QUANTILES
        )
        print(
            f"{row['policy']:17} {row['rate']:6.0f}/s  measured/simulated ms: {latencies}  "
            f"exit shares apart by at most {row['exit_share_error']:.3f}"
        )
    speed = simulated_speed(options)
    for name, value in speed.items():
        print(f"{name:40} {value:10,.0f} requests/s simulated")
    if options.json is not None:
        document = {
            "rows": rows,
            "simulated_requests_per_second": speed,
            "environment": describe_environment(stage_overhead_us=options.stage_overhead_us),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def compare(policy: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one policy, a load each."""
    with serving(policy, options.bundle) as address:
        lone = load(address, options, ["--closed-loop", "1", "--duration-s", "4"])
        saturated = load(address, options, ["--closed-loop", "64", "--duration-s", "6"])
        capacity = saturated["throughput_rps"]
        sparse = ["--trace", "constant", "--rate", "20", "--duration-s", "60"]
        way_ms = (
            lone["latency_ms"]["mean"] - simulation(policy, options, sparse)["latency_ms"]["mean"]
        )
        for share in LOADS:
            rate = f"{share * capacity:.0f}"
            trace = ["--trace", "poisson", "--rate", rate, "--duration-s", DURATION_S]
            measured = load(address, options, [*trace, "--slo-ms", str(SLO_MS)])
            simulated = simulation(policy, options, [*trace, "--slo-ms", str(SLO_MS - way_ms)])
            yield row(policy, float(rate), way_ms, measured, simulated)


def row(
    policy: str, rate: float, way_ms: float, measured: dict[str, Any], simulated: dict[str, Any]
) -> dict[str, Any]:
    """What was measured beside what was simulated."""
    measured_ms = {q: measured["latency_ms"][q] for q in QUANTILES}
    simulated_ms = {q: simulated["latency_ms"][q] + way_ms for q in QUANTILES}
    labels = set(measured["exit_shares"]) | set(simulated["exit_shares"])
    shares = [
        abs(measured["exit_shares"].get(label, 0.0) - simulated["exit_shares"].get(label, 0.0))
        for label in labels
    ]
    return {
        "policy": policy,
        "rate": rate,
        "way_ms": way_ms,
        "measured_ms": measured_ms,
        "simulated_ms": simulated_ms,
        "error": {q: simulated_ms[q] / measured_ms[q] - 1 for q in QUANTILES},
        "measured_attainment": measured["attainment"],
        "simulated_attainment": simulated["attainment"],
        "exit_share_error": max(shares),
    }


def simulated_speed(options: argparse.Namespace) -> dict[str, float]:
    """Requests a second of the simulator, by policy and load."""
    found = {}
    for policy in POLICIES:
        for rate in ("500", "3000", "10000"):
            trace = ["--trace", "poisson", "--rate", rate, "--duration-s", f"{2e5 / float(rate):g}"]
            arguments = [*trace, "--max-batch-size", "32", "--slo-ms", str(SLO_MS)]
            text = eebench(
                ["simulate", str(options.bundle), "--policy", policy, *arguments]
            ).replace("\n", " ")
            match = re.search(r"([\d,]+) requests a\s+second\s+were\s+simulated", text)
            assert match is not None, text
            found[f"{policy} at {rate}/s"] = float(match[1].replace(",", ""))
    return found


def load(address: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Summary of a real load."""
    fixed = ["--model", "model", "--data", str(options.data)]
    return summary(["load", address, *fixed, *arguments], lambda document: document["summary"])


def simulation(
    policy: str, options: argparse.Namespace, arguments: Sequence[str]
) -> dict[str, Any]:
    """Summary of a simulated load."""
    fixed = ["--policy", policy, "--max-batch-size", MAX_BATCH]
    overhead = ["--stage-overhead-us", str(options.stage_overhead_us)]
    return summary(
        ["simulate", str(options.bundle), *fixed, *overhead, *arguments],
        lambda document: document["runs"][0]["summary"],
    )


def summary(arguments: Sequence[str], pick: Any) -> dict[str, Any]:
    """Run eebench with ``--json`` and take what is wanted of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        eebench([*arguments, "--json", str(path)])
        found: dict[str, Any] = pick(json.loads(path.read_text()))
        return found


def eebench(arguments: Sequence[str]) -> str:
    """Run eebench; gives what it prints."""
    command = [sys.executable, "-m", "offramp.tools.bench.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def serving(policy: str, bundle: Path) -> Iterator[str]:
    """A server of the bundle, as ``model``; gives its address."""
    mode = "off" if policy.startswith("source:") else "leave"
    command = [sys.executable, "-m", "offramp.server.cli", "--model", f"model={bundle}"]
    command += ["--policy", policy.removeprefix("source:"), "--mode", mode]
    command += ["--max-batch-size", MAX_BATCH, "--streams", "1", "--threads", "1"]
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


if __name__ == "__main__":
    main()
