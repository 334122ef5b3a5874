"""Shared parts of the engine's tests: an engine on the fake backend, and a gate to hold its
runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tests.fakes import fake_model

from offramp.engine.core import Engine
from offramp.testing.backend import FakeBackend

LIMIT_S = 30.0
"""Bound of everything awaited: a test hangs no longer, and asserts no time."""


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what threads bring about, not tasks; :func:`with_engine` bounds the time."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Gate:
    """Holds the fake backend's runs until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, stage: int, rows: int) -> None:
        self.entered.set()
        assert self._open.wait(LIMIT_S)

    def open(self) -> None:
        self._open.set()

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, LIMIT_S)


def with_engine(
    body: Callable[[Engine, FakeBackend], Coroutine[Any, Any, None]],
    on_run: Callable[[int, int], None] | None = None,
    backend_type: type[FakeBackend] = FakeBackend,
    **model: Any,
) -> FakeBackend:
    """Run ``body`` against an engine with one fake model; checks that slots are closed."""
    backend = backend_type(on_run=on_run) if on_run else backend_type()

    async def run() -> None:
        streams = model.get("streams", 1)
        served = {"fake": fake_model(backend, **model)}
        engine = Engine(served, backend, streams=streams, parallel=model.get("parallel"))
        try:
            await asyncio.wait_for(body(engine, backend), LIMIT_S)
        finally:
            await engine.close()

    asyncio.run(run())
    backend.close()
    return backend
