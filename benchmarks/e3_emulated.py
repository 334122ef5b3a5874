"""E3's evaluation (section 5), MEASURED ON EMULATED DEVICES: real router, wire and processes.

    python -m benchmarks.e3_emulated [--only NAME,…] [--stretch 20] [--duration-s 0.5] [--json FILE]

Each device is a worker process that answers from a script and sleeps for the device's times and for
the transfers of rows. All times are stretched twentyfold, so that two cores carry 29 devices; rates
are converted back to those of the devices. Goodput is measured with closed-loop clients: rows per
second that are answered within 100 ms. The number of rows in flight is four batches for each
device, or 70 ms of the simulated rate, if that is less. The SIMULATED result of benchmarks/e3.py
for the same systems, the highest rate of evenly spaced requests, is shown next to it. Devices,
layers, exits, links and rows are assumed as in benchmarks/e3.py.

Systems: source is the unmodified model on all devices, in batches. Run-through has exits, and
batches that shrink (DeeBERT, BranchyNet). Dedicated is a plan whose devices run their own split
only, as in E3. If overlapped, each device also receives the next batch and sends the last one
while it computes (E3 3.2.2; batches_per_worker = 2). Stealing is the same plan, but its devices
take other work if their own split has none, as ``eeserve --cluster`` serves it.

The experiments fewest and cheapest count the devices for 6,000 rows per second, 80 % easy. They
start with the number that simulated rates need, and add devices until the measured goodput is as
high.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from benchmarks.clusters import (
    HETEROGENEOUS,
    HOMOGENEOUS,
    PRICES,
    ROW_BYTES,
    cluster_of,
    going_on,
    model_of,
)
from benchmarks.common import make_parser, some_of
from benchmarks.e3 import LIKELY, SLO_S, STRAGGLER, EasyMix, limit_rps, make_plan
from benchmarks.e3_systems import System, planned
from benchmarks.emulated import (
    EmulatedCluster,
    emulated_cluster,
    goodput_emulated,
    show_emulated,
    write_emulated,
)

from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.tools.bench.common.output import describe_environment

EASY: Final = (0.8, 0.5, 0.2)
SIZES: Final = (1, 4, 16, 64)
ERRORS: Final = (-0.2, 0.2)
PLANS: Final = ("dedicated", "dedicated, overlapped", "stealing", "stealing, overlapped")
BEST: Final = PLANS[-1]
FULL: Final = 0.7
"""Largest number of requests in flight: this part of the objective times the simulated rate."""

WANTED_RPS: Final = 6_000.0
PRICED_SIZES: Final = (1, 4, 8)
OFFERED: Final = {"V100": 16, "P100": 16, "K80": 48}
"""Available devices; the cheapest are taken."""

Row = dict[str, Any]


class EmulatedGoodputs:
    """Goodputs of systems on the devices of one cluster."""

    def __init__(self, emulated: EmulatedCluster, duration_s: float) -> None:
        self._emulated, self._duration_s = emulated, duration_s

    def goodput(
        self, mix: EasyMix, name: str, *, system: System | None = None, straggler: bool = False
    ) -> tuple[float, float]:
        """Return the goodput on emulated devices, and the simulated goodput, in rows per second.

        ``system`` is measured instead of the mix's system ``name``; the simulated goodput is still
        that of the mix's system.
        """
        base, _, overlapped = name.partition(", ")
        simulated = mix.goodput(base, straggler=straggler)
        served = system or mix.systems[base]
        self._emulated.slow_down({served.last_split: STRAGGLER} if straggler else None)
        most = 4 * len(served.placement.streams) * served.batch_size
        found = goodput_emulated(
            self._emulated,
            served,
            mix.depths,
            slo_s=SLO_S,
            under_way=max(1, int(min(most, FULL * SLO_S * simulated))),
            duration_s=self._duration_s,
            batches_per_worker=2 if overlapped else 1,
        )
        print(f"  {name:22} {found:10,.0f}/s on emulated devices", flush=True)
        return found, simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedBench:
    """Settings of the emulated devices, and the duration of each load."""

    stretch: float
    duration_s: float

    @contextmanager
    def devices(self, counts: Mapping[str, int]) -> Iterator[EmulatedGoodputs]:
        """Start a worker for each device; they end with the context."""
        cluster = cluster_of(counts)
        with emulated_cluster(cluster, row_bytes=ROW_BYTES, stretch=self.stretch) as emulated:
            yield EmulatedGoodputs(emulated, self.duration_s)


def against(row: Row, found: Mapping[str, tuple[float, float]], of: str = "source") -> Row:
    """Add goodputs relative to those of the system ``of``, and the error of the simulation."""
    base = found[of][0]
    row[f"{of} rows/s"] = round(base)
    for name, (measured, simulated) in found.items():
        if name != of:
            row[f"{name} / {of}"] = measured / base
        if "overlapped" not in name:
            row[f"{name}: simulated / measured"] = simulated / measured
    return row


def mixes(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figures 7 and 16: mixes of easy and hard rows, batches of 8."""
    with bench.devices(HOMOGENEOUS) as measured:
        for easy in EASY:
            mix = EasyMix(easy, cluster_of(HOMOGENEOUS), 8)
            names = ("source", "run-through", *PLANS)
            found = {name: measured.goodput(mix, name) for name in names}
            row = against({"easy": f"{easy:.0%}"}, found)
            row[f"{BEST} / run-through"] = found[BEST][0] / found["run-through"][0]
            yield row


def sizes(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figures 7 to 9: batch sizes, 80 % easy rows."""
    with bench.devices(HOMOGENEOUS) as measured:
        for size in SIZES:
            mix = EasyMix(EASY[0], cluster_of(HOMOGENEOUS), size)
            names = ("source", "run-through", "dedicated, overlapped", BEST)
            yield against({"batch": size}, {name: measured.goodput(mix, name) for name in names})


def forecast_errors(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figure 22: plans for a forecast that is wrong by a fifth."""
    with bench.devices(HOMOGENEOUS) as measured:
        cluster = cluster_of(HOMOGENEOUS)
        for easy in EASY[:2]:
            right = EasyMix(easy, cluster, 8)
            names = ("dedicated, overlapped", BEST)
            best = {name: measured.goodput(right, name)[0] for name in names}
            for error in ERRORS:
                wrong = [1 - (1 - share) * (1 - error) for share in going_on(easy)]
                plan = make_plan(model_of(np.maximum(wrong, 0.0).tolist()), cluster, 8)
                row: Row = {"easy": f"{easy:.0%}", "fewer leave than expected by": f"{-error:+.0%}"}
                for name, goodput in best.items():
                    steals = name.startswith("stealing")
                    system = planned(plan, right.model, cluster, steals=steals)
                    found, _ = measured.goodput(right, name, system=system)
                    row[f"{name}: lost %"] = 100 * (1 - found / goodput)
                yield row


def stragglers(bench: EmulatedBench) -> Iterator[Row]:
    """Yield goodputs while one device of the last split takes four times as long (E3 3.3)."""
    with bench.devices(HOMOGENEOUS) as measured:
        mix = EasyMix(EASY[0], cluster_of(HOMOGENEOUS), 8)
        for name in ("source", "dedicated, overlapped", BEST):
            usual, _ = measured.goodput(mix, name)
            slow, _ = measured.goodput(mix, name, straggler=True)
            yield {"system": name, "rows/s": round(usual), "with a straggler": round(slow),
                   "lost %": 100 * (1 - slow / usual)}  # fmt: skip


def heterogeneous(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figure 13: 6 V100, 8 P100 and 15 K80, which cost as much as 16 V100."""
    with bench.devices(HETEROGENEOUS) as measured:
        for size in (8, 1):
            mix = EasyMix(EASY[0], cluster_of(HETEROGENEOUS), size)
            names = ("source", "dedicated, overlapped", BEST)
            yield against({"batch": size}, {name: measured.goodput(mix, name) for name in names})


def fewest(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figure 14: the number of V100 that sustain a rate.

    The search starts at the smallest number in simulation, and adds one device at a time.
    """
    for size in PRICED_SIZES:
        row: Row = {"batch": size}
        for name in ("source", "run-through", BEST):
            count, found = _least(bench, name, size)
            row[f"{name}: V100"], row[f"{name}: rows/s"] = count, round(found)
        yield row


def _least(bench: EmulatedBench, name: str, size: int) -> tuple[int, float]:
    base = name.partition(", ")[0]
    of_16 = EasyMix(EASY[0], cluster_of(HOMOGENEOUS), size).goodput(base)
    count = math.ceil(WANTED_RPS / of_16 * HOMOGENEOUS["V100"])
    while True:
        with bench.devices({"V100": count}) as measured:
            mix = EasyMix(EASY[0], cluster_of({"V100": count}), size)
            found, _ = measured.goodput(mix, name)
        if found >= WANTED_RPS:
            return count, found
        count += 1


def cheapest(bench: EmulatedBench) -> Iterator[Row]:
    """Yield figure 15: the dollars per hour of devices of three types that sustain a rate."""
    for size in PRICED_SIZES:
        row: Row = {"batch": size}
        for name, least in (
            ("source", _cheapest_shared),
            ("run-through", _cheapest_shared),
            (BEST, _cheapest_plan),
        ):
            wanted_rps = WANTED_RPS
            while True:
                counts = least(name, size, wanted_rps)
                with bench.devices(counts) as measured:
                    mix = EasyMix(EASY[0], cluster_of(counts), size)
                    found, _ = measured.goodput(mix, name)
                if found >= WANTED_RPS:
                    break
                wanted_rps *= 1.05
            row[f"{name}: $/h"] = sum(PRICES[kind] * n for kind, n in counts.items())
            row[f"{name}: devices"] = "+".join(f"{n} {kind}" for kind, n in counts.items())
            row[f"{name}: rows/s"] = round(found)
        yield row


def _cheapest_shared(name: str, size: int, wanted_rps: float) -> dict[str, int]:
    """Return the cheapest devices whose limits reach the rate, if all devices serve all stages."""
    limits = {}
    for kind in OFFERED:
        mix = EasyMix(EASY[0], cluster_of({kind: 1}), size)
        limits[kind] = LIKELY[name] * limit_rps(mix.systems[name], mix.model.shares.tolist())
    counts = itertools.product(*(range(most + 1) for most in OFFERED.values()))
    kinds = tuple(OFFERED)
    enough = (
        dict(zip(kinds, row, strict=True))
        for row in counts
        if sum(n * limits[kind] for n, kind in zip(row, kinds, strict=True)) >= wanted_rps
    )
    best = min(enough, key=lambda found: sum(PRICES[kind] * n for kind, n in found.items()))
    return {kind: n for kind, n in best.items() if n}


def _cheapest_plan(_: str, size: int, wanted_rps: float) -> dict[str, int]:
    """Return the devices of the cheapest plan for the rate, as ``eecompile plan --rate`` does."""
    goal = PlanningGoal(batch_sizes=(size,), rate_rps=wanted_rps)
    plan = make_cluster_plan(model_of(going_on(EASY[0])), cluster_of(OFFERED), goal).plan
    counts = Counter[str]()
    for split in plan.splits:
        counts.update({r.device_type: r.count for r in split.replicas})
    return {kind: counts[kind] for kind in OFFERED if counts[kind]}


EXPERIMENTS: Final[Mapping[str, Callable[[EmulatedBench], Iterator[Row]]]] = {
    "mixes": mixes,
    "sizes": sizes,
    "forecast errors": forecast_errors,
    "stragglers": stragglers,
    "heterogeneous": heterogeneous,
    "fewest": fewest,
    "cheapest": cheapest,
}


def main() -> None:
    """Measure, print, and write if asked, after each experiment."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only",
        type=some_of(EXPERIMENTS),
        default=list(EXPERIMENTS),
        metavar="NAME,…",
        help=f"experiments to run, of {', '.join(EXPERIMENTS)} (default: all)",
    )
    parser.add_argument("--stretch", type=float, default=20.0, help="factor on all times")
    parser.add_argument(
        "--duration-s", type=float, default=0.5, help="seconds of a load, not stretched"
    )
    options = parser.parse_args()
    bench = EmulatedBench(stretch=options.stretch, duration_s=options.duration_s)
    found: dict[str, Sequence[Row]] = {}
    for name in options.only:
        found[name] = list(EXPERIMENTS[name](bench))
        show_emulated(name, found[name], digits=2, width=200)
        write_emulated(
            options.json,
            __doc__,
            found,
            measured_on_emulated_devices="goodputs, and ratios of them",
            simulated="what is called so, by benchmarks/e3.py",
            environment=describe_environment(
                seed=0, stretch=options.stretch, duration_s=options.duration_s
            ),
        )


if __name__ == "__main__":
    main()
