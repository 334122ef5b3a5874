"""SlackFit over a bundle's subnets and exits compared with fixed points (SuperServe 6.2 to 6.4).

    python -m benchmarks.superserve_example SUPERNET.ee [--trace azure:FILE] [--streams 8]
        [--share 0.8] [--requests 60000] [--data TEST.npz] [--json FILE]

SIMULATED with the bundle's own profile and records, on virtual time. The loads are gamma arrivals
of CV² 2, 4 and 8, a stream whose rate rises from half of the mean rate to all of it, and a recorded
trace, if one is named (its time is rescaled). The mean rate is a share of the rate of the fastest
operating point (of subnets and exits) in full batches. The latency objective is the tightest one at
which that point alone has 0.9995 of the requests in time (found by bisection).

Under each load slackfit is compared with every fixed point (Clipper+), ``cheapest`` (INFaaS without
an accuracy target), ``max-batch`` and ``max-accuracy``. The goal: slackfit has 0.999 of the
requests in time, and its accuracy is at least one percentage point above that of the best fixed
point that also has 0.999 in time. Accuracy is measured against the labels of the certify split;
without labels it is agreement.

If exits may be forced, the fastest point can be an exit after so few layers that rates and
objectives leave the range in which schedulers react (slackfit learns arrivals over 100 ms). With
``--ends-only`` operating points are therefore subnets to their own ends, as in the paper; samples
may still leave at certified exits.

Then half of the streams are lost, one by one every ``--lost-every-s``, under a load of CV² 2 that
the fastest point can just serve with the remaining streams (figure 11a): the goal is 0.999 too.

With ``--data`` one case, CV² 2, is MEASURED on engines in this process as in
``benchmarks.policies``, at shares of the rate that the fastest point reaches there.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.common import make_parser
from benchmarks.policies import MAX_BATCH, Bench, make_trace, median_of
from rich.console import Console

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import read_dataset
from offramp.certify import MODEL_END
from offramp.engine.common.errors import OptionsError
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
from offramp.tools.bench.common.traces import Trace, accelerate, gamma
from offramp.tools.bench.simulated_model import SimulatedModel, model_of
from offramp.tools.bench.simulation import SimulatedOutcomes, draw_load, simulate

POLICIES: Final = ("slackfit", "slackfit-bare", "max-batch", "max-accuracy", "cheapest")
FASTEST: Final = "cheapest"
CV2: Final = (2.0, 4.0, 8.0)
ATTAINED: Final = 0.9995
"""Share of requests in time with the fastest point alone, which defines the objective."""
GOAL: Final = 0.999
GAIN: Final = 0.01
"""Required gain in accuracy of slackfit over the best fixed point that reaches the goal."""
SHORTEST_S, LONGEST_S = 1e-4, 60.0
"""Smallest and largest latency objective that the search considers, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveCase:
    """A trace with its objective, and the results of each policy."""

    trace: Trace
    slo_s: float
    rows: Mapping[str, Summary]
    """Summaries by policy; agreement is accuracy if there are labels."""

    @property
    def best_fixed(self) -> tuple[str, Summary] | None:
        """Return the most accurate fixed point that reaches the goal; ``None`` if none does."""
        reaching = [
            (name, row)
            for name, row in self.rows.items()
            if (name.startswith("fixed:") or name == FASTEST) and (row.attainment or 0.0) >= GOAL
        ]
        return max(reaching, key=lambda item: item[1].agreement or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """Accuracy of slackfit above that of the best fixed point."""
        ours, best = self.rows["slackfit"].agreement, self.best_fixed
        if ours is None or best is None or best[1].agreement is None:
            return None
        return ours - best[1].agreement

    def describe(self) -> str:
        """Return one line on the goal."""
        attained = self.rows["slackfit"].attainment or 0.0
        best, gain = self.best_fixed, self.gain
        if best is None or gain is None:
            return f"slackfit attains {attained:.4f}; no fixed point attains {GOAL}"
        held = "reached" if attained >= GOAL and gain >= GAIN else "NOT reached"
        return (
            f"slackfit attains {attained:.4f}, {100 * gain:+.2f} points beside the best fixed "
            f"point that attains {GOAL} ({best[0]}); goal {held}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the case as plain values."""
        best = self.best_fixed
        return {
            "trace": self.trace.name,
            "rate": self.trace.rate,
            "slo_ms": 1e3 * self.slo_s,
            "best_fixed": None if best is None else best[0],
            "gain": self.gain,
            "rows": {name: row.to_json() for name, row in self.rows.items()},
        }


class Simulation:
    """A bundle with all of its variants on virtual time."""

    def __init__(self, bundle: Bundle, streams: int, seed: int, *, ends_only: bool = False) -> None:
        options = ModelOptions(scheduling=PolicyName("slackfit"), max_batch_size=MAX_BATCH)
        self.model: SimulatedModel = model_of(
            bundle, Mode.LEAVE, options, stage_overhead_s=STAGE_OVERHEAD_S
        )
        if ends_only:
            ends = {0: MODEL_END} | {v.index: v.exits[-1].index for v in bundle.manifest.variants}
            points = self.model.points
            kept = tuple(p for p in points.points if p.exit == ends[p.variant])
            self.model = replace(self.model, points=replace(points, points=kept))
        self.streams, self._seed = streams, seed

    def capacity(self, streams: int) -> float:
        """Return the requests per second of the fastest point in full batches."""
        points = self.model.points
        first = points.points[0]
        table = points.latencies.variants[first.variant].shrinking
        return streams * MAX_BATCH / table.busy_s[first.deepest][MAX_BATCH]

    @property
    def policies(self) -> tuple[str, ...]:
        """All policies that are compared, including each fixed point."""
        return *POLICIES, *(f"fixed:{_place(point)}" for point in self.model.points.points)

    def run(
        self,
        policy: str,
        trace: Trace,
        slo_s: float,
        *,
        streams: int | None = None,
        losing_s: Sequence[float] = (),
    ) -> SimulatedOutcomes:
        """Simulate a policy under a trace, with some streams lost on the way if asked."""
        model, streams = self.model, streams or self.streams
        scheduler = make_scheduler(
            PolicyName.parse(policy),
            deepcopy(model.points),  # a run learns; the next one starts afresh
            max_batch_size=MAX_BATCH,
            max_queue=max(4096, len(trace.arrivals_s)),
            streams=streams,
        )
        records = model.behaviour.leaves_at.size
        load = draw_load(trace.arrivals_s, trace.duration_s, records, slo_s=slo_s, seed=self._seed)
        return simulate(
            model.behaviour,
            scheduler,
            model.seconds,
            load,
            streams=streams,
            smaller=model.smaller,
            losing_s=losing_s,
        )

    def tightest_slo_s(self, trace: Trace, *, streams: int | None = None) -> float:
        """Return the tightest objective at which the fastest point alone is in time, to 1 %.

        Raise ValueError if there is none.
        """

        def holds(slo_s: float) -> bool:
            found = self.run(FASTEST, trace, slo_s, streams=streams)
            return attained(found, slo_s) >= ATTAINED

        return tightest(holds, SHORTEST_S, LONGEST_S)

    def case(self, trace: Trace) -> ObjectiveCase:
        """Find the objective, and run all policies under it."""
        slo_s = self.tightest_slo_s(trace)
        rows = {name: judged(self.run(name, trace, slo_s), slo_s) for name in self.policies}
        return ObjectiveCase(trace=trace, slo_s=slo_s, rows=rows)

    def losing_streams(self, share: float, every_s: float) -> dict[str, Any]:
        """Lose half of the streams one by one; return figures by policy, in total and by phase."""
        left = self.streams - self.streams // 2
        losing_s = [every_s * (n + 1) for n in range(self.streams - left)]
        rate, duration_s = share * self.capacity(left), every_s * (len(losing_s) + 1)
        trace = gamma(rate, 2.0, duration_s, self._seed)
        slo_s = self.tightest_slo_s(
            gamma(rate, 2.0, min(duration_s, 2 * every_s), self._seed), streams=left
        )
        rows = {}
        for policy in ("slackfit", FASTEST, "max-batch", "max-accuracy"):
            outcomes = self.run(policy, trace, slo_s, losing_s=losing_s)
            phases = np.minimum(outcomes.intended_s // every_s, len(losing_s)).astype(int)
            rows[policy] = {
                **judged(outcomes, slo_s).to_json(),
                "by_streams": {
                    self.streams - phase: _phase(outcomes, phases == phase, slo_s)
                    for phase in range(len(losing_s) + 1)
                },
            }
        return {"trace": trace.name, "slo_ms": 1e3 * slo_s, "lost_at_s": losing_s, "rows": rows}


def _place(point: OperatingPoint) -> str:
    depth = "final" if point.exit == MODEL_END else str(point.exit)
    return f"{depth}@{point.variant}" if point.variant else depth


def _phase(
    outcomes: SimulatedOutcomes, during: np.ndarray[Any, Any], slo_s: float
) -> dict[str, float]:
    """Return attainment, and accuracy (or agreement), of requests due during a phase."""
    known = outcomes.answered & during
    worth = outcomes.right if (outcomes.right[known] >= 0).any() else outcomes.agrees
    return {
        "attainment": float(outcomes.within(1e3 * slo_s)[during].mean()),
        "accuracy": float(worth[known].mean()),
    }


def attained(outcomes: SimulatedOutcomes, slo_s: float) -> float:
    """Return the share of all requests that are answered in time."""
    return float(outcomes.within(1e3 * slo_s).mean())


def judged(outcomes: SimulatedOutcomes, slo_s: float) -> Summary:
    """Summarise a run; where there are labels, accuracy takes the place of agreement."""
    summary = summarise(outcomes, slo_ms=1e3 * slo_s)
    accuracy = outcomes.accuracy
    return summary if accuracy is None else replace(summary, agreement=accuracy)


def tightest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest value for which ``holds`` is true, to 1 %.

    The search starts at ``low`` and doubles the value. Raise ValueError if ``holds`` is false at
    ``high``.
    """
    value = low
    while not holds(value):
        low, value = value, 2 * value
        if value > high:
            raise ValueError(f"not even {value / 2:g} s are enough; expected at most {high:g} s")
    while value / low > 1.01:
        middle = (low * value) ** 0.5
        low, value = (low, middle) if holds(middle) else (middle, value)
    return value


def traces_of(rate: float, options: argparse.Namespace) -> Iterator[Trace]:
    """Yield the loads at a mean rate; the accelerating load ends at this rate."""
    seconds, seed = options.requests / rate, options.seed
    for cv2 in CV2:
        yield gamma(rate, cv2, seconds, seed)
    slope = rate / seconds  # from half to the whole, in half of the time
    yield accelerate(rate / 2, rate, slope, 2.0, seconds, seed=seed)
    if options.trace is not None:
        yield make_trace(options, rate)


async def measured(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure one case on the real engine: slackfit and the others, in rounds."""
    labels = read_dataset(options.data, Bundle.open(options.bundle).manifest.inputs).labels
    bench = Bench(options.bundle, options.data, options.samples)
    if labels is None:
        await bench.prepare()
    else:
        bench.judge_by(labels)
    capacity = await bench.capacity_rps(FASTEST, 3.0)
    trace = gamma(options.measured_share * capacity, 2.0, options.duration_s, options.seed)
    slo_s = options.measured_slo_ms / 1e3
    while options.measured_slo_ms <= 0:
        slo_s = max(1.5 * slo_s, 0.004)
        found = await bench.under(FASTEST, trace, slo_s)
        if (found.attainment or 0.0) >= GOAL or slo_s > 1.0:
            break
    simulation = Simulation(Bundle.open(options.bundle), bench.streams, options.seed)
    rounds: dict[str, list[Summary]] = {}
    for _ in range(options.rounds):
        for policy in simulation.policies:
            try:
                summary = await bench.under(policy, trace, slo_s)
            except OptionsError:  # by the new profile another one dominates it
                console.print(f"{policy} is no operating point of the engine this time")
                continue
            rounds.setdefault(policy, []).append(summary)
    rows = {name: median_of(found) for name, found in rounds.items()}
    case = ObjectiveCase(trace=trace, slo_s=slo_s, rows=rows)
    title = f"MEASURED, {trace.name}, SLO {1e3 * slo_s:.1f} ms; agree is accuracy"
    print_summaries(console, rows, title=title)
    console.print(case.describe())
    return {**case.to_json(), "capacity_rps": capacity, "sender": bench.median_lateness_ms()}


def main() -> None:
    """Simulate, measure if asked, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument("--trace", help="azure:FILE, in addition to random traces")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument(
        "--share",
        type=float,
        default=0.8,
        help="mean rate as a share of the fastest point's capacity",
    )
    parser.add_argument(
        "--requests", type=int, default=60_000, help="number of requests of each drawn trace"
    )
    parser.add_argument(
        "--ends-only", action="store_true", help="simulate no point that forces an exit"
    )
    parser.add_argument("--lost-every-s", type=float, default=12.0)
    parser.add_argument(
        "--data", type=Path, help=".npz of unseen samples, for a case that is also measured"
    )
    parser.add_argument(
        "--measured-share",
        type=float,
        default=0.6,
        help="measured load as a share of the measured capacity",
    )
    parser.add_argument(
        "--measured-slo-ms",
        type=float,
        default=0.0,
        help="latency objective of the measured case; 0 searches for it",
    )
    parser.add_argument(
        "--duration-s", type=float, default=10.0, help="seconds of the measured trace"
    )
    parser.add_argument(
        "--samples", type=int, default=4000, help="number of samples of the data to use"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of the measurement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    if not bundle.manifest.variants:
        raise SystemExit(f"{bundle.path} has no variants; make it with eecompile supernet")
    console = wide_console()
    simulation = Simulation(bundle, options.streams, options.seed, ends_only=options.ends_only)
    cases = []
    for trace in traces_of(options.share * simulation.capacity(options.streams), options):
        case = simulation.case(trace)
        cases.append(case)
        title = f"SIMULATED WITH THE EXAMPLE'S PROFILE, {trace.name}, SLO {1e3 * case.slo_s:.2f} ms"
        print_summaries(console, case.rows, title=f"{title}; agree is accuracy")
        console.print(case.describe())
    lost = simulation.losing_streams(options.share, options.lost_every_s)
    _print_lost(console, lost)
    document = {
        "simulated": {
            "with": "the bundle's own profile and records of the certify split",
            "cases": [case.to_json() for case in cases],
            "losing_streams": lost,
        },
        "goal": {"attainment": GOAL, "accuracy_gain": GAIN},
        "environment": describe_environment(
            streams=options.streams, share=options.share, ends_only=options.ends_only,
            max_batch_size=MAX_BATCH,
            seed=options.seed, requests=options.requests,
        ),
    }  # fmt: skip
    if options.data is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            document["measured"] = runner.run(measured(options, console))
    write_json(options.json, document)


def _print_lost(console: Console, lost: Mapping[str, Any]) -> None:
    console.print(
        f"SIMULATED, streams lost at {', '.join(f'{s:g}' for s in lost['lost_at_s'])} s: "
        f"{lost['trace']}, SLO {lost['slo_ms']:.2f} ms"
    )
    for policy, row in lost["rows"].items():
        phases = "; ".join(
            f"{streams} streams {phase['attainment']:.4f} at {phase['accuracy']:.2%}"
            for streams, phase in row["by_streams"].items()
        )
        console.print(f"  {policy}: attains {row['attainment']:.4f} ({phases})")


if __name__ == "__main__":
    main()
