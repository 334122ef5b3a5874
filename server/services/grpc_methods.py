"""All methods of the gRPC port: inference, health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from offramp.proto.descriptors import FILE, SERVICE
from offramp.server.common.catalog import Catalog
from offramp.server.common.methods import Handler
from offramp.server.common.served import ServedEngine
from offramp.server.services.protocol_services import ProtocolServices
from offramp.server.services.service import GuardedMethods, inference_methods

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Seconds between two readiness checks; the engine does not report changes."""

_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class HealthReporter:
    """Reports each model's readiness; server and service are ready if all models are.

    Watchers are notified of changes. Used on the event loop's thread.
    """

    def __init__(self, engine: ServedEngine, catalog: Catalog) -> None:
        self.servicer: Final = health.aio.HealthServicer()
        """The health servicer, to be added to the server."""
        self._engine = engine
        self._catalog = catalog
        self._reported: dict[str, bool] = {}
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report readiness now, and follow the engine from now on."""
        await self._report()
        self._following = asyncio.create_task(self._follow(), name="health")

    async def leave(self) -> None:
        """Report everything as not serving, permanently."""
        await self.stop()
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Stop following the engine; harmless if it was never followed."""
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
        readiness = dict(self._readiness())
        gone = self._reported.keys() - readiness.keys()
        for name, ready in [*readiness.items(), *dict.fromkeys(gone, False).items()]:
            if self._reported.get(name) != ready:
                if name in self._reported:
                    logger.warning("%s: %s", name or "server", "ready" if ready else "not ready")
                self._reported[name] = ready
                await self.servicer.set(name, _STATUS[ready])

    def _readiness(self) -> Iterator[tuple[str, bool]]:
        for name in ("", SERVICE):
            yield name, self._catalog.all_ready()
        for name in self._catalog.names():
            yield name, self._catalog.ready(name)


REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
"""Name of the reflection service without its preview version; its messages are the same."""

SERVICES: Final = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)
"""Names of the services that reflection lists."""


class GrpcMethods:
    """The gRPC methods of an engine; used on the event loop's thread."""

    def __init__(self, services: ProtocolServices) -> None:
        self.health: Final = HealthReporter(services.engine, services.repository.catalog)
        guarded = GuardedMethods(services.admission)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, guarded)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(SERVICES, pool=_reflection_pool()), guarded
        )
        preview = f"/{reflection.SERVICE_NAME}/"
        self.handlers: Final[dict[str, Handler]] = {
            **inference_methods(services.method, services.admission),
            **guarded.methods,
            **{
                name.replace(preview, f"/{REFLECTION_V1}/"): handler
                for name, handler in guarded.methods.items()
                if name.startswith(preview)
            },
        }
        """Handlers by full method name."""


def _reflection_pool() -> DescriptorPool:
    """Return a pool with our messages and those of gRPC's own services."""
    pool = DescriptorPool()
    for file in (FILE, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    return pool
