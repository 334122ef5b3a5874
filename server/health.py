"""Keeps ``grpc.health.v1`` in step with the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

from grpc_health.v1 import health, health_pb2

from offramp.proto.descriptors import SERVICE
from offramp.server.served import ServedEngine

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Between two looks at the engine; it tells nobody when its readiness changes."""

_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class HealthReporter:
    """Reports each model as the engine says, and server and service as ready with all models.

    Watchers are told of changes. To be used on the event loop's thread.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.servicer: Final = health.aio.HealthServicer()
        """To be added to the server."""
        self._engine = engine
        self._reported: dict[str, bool] = {}
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report now, and follow the engine from here on."""
        await self._report()
        self._following = asyncio.create_task(self._follow(), name="health")

    async def leave(self) -> None:
        """Report everything as not serving, for good."""
        await self.stop()
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Follow the engine no more; harmless if it was never followed."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait((following,))

    async def _follow(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await self._report()
        except Exception:
            logger.exception("health is no longer followed")

    async def _report(self) -> None:
        for name, ready in self._readiness():
            if self._reported.get(name) != ready:
                if name in self._reported:
                    logger.warning("%s: %s", name or "server", "ready" if ready else "not ready")
                self._reported[name] = ready
                await self.servicer.set(name, _STATUS[ready])

    def _readiness(self) -> Iterator[tuple[str, bool]]:
        for name in ("", SERVICE):
            yield name, self._engine.ready()
        for model in self._engine.models():
            yield model.name, self._engine.ready(model.name)
