"""Cost of changing subnets from one batch to the next, measured in the engine.

    python -m benchmarks.switching SUPERNET.ee --data TEST.npz [--batch-sizes 1,8] [--batches 2000]
        [--rounds 3] [--json FILE]

SuperServe's SubNetAct changes subnets in less than a millisecond (3, figure 5), while loading a
model takes much longer. Here all variants are loaded when the engine opens. One stream with one
thread serves requests of a whole batch each, one after the other; a policy of this benchmark draws
the variant of every batch at random. Measured, after a switch and without one: the time from the
policy's decision to the start of the variant's first session run (forming the batch, gathering and
checking its inputs), and from there to the end of its last run. Wall time, in milliseconds; figures
are medians over rounds. The benchmark fails if anything is prepared after the start.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.engine.backends import Backend, Slot, make_backend
from offramp.engine.core import Engine
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.policies import PlanPolicy, PolicyName
from offramp.engine.scheduling.policy_protocol import Choice, NeverBuffers, Start, Waiting
from offramp.engine.stages.backend_protocol import Stage, StageResult, TensorBatch
from offramp.engine.stages.plan import Mode, StageSpec
from offramp.tools.bench.common.output import (
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)

MODEL: Final = "model"
GOAL_MS: Final = 1.0
"""Goal at p99, from the decision to the first run after a switch, in ms."""
WARM_UP: Final = 100
"""Number of first batches that are not counted."""


class RandomVariant(NeverBuffers):
    """A policy that draws the variant of every batch, and runs it to its own end."""

    name = "random-variant"

    def __init__(self, deployment: Deployment, max_batch_size: int, seed: int) -> None:
        last = [len(pipeline.plan.stages) - 1 for pipeline in deployment.pipelines]
        self._deepest = [last[0], *(stage - 1 for stage in last[1:])]  # then the full model
        self._max_batch_size = max_batch_size
        self._random = np.random.default_rng(seed)
        self.decisions: list[tuple[float, int]] = []
        """Time of each decision in seconds, and the variant that was chosen."""

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Start waiting samples with a random variant."""
        bucket = waiting.ready(now_s)
        if not isinstance(bucket, Bucket):
            return bucket
        variant = int(self._random.integers(len(self._deepest)))
        self.decisions.append((time.perf_counter(), variant))
        return Start(bucket, self._max_batch_size, self._deepest[variant], variant)


class NotingSlot:
    """A slot that notes when each of its runs began and ended."""

    def __init__(self, slot: Slot, runs: list[tuple[float, float]]) -> None:
        self._slot, self._runs = slot, runs
        self.upload, self.select = slot.upload, slot.select
        self.buffer, self.merge, self.close = slot.buffer, slot.merge, slot.close

    def run(self, stage: Stage, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        """Run a stage, and record the times before and after it."""
        began_s = time.perf_counter()
        result = self._slot.run(stage, batch, threshold)
        self._runs.append((began_s, time.perf_counter()))
        return result


class NotingBackend:
    """A backend that counts the stages it prepares, and opens slots that note their runs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.on_cpu = backend.name, backend.on_cpu
        self.as_computed, self.sizes = backend.as_computed, backend.sizes
        self.missing, self.close = backend.missing, backend.close
        self.prepared = 0
        self.runs: list[tuple[float, float]] = []
        """Start and end of each run in seconds, over all slots."""

    def prepare(self, spec: StageSpec) -> Stage:
        """Load a stage, and count it."""
        self.prepared += 1
        return self._backend.prepare(spec)

    def open_slot(self) -> Slot:
        """Open a slot that records its runs."""
        return NotingSlot(self._backend.open_slot(), self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Times until a batch starts and while it runs, in milliseconds."""

    variant: int
    switched: bool
    """True if the batch before it ran another variant."""
    start_ms: float
    """Time from the decision to the start of the batch's first run."""
    run_ms: float
    """Time from the start of the first run to the end of the last run."""


def batch_times(
    decisions: Sequence[tuple[float, int]], runs: Sequence[tuple[float, float]]
) -> list[BatchTimes]:
    """Match decisions and runs of one stream: a batch has the runs until the next decision."""
    began = np.array([run[0] for run in runs])
    ended = np.array([run[1] for run in runs])
    starts = np.array([when for when, _ in decisions])
    first = np.searchsorted(began, starts)
    behind = np.append(first[1:], len(began))
    return [
        BatchTimes(
            variant=variant,
            switched=number > 0 and decisions[number - 1][1] != variant,
            start_ms=1e3 * float(began[first[number]] - when),
            run_ms=1e3 * float(ended[behind[number] - 1] - began[first[number]]),
        )
        for number, (when, variant) in enumerate(decisions)
        if behind[number] > first[number]
    ]


def activate(engine: Engine, max_batch_size: int, seed: int) -> RandomVariant:
    """Make an engine draw the variant of every batch from now on."""
    executor = engine._executor  # noqa: SLF001 - no policy of the product draws
    deployment = executor.deployment(MODEL)
    policy = RandomVariant(deployment, max_batch_size, seed)
    chosen = PlanPolicy(policy, deployment.points.latencies)
    executor.hot_swap(MODEL, replace(deployment, number=deployment.number + 1), chosen)
    return policy


async def served(
    bundle: Path, dataset: Dataset, batch_size: int, batches: int, seed: int
) -> list[BatchTimes]:
    """Serve batches one after another on one stream; RuntimeError if a stage is prepared late."""
    backend = NotingBackend(make_backend("onnxruntime", threads=1, max_rows=batch_size))
    defaults = ModelOptions(scheduling=PolicyName("slackfit"), max_batch_size=batch_size)
    options = EngineOptions(
        mode=Mode.LEAVE, streams=1, threads=1, keep_state=False, defaults=defaults
    )
    requests = requests_of(dataset, batch_size)
    try:
        async with await Engine.open({MODEL: bundle}, options, backend=backend) as engine:
            policy = activate(engine, batch_size, seed)
            prepared = backend.prepared
            backend.runs.clear()
            for number in range(WARM_UP + batches):
                await engine.infer(MODEL, requests[number % len(requests)])
            if backend.prepared != prepared:
                raise RuntimeError(
                    f"{backend.prepared - prepared} stages were prepared while batches ran"
                )
            return batch_times(policy.decisions, backend.runs)[WARM_UP:]
    finally:
        backend.close()


def requests_of(dataset: Dataset, batch_size: int) -> list[Mapping[str, NDArray[Any]]]:
    """Return whole batches of a data set, in turn."""
    return [
        dataset.take(slice(start, start + batch_size))
        for start in range(0, len(dataset) - batch_size + 1, batch_size)
    ]


def quantiles(times: Sequence[BatchTimes]) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of both times, after a switch and without one."""
    found: dict[str, dict[str, float]] = {}
    for name, switched in (("switched", True), ("same", False)):
        some = [t for t in times if t.switched is switched]
        found[name] = {
            f"{what}_{quantile}_ms": float(np.quantile([getattr(t, f"{what}_ms") for t in some], q))
            for what in ("start", "run")
            for quantile, q in (("p50", 0.5), ("p99", 0.99))
        }
    return found


def measured(bundle: Path, dataset: Dataset, size: int, options: argparse.Namespace) -> Any:
    """Return the figures of one batch size, for all variants together and for each variant.

    Figures are medians over rounds.
    """
    rounds = []
    for seed in range(options.rounds):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            times = runner.run(served(bundle, dataset, size, options.batches, seed))
        by_variant = {
            "all": times,
            **{str(v): [t for t in times if t.variant == v] for v in {t.variant for t in times}},
        }
        rounds.append({name: quantiles(some) for name, some in by_variant.items()})
    return {
        name: {
            kind: {
                figure: float(np.median([r[name][kind][figure] for r in rounds]))
                for figure in figures
            }
            for kind, figures in kinds.items()
        }
        for name, kinds in rounds[0].items()
    }


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--batches", type=int, default=2000, help="number of batches in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    if not bundle.manifest.variants:
        raise SystemExit(f"{bundle.path} has no variants; make it with eecompile supernet")
    dataset = read_dataset(options.data, bundle.manifest.inputs, answer=bundle.manifest.answer)
    names = {"all": "all", "0": "full model"}
    names |= {str(v.index): v.name for v in bundle.manifest.variants}
    results = {}
    for size in map(int, options.batch_sizes.split(",")):
        found = results[size] = measured(options.bundle, dataset, size, options)
        _print(found, names, size)
    document = {
        "measured": True,
        "goal_ms": GOAL_MS,
        "variants": names,
        "batch_sizes": results,
        "environment": describe_environment(
            streams=1, threads=1, rounds=options.rounds, batches=options.batches
        ),
    }
    write_json(options.json, document)


def _print(found: Any, names: Mapping[str, str], size: int) -> None:
    table = figure_table(
        f"MEASURED, variants drawn at random, batch {size}, ms",
        f"start: from the decision to the first session run; goal at p99 after a switch: {GOAL_MS} "
        "ms. run: from there to the end of the last. No stage was prepared after the start.",
        ("variant", "", "start p50", "start p99", "run p50", "run p99"),
        names=("variant", ""),
    )
    for name in sorted(found, key=lambda n: -1 if n == "all" else int(n)):
        for kind in ("switched", "same"):
            values = [f"{value:.3f}" for value in found[name][kind].values()]
            table.add_row(names[name] if kind == "switched" else "", kind, *values)
    wide_console(120).print(table)


if __name__ == "__main__":
    main()
