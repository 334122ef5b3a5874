"""PAME's parallel batches (4.2, 7.8; figure 18): throughput and latency by τ_b, and with τ_l.

    python -m benchmarks.parallel BUNDLE --data TEST.npz [--rounds 3] [--json FILE] [--quick]

Two streams, batches of at most 8, policy run-through. A batch may start next to a running one that
has fewer than τ_b rows: τ_b = 1 runs batches one after the other, and τ_b = 9 is no limit. The
settings take turns in each round; figures are medians of rounds.

* cpu: MEASURED, the bundle by ONNX Runtime in mode leave, one thread per stream.
* device: MEASURED ON EMULATED DEVICES, in this process. A batch of 8 takes twice as long as one of
  1 (7 and 14 ms for the model), half of it before the only exit, which takes 8.9 % of the model
  (7.7) and is confident on 70 % of the rows. Parallel batches are slowed down equally if together
  they would have more rows per second than batches of 8 alone: curve and rule are assumed. All
  times are stretched tenfold.

``throughput`` is that of 16 clients that send again immediately; ``in stages`` is the mean time of
a batch from its first stage to its last in that load. ``mean``, ``p99`` and ``late`` are of Poisson
arrivals at 80 % of the throughput of τ_b = 1; requests are late after three times the unmodified
model's time for a batch of 8. The last row follows τ_l = 0.02 (``--max-violations``): τ_b starts at
9 and falls after 256 requests of which a larger share was late; its τ_b is the final one.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.common import make_parser
from benchmarks.e3_systems import MOST_WAITING, System, draw_depths, points_of
from benchmarks.emulated import plan_of, samples_of, scripted_model
from benchmarks.replay import Replay, single_samples
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy
from offramp.calibration.data.dataset import read_dataset
from offramp.certify.decision import MODEL_END
from offramp.engine.backends.host import HostStage
from offramp.engine.core import Engine
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.options import RUN_THROUGH, EngineOptions, ModelOptions
from offramp.engine.scheduling import DeviceKind, Placement, StreamPlacement
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend
from offramp.tools.bench.common.outcomes import summarise
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import poisson

MODEL: Final = "model"
STREAMS: Final = 2
BATCH: Final = 8
CLIENTS: Final = 2 * BATCH
LIMITS: Final = (1, 2, 4, 6, 8, BATCH + 1)
MAX_VIOLATIONS: Final = 0.02
LOAD: Final = 0.8
"""Load relative to the throughput with sequential batches."""
LATE_AFTER: Final = 3.0
"""Times the unmodified model's time for a full batch."""
STRETCH: Final = 10.0
MODEL_MS: Final = (7.0, 14.0)
"""Times of a batch of 1, and of ``BATCH``, in ms."""
EXIT_SHARE: Final = 0.089
GOING_ON: Final = 0.3


def model_s(rows: int) -> float:
    """Return the seconds that the emulated device takes for the whole model."""
    alone, full = MODEL_MS
    return 1e-3 * (alone + (full - alone) * (rows - 1) / (BATCH - 1))


def stages_s(rows: int) -> tuple[float, float]:
    """Return the emulated seconds of the stage with the exit, and of the one after it."""
    half = model_s(rows) / 2
    return half + EXIT_SHARE * model_s(rows), half


class SharedDevice:
    """A device shared by two batches: each takes its own time, or both are slower."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = 0.0
        """Total rows per second of the running batches if each ran alone, relative to full
        batches."""

    def work(self, alone_s: float, rows: int) -> None:
        """Wait until the device has finished a batch."""
        share = (rows / model_s(rows)) / (BATCH / model_s(BATCH))
        with self._changed:
            self._add(share)
            while alone_s > 0:
                slowdown, began_s = max(1.0, self._asked), time.perf_counter()
                self._changed.wait(alone_s * slowdown)
                alone_s -= (time.perf_counter() - began_s) / slowdown
            self._add(-share)

    def _add(self, share: float) -> None:
        self._asked += share
        self._changed.notify_all()


class SharedDeviceBackend(ScriptedBackend):
    """A backend that answers from a script, after the emulated device has done the work."""

    def __init__(self) -> None:
        super().__init__()
        self._device = SharedDevice()

    def prepare(self, spec: StageSpec) -> HostStage:
        """Make a stage that waits for the device."""
        stage = super().prepare(spec)

        def execute(
            fetched: Sequence[str], tensors: Mapping[str, NDArray[Any]], _: None
        ) -> list[Any]:
            rows = len(tensors[SCRIPT])
            self._device.work(STRETCH * stages_s(rows)[spec.index], rows)
            return stage.execute(fetched, tensors, None)

        return replace(stage, execute=execute)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSetting:
    """A limit on parallel batches: τ_b itself, or the share of late samples that adapts it."""

    name: str
    fixed: int | None = None
    max_violations: float | None = None


SETTINGS: Final = (
    *(ParallelSetting(name=str(limit), fixed=limit) for limit in LIMITS),
    ParallelSetting(name=f"by τ_l {MAX_VIOLATIONS}", max_violations=MAX_VIOLATIONS),
)


async def open_bundle(path: Path, setting: ParallelSetting) -> Engine:
    """Serve a bundle on the CPU."""
    options = EngineOptions(
        mode=Mode.LEAVE,
        streams=STREAMS,
        threads=1,
        keep_state=False,
        parallel_below=setting.fixed,
        max_violations=setting.max_violations,
        defaults=ModelOptions(scheduling=RUN_THROUGH, max_batch_size=BATCH),
    )
    return await Engine.open({MODEL: path}, options)


def emulated_system() -> System:
    """Return the model on the emulated device, with stretched times."""
    every = frozenset(range(2))
    seconds = tuple(
        tuple(STRETCH * stages_s(max(rows, 1))[stage] for rows in range(BATCH + 1))
        for stage in range(2)
    )
    return System(
        spans=((0, 0, 0), (1, 1, MODEL_END)),
        placement=Placement(
            stages=2,
            streams=(StreamPlacement(kind="gpu", prefers=every, holds=every),) * STREAMS,
            kinds=(DeviceKind(name="gpu", seconds=seconds),),
        ),
        policy=str(RUN_THROUGH),
        batch_size=BATCH,
        going_on=(GOING_ON, 1.0),
    )


async def open_emulated(system: System, setting: ParallelSetting) -> Engine:
    """Serve the scripted model on its own emulated device."""
    backend = SharedDeviceBackend()
    deployment = Deployment(
        number=0,
        policy=ExitPolicy(version=1, active=()),
        pipeline=Pipeline(backend, plan_of(system)),
        points=points_of(system, system.placement),
        batch_size=BATCH,
    )
    limit = ParallelLimit(BATCH, fixed=setting.fixed, max_violations=setting.max_violations)
    model = scripted_model(
        deployment, system.policy, streams=STREAMS, most_waiting=MOST_WAITING, parallel=limit
    )
    return Engine({MODEL: model}, backend, streams=STREAMS, parallel=limit, owned=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBench:
    """Settings of a measurement: engines and durations."""

    label: str
    opened: Callable[[ParallelSetting], Any]
    """Awaitable function that opens an engine."""
    samples: Sequence[Mapping[str, NDArray[Any]]]
    objective_s: float
    """Latency objective, in wall time."""
    stretch: float
    rounds: int
    duration_s: float
    """Duration of each of the two loads, in wall time."""
    seed: int

    async def measure(self) -> list[dict[str, Any]]:
        """Return a row for each setting."""
        found: dict[str, list[dict[str, float]]] = {s.name: [] for s in SETTINGS}
        async with AsyncExitStack() as stack:
            replays: dict[str, tuple[Engine, Replay]] = {}
            for setting in SETTINGS:
                engine = await stack.enter_async_context(await self.opened(setting))
                answers = np.zeros(len(self.samples), np.int64)
                replay = Replay(engine, MODEL, self.samples, answers)
                await replay.closed_loop(CLIENTS, self.duration_s / 4)
                replays[setting.name] = engine, replay
            one_after_another, _ = await self._saturate(*replays[str(LIMITS[0])])
            for number in range(self.rounds):
                arrivals = poisson(LOAD * one_after_another, self.duration_s, self.seed + number)
                for name, (engine, replay) in replays.items():
                    throughput, in_stages_s = await self._saturate(engine, replay)
                    outcomes = await replay.open_loop(
                        arrivals.arrivals_s, arrivals.duration_s, self.objective_s
                    )
                    summary = summarise(outcomes, slo_ms=1e3 * self.objective_s)
                    limit = engine.statistics()[MODEL].parallel_below
                    found[name].append(
                        {
                            "throughput": throughput * self.stretch,
                            "in stages ms": 1e3 * in_stages_s / self.stretch,
                            "mean ms": summary.latency_ms["mean"] / self.stretch,
                            "p99 ms": summary.latency_ms["p99"] / self.stretch,
                            "late": 1.0 - summary.attainment,
                            "τ_b at the end": float(BATCH + 1 if limit is None else limit),
                        }
                    )
        return [
            {"τ_b": name, **{k: statistics.median(row[k] for row in rows) for k in rows[0]}}
            for name, rows in found.items()
        ]

    async def _saturate(self, engine: Engine, replay: Replay) -> tuple[float, float]:
        """Return requests per second, and the mean seconds of a batch in stages."""
        before = engine.statistics()[MODEL].stages
        rate = await replay.closed_loop(CLIENTS, self.duration_s)
        after = engine.statistics()[MODEL].stages
        ran_s = sum(a.run_s.total - b.run_s.total for a, b in zip(after, before, strict=True))
        return rate, ran_s / max(after[0].run_s.count - before[0].run_s.count, 1)


async def source_batch_s(path: Path, samples: Sequence[Mapping[str, NDArray[Any]]]) -> float:
    """Return the median seconds of the unmodified model for a full batch, in one thread."""
    options = EngineOptions(
        mode=Mode.OFF, streams=1, threads=1, defaults=ModelOptions(max_batch_size=BATCH)
    )
    batch = {name: np.concatenate([s[name] for s in samples[:BATCH]]) for name in samples[0]}
    async with await Engine.open({MODEL: path}, options) as engine:
        took_s = []
        for _ in range(30):
            began_s = time.perf_counter()
            await engine.infer(MODEL, batch)
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


async def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure on the CPU and on the emulated device, and print."""
    dataset = read_dataset(options.data, Bundle.open(options.bundle).manifest.inputs)
    samples = single_samples(dataset, 1000)
    system = emulated_system()
    common = {"rounds": options.rounds, "seed": options.seed}
    scale = 0.1 if options.quick else 1.0
    benches = {
        "cpu": ParallelBench(
            label="MEASURED",
            opened=partial(open_bundle, options.bundle),
            samples=samples,
            objective_s=LATE_AFTER * await source_batch_s(options.bundle, samples),
            stretch=1.0,
            duration_s=4.0 * scale,
            **common,
        ),
        "device": ParallelBench(
            label="MEASURED ON EMULATED DEVICES",
            opened=partial(open_emulated, system),
            samples=samples_of(system, draw_depths([GOING_ON], options.seed)),
            objective_s=STRETCH * LATE_AFTER * model_s(BATCH),
            stretch=STRETCH,
            duration_s=10.0 * scale,
            **common,
        ),
    }
    found = {}
    for name, bench in benches.items():
        found[name] = await bench.measure()
        table = figure_table(
            f"{bench.label}: {name}", "medians of rounds", list(found[name][0]), names=("τ_b",)
        )
        for row in found[name]:
            table.add_row(*(f"{v:,.3f}" if isinstance(v, float) else v for v in row.values()))
        wide_console(110).print(table)
    return found


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="run each measurement for a tenth of its time"
    )
    options = parser.parse_args()
    check_outputs(options.json)
    found = uvloop.run(measure(options))
    environment = describe_environment(seed=options.seed, rounds=options.rounds)
    write_json(options.json, {"experiments": found, "environment": environment})


if __name__ == "__main__":
    main()
