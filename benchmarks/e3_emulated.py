"""E3's evaluation (section 5), MEASURED ON EMULATED DEVICES: real router, wire and processes.

    python -m benchmarks.e3_emulated [--only NAME,…] [--stretch 20] [--duration-s 0.5] [--json FILE]

Each device is a worker process that answers from a script and sleeps for as long as the device
would, and as rows from another device would travel; all times are stretched twentyfold, so that two
cores carry 29 devices, and rates are those of the devices. Goodput is that of closed-loop clients,
rows a second that are answered within 100 ms: so many are under way as four batches of each device,
or as 70 ms of the simulated rate, if that is less. What benchmarks/e3.py SIMULATES for the same
systems, the highest rate of evenly spaced requests, stands beside it. What is assumed of devices,
layers, exits, links and rows is what is assumed there.

Systems: source is the model as it is on all devices, in batches. Run-through has exits, and batches
that shrink (DeeBERT, BranchyNet). Dedicated is a plan whose devices run their own split only, as
E3's; overlapped, each device receives the next batch and sends the last one while it computes (E3
3.2.2; batches_per_worker = 2). Stealing is the same plan, whose devices take other work where their
own has none, as ``eeserve --cluster`` serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from benchmarks.clusters import (
    HETEROGENEOUS,
    HOMOGENEOUS,
    ROW_BYTES,
    cluster_of,
    going_on,
    model_of,
)
from benchmarks.common import make_parser
from benchmarks.e3 import SLO_S, STRAGGLER, EasyMix, make_plan
from benchmarks.e3_systems import System, planned
from benchmarks.emulated import (
    EmulatedCluster,
    emulated_cluster,
    goodput_emulated,
    show_emulated,
    write_emulated,
)

from offramp.tools.bench.common.output import describe_environment

EASY: Final = (0.8, 0.5, 0.2)
SIZES: Final = (1, 4, 16, 64)
ERRORS: Final = (-0.2, 0.2)
PLANS: Final = ("dedicated", "dedicated, overlapped", "stealing", "stealing, overlapped")
BEST: Final = PLANS[-1]
FULL: Final = 0.7
"""Part of the objective that requests under way take at the simulated rate, at most."""

Row = dict[str, Any]


class EmulatedGoodputs:
    """Goodputs of systems on the devices of one cluster."""

    def __init__(self, emulated: EmulatedCluster, devices: int, duration_s: float) -> None:
        self._emulated, self._devices, self._duration_s = emulated, devices, duration_s

    def goodput(
        self, mix: EasyMix, name: str, *, system: System | None = None, straggler: bool = False
    ) -> tuple[float, float]:
        """Measured on emulated devices, and simulated, in rows a second.

        ``system`` takes the place of the mix's of that name, for which it is simulated.
        """
        base, _, overlapped = name.partition(", ")
        simulated = mix.goodput(base, straggler=straggler)
        served = system or mix.systems[base]
        self._emulated.slow_down({served.last_split: STRAGGLER} if straggler else None)
        most = 4 * self._devices * served.batch_size
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


def against(row: Row, found: Mapping[str, tuple[float, float]], of: str = "source") -> Row:
    """Add goodputs, over that of a system, and how far the simulation is off."""
    base = found[of][0]
    row[f"{of} rows/s"] = round(base)
    for name, (measured, simulated) in found.items():
        if name != of:
            row[f"{name} / {of}"] = measured / base
        if "overlapped" not in name:
            row[f"{name}: simulated / measured"] = simulated / measured
    return row


def mixes(measured: EmulatedGoodputs) -> Iterator[Row]:
    """Fig. 7 and 16: mixes of easy and hard rows, batches of 8."""
    for easy in EASY:
        mix = EasyMix(easy, cluster_of(HOMOGENEOUS), 8)
        names = ("source", "run-through", *PLANS)
        found = {name: measured.goodput(mix, name) for name in names}
        row = against({"easy": f"{easy:.0%}"}, found)
        row[f"{BEST} / run-through"] = found[BEST][0] / found["run-through"][0]
        yield row


def sizes(measured: EmulatedGoodputs) -> Iterator[Row]:
    """Figs. 7 to 9: batch sizes, 80 % easy."""
    for size in SIZES:
        mix = EasyMix(EASY[0], cluster_of(HOMOGENEOUS), size)
        names = ("source", "run-through", "dedicated, overlapped", BEST)
        yield against({"batch": size}, {name: measured.goodput(mix, name) for name in names})


def forecast_errors(measured: EmulatedGoodputs) -> Iterator[Row]:
    """Fig. 22: a plan for a forecast that is a fifth off."""
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


def stragglers(measured: EmulatedGoodputs) -> Iterator[Row]:
    """One device of the last split takes four times as long (E3 3.3)."""
    mix = EasyMix(EASY[0], cluster_of(HOMOGENEOUS), 8)
    for name in ("source", "dedicated, overlapped", BEST):
        usual, _ = measured.goodput(mix, name)
        slow, _ = measured.goodput(mix, name, straggler=True)
        yield {"system": name, "rows/s": round(usual), "with a straggler": round(slow),
               "lost %": 100 * (1 - slow / usual)}  # fmt: skip


def heterogeneous(measured: EmulatedGoodputs) -> Iterator[Row]:
    """Fig. 13: 6 V100, 8 P100 and 15 K80, which cost as much as 16 V100."""
    for size in (8, 1):
        mix = EasyMix(EASY[0], cluster_of(HETEROGENEOUS), size)
        names = ("source", "dedicated, overlapped", BEST)
        yield against({"batch": size}, {name: measured.goodput(mix, name) for name in names})


EXPERIMENTS: Final[
    Mapping[str, tuple[Mapping[str, int], Callable[[EmulatedGoodputs], Iterator[Row]]]]
] = {
    "mixes": (HOMOGENEOUS, mixes),
    "sizes": (HOMOGENEOUS, sizes),
    "forecast errors": (HOMOGENEOUS, forecast_errors),
    "stragglers": (HOMOGENEOUS, stragglers),
    "heterogeneous": (HETEROGENEOUS, heterogeneous),
}


def main() -> None:
    """Measure, print, and write if asked, after each experiment."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="names of experiments")
    parser.add_argument("--stretch", type=float, default=20.0, help="factor of all times")
    parser.add_argument("--duration-s", type=float, default=0.5, help="of a load, not stretched")
    options = parser.parse_args()
    found: dict[str, Sequence[Row]] = {}
    for name in options.only.split(","):
        counts, experiment = EXPERIMENTS[name]
        cluster = cluster_of(counts)
        with emulated_cluster(cluster, row_bytes=ROW_BYTES, stretch=options.stretch) as emulated:
            measured = EmulatedGoodputs(emulated, sum(counts.values()), options.duration_s)
            found[name] = list(experiment(measured))
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
