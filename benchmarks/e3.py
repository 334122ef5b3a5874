"""E3's evaluation (section 5) on virtual time: benefit of splits on dedicated devices.

    python -m benchmarks.e3 [--json FILE] [--only NAME,…] [--trace TRACE.csv.gz]

All goodputs are SIMULATED: the server's own scheduler under the plan's placement, on devices with
assumed stage times. Goodput is the highest rate of evenly spaced requests, to 2 %, at which 99.9 %
are answered within 100 ms and no backlog grows, over the second half of 0.6 s of virtual time (of
1 s for the mixes).

Systems: source is the unmodified model on all devices, in batches. Run-through has exits, and
batches that shrink, as DeeBERT. Dedicated is a plan of the optimiser whose devices run their own
split only, as in E3. Stealing is the same plan, whose devices take other work if their own has no
full batch. Shared has no splits: all devices serve all stages, and batches are refilled.

Assumed, since the paper prints none: batch curves of devices (benchmarks/clusters.py), 12 layers
with an exit after each at 2 % of a layer, easy rows that leave evenly over the first half, and 128
x 768 floats per row that changes devices. A transfer takes 0.1 ms and the time at 80 Gb/s; the
receiving device waits for it, while the paper overlaps transfers with work (3.2.2). Unprofitable
exits are off and plans know the true shares, unless stated otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.clusters import HETEROGENEOUS, HOMOGENEOUS, cluster_of, going_on, model_of
from benchmarks.common import described, make_parser, some_of
from benchmarks.e3_published import DIFFERS, PUBLISHED
from benchmarks.e3_systems import (
    Search,
    System,
    draw_depths,
    exits_of,
    planned,
    run,
    shared,
)
from rich.table import Table

from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.prediction import predict
from offramp.tools.bench.common.outcomes import summarise
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import azure

EASY: Final = (0.8, 0.5, 0.2)
SIZES: Final = (1, 4, 16, 64)
"""Batch sizes in addition to 8, which the mixes have."""
SLO_S: Final = 0.1
SEARCH: Final = Search(slo_s=SLO_S, duration_s=6 * SLO_S)
LONGER: Final = Search(slo_s=SLO_S, duration_s=10 * SLO_S)
"""Search for the goodput of the mixes, with longer loads."""
ERRORS: Final = (-0.2, 0.2)
"""Relative errors of the share that leaves: 0.2 expects a fifth fewer to leave than do."""
STRAGGLER: Final = 4.0
"""Slowdown of a straggler relative to other devices of its kind."""

Row = dict[str, Any]


def main() -> None:
    """Simulate, print each experiment, and write all of them if asked."""
    parser = make_parser(__doc__)
    named = [*EXPERIMENTS, "bursts"]
    parser.add_argument(
        "--only",
        type=some_of(named),
        metavar="NAME,…",
        help=f"experiments to run, of {', '.join(named)} (default: all that have their data)",
    )
    parser.add_argument(
        "--trace", type=Path, help="file of an Azure LLM inference trace, for the experiment bursts"
    )
    options = parser.parse_args()
    check_outputs(options.json)
    experiments = dict(EXPERIMENTS)
    if options.trace is not None:
        experiments["bursts"] = functools.partial(bursts, options.trace)
    names = options.only or list(experiments)
    if "bursts" in names and options.trace is None:
        parser.error("--only bursts needs --trace, the file of a trace")
    found: dict[str, Any] = {}
    for name in names:
        rows = list(experiments[name]())
        show(name, rows)
        found[name] = {
            "rows": rows,
            "published": " ".join(PUBLISHED[name].split()),
            "where_ours_differs": " ".join(DIFFERS[name].split()),
        }
    document = {
        "simulated": "all goodputs",
        "assumptions": " ".join((__doc__ or "").split("TRACE.csv.gz]")[1].split()),
        "experiments": found,
        "environment": describe_environment(seed=SEARCH.seed, virtual_s=SEARCH.duration_s),
    }
    write_json(options.json, document)


def show(name: str, rows: Sequence[Row]) -> None:
    caption = f"{' '.join(PUBLISHED[name].split())}. Here: {' '.join(DIFFERS[name].split())}"
    table = Table(*rows[0], title=f"SIMULATED {name}", caption=caption)
    for row in rows:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    wide_console(140).print(table)


def make_plan(
    model: ModelFacts, cluster: Cluster, size: int, *, wrapper: bool = True
) -> ClusterPlan:
    goal = PlanningGoal(batch_sizes=(size,), wrapper=wrapper)
    return make_cluster_plan(model, cluster, goal).plan


def limit_rps(system: System, shares: Sequence[float]) -> float:
    """Return the rows per second of all devices if all batches are full and transfers are free."""
    placement, size = system.placement, system.batch_size
    each_s = [
        sum(
            shares[first] * row[size]
            for (first, _, _), row in zip(
                system.spans, placement.kind_of(stream).seconds, strict=True
            )
        )
        for stream in range(len(placement.streams))
    ]
    return sum(size / seconds for seconds in each_s)


class EasyMix:
    """A mix of easy and hard rows on a cluster at a batch size, with its systems."""

    def __init__(
        self,
        easy: float,
        cluster: Cluster,
        size: int,
        *,
        expected: ModelFacts | None = None,
        wrapper: bool = True,
    ) -> None:
        """Plan the mix; ``expected`` is the model that the plan assumes, if not the true one."""
        self.model = model_of(going_on(easy))
        self.depths = draw_depths(self.model.going_on, SEARCH.seed)
        self.plan = make_plan(expected or self.model, cluster, size, wrapper=wrapper)
        self._cluster = cluster
        self._found: dict[tuple[str, bool, Search], float] = {}
        on = exits_of(self.plan)
        self.systems: Mapping[str, System] = {
            "source": shared(self.model, cluster, size, "delay"),
            "run-through": shared(self.model, cluster, size, "run-through", on),
            "dedicated": planned(self.plan, self.model, cluster, steals=False),
            "stealing": planned(self.plan, self.model, cluster, steals=True),
            "shared": shared(self.model, cluster, size, "refill", on),
        }

    def goodput(self, name: str, *, straggler: bool = False, search: Search = SEARCH) -> float:
        """Return requests per second; a straggler is a slow device of the last split."""
        system = self.systems[name]
        if (name, straggler, search) in self._found:
            return self._found[name, straggler, search]
        if name == "dedicated":
            likely = predict(self.plan, self.model, self._cluster, arrival_rps=1.0).rate_rps
        else:
            likely = limit_rps(system, self.model.shares.tolist())
        guess = likely * LIKELY[name]
        slower = {system.last_split: STRAGGLER} if straggler else None
        found = search.sustained(system, self.depths, guess, slower)
        self._found[name, straggler, search] = found
        print(f"  {name:12} {found:10,.0f}/s", flush=True)
        return found


@functools.cache
def alike(easy: float, size: int) -> EasyMix:
    """Return a mix on 16 V100, planned with its true shares."""
    return EasyMix(easy, cluster_of(HOMOGENEOUS), size)


LIKELY: Final = {
    "source": 0.97,
    "run-through": 0.75,
    "dedicated": 0.8,
    "stealing": 0.87,
    "shared": 0.88,
}
"""Start of the search for a system's goodput, relative to its limit or its prediction."""
SYSTEMS: Final = tuple(LIKELY)
SPLIT: Final = ("dedicated", "stealing", "shared")


def ratios(mix: EasyMix, source: float, search: Search = SEARCH) -> Row:
    """Return the goodputs of systems relative to that of the source model."""
    names = SYSTEMS[1:]
    return {f"{name} / source": mix.goodput(name, search=search) / source for name in names}


def mixes() -> Iterator[Row]:
    source = alike(EASY[0], 8).goodput("source", search=LONGER)  # equal in all
    for easy in EASY:
        mix = alike(easy, 8)
        yield {"easy": f"{easy:.0%}", "source rows/s": round(source),
               **ratios(mix, source, LONGER), "splits": described(mix.plan)}  # fmt: skip


def sizes() -> Iterator[Row]:
    for size in SIZES:
        mix = alike(0.8, size)
        source = mix.goodput("source")
        yield {"batch": size, "source rows/s": round(source), **ratios(mix, source),
                     "splits": described(mix.plan)}  # fmt: skip


def forecast_errors() -> Iterator[Row]:
    cluster = cluster_of(HOMOGENEOUS)
    for easy in EASY[:2]:
        right = alike(easy, 8)
        best = {name: right.goodput(name) for name in ("dedicated", "stealing")}
        for error in ERRORS:
            wrong = [1 - (1 - share) * (1 - error) for share in right.model.going_on]
            mix = EasyMix(easy, cluster, 8, expected=model_of(np.maximum(wrong, 0.0).tolist()))
            yield {
                "easy": f"{easy:.0%}", "fewer leave than expected by": f"{-error:+.0%}",
                **{f"{name}: lost %": 100 * (1 - mix.goodput(name) / rps)
                   for name, rps in best.items()},
                "splits": described(mix.plan),
            }  # fmt: skip


def heterogeneous() -> Iterator[Row]:
    for size in (8, 1):
        base, mix = alike(0.8, size), EasyMix(0.8, cluster_of(HETEROGENEOUS), size)
        source, best = base.goodput("source"), base.goodput("stealing")
        found = {name: mix.goodput(name) for name in ("source", *SPLIT)}
        yield {
            "batch": size, "16 V100: source rows/s": round(source),
            "16 V100: stealing / source": best / source,
            **{f"mixed: {name} / source of 16 V100": rps / source for name, rps in found.items()},
            "mixed / 16 V100, stealing": found["stealing"] / best, "splits": described(mix.plan),
        }  # fmt: skip


def stragglers() -> Iterator[Row]:
    mix = alike(0.8, 8)
    for name in ("source", *SPLIT):
        usual, slow = mix.goodput(name), mix.goodput(name, straggler=True)
        yield {"system": name, "rows/s": round(usual), "with a straggler": round(slow),
                     "lost %": 100 * (1 - slow / usual)}  # fmt: skip


def wrapper() -> Iterator[Row]:
    for exit_cost in (0.02, 0.2):
        cluster = cluster_of(HOMOGENEOUS, exit_cost=exit_cost)
        found = {
            on: {name: mix.goodput(name) for name in ("dedicated", "stealing")}
            for on, mix in ((w, EasyMix(0.8, cluster, 8, wrapper=w)) for w in (True, False))
        }
        yield {"exit costs % of a layer": 100 * exit_cost,
                     **{f"{name}: with / without": rps / found[False][name]
                        for name, rps in found[True].items()}}  # fmt: skip


def bursts(path: Path) -> Iterator[Row]:
    """Yield shares of answers in time under a recorded trace, at a rate for the source model."""
    mix = alike(0.8, 8)
    limit = limit_rps(mix.systems["source"], mix.model.shares.tolist())
    for load in (0.5, 0.9):
        trace = azure(path, load * limit)
        row: Row = {"mean rate / limit of source": load, "requests": len(trace.arrivals_s)}
        for name, system in mix.systems.items():
            outcomes = run(system, trace, mix.depths, slo_s=SLO_S)
            found = summarise(outcomes, slo_ms=1e3 * SLO_S)
            row[f"{name}: in time %"] = 100 * (found.attainment or 0.0)
        yield row


EXPERIMENTS: Final[Mapping[str, Callable[[], Iterator[Row]]]] = {
    "mixes": mixes,
    "forecast errors": forecast_errors,
    "heterogeneous": heterogeneous,
    "stragglers": stragglers,
    "wrapper": wrapper,
    "sizes": sizes,
}

if __name__ == "__main__":
    main()
