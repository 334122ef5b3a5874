"""Apparate's evaluation (5.2, 5.4) in this engine: latency by load, SLO, ramp budget, constraint.

    python -m benchmarks.apparate BUNDLE --data TEST.npz [--only TABLE …] [--json FILE] [--quick]

Systems are engines in this process, with one stream of one thread (the sender has the other core).
All systems of a table are open at the same time, and receive the same samples at the same relative
times, one system after the other. ``off`` is the unmodified model, ``apparate`` the published
controller in release mode; ``release``, ``audit`` and ``leave`` are this project's modes. Systems
that learn are first driven at saturation for a while, so that figures are those of a server that
has been running.

* latency: loads of 20, 40 and 60 % of the throughput of ``off``. ``poisson`` sends in random order;
  ``video`` sends samples similar to the one before, at a constant rate; ``reviews`` sends class
  by class, with Poisson arrivals.
* slo: deadlines of 2, 4 and 8 times the latency of a lone request, under the policy ``clockwork``.
* ramp_budget: budgets of 1, 2, 5 and 10 %, for ``apparate`` and ``release``.
* constraint: largest disagreements of 1, 2 and 5 %, for the same systems.

``optimal`` is SIMULATED as in the paper (2.2): each sample leaves at the first exit that answers
like the model, and no other exit costs anything. The time that the sample would have saved in a
batch of 1 is subtracted from its latency measured with ``off``; shorter waiting times of other
samples are ignored. Everything else is MEASURED. Agreement is with the unmodified model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.adapt.corruptions import channel_axis
from benchmarks.adapt.scenarios import answering
from benchmarks.adapt.sequence import Population
from benchmarks.common import make_parser
from benchmarks.orders import random_order, review_order, video_order
from benchmarks.replay import Replay, altered
from numpy.typing import NDArray
from rich.console import Console

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.certify import MODEL_END
from offramp.engine.control.costs import CostModel
from offramp.engine.core import Engine
from offramp.engine.models.options import RUN_THROUGH, EngineOptions, ModelOptions
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.outcomes import Outcomes, summarise
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import Trace, constant, poisson

MODEL: Final = "model"
SATURATED: Final = 64
"""Number of requests in flight while capacity is measured and controllers learn."""
SETTLING_SAMPLES: Final = 4096
"""Number of distinct samples to learn from; they are sent again if time remains."""
MIDDLE_LOAD: Final = 0.4
"""Load, as a share of capacity, of the tables that vary something other than the load."""
OPTIMAL: Final = "optimal"
_HEADLINE: Final = ("p50", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSystem:
    """A mode and a controller, and their options; ``None`` is the default."""

    name: str
    mode: Mode
    controller: str = "certified"
    ramp_budget: float | None = None
    max_disagreement: float | None = None


OFF: Final = ServedSystem(name="off", mode=Mode.OFF)
APPARATE: Final = ServedSystem(name="apparate", mode=Mode.RELEASE, controller="apparate")
RELEASE: Final = ServedSystem(name="release", mode=Mode.RELEASE)
SYSTEMS: Final = (
    OFF,
    APPARATE,
    RELEASE,
    ServedSystem(name="audit", mode=Mode.AUDIT),
    ServedSystem(name="leave", mode=Mode.LEAVE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The settings that are measured, and for how long."""

    loads: tuple[float, ...] = (0.2, 0.4, 0.6)
    slo_factors: tuple[float, ...] = (2.0, 4.0, 8.0)
    ramp_budgets: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    constraints: tuple[float, ...] = (0.01, 0.02, 0.05)
    duration_s: float = 5.0
    """Duration of the load of each figure."""
    settle_s: float = 4.0
    """Time at saturation before, of each system that learns."""
    lone_requests: int = 500


QUICK: Final = Extent(
    loads=(0.4,),
    slo_factors=(8.0,),
    ramp_budgets=(0.02, 0.1),
    constraints=(0.05,),
    duration_s=0.3,
    settle_s=0.3,
    lone_requests=20,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Samples in an order, with the way in which they arrive."""

    name: str
    order: NDArray[np.int64]
    """int64[samples]: rows of the data, sent again and again."""
    evenly: bool = False
    """True if requests come at a constant rate, false for a Poisson process."""

    def trace(self, rate: float, duration_s: float, seed: int) -> Trace:
        """Return arrivals at a mean rate in requests per second."""
        return constant(rate, duration_s) if self.evenly else poisson(rate, duration_s, seed)


def workloads_of(dataset: Dataset, classes: NDArray[Any], seed: int) -> list[Workload]:
    """Return the workloads that fit the data: ``video`` only where the one input holds images."""
    rngs = np.random.default_rng(seed).spawn(3)
    found = [Workload(name="poisson", order=random_order(len(dataset), rngs[0]))]
    arrays = list(dataset.inputs.values())
    if len(arrays) == 1 and _holds_images(arrays[0]):
        order = video_order(arrays[0], rngs[1])
        found.append(Workload(name="video", order=order, evenly=True))
    found.append(Workload(name="reviews", order=review_order(classes, rngs[2])))
    return found


def _holds_images(array: NDArray[Any]) -> bool:
    try:
        channel_axis(array.shape)
    except ValueError:
        return False
    return True


class SampleStream:
    """A workload's samples in order, without equal samples: repeated ones are altered a little.

    Controllers do not accept a copy of a sample as evidence.
    """

    def __init__(self, dataset: Dataset, order: NDArray[np.int64]) -> None:
        self._dataset, self._order = dataset, order
        self._taken = 0

    def take(self, count: int) -> tuple[list[dict[str, NDArray[Any]]], NDArray[np.int64]]:
        """Return the next inputs, each of one sample, and int64[count], their rows of the data."""
        turns, places = np.divmod(np.arange(self._taken, self._taken + count), len(self._order))
        self._taken += count
        rows = self._order[places]
        inputs = [
            altered({n: a[row : row + 1] for n, a in self._dataset.inputs.items()}, turn)
            for row, turn in zip(rows.tolist(), turns.tolist(), strict=True)
        ]
        return inputs, rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimalExits:
    """Offline optimal exits: samples leave at the first exit that answers like the model (2.2)."""

    exit: NDArray[np.int16]
    """int16[samples]; ``MODEL_END`` where no exit is right, or none that saves time."""
    saved: NDArray[np.float64]
    """float64[samples]: share of the model's time that the sample avoids by leaving there."""

    @classmethod
    def of(cls, population: Population, costs: CostModel) -> OptimalExits:
        """Find the optimal exits; ``costs`` are the costs of a batch of 1."""
        alone = [float(costs.latency_ms([e])[0]) for e in range(costs.exits)]
        saved = np.maximum(1 - np.array([*alone, costs.source_ms]) / costs.source_ms, 0.0)
        first = population.agrees.argmax(axis=0)  # the last row is the model's end, always right
        at = np.where(saved[first] > 0, first, MODEL_END)
        return cls(exit=at.astype(np.int16), saved=saved[first])

    def improve(self, outcomes: Outcomes, rows: NDArray[np.int64], lone_ms: float) -> Outcomes:
        """Return the outcomes that requests would have with the optimal exits.

        ``rows`` has the sample of each request. ``lone_ms`` is the time of the unmodified model for
        a batch of 1.
        """
        saved_s = self.saved[rows] * lone_ms / 1e3
        latency_s = np.maximum(outcomes.latency_s - saved_s, 0.0)
        exits = np.where(outcomes.answered, self.exit[rows], outcomes.exit).astype(np.int16)
        return replace(outcomes, latency_s=latency_s, exit=exits)


class ApparateBench:
    """A bundle, its data, and the figures that are measured with them."""

    def __init__(self, bundle: Bundle, dataset: Dataset, extent: Extent, seed: int) -> None:
        """Record the answers of every exit to every sample."""
        self.bundle, self.dataset, self.extent, self.seed = bundle, dataset, extent, seed
        self.population = answering(bundle, threads=1)(dataset, lambda _: None)
        self.optimal = OptimalExits.of(
            self.population, CostModel.of(bundle.manifest, bundle.profile(), 1)
        )
        self.lone_ms = self.lone_stages_ms = self.capacity_rps = 0.0
        """Latency of a lone request, time of the stages and throughput of the unmodified model."""

    async def calibrate(self) -> None:
        """Measure the unmodified model, lone and at saturation."""
        async with AsyncExitStack() as stack:
            engine = await self._open(stack, OFF, RUN_THROUGH)
            inputs, rows = self._stream(self._random()).take(SETTLING_SAMPLES)
            replay = self._replay(engine, inputs, rows)
            lone_s, stages_s = await replay.lone(self.extent.lone_requests)
            self.capacity_rps = await replay.closed_loop(SATURATED, max(self.extent.settle_s, 0.5))
        self.lone_ms, self.lone_stages_ms = 1e3 * lone_s, 1e3 * stages_s

    async def latency(self) -> list[dict[str, Any]]:
        """Measure the latency for every workload, load and system."""
        found = []
        for workload in workloads_of(self.dataset, self.population.final, self.seed):
            runs = [({"workload": workload.name, "load": load}, load, None) for load in
                    self.extent.loads]  # fmt: skip
            found += await self._table(workload, SYSTEMS, runs)
        return found

    async def slo(self) -> list[dict[str, Any]]:
        """Measure deadlines, under the policy that forms batches by deadline."""
        runs = [
            ({"slo_factor": factor}, MIDDLE_LOAD, factor * self.lone_ms)
            for factor in self.extent.slo_factors
        ]
        return await self._table(self._random(), SYSTEMS, runs, PolicyName("clockwork"))

    async def ramp_budget(self) -> list[dict[str, Any]]:
        """Measure both controllers of release mode at each ramp budget."""
        systems = [
            replace(system, name=f"{system.name} {budget:g}", ramp_budget=budget)
            for budget in self.extent.ramp_budgets
            for system in (APPARATE, RELEASE)
        ]
        return await self._table(self._random(), [OFF, *systems], [({}, MIDDLE_LOAD, None)])

    async def constraint(self) -> list[dict[str, Any]]:
        """Measure both controllers of release mode at each constraint."""
        systems = [
            replace(system, name=f"{system.name} {bound:g}", max_disagreement=bound)
            for bound in self.extent.constraints
            for system in (APPARATE, RELEASE)
        ]
        return await self._table(self._random(), [OFF, *systems], [({}, MIDDLE_LOAD, None)])

    async def _table(
        self,
        workload: Workload,
        systems: Sequence[ServedSystem],
        runs: Sequence[tuple[dict[str, Any], float, float | None]],
        scheduling: PolicyName = RUN_THROUGH,
    ) -> list[dict[str, Any]]:
        """Open the systems, let them learn, then run each load on all systems.

        Each entry of ``runs`` has the words that describe a load, its share of capacity, and its
        SLO in ms.
        """
        stream, found = self._stream(workload), list[dict[str, Any]]()
        async with AsyncExitStack() as stack:
            engines = {s: await self._open(stack, s, scheduling) for s in systems}
            learnt_from = stream.take(SETTLING_SAMPLES)
            for system, engine in engines.items():
                if system.mode.observed:
                    replay = self._replay(engine, *learnt_from)
                    await replay.saturate(SATURATED, self.extent.settle_s)
            for words, load, slo_ms in runs:
                trace = workload.trace(load * self.capacity_rps, self.extent.duration_s, self.seed)
                inputs, rows = stream.take(len(trace.arrivals_s))
                for system, engine in engines.items():
                    outcomes = await self._replay(engine, inputs, rows).open_loop(
                        trace.arrivals_s,
                        trace.duration_s,
                        None if slo_ms is None else slo_ms / 1e3,
                    )
                    row = _row("MEASURED", system.name, outcomes, slo_ms, words)
                    found.append({**row, **_asked(system), "policy": _policy(engine)})
                    if system is OFF:
                        best = self.optimal.improve(outcomes, rows, self.lone_stages_ms)
                        found.append(_row("SIMULATED", OPTIMAL, best, slo_ms, words))
        return found

    async def _open(
        self, stack: AsyncExitStack, system: ServedSystem, scheduling: PolicyName
    ) -> Engine:
        """Open an engine that closes with the stack."""
        options = EngineOptions(
            mode=system.mode,
            streams=1,
            threads=1,
            keep_state=False,
            defaults=ModelOptions(
                scheduling=scheduling,
                controller=system.controller,
                ramp_budget=system.ramp_budget,
                max_disagreement=system.max_disagreement,
            ),
        )
        engine = await Engine.open({MODEL: self.bundle.path}, options)
        return await stack.enter_async_context(engine)

    def _replay(
        self, engine: Engine, inputs: list[dict[str, NDArray[Any]]], rows: NDArray[np.int64]
    ) -> Replay:
        return Replay(engine, MODEL, inputs, self.population.final[rows].astype(np.int64))

    def _random(self) -> Workload:
        return workloads_of(self.dataset, self.population.final, self.seed)[0]

    def _stream(self, workload: Workload) -> SampleStream:
        return SampleStream(self.dataset, workload.order)


def _row(
    label: str, system: str, outcomes: Outcomes, slo_ms: float | None, words: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a line of a table, as JSON values."""
    summary = summarise(outcomes, slo_ms=slo_ms).to_json()
    return {"label": label, **words, "system": system, **summary}


def _asked(system: ServedSystem) -> dict[str, float]:
    asked = {"ramp_budget": system.ramp_budget, "constraint": system.max_disagreement}
    return {name: value for name, value in asked.items() if value is not None}


def _policy(engine: Engine) -> list[dict[str, float]]:
    """Return the exits that are in use when a load has ended."""
    active = engine.model(MODEL).policy.active
    return [{"exit": a.exit, "threshold": a.threshold} for a in active]


TABLES: Final = ("latency", "slo", "ramp_budget", "constraint")


async def measure(
    bench: ApparateBench, console: Console, names: Sequence[str] = TABLES
) -> dict[str, Any]:
    """Measure the named tables; return their rows by name, for the file of results."""
    await bench.calibrate()
    console.print(
        f"MEASURED off: {bench.lone_ms:.2f} ms a lone request, {bench.capacity_rps:.0f}/s"
    )
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        tables[name] = await getattr(bench, name)()
        print_table(console, name, tables[name])
    off = {
        "label": "MEASURED",
        "lone_ms": bench.lone_ms,
        "lone_stages_ms": bench.lone_stages_ms,
        "capacity_rps": bench.capacity_rps,
    }
    return {"off": off, **tables}


def print_table(console: Console, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; ratios are to ``off``, which is the first row of each setting."""
    columns = ("setting", "system", "label", "p50 ms", "p99 ms", "p50 / off", "p99 / off")
    table = figure_table(
        name,
        "lost: not answered, or not in time for a deadline",
        (*columns, "agree", "lost"),
        names=columns[:3],
    )
    off: Mapping[str, float] = {}
    for row in rows:
        latency = row["latency_ms"]
        off = latency if row["system"] == OFF.name else off
        setting = [str(row[word]) for word in ("workload", "load", "slo_factor") if word in row]
        ratios = [f"{latency[q] / off[q]:.3f}" if latency and off else "–" for q in _HEADLINE]
        agreement, lost = row["agreement"], sum(row["failures"].values()) / row["requests"]
        table.add_row(
            " ".join(setting),
            row["system"],
            row["label"],
            *(f"{latency[q]:.2f}" if latency else "–" for q in _HEADLINE),
            *ratios,
            "–" if agreement is None else f"{agreement:.4f}",
            f"{lost:.3f}",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument(
        "--samples", type=int, default=4000, help="number of samples of the data to use"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the samples' order and of arrivals"
    )
    parser.add_argument(
        "--duration-s", type=float, help="seconds of load for each figure (default: 5)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run each table for a second only, as a test"
    )
    parser.add_argument(
        "--only", nargs="+", choices=TABLES, default=TABLES, help="tables to measure"
    )
    options: argparse.Namespace = parser.parse_args(argv)
    check_outputs(options.json)
    extent = QUICK if options.quick else Extent()
    if options.duration_s is not None:
        extent = replace(extent, duration_s=options.duration_s)
    bundle = Bundle.open(options.bundle)
    read = read_dataset(options.data, bundle.manifest.inputs)
    dataset = replace(
        read,
        inputs={name: array[: options.samples] for name, array in read.inputs.items()},
        labels=None if read.labels is None else read.labels[: options.samples],
    )
    bench = ApparateBench(bundle, dataset, extent, options.seed)
    found = uvloop.run(measure(bench, wide_console(110), options.only))
    environment = describe_environment(
        seed=options.seed,
        samples=len(dataset),
        streams=1,
        threads=1,
        duration_s=extent.duration_s,
        settle_s=extent.settle_s,
        data=options.data.name,
        bundle=bundle.manifest.name,
    )
    write_json(options.json, {**found, "environment": environment})


if __name__ == "__main__":
    main()
