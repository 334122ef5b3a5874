"""Goodput beyond capacity and attainment of SlackFit under bursts, measured.

    python -m benchmarks.overload BUNDLE --data TEST.npz [--json FILE]

Engines in this process, as in ``benchmarks.policies``. Gamma arrivals of CV² 2, 4 and 8: the rate
rises in steps of a tenth of the source model's capacity until the source model under ``clockwork``
attains less than 95 %; there SlackFit and others run the same trace, in rounds; figures are
medians. Then goodput at rising rates, as shares of each system's own throughput at saturation: at
two and four times that rate it should stay near its peak, or near the offered rate if that is less
(``slackfit`` serves more if more is offered). With as many streams as cores the sender, which also
handles rejected requests, takes its time from the streams; ``--streams 1`` leaves it a core.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvloop
from benchmarks.common import make_parser
from benchmarks.policies import MAX_BATCH, Bench, median_of

from offramp.tools.bench.common.outcomes import Summary
from offramp.tools.bench.common.output import (
    describe_environment,
    print_summaries,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import gamma, poisson

SHARES = (0.8, 1.0, 1.5, 2.0, 4.0)
OVERLOADED = ("source:clockwork", "run-through", "slackfit")
BURSTY = ("source:clockwork", "run-through", "slackfit", "slackfit-bare")
DURATION_S = 5.0
SLO_FACTOR = 10
LEAST = 0.95
STEP = 0.1


async def overload(bench: Bench, slo_s: float, rounds: int) -> dict[str, Any]:
    """Goodput by load, of each system."""
    found: dict[str, Any] = {}
    for system in OVERLOADED:
        capacity = await bench.capacity_rps(system, 3.0)
        goodput: dict[str, float] = {}
        attained: dict[str, float] = {}
        offered: dict[str, float] = {}
        for share in SHARES:
            trace = poisson(share * capacity, DURATION_S, 1)
            offered[f"×{share:g}"] = len(trace.arrivals_s) / DURATION_S
            summary = median_of([await bench.under(system, trace, slo_s) for _ in range(rounds)])
            goodput[f"×{share:g}"] = summary.goodput_rps
            attained[f"×{share:g}"] = summary.attainment or 0.0
        peak = max(goodput.values())
        held = {name: goodput[name] / min(peak, offered[name]) for name in ("×2", "×4")}
        found[system] = {
            "capacity_rps": capacity,
            "goodput_rps": goodput,
            "attainment": attained,
            "offered_rps": offered,
            "held_at_twice": held["×2"],
            "held_at_four_times": held["×4"],
        }
        cells = "  ".join(f"{name} {value:,.0f}" for name, value in goodput.items())
        shares = ", ".join(f"{share:.3f} at {name}" for name, share in held.items())
        print(f"{system:17} capacity {capacity:,.0f}/s, goodput: {cells}; held: {shares}")
    return found


async def bursts(bench: Bench, slo_s: float, rounds: int) -> dict[str, Any]:
    """Attainment under gamma arrivals where the source model fails."""
    capacity = await bench.capacity_rps("source:delay", 3.0)
    console = wide_console()
    found = {}
    for cv2 in (2, 4, 8):
        share, reference = 0.3, 1.0
        while reference >= LEAST and share < 2.0:
            share += STEP
            trace = gamma(share * capacity, cv2, DURATION_S, cv2)
            reference = (await bench.under("source:clockwork", trace, slo_s)).attainment or 0.0
        if reference >= LEAST:
            raise RuntimeError(f"the source model attains {reference:.3f} at every rate tried")
        runs: dict[str, list[Summary]] = {}
        for _ in range(rounds):
            for system in BURSTY:
                runs.setdefault(system, []).append(await bench.under(system, trace, slo_s))
        rows = {system: median_of(summaries) for system, summaries in runs.items()}
        title = f"measured, {trace.name}: {share:.2f} of the source model's capacity"
        print_summaries(console, rows, title=title)
        found[f"cv2={cv2}"] = {
            "trace": trace.name,
            "share_of_source_capacity": share,
            "attainment_of_each_round": {
                system: [summary.attainment for summary in summaries]
                for system, summaries in runs.items()
            },
            "rows": {system: summary.to_json() for system, summary in rows.items()},
        }
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of the module's docstring."""
    bench = Bench(options.bundle, options.data, 4000, streams=options.streams)
    await bench.prepare()
    lone_s, _ = await bench.lone("source:clockwork")
    slo_s = options.slo_ms / 1e3 if options.slo_ms else SLO_FACTOR * lone_s
    print(f"SLO {slo_s * 1e3:.1f} ms; the source model takes {lone_s * 1e3:.2f} ms at batch 1")
    return {
        "measured": True,
        "slo_ms": slo_s * 1e3,
        "bursts": await bursts(bench, slo_s, options.rounds) if "bursts" in options.parts else None,
        "overload": await overload(bench, slo_s, options.rounds)
        if "overload" in options.parts
        else None,
        "sender_lateness_ms": bench.median_lateness_ms(),
        "environment": describe_environment(
            streams=bench.streams, threads=1, max_batch_size=MAX_BATCH, rounds=options.rounds
        ),
    }


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, help="default: as many as there are cores")
    parser.add_argument("--slo-ms", type=float, help="default: 10 times the latency at batch 1")
    parser.add_argument("--parts", default="bursts,overload")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(measure(options))
    write_json(options.json, document)


if __name__ == "__main__":
    main()
