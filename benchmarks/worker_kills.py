"""Lost or wrong answers among ten thousand requests while a random worker is killed every second.

    python -m benchmarks.worker_kills BUNDLE --data TEST.npz [--workers 2] [--splits 1]
        [--requests 10000] [--under-way 32] [--every-s 1.0] [--max-batch-size 1] [--ray]
        [--json FILE]

An engine runs the bundle's stages in worker processes; at intervals a random worker gets SIGKILL.
Requests are of one sample each, a fixed number in flight. Results are compared, bit by bit, with
those of the same stages in this process, sample by sample. With ``--splits`` workers have memory
for only a part of the weights: the model is planned in about that many splits, and each worker
holds its own split only. With ``--ray`` workers are actors, of one CPU each, of the Ray cluster of
this host (or of RAY_ADDRESS), which has no other hosts.

In batches of more than one sample, the order in which sums are rounded depends on the batch: then
exits and answers are compared up to 1e-5 of the largest value. MEASURED; times are of the busy
engine, kills included.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from benchmarks.common import make_parser
from benchmarks.replay import single_samples
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.schema.parts import PartSizes
from offramp.calibration.data.dataset import read_dataset
from offramp.cluster.planning.cluster import Cluster, DeviceType
from offramp.cluster.planning.cluster_times import times_of
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.ray_entry import ONE_CPU
from offramp.cluster.ray.launcher import RayLauncher, actor_needs, reserve
from offramp.cluster.remote.launching import LocalLauncher, WorkerLauncher, worker_command
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.cluster_serving import ServedCluster
from offramp.cluster.serving.worker_devices import OpenedWorkers
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.environment import package_version
from offramp.engine.common.errors import EngineError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

MODEL: Final = "model"
TOLERANCE: Final = 1e-5


def main() -> None:
    """Serve in both ways, kill, compare, print; exit status 1 if an answer is missing or wrong."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--splits", type=int, default=1, help="number of splits that the workers share"
    )
    parser.add_argument("--ray", action="store_true", help="run workers as actors of Ray")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--under-way", type=int, default=32, metavar="N", help="number of requests in flight"
    )
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--max-batch-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_outputs(options.json)
    found = asyncio.run(measured(options))
    for name, value in found.items():
        print(f"{name}: {value:,.5g}" if isinstance(value, float) else f"{name}: {value}")
    versions = {"ray": package_version("ray")} if options.ray else {}
    environment = describe_environment(seed=options.seed, threads=1, **versions)
    write_json(options.json, {**found, "environment": environment})
    if found["failed"] or found["different"] or found["counted"] != options.requests:
        raise SystemExit("NOT EVERY REQUEST HAS ITS ANSWER, ONCE AND RIGHT")


async def measured(options: Namespace) -> dict[str, Any]:
    """Return the outcomes of the requests."""
    bundle = Bundle.open(options.bundle)
    dataset = read_dataset(options.data, bundle.manifest.inputs, answer=bundle.manifest.answer)
    samples = single_samples(dataset, options.requests)
    each = ModelOptions(max_batch_size=options.max_batch_size)
    backend, remote = workers_for(options, bundle, each)
    async with await Engine.open({MODEL: options.bundle}, remote, backend=backend) as engine:
        killed: list[int] = []
        killing = asyncio.create_task(_kill(backend, options.every_s, options.seed, killed))
        begun_s = time.monotonic()
        given = await _ask(engine, samples, options.requests, options.under_way)
        seconds = time.monotonic() - begun_s
        killing.cancel()
        (statistics,) = engine.statistics().values()
        held = [len(worker.stages) for worker in backend.alive]
        stages = engine._executor.deployment(MODEL).plan.stages  # noqa: SLF001
    backend.close()
    exact = options.max_batch_size == 1
    wanted = answers_here(bundle, [s.last_segment for s in stages if s.exit is None], samples)
    pairs = [(wanted[n % len(samples)], result) for n, result in enumerate(given)]
    return {
        "requests": options.requests,
        "workers": options.workers,
        "started_by": "Ray" if options.ray else "the router",
        "splits": options.splits,
        "stages": len(stages),
        "stages_held_by_each": held,
        "bit_by_bit": exact,
        "killed": len(killed),
        "restarts": statistics.worker_restarts,
        "resumed_samples": statistics.resumed,
        "retried_samples": statistics.retried,
        "failed": sum(result is None for result in given),
        "different": sum(not _same(a, b, exact=exact) for a, b in pairs if b is not None),
        "counted": sum(stage.answered for stage in statistics.stages),
        "seconds": seconds,
    }


def workers_for(
    options: Namespace, bundle: Bundle, each: ModelOptions
) -> tuple[RemoteBackend, EngineOptions]:
    """Make workers that hold the whole model, or one split of it each."""
    launchers: Sequence[WorkerLauncher]
    launchers = [LocalLauncher(worker_command(), device_type="cpu")] * options.workers
    if options.ray:
        needs = actor_needs([bundle.path])
        actors = [RayLauncher(ONE_CPU, needs, device_type="cpu") for _ in range(options.workers)]
        reserve(actors, least=options.workers)
        launchers = actors
    backend = RemoteBackend(OnnxRuntimeBackend(threads=1), launchers=launchers, threads=1)
    cluster = None
    if options.splits > 1:
        sizes = PartSizes.kept_by(bundle.manifest.segments)
        device = DeviceType(
            name="cpu",
            count=options.workers,
            cost_per_hour=1.0,
            times=times_of(bundle.profile(), each.max_batch_size),
            memory_bytes=1.2 * sum(sizes.weight_bytes) / options.splits,
        )
        goal = PlanningGoal(batch_sizes=(each.max_batch_size,))
        cluster = ServedCluster(cluster=Cluster(types=(device,)), goal=goal)
    devices = OpenedWorkers(options.workers, cluster)
    remote = EngineOptions(threads=1, devices=devices, keep_state=False, defaults=each)
    return backend, remote


async def _ask(
    engine: Engine, samples: Sequence[Mapping[str, NDArray[Any]]], count: int, under_way: int
) -> list[EngineResult | None]:
    """Send ``count`` samples, ``under_way`` at a time; a failed request has the result ``None``."""
    free = asyncio.Semaphore(under_way)

    async def ask(number: int) -> EngineResult | None:
        async with free:
            try:
                return await engine.infer(MODEL, samples[number % len(samples)])
            except EngineError as error:
                print(f"request {number}: {error}")
                return None

    return await asyncio.gather(*map(ask, range(count)))


async def _kill(backend: RemoteBackend, every_s: float, seed: int, killed: list[int]) -> None:
    """Kill a random worker every ``every_s`` seconds; add its process id to ``killed``."""
    chosen = random.Random(seed)
    while True:
        await asyncio.sleep(every_s)
        if pids := backend.pids:
            killed.append(chosen.choice(pids))
            os.kill(killed[-1], signal.SIGKILL)


def answers_here(
    bundle: Bundle, borders: Sequence[int], samples: Sequence[Mapping[str, NDArray[Any]]]
) -> list[tuple[int, NDArray[Any]]]:
    """Return exit and answer of each sample, run alone, by the same stages in this process."""
    pipeline = Pipeline(OnnxRuntimeBackend(threads=1), make_plan(bundle, borders=borders))
    slot, found = pipeline.backend.open_slot(), []
    for sample in samples:
        (left,) = pipeline.run(slot, sample)
        found.append((pipeline.plan.stages[left.stage].answered_by, left.answer))
    slot.close()
    return found


def _same(wanted: tuple[int, NDArray[Any]], given: EngineResult, *, exact: bool) -> bool:
    """Return True if two answers are equal: bit by bit, or within the rounding of sums."""
    exit_, answer = wanted
    (found,) = given.outputs.values()
    allowed = 0.0 if exact else TOLERANCE * float(np.abs(answer).max(initial=1.0))
    alike = found.shape == answer.shape and np.abs(found - answer).max(initial=0.0) <= allowed
    return bool(alike) and given.exits.tolist() == [exit_]


if __name__ == "__main__":
    main()
