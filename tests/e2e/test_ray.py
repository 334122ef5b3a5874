"""Ray workers answer like a single process, and no answer is lost when they end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.remote.listening import GOLDEN
from tests.cluster.remote.workers import answers_of, in_process, random_scripts, serve
from tests.e2e.test_workers import ask_while_killing, children
from tests.facts import facts, tells
from tests.local_ray import LocalRay, local_ray
from tests.unit.engine.serving import until

from offramp.bundle import Bundle
from offramp.cluster.ray.launcher import ActorNeeds, RayLauncher, RayWorker
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.serving import stream_health
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import make_plan
from offramp.testing.ray_actor import ScriptedActor
from offramp.testing.scripted_worker import ScriptedBackend

# Not imported here: where Ray listens is decided when it is imported.
if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra `ray` is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,  # clusters take seconds to start, twenty on a busy machine
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves logs of its nodes open
]

SCRIPTS = random_scripts(300)
CLUSTER = """
[devices.cpu]
count = 2
cost_per_hour = 0
speed = 1
resources = {{ CPU = 1 }}

[router]
launch = "ray"
ray_address = "{address}"
"""
ROWS = sum(map(len, SCRIPTS))
FRESH = GOLDEN.parent / "fresh.npz"
CPU, GADGET = {"CPU": 1.0}, {"gadget": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalRay]:
    with local_ray() as started:
        yield started


@contextlib.contextmanager
def actors(cluster: LocalRay, *resources: dict[str, float]) -> Iterator[RemoteBackend]:
    """A backend of one actor of each of these resources."""
    needs = ActorNeeds(bundles=(), actor=ScriptedActor)
    launchers = [RayLauncher(each, needs, address=cluster.address) for each in resources]
    with contextlib.closing(
        RemoteBackend(ScriptedBackend(), launchers=launchers, least_s=30.0)
    ) as backend:
        yield backend


def test_two_actors_answer_as_one_process_does_while_they_are_killed(cluster: LocalRay) -> None:
    expected = in_process(SCRIPTS)
    with actors(cluster, CPU, CPU) as backend:

        async def body(engine: Engine) -> None:
            for done, how in enumerate(("ray.kill", "SIGKILL")):
                await until(lambda: backend.in_service == 2)
                before = set(backend.pids)
                assert len(before - {os.getpid()}) == 2
                asked = asyncio.create_task(answers_of(engine, SCRIPTS))
                await until(lambda n=done: answered(engine) > n * ROWS)
                kill(backend, how)
                assert await asked == expected
                assert answered(engine) == (done + 1) * ROWS, "none twice"
                await until(lambda b=before: not set(backend.pids) >= b)
            statistics = engine.statistics()["fake"]
            assert (statistics.failed, statistics.retried) == ({}, 0)

        serve(backend, body, streams=2, max_batch_size=1)
        assert backend.restarts >= 1


def test_a_worker_starts_when_resources_are_free_and_ends_with_its_node(
    cluster: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_health, "LONGEST_PAUSE_S", 0.1)
    expected = in_process(SCRIPTS)
    with actors(cluster, CPU, GADGET) as backend:

        async def body(engine: Engine) -> None:
            await until(lambda: backend.in_service == 1)
            assert await answers_of(engine, SCRIPTS[:20]) == expected[:20]
            with pytest.raises(WorkerLostError, match=facts("too few free resources", "1 gadget")):
                backend.open_slot_of(1)
            with cluster.node(gadget=1) as node:
                await until(lambda: backend.in_service == 2)
                begun = answered(engine)
                asked = asyncio.create_task(answers_of(engine, SCRIPTS))
                await until(lambda: answered(engine) > begun)
                node.kill()
                assert await asked == expected
                while backend.in_service == 2:  # its worker looks for it once a second
                    assert await answers_of(engine, SCRIPTS[:20]) == expected[:20]
                assert await answers_of(engine, SCRIPTS[:20]) == expected[:20]
                statistics = engine.statistics()["fake"]
                assert (statistics.failed, statistics.retried) == ({}, 0)

        serve(backend, body, streams=2, max_batch_size=1)


def test_a_bundle_is_served_by_its_path_and_no_other(cluster: LocalRay, tmp_path: Path) -> None:
    found = []
    for path in (GOLDEN, tmp_path / "other"):
        needs = ActorNeeds(bundles=(str(path),))
        launcher = RayLauncher(CPU, needs, device_type="cpu", address=cluster.address)
        assert launcher.device_type == "cpu"
        assert launcher.describe() == "an actor of Ray with 1 CPU"
        found.append(RemoteBackend(OnnxRuntimeBackend(threads=1), launchers=[launcher]))
    right, wrong = found
    with contextlib.closing(right), contextlib.closing(wrong):
        assert golden_answers(right) == golden_answers(OnnxRuntimeBackend(threads=1))
        bundle = Bundle.open(GOLDEN)
        other = replace(bundle, manifest=replace(bundle.manifest, name="other"))
        with pytest.raises(BackendError, match=r"this worker has no bundle 'bundle' '[0-9a-f]{12}"):
            right.prepare(make_plan(other).stages[0])
        with pytest.raises(BackendError) as refused:
            wrong.open_slot()
        tells(str(refused.value), "node 127.0.0.1")
        tells(str(refused.value), "bundles and files", "same paths")


def test_killed_actors_cost_clients_nothing(cluster: LocalRay, launch: Any, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(GOLDEN, tmp_path / "recorded.ee"))
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(address=cluster.address))
    words = ["--mode=leave", "--backend=onnxruntime", f"--cluster={file}"]
    server = launch(bundle.path, *words)
    assert server.metric("offramp_workers") == 2

    def pids() -> list[int]:
        return list(children(cluster.head_pid, b"ray::WorkerActor"))

    assert len(pids()) == 2
    ask_while_killing(server, bundle, 600, 2, pids)


def golden_answers(backend: Backend) -> list[tuple[list[int], list[Any]]]:
    """Return the answers of an engine on a backend for fresh samples, each sent alone."""
    options = EngineOptions(keep_state=False, defaults=ModelOptions(max_batch_size=1))

    async def serve() -> list[tuple[list[int], list[Any]]]:
        async with await Engine.open({"golden": GOLDEN}, options, backend=backend) as engine:
            (name,) = (tensor.name for tensor in engine.model("golden").inputs)
            with np.load(FRESH) as archive:
                rows = archive[name][:40]
            asked = [engine.infer("golden", {name: rows[n : n + 1]}) for n in range(len(rows))]
            results = await asyncio.gather(*asked)
        return [(r.exits.tolist(), [a.tolist() for a in r.outputs.values()]) for r in results]

    return asyncio.run(serve())


def answered(engine: Engine) -> int:
    """Samples that have their answers."""
    return engine.statistics()["fake"].answered


def kill(backend: RemoteBackend, how: str) -> None:
    """End one of the actors that are there, in one way or the other."""
    worker = backend._pool[0].worker
    assert isinstance(worker, RayWorker)
    if how == "SIGKILL":
        os.kill(worker.pid, signal.SIGKILL)
    else:
        import ray

        ray.kill(worker._actor)
