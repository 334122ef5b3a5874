"""Shared parts of tests of workers: a backend of scripted workers, and an engine on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes import fake_model, script
from tests.unit.engine.serving import LIMIT_S

from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.core import Engine
from offramp.testing.backend import SCRIPT, FakeBackend
from offramp.testing.scripted_worker import ScriptedBackend

COMMAND = WorkerCommand(module="offramp.testing.scripted_worker")
MISSING = WorkerCommand(module="offramp.testing.no_such_worker")
"""Starts no worker."""
POINTS = ("before-run", "mid-run", "after-run", "after-write")
"""Points of the protocol at which a worker can end during a run."""


@contextmanager
def scripted_workers(count: int, *, least_s: float = 30.0) -> Iterator[RemoteBackend]:
    """A backend of so many workers without a model; nothing is taken to hang for a while."""
    launchers = [LocalLauncher(COMMAND)] * count
    backend = RemoteBackend(ScriptedBackend(), launchers=launchers, least_s=least_s)
    try:
        yield backend
    finally:
        backend.close()


def launch_as(backend: RemoteBackend, command: WorkerCommand) -> None:
    """Set the command that starts the backend's next workers."""
    for entry in backend._pool:
        entry.launcher = LocalLauncher(command)


def break_at(folder: Path, *faults: str) -> None:
    """Request faults of workers, such as ``kill@before-run@3``, each once."""
    for fault in faults:
        (folder / fault).touch()


def left(folder: Path) -> list[str]:
    """Faults that no worker came to."""
    return sorted(fault.name for fault in folder.iterdir())


def serve(
    backend: RemoteBackend | FakeBackend,
    body: Callable[[Engine], Coroutine[Any, Any, None]],
    *,
    streams: int,
    **model: Any,
) -> None:
    """Run ``body`` against an engine with one fake model of two exits."""

    async def run() -> None:
        served = {"fake": fake_model(backend, (0.9, 0.8), streams=streams, **model)}
        engine = Engine(served, backend, streams=streams)
        try:
            await asyncio.wait_for(body(engine), 2 * LIMIT_S)
        finally:
            await engine.close()

    asyncio.run(run())


def random_scripts(count: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Requests of one to four samples that leave at all stages."""
    rng = np.random.default_rng(seed)
    return [script(*rng.random((rng.integers(1, 5), 3)).tolist()) for _ in range(count)]


Answered = tuple[list[int], list[float], list[Any]]


async def answers_of(engine: Engine, scripts: Sequence[np.ndarray[Any, Any]]) -> list[Answered]:
    """Return exits, confidences and outputs of requests that were sent concurrently."""
    asked = [engine.infer("fake", {SCRIPT: each}) for each in scripts]
    results = await asyncio.gather(*asked)
    return [
        (r.exits.tolist(), r.confidences.tolist(), r.outputs["answer"].tolist()) for r in results
    ]


def in_process(scripts: Sequence[np.ndarray[Any, Any]]) -> list[Answered]:
    """The same, of a backend in this process."""
    found: list[Answered] = []

    async def body(engine: Engine) -> None:
        found.extend(await answers_of(engine, scripts))

    serve(FakeBackend(), body, streams=1)
    return found
