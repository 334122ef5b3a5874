"""Depth of ``slackfit`` compared with the deepest setting for the same deadlines, simulated.

    python -m benchmarks.depth BUNDLE [--slo-ms 20] [--streams 1] [--duration-s 5] [--seed 0]
        [--json FILE]

The loads are shares of the streams' rate at the last exit, by the bundle's profile, in the
largest batch. The oracle knows the whole trace: of all single depths (``fixed:…``) it takes
the one of the highest agreement that is in time at least as often as ``slackfit``. A depth that
is in time less often did not "meet the same deadlines". All on virtual time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from benchmarks.common import make_parser

from offramp.bundle import Bundle
from offramp.certify.decision import MODEL_END
from offramp.engine.models.deployment import STAGE_OVERHEAD_S
from offramp.engine.models.options import ModelOptions
from offramp.engine.scheduling import OperatingPoint
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.outcomes import Summary, summarise
from offramp.tools.bench.common.output import (
    describe_environment,
    print_summaries,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import Trace, constant, gamma, poisson
from offramp.tools.bench.simulated_model import SimulatedModel, model_of
from offramp.tools.bench.simulation import draw_load, simulate

IDLE_RPS = 20.0
POISSON = (0.25, 0.5, 0.75, 0.95, 1.5, 2.0, 4.0)
GAMMA = (0.5, 0.9, 1.0, 1.2, 2.0)
CV2 = 8.0
MAX_BATCH = 32
POLICIES = ("slackfit", "slackfit-bare", "run-through")


def main() -> None:
    """Simulate, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument("--slo-ms", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--duration-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options_of_model = ModelOptions(max_batch_size=MAX_BATCH)
    bundle = Bundle.open(options.bundle)
    model = model_of(bundle, Mode.LEAVE, options_of_model, stage_overhead_s=STAGE_OVERHEAD_S)
    console = wide_console()
    found: dict[str, dict[str, Any]] = {}
    for name, trace in loads(model, options):
        rows = under(
            model, trace, slo_ms=options.slo_ms, streams=options.streams, seed=options.seed
        )
        print_summaries(console, rows, title=f"SIMULATED, {name}, {trace.rate:.0f}/s")
        label, oracle = best_in_hindsight(rows)
        console.print(f"the best single depth in hindsight: {label} ({oracle.agreement})")
        found[name] = {"rate": trace.rate, "hindsight": label, "rows": rows}
    if options.json is not None:
        shown = {
            name: case | {"rows": {policy: row.to_json() for policy, row in case["rows"].items()}}
            for name, case in found.items()
        }
        settings = {name: getattr(options, name) for name in ("slo_ms", "streams", "duration_s")}
        environment = describe_environment(seed=options.seed, max_batch_size=MAX_BATCH, **settings)
        write_json(options.json, {"simulated": True, "loads": shown, "environment": environment})


def loads(model: SimulatedModel, options: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    """Yield names and traces, from an idle server to overload."""
    last_busy_s = model.points.latencies.shrinking.busy_s[-1][MAX_BATCH]
    capacity = options.streams * MAX_BATCH / last_busy_s
    seconds, seed = options.duration_s, options.seed
    yield "idle", constant(IDLE_RPS, seconds)
    for share in POISSON:
        yield f"Poisson, {share:g} of capacity", poisson(share * capacity, seconds, seed)
    for share in GAMMA:
        yield f"gamma CV² 8, {share:g} of capacity", gamma(share * capacity, CV2, seconds, seed)


def under(
    model: SimulatedModel, trace: Trace, *, slo_ms: float, streams: int, seed: int = 0
) -> dict[str, Summary]:
    """Simulate all policies and every fixed depth under a trace."""
    names = [*POLICIES, *(f"fixed:{_exit_name(point)}" for point in model.points.points)]
    return {
        name: run(name, model, trace, slo_ms=slo_ms, streams=streams, seed=seed) for name in names
    }


def run(
    name: str, model: SimulatedModel, trace: Trace, *, slo_ms: float, streams: int, seed: int = 0
) -> Summary:
    """Simulate one policy under a trace."""
    points = deepcopy(model.points)  # a run learns; the next one starts afresh
    largest = points.latencies.max_batch_size
    scheduler = make_scheduler(
        PolicyName.parse(name), points, max_batch_size=largest, streams=streams
    )
    records = model.behaviour.leaves_at.size
    load = draw_load(trace.arrivals_s, trace.duration_s, records, slo_s=slo_ms / 1e3, seed=seed)
    outcomes = simulate(model.behaviour, scheduler, model.seconds, load, streams=streams)
    return summarise(outcomes, slo_ms=slo_ms)


def best_in_hindsight(rows: Mapping[str, Summary]) -> tuple[str, Summary]:
    """Return the best single depth in time as often as ``slackfit``; without one, ``slackfit``."""
    ours = rows["slackfit"]
    in_time = {
        name: row
        for name, row in rows.items()
        if name.startswith("fixed:") and (row.attainment or 0.0) >= (ours.attainment or 0.0)
    }
    known = in_time or {"slackfit": ours}
    return max(known.items(), key=lambda item: item[1].agreement or 0.0)


def _exit_name(point: OperatingPoint) -> str:
    return "final" if point.exit == MODEL_END else str(point.exit)


if __name__ == "__main__":
    main()
