"""The services that come with gRPC, health and reflection, with their messages decoded here.

gRPC decodes whatever comes, however large, and what it cannot it answers UNKNOWN, with a traceback
in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio

from offramp.server.decoding import decode_small
from offramp.server.reception import CallKind, Method, Reception, Visit, answering_errors

_Handler: TypeAlias = Any
"""A ``grpc.RpcMethodHandler``, whose types say nothing of asyncio."""
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class GuardedServer:
    """Stands in for a server where generated code adds a service to it."""

    def __init__(self, server: grpc.aio.Server, reception: Reception) -> None:
        self._server = server
        self._reception = reception

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Do nothing: the same handlers come once more, by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, _Handler]
    ) -> None:
        """Add the methods of a service."""
        reception = self._reception
        guarded = {name: _guarded(name, made, reception) for name, made in handlers.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, guarded),)
        )


def _guarded(name: str, handler: _Handler, reception: Reception) -> _Handler:
    serialize = handler.response_serializer
    how = {"response_serializer": serialize}
    if handler.stream_stream:
        answer = answering_errors(reception, name, _of_many(handler), kind=CallKind.WATCH)
        return grpc.stream_stream_rpc_method_handler(answer, **how)
    if handler.unary_stream:
        method = _of_one(handler, handler.unary_stream)
        answer = answering_errors(reception, name, method, kind=CallKind.WATCH)
        return grpc.unary_stream_rpc_method_handler(answer, **how)
    method = _of_one(handler, handler.unary_unary)
    return grpc.unary_unary_rpc_method_handler(
        answering_errors(reception, name, method, serialize=serialize)
    )


def _of_one(handler: _Handler, method: Any) -> Method[Any]:
    async def call(_visit: Visit, data: bytes, context: _Context) -> Any:
        return await method(decode_small(data, handler.request_deserializer), context)

    return call


def _of_many(handler: _Handler) -> Method[None]:
    async def decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield decode_small(data, handler.request_deserializer)

    async def call(_visit: Visit, requests: AsyncIterator[bytes], context: _Context) -> None:
        async for response in handler.stream_stream(decoded(requests), context):
            await context.write(response)

    return call
