"""The service ``inference.GRPCInferenceService`` over an engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from offramp import __version__
from offramp.engine.errors import EngineError, ModelNotServedError
from offramp.engine.results import ResultKind
from offramp.proto import messages
from offramp.proto.descriptors import FILE, SERVICE
from offramp.proto.messages import ModelInferRequest, ModelStreamInferResponse
from offramp.server.codec import (
    check_version,
    read_request,
    write_config,
    write_end,
    write_failure,
    write_metadata,
    write_response,
    write_streamed,
)
from offramp.server.errors import INTERNAL_ERROR, answering_errors, status_code
from offramp.server.served import ServedEngine

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 256
"""Requests of one stream that are being answered. The next is read once all responses to one of
them are on their way: a client that does not read its answers cannot pile them up here."""


class RequestStream:
    """One stream; a request that fails is answered with its error, and the stream goes on.

    ``write`` sends a response, and waits until the connection has taken it.
    """

    def __init__(
        self,
        engine: ServedEngine,
        write: Callable[[ModelStreamInferResponse], Awaitable[None]],
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._engine = engine
        self._write = write
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(max_in_flight)

    async def serve(self, requests: AsyncIterator[ModelInferRequest]) -> None:
        """Answer until the client has no more requests; cancelling withdraws all of them."""
        try:
            async with asyncio.TaskGroup() as answering:
                await self._room.acquire()
                async for request in requests:
                    answering.create_task(self._answer(request))
                    await self._room.acquire()
        except* _StreamLostError:
            logger.debug("a stream broke off with requests in flight")

    async def _answer(self, request: ModelInferRequest) -> None:
        try:
            await self._infer(request)
        except _StreamLostError:
            raise
        except EngineError as error:
            await self._fail(request, status_code(error), str(error))
        except Exception:
            logger.exception("unexpected error in ModelStreamInfer")
            await self._fail(request, grpc.StatusCode.INTERNAL, INTERNAL_ERROR)
        finally:
            self._room.release()

    async def _infer(self, request: ModelInferRequest) -> None:
        model = self._engine.model(request.model_name)
        # gRPC's deadline is the whole stream's, and says nothing about one request of it.
        call = read_request(request, model, now_s=time.monotonic(), time_remaining_s=None)
        results = self._engine.infer_stream(
            request.model_name, call.inputs, deadline_s=call.deadline_s, priority=call.priority
        )
        more = False
        async with aclosing(results):  # withdraws the request, should the client leave
            async for result in results:
                more = result.kind is ResultKind.EARLY
                await self._send(write_streamed(request, result, call.outputs))
        if more:  # the final answer was lost: nobody shall wait for it
            await self._send(write_end(request))

    async def _fail(self, request: ModelInferRequest, code: grpc.StatusCode, message: str) -> None:
        if code is grpc.StatusCode.INTERNAL:
            logger.error("answered INTERNAL: %s", message)
        await self._send(write_failure(request, code, message))

    async def _send(self, response: ModelStreamInferResponse) -> None:
        async with self._writing:  # gRPC takes one message of a call at a time
            try:
                await self._write(response)
            except Exception as error:  # of no one class, and always the connection's end
                raise _StreamLostError from error


class _StreamLostError(Exception):
    """The client is gone."""


_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVER_NAME: Final = "offramp"

SLO_METADATA: Final = ("offramp-deadline", "slo")
"""Of a call that leaves its deadline to the model's SLO, whatever gRPC's is."""


class InferenceService:
    """One method per call of the protocol, named as in ``inference.proto``.

    When a client hangs up, grpc.aio cancels its method and thereby ``engine.infer``, which
    withdraws that request alone.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    async def ServerLive(  # noqa: N802 - the protocol's name
        self, _request: messages.ServerLiveRequest, _context: _Context
    ) -> messages.ServerLiveResponse:
        """Live as long as it answers."""
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, _request: messages.ServerReadyRequest, _context: _Context
    ) -> messages.ServerReadyResponse:
        """Ready once every model takes requests."""
        return messages.ServerReadyResponse(ready=self._engine.ready())

    async def ModelReady(  # noqa: N802
        self, request: messages.ModelReadyRequest, _context: _Context
    ) -> messages.ModelReadyResponse:
        """Not ready, rather than an error, for a model that is not there, as in Triton."""
        try:
            check_version(request.name, request.version)
            self._engine.model(request.name)
        except ModelNotServedError:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=self._engine.ready(request.name))

    async def ServerMetadata(  # noqa: N802
        self, _request: messages.ServerMetadataRequest, _context: _Context
    ) -> messages.ServerMetadataResponse:
        """No extensions: perf_analyzer stops at one that is named and not implemented."""
        return messages.ServerMetadataResponse(name=SERVER_NAME, version=__version__)

    async def ModelMetadata(  # noqa: N802
        self, request: messages.ModelMetadataRequest, _context: _Context
    ) -> messages.ModelMetadataResponse:
        """Inputs and outputs of a model."""
        model = self._engine.model(request.name)
        check_version(request.name, request.version)
        return write_metadata(model)

    async def ModelConfig(  # noqa: N802
        self, request: messages.ModelConfigRequest, _context: _Context
    ) -> messages.ModelConfigResponse:
        """The configuration that perf_analyzer reads: batch size, and one answer a request."""
        model = self._engine.model(request.name)
        check_version(request.name, request.version)
        return messages.ModelConfigResponse(config=write_config(model))

    async def ModelInfer(  # noqa: N802
        self, request: messages.ModelInferRequest, context: _Context
    ) -> messages.ModelInferResponse:
        """Decode, ask the engine, encode."""
        model = self._engine.model(request.model_name)
        call = read_request(
            request, model, now_s=time.monotonic(), time_remaining_s=_time_remaining_s(context)
        )
        result = await self._engine.infer(
            request.model_name, call.inputs, deadline_s=call.deadline_s, priority=call.priority
        )
        return write_response(request, result, call.outputs)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[messages.ModelInferRequest], context: _Context
    ) -> None:
        """Answer each request of a stream as soon as its answers are there."""
        await RequestStream(self._engine, context.write).serve(requests)


def _time_remaining_s(context: _Context) -> float | None:
    """The time until gRPC's deadline; ``None`` without one, or if the client only limits its wait.

    Our clients always set one, lest they wait for ever, and say which of the two it is.
    """
    if SLO_METADATA in (context.invocation_metadata() or ()):
        return None
    return context.time_remaining()


def inference_handler(engine: ServedEngine) -> grpc.GenericRpcHandler:
    """The service as grpc takes it; methods that it lacks are answered UNIMPLEMENTED."""
    service = InferenceService(engine)
    methods = FILE.services_by_name[SERVICE.rpartition(".")[2]].methods
    return grpc.method_handlers_generic_handler(
        SERVICE, {method.name: _method_handler(service, method) for method in methods}
    )


def _method_handler(
    service: InferenceService, method: MethodDescriptor
) -> grpc.RpcMethodHandler[Any, Any]:
    call = getattr(service, method.name)
    coding = {
        "request_deserializer": getattr(messages, method.input_type.name).FromString,
        "response_serializer": getattr(messages, method.output_type.name).SerializeToString,
    }
    if method.client_streaming:  # it answers errors itself, each as its request's
        return grpc.stream_stream_rpc_method_handler(call, **coding)
    return grpc.unary_unary_rpc_method_handler(answering_errors(call), **coding)
