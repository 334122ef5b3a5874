"""SuperServe's policies (6.2, 6.4) MEASURED ON EMULATED DEVICES, and the speed of the router.

    python -m benchmarks.superserve_emulated [--only NAME,…] [--stretch 10] [--duration-s 3]
        [--json FILE]

Each of 8 devices is a worker process that sleeps for the time of a batch on it, by the curves of
the table "GPU" of benchmarks/superserve.py, which are assumed; router, scheduler, wire and
processes are real. All times are stretched tenfold; rates and latencies are those of the devices.
The objective is 36 ms, the mean rate 7,050 requests/s unless stated otherwise. Accuracy is that of
the subnet that answered. Systems are slackfit-bare, the published rule, and slackfit, ours,
compared with max-batch (MaxBatch), max-accuracy (MaxAcc), cheapest (INFaaS without an accuracy
target), and fixed:final@5 to @3, single subnets (Clipper+), the smallest first.

* bursts: 1,500 constant and 5,550 of a gamma stream of CV² 2, 4 and 8 (figures 8 and 11c);
* accelerating: from 2,500 to 7,400 requests/s (figures 9 and 12b);
* spikes: 5,500, and 8,750 for a tenth of each second, as the MAF trace is described (6.3, figure
  10);
* kills: 1,500 constant and 3,500 of CV² 2 while a worker is killed every 12 s of wall time, 1.2 s
  of the devices', and restarted by the router (in 6.4 it is lost permanently; figure 11a);
* router: queries per second of closed-loop clients on 1 to 8 workers that take no time, not
  stretched; processor time of the router per query (figure 11b).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.common import make_parser, some_of
from benchmarks.emulated import (
    EmulatedCluster,
    emulated_workers,
    scripted_model,
    show_emulated,
    stretched,
    write_emulated,
)
from benchmarks.replay import COUNTED, Replay
from benchmarks.superserve import (
    ACCURACIES,
    MAX_BATCH,
    MAX_WAITING,
    SLO_MS,
    WORKERS,
    gpu_table,
    table_points,
)

from offramp.bundle import ExitPolicy
from offramp.bundle.schema.parts import Exit, Head, Variant
from offramp.certify.decision import MODEL_END
from offramp.engine.core import Engine
from offramp.engine.models.deployment import Deployment
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.emulated_worker import EmulatedDevice
from offramp.tools.bench.common.outcomes import Outcomes, summarise
from offramp.tools.bench.common.output import describe_environment
from offramp.tools.bench.common.traces import Trace, accelerate, bursty

MODEL: Final = "supernet"
SUBNETS: Final = len(ACCURACIES)
FIXED: Final = tuple(f"fixed:final@{variant}" for variant in (5, 4, 3))
POLICIES: Final = ("slackfit-bare", "slackfit", "max-batch", "max-accuracy", "cheapest", *FIXED)
FEW: Final = ("slackfit-bare", "slackfit", "max-batch", "cheapest", FIXED[1])
KILL_EVERY_S: Final = 12.0
UNDER_WAY: Final = 256
_CLASSES: Final = 2

Row = dict[str, Any]


def spikes(duration_s: float, seed: int) -> Trace:
    """Draw 5,500 arrivals a second, and 8,750 in the first tenth of each."""
    draw, arrivals = np.random.default_rng(seed), []
    for begin_s in np.arange(0.0, duration_s, 0.1):
        rate = 8_750 if round(begin_s * 10) % 10 == 0 else 5_500
        ends_s = min(begin_s + 0.1, duration_s)
        count = draw.poisson(rate * (ends_s - begin_s))
        arrivals.append(np.sort(draw.uniform(begin_s, ends_s, count)))
    return Trace(name="spikes", arrivals_s=np.concatenate(arrivals), duration_s=duration_s)


class ServedSupernet:
    """A supernet of one stage a subnet, on emulated workers."""

    def __init__(self, emulated: EmulatedCluster, table: Sequence[Sequence[float]]) -> None:
        self._emulated, self._table = emulated, table
        script = np.full((1, SUBNETS + 1, _CLASSES), 0.5, np.float32)
        script[:, -1] = 0
        self._samples = [{SCRIPT: script}]

    def load(self, policy: str, trace: Trace, *, kills: bool = False) -> Row:
        """Serve a trace by a policy; return attainment and accuracy."""
        return uvloop.run(self._load(policy, trace, kills=kills))

    def rate(self, policy: str, duration_s: float) -> tuple[float, float]:
        """Return the queries per second of closed-loop clients.

        Also return the router's processor seconds per query.
        """
        return uvloop.run(self._rate(policy, duration_s))

    async def _load(self, policy: str, trace: Trace, *, kills: bool) -> Row:
        stretch, slo_s = self._emulated.stretch, SLO_MS / 1e3
        engine = self._engine(policy)
        killing = asyncio.create_task(self._kill()) if kills else None
        try:
            replay = Replay(engine, MODEL, self._samples, np.zeros(1, np.int64))
            found = await replay.open_loop(
                stretch * trace.arrivals_s, stretch * trace.duration_s, stretch * slo_s
            )
            (statistics,) = engine.statistics().values()
            smaller = [variant.answered for variant in statistics.variants]
            answered = [statistics.answered - sum(smaller), *smaller]
        finally:
            if killing is not None:
                killing.cancel()
            await engine.close()
        summary = summarise(_faster(found, stretch), slo_ms=SLO_MS)
        worth = np.array(ACCURACIES[::-1])
        return {
            "policy": policy,
            "requests": len(found.intended_s),
            "attainment": summary.attainment,
            "accuracy %": 100 * float(worth @ answered) / max(sum(answered), 1),
            "restarts": statistics.worker_restarts,
        }

    async def _kill(self) -> None:
        chosen = random.Random(0)
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            if pids := self._emulated.backend.pids:
                os.kill(chosen.choice(pids), signal.SIGKILL)

    async def _rate(self, policy: str, duration_s: float) -> tuple[float, float]:
        engine = self._engine(policy)
        try:
            replay = Replay(engine, MODEL, self._samples, np.zeros(1, np.int64))
            began_s = time.process_time()
            took_s = await replay.saturate(UNDER_WAY, duration_s)
            busy_s = time.process_time() - began_s
        finally:
            await engine.close()
        return len(took_s) / (COUNTED * duration_s), COUNTED * busy_s / max(len(took_s), 1)

    def _engine(self, policy: str) -> Engine:
        backend = self._emulated.backend
        table = stretched(np.array(self._table), self._emulated.stretch)
        points = table_points(table)
        full, *smaller = (
            Pipeline(backend, _plan_of(segment)) for segment in reversed(range(SUBNETS))
        )
        deployment = Deployment(
            number=0,
            policy=ExitPolicy(version=1, active=()),
            pipeline=full,
            smaller=tuple(smaller),
            points=points,
            batch_size=MAX_BATCH,
        )
        streams = len(self._emulated.slowdowns)
        model = scripted_model(
            deployment,
            policy,
            streams=streams,
            most_waiting=MAX_WAITING,
            variants=tuple(map(_variant, range(1, SUBNETS))),
        )
        return Engine({MODEL: model}, backend, streams=streams)


def _variant(number: int) -> Variant:
    """Describe a subnet as a variant; only a page reads the agreement of its exit."""
    end = Exit(
        index=0,
        after_segment=0,
        file="",
        inputs=(),
        output="answer",
        confidence="",
        head=Head(kind="mean"),
        agreement=ACCURACIES[SUBNETS - 1 - number],
    )
    return Variant(index=number, name=f"subnet {number}", segments=(), exits=(end,))


def _plan_of(segment: int) -> Plan:
    stage = StageSpec(
        index=0,
        first_segment=segment,
        last_segment=segment,
        exit=MODEL_END,
        load=bytes,
        inputs=(SCRIPT,),
        carried=(),
        answer="answer",
        form="probabilities",
        threshold=0.0,
    )
    return Plan(stages=(stage,), policy_version=1, mode=Mode.LEAVE)


def _faster(found: Outcomes, stretch: float) -> Outcomes:
    return replace(
        found,
        intended_s=found.intended_s / stretch,
        latency_s=found.latency_s / stretch,
        duration_s=found.duration_s / stretch,
    )


def bursts(stretch: float, duration_s: float) -> Iterator[Row]:
    """Yield results under bursts (figures 8 and 11c)."""
    with _devices(stretch) as served:
        for cv2 in (2, 4, 8):
            trace = bursty(1_500, 5_550, cv2, duration_s, 0)
            for policy in POLICIES:
                yield {"CV²": cv2, **served.load(policy, trace)}


def accelerating(stretch: float, duration_s: float) -> Iterator[Row]:
    """Yield results under an accelerating load (figures 9 and 12b)."""
    with _devices(stretch) as served:
        for per_s2 in (250, 5_000):
            trace = accelerate(2_500, 7_400, per_s2, 8, duration_s, seed=0)
            for policy in FEW:
                yield {"per s²": per_s2, **served.load(policy, trace)}


def spiky(stretch: float, duration_s: float) -> Iterator[Row]:
    """Yield results under a load with spikes, in the shape of figure 10."""
    with _devices(stretch) as served:
        for policy in FEW:
            yield served.load(policy, spikes(duration_s, 0))


def killed(stretch: float, duration_s: float) -> Iterator[Row]:
    """Yield results while workers are killed (figure 11a)."""
    with _devices(stretch) as served:
        trace = bursty(1_500, 3_500, 2, 3 * duration_s, 0)
        for policy in FEW[:3]:
            yield served.load(policy, trace, kills=True)


def router(_: float, duration_s: float) -> Iterator[Row]:
    """Yield the queries per second that the router carries."""
    nothing = np.zeros((SUBNETS, MAX_BATCH + 1)).tolist()
    for workers in (1, 2, 4, 8):
        device = EmulatedDevice(segments_s=nothing)
        with emulated_workers([device] * workers, stretch=1.0) as emulated:
            served = ServedSupernet(emulated, gpu_table())
            rate, busy_s = served.rate("fixed:final@5", max(duration_s, 2.0))
            yield {"workers": workers, "queries/s": round(rate),
                   "router µs a query": 1e6 * busy_s}  # fmt: skip


@contextmanager
def _devices(stretch: float) -> Iterator[ServedSupernet]:
    """Start eight devices with the curves of the table "GPU"."""
    table = gpu_table()
    device = EmulatedDevice(segments_s=stretched(np.array(table), stretch))
    with emulated_workers([device] * WORKERS, stretch=stretch) as emulated:
        yield ServedSupernet(emulated, table)


EXPERIMENTS: Final[Mapping[str, Callable[[float, float], Iterator[Row]]]] = {
    "bursts": bursts,
    "accelerating": accelerating,
    "spikes": spiky,
    "kills": killed,
    "router": router,
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
    parser.add_argument("--stretch", type=float, default=10.0, help="factor on all times")
    parser.add_argument(
        "--duration-s", type=float, default=3.0, help="seconds of a load, not stretched"
    )
    options = parser.parse_args()
    found: dict[str, Sequence[Row]] = {}
    for name in options.only:
        rows: list[Row] = []
        for row in EXPERIMENTS[name](options.stretch, options.duration_s):
            rows.append(row)
            print(row, flush=True)
        found[name] = rows
        show_emulated(name, rows, digits=4, width=140)
        write_emulated(
            options.json,
            __doc__,
            found,
            measured_on_emulated_devices="all figures",
            environment=describe_environment(
                seed=0, stretch=options.stretch, duration_s=options.duration_s
            ),
        )


if __name__ == "__main__":
    main()
