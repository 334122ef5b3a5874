"""A model that no worker has room for is split among several, and answers as it always does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.loops import plans_of
from tests.cluster.remote.listening import ThreadLauncher
from tests.cluster.split_serving import BACK, FRONT
from tests.cuda_fakes import fake_cuda
from tests.facts import facts
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster import Cluster, DeviceType
from offramp.cluster.planning.cluster_times import times_of
from offramp.cluster.planning.facts import recorded_shares
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.replanning import ReplanGuard, ReplanRules
from offramp.cluster.remote.launching import LocalLauncher, WorkerLauncher, WorkerRuntime
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.cluster_serving import ServedCluster, served_facts
from offramp.cluster.serving.cluster_statistics import plan_of
from offramp.cluster.serving.plan_loop import PlanLoop
from offramp.cluster.serving.plan_status import PlanStatus
from offramp.cluster.serving.split_change import SplitChange
from offramp.cluster.serving.worker_devices import OpenedWorkers
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import OptionsError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.served_model import merging_options
from offramp.engine.requests.results import EngineResult
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode

ROWS = 8
KINDS = ("slow", "fast", "slow", "fast")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    return compile_small(tmp_path_factory.mktemp("small"))


def cluster_for(
    bundle: Bundle, *, share: float, speeds: tuple[float, float] = (2.0, 1.0)
) -> ServedCluster:
    """Two types of device, with room for so much of the weights each."""
    total = sum(s.weight_bytes for s in bundle.manifest.segments)
    types = [
        DeviceType(
            name=name,
            count=2,
            cost_per_hour=1.0,
            times=times_of(bundle.profile(), ROWS, speed=speed),
            memory_bytes=share * total,
        )
        for name, speed in zip(("fast", "slow"), speeds, strict=True)
    ]
    goal = PlanningGoal(batch_sizes=(1, 2, 4, ROWS))
    return ServedCluster(cluster=Cluster(types=tuple(types)), goal=goal)


def launched(kind: str) -> WorkerLauncher:
    """A process on this host, on the CPU."""
    return LocalLauncher(device_type=kind)


def on_fake_gpu(kind: str) -> WorkerLauncher:
    """A worker in a thread of this process, on a fake GPU; those that are slow are on the CPU."""
    if kind == "slow":
        return launched(kind)
    gpu = WorkerRuntime(backend="cuda", device="cuda:0")
    launcher = ThreadLauncher(lambda hello: fake_cuda(graphs=hello.graphs)[0], gpu)
    launcher.device_type = kind
    return launcher


def answers(
    bundle: Bundle,
    requests: Sequence[np.ndarray],
    *,
    kinds: Sequence[str] = (),
    cluster: ServedCluster | None = None,
    mode: Mode = Mode.LEAVE,
    launch: Callable[[str], WorkerLauncher] = launched,
) -> tuple[list[EngineResult], list[int]]:
    """Serve by workers of these kinds, or in this process; and how many stages each then has."""
    options = EngineOptions(
        mode=mode,
        threads=1,
        devices=OpenedWorkers(len(kinds), cluster) if kinds else None,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=ROWS),
    )

    async def serve() -> tuple[list[EngineResult], list[int]]:
        backend = OnnxRuntimeBackend(threads=1)
        workers = RemoteBackend(
            backend, launchers=[launch(kind) for kind in kinds], threads=1, graphs=False
        )
        try:
            async with await Engine.open(
                {"small": bundle.path}, options, backend=workers if kinds else backend
            ) as engine:
                asked = [engine.infer("small", {"x": rows}) for rows in requests]
                held = [len(seat.worker.stages) for seat in workers._pool if seat.worker]
                return list(await asyncio.gather(*asked)), held
        finally:
            workers.close()

    return asyncio.run(serve())


@pytest.mark.parametrize(
    ("mode", "launch"),
    [(Mode.LEAVE, launched), (Mode.AUDIT, launched), (Mode.LEAVE, on_fake_gpu)],
)
def test_a_split_model_answers_as_in_one_process(
    small: tuple[Bundle, Path],
    mode: Mode,
    launch: Callable[[str], WorkerLauncher],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundle, inputs = small
    with np.load(inputs) as archive:
        requests = np.array_split(archive["x"][:120], 40)
    with caplog.at_level(logging.INFO):
        found, held = answers(
            bundle,
            requests,
            kinds=KINDS,
            cluster=cluster_for(bundle, share=0.7),
            mode=mode,
            launch=launch,
        )
    expected, _ = answers(bundle, requests, mode=mode)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.exits, other.exits)
        (name,) = one.outputs
        np.testing.assert_allclose(one.outputs[name], other.outputs[name], rtol=1e-5, atol=1e-6)
    assert "segments 0 to" in caplog.text, "the plan is told"
    assert "policy refill, as run-through never merges" in caplog.text
    assert 0 < min(held) < max(len(bundle.policy.active) + 1, *held)


def test_plans_are_of_what_is_served(small: tuple[Bundle, Path]) -> None:
    bundle, _ = small
    shares = recorded_shares(bundle)
    assert min(shares.values()) < 1
    assert served_facts(bundle, shares, Mode.AUDIT).going_on == tuple(shares.values())
    assert set(served_facts(bundle, shares, Mode.RELEASE).going_on) == {1.0}


@pytest.mark.parametrize("policy", ["fixed:final", "cheapest"])
def test_a_policy_that_chooses_exits_is_not_replaced(policy: str) -> None:
    options = ModelOptions(scheduling=PolicyName.parse(policy))
    with pytest.raises(OptionsError, match=f"m: policy {policy} fixes the exit that answers"):
        merging_options("m", options)
    assert merging_options("m", ModelOptions()).scheduling == PolicyName("refill")


def test_what_fits_nowhere_is_refused(small: tuple[Bundle, Path]) -> None:
    bundle, inputs = small
    with np.load(inputs) as archive:
        requests = [archive["x"][:1]]
    with pytest.raises(OptionsError, match=facts("small", "memory", "1 devices")):
        answers(bundle, requests, kinds=["slow"], cluster=cluster_for(bundle, share=0.2))
    cluster = cluster_for(bundle, share=2.0)
    with pytest.raises(OptionsError, match=r"workers have types \['gpu'\]"):
        answers(bundle, requests, kinds=["gpu"], cluster=cluster)
    late = replace(cluster, goal=replace(cluster.goal, slo_s=1e-9))
    with pytest.raises(OptionsError, match="latency: no plan is faster than"):
        answers(bundle, requests, kinds=["slow"], cluster=late)


@asynccontextmanager
async def looked_at_by_hand(
    cluster: ServedCluster, bundle: Bundle
) -> AsyncIterator[tuple[Engine, RemoteBackend]]:
    """An engine on four workers, whose plans change when a test says so."""
    options = EngineOptions(
        threads=1,
        devices=OpenedWorkers(len(KINDS), cluster),
        keep_state=False,
        defaults=ModelOptions(max_batch_size=ROWS),
    )
    launchers = [LocalLauncher(device_type=kind) for kind in KINDS]
    backend = RemoteBackend(OnnxRuntimeBackend(threads=1), launchers=launchers, threads=1)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PlanLoop, "start", lambda _: None)
            async with await Engine.open(
                {"small": bundle.path}, options, backend=backend
            ) as engine:
                yield engine, backend
    finally:
        backend.close()


def check_held(engine: Engine, backend: RemoteBackend) -> None:
    """Each worker has the stages that it is to hold, and no others."""
    splits = plans_of(engine)._served.splits
    stages = engine._executor.deployment("small").plan.stages
    for number, seat in enumerate(backend._pool):
        held = [spec for spec in stages if splits.holds(number, spec)]
        assert seat.worker is not None
        assert len(seat.worker.stages) == len(held) > 0


def test_plans_change_while_workers_are_killed(small: tuple[Bundle, Path]) -> None:
    """One worker is killed in each change; another one of its split is there."""
    bundle, inputs = small
    with np.load(inputs) as archive:
        requests = np.array_split(archive["x"][:120], 40)
    expected, _ = answers(bundle, requests)

    async def serve() -> None:
        async with looked_at_by_hand(cluster_for(bundle, share=1.3), bundle) as (engine, backend):
            loop = plans_of(engine)
            assert loop is not None
            served = loop._served

            async def ask() -> None:
                asked = [engine.infer("small", {"x": rows}) for rows in requests]
                for one, other in zip(await asyncio.gather(*asked), expected, strict=True):
                    np.testing.assert_array_equal(one.exits, other.exits)

            changed = 0
            for number, plan in enumerate((FRONT, BACK, FRONT, BACK)):
                while backend.in_service < len(KINDS):
                    await ask()
                change = SplitChange(served, plan, served.splits.model)
                asking = asyncio.create_task(ask())
                going = asyncio.create_task(asyncio.to_thread(change.advance))
                os.kill(backend.pids[number], signal.SIGKILL)
                while not await going:
                    await ask()
                    going = asyncio.create_task(asyncio.to_thread(change.advance))
                await asking
                changed += change.switched
                assert change.switched == (change.failure is None)
                assert served.splits.plan == plan or not change.switched
            assert changed > 0
            while backend.in_service < len(KINDS):
                await ask()
            await ask()
            assert engine.statistics()["small"].failed == {}
            check_held(engine, backend)

    asyncio.run(serve())


def test_a_plan_follows_the_shares_while_requests_run(small: tuple[Bundle, Path]) -> None:
    """Rows go on that were to leave: workers load, and the next plan answers as the last one."""
    bundle, inputs = small
    with np.load(inputs) as archive:
        rows = archive["x"][:200]
    (whole,), _ = answers(bundle, [rows])
    late = np.flatnonzero(whole.exits != 0)
    assert len(late) >= 10

    async def serve() -> None:
        cluster = cluster_for(bundle, share=0.8, speeds=(1.0, 1.0))
        async with looked_at_by_hand(cluster, bundle) as (engine, backend):
            loop = plans_of(engine)
            assert loop is not None
            loop._guard = ReplanGuard(ReplanRules(least_rows=100))

            def seen() -> PlanStatus:
                found = plan_of(engine.statistics()["small"])
                assert found is not None
                return found

            async def ask(numbers: Sequence[int]) -> None:
                asked = [engine.infer("small", {"x": rows[n : n + 1]}) for n in numbers]
                for n, result in zip(numbers, await asyncio.gather(*asked), strict=True):
                    np.testing.assert_array_equal(result.exits, whole.exits[n : n + 1])
                    (name,) = result.outputs
                    expected = whole.outputs[name][n : n + 1]
                    np.testing.assert_allclose(result.outputs[name], expected, rtol=1e-5, atol=1e-6)

            loop.poll()
            before = seen()
            assert before.changes == 0
            await ask([*late[:10]] * 20)
            looking = asyncio.create_task(asyncio.to_thread(loop.poll))
            while not looking.done() or seen().changing:
                if looking.done():
                    looking = asyncio.create_task(asyncio.to_thread(loop.poll))
                await ask(range(0, 200, 5))
            await looking
            after = seen()
            assert (after.changes, after.given_up) == (1, 0), after.reason
            assert [s.last_segment for s in after.splits] != [s.last_segment for s in before.splits]
            assert all(split.in_service == split.workers for split in after.splits)
            await ask(range(200))
            assert engine.statistics()["small"].failed == {}
            check_held(engine, backend)

    asyncio.run(serve())
