"""The gRPC side of the server: inference, health and reflection on one port."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from offramp.proto.descriptors import FILE, SERVICE
from offramp.server.addresses import join_address
from offramp.server.errors import StartError
from offramp.server.health import HealthReporter
from offramp.server.served import ServedEngine
from offramp.server.service import inference_handler

SERVICES: Final = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
"""What reflection lists."""


class GrpcEndpoint:
    """A grpc.aio server; made and used on the event loop's thread."""

    def __init__(self, engine: ServedEngine, *, max_message_bytes: int) -> None:
        self._health = HealthReporter(engine)
        self._server = grpc.aio.server(options=_channel_options(max_message_bytes))
        self._server.add_generic_rpc_handlers((inference_handler(engine),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(SERVICES, pool=_reflection_pool()), self._server
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port, which the system chooses for port 0.

        Raises:
            StartError: The address cannot be listened on.
        """
        address = join_address(host, port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartError(f"cannot listen for gRPC on {address}: {error}") from error
        await self._server.start()
        return port

    async def serving(self) -> None:
        """From now on report models, service and server as ready as the engine is."""
        await self._health.start()

    async def leaving(self) -> None:
        """Report everything as not serving, for good; calls are answered all the same."""
        await self._health.leave()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; give those in flight ``grace_s`` to end, then cancel them."""
        await self._health.stop()
        await self._server.stop(grace_s)


def _channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # gRPC lets a second server share the port, and splits the calls between the two.
        ("grpc.so_reuseport", 0),
    ]


def _reflection_pool() -> DescriptorPool:
    """Our messages and those of gRPC's own services; their home is the process-wide pool."""
    pool = DescriptorPool()
    for file in (FILE, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    return pool
