"""The inference service of the gRPC port, and the handlers of its methods.

All messages are decoded here. gRPC would decode messages of any size, and would answer invalid ones
with UNKNOWN and a traceback in the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from offramp import __version__
from offramp.proto import messages
from offramp.proto.descriptors import FILE, SERVICE, method_path
from offramp.server.common.catalog import Catalog
from offramp.server.common.methods import Handler
from offramp.server.common.served import ServedEngine
from offramp.server.requests.admission import (
    CallKind,
    CallState,
    Method,
    RequestAdmission,
    answering_errors,
)
from offramp.server.requests.answering import RequestAnswering
from offramp.server.requests.codec import write_config, write_metadata
from offramp.server.requests.decoding import RequestDecoder, decode_small
from offramp.server.requests.receiving import MessageReceiver
from offramp.server.requests.streaming import RequestStream
from offramp.server.requests.tracing import TRACE_PARENT

_T = TypeVar("_T")
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVER_NAME: Final = "offramp"

EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "logging",
    "model_configuration",
    "model_repository",
    "statistics",
    "system_shared_memory",
    "trace",
)
"""Implemented extensions of the protocol, by Triton's names."""

SLO_METADATA: Final = ("offramp-deadline", "slo")
"""Metadata of a call whose deadline is the model's SLO, regardless of gRPC's deadline."""


class InferenceService:
    """One method per call of the protocol, named as in ``inference.proto``.

    If a client closes its connection, grpc.aio cancels the method and thereby ``engine.infer``,
    which withdraws only that request.
    """

    def __init__(
        self,
        engine: ServedEngine,
        admission: RequestAdmission,
        catalog: Catalog,
        decoder: RequestDecoder,
        answering: RequestAnswering,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._catalog = catalog
        self._decoder = decoder
        self._answering = answering
        self._receiver = MessageReceiver()

    async def ServerLive(  # noqa: N802 - the protocol's name
        self, _request: messages.ServerLiveRequest, _context: _Context
    ) -> messages.ServerLiveResponse:
        """Return live while the server answers and some model is served, or can be again."""
        return messages.ServerLiveResponse(live=self._engine.live())

    async def ServerReady(  # noqa: N802
        self, _request: messages.ServerReadyRequest, _context: _Context
    ) -> messages.ServerReadyResponse:
        """Return ready while every model takes requests, and none failed to load at the start."""
        return messages.ServerReadyResponse(ready=self._catalog.all_ready())

    async def ModelReady(  # noqa: N802
        self, request: messages.ModelReadyRequest, _context: _Context
    ) -> messages.ModelReadyResponse:
        """Return a model's readiness; an unknown model is not ready, as in Triton, not an error."""
        ready = self._catalog.ready(request.name, request.version)
        return messages.ModelReadyResponse(ready=ready)

    async def ServerMetadata(  # noqa: N802
        self, _request: messages.ServerMetadataRequest, _context: _Context
    ) -> messages.ServerMetadataResponse:
        """Return the server's name, version and implemented extensions."""
        return messages.ServerMetadataResponse(
            name=SERVER_NAME, version=__version__, extensions=EXTENSIONS
        )

    async def ModelMetadata(  # noqa: N802
        self, request: messages.ModelMetadataRequest, _context: _Context
    ) -> messages.ModelMetadataResponse:
        """Return the inputs and outputs of a model."""
        model = self._catalog.model(request.name, request.version)
        versions = [served.version for served in self._catalog.served(request.name)]
        return write_metadata(request.name, versions, model)

    async def ModelConfig(  # noqa: N802
        self, request: messages.ModelConfigRequest, _context: _Context
    ) -> messages.ModelConfigResponse:
        """Return the configuration that perf_analyzer reads, such as the batch size."""
        model = self._catalog.model(request.name, request.version)
        return messages.ModelConfigResponse(config=write_config(request.name, model))

    async def ModelInfer(  # noqa: N802
        self, state: CallState, _requests: AsyncIterator[bytes], context: _Context
    ) -> messages.ModelInferResponse:
        """Receive and decode a request, run it in the engine, and encode the answer."""
        self._admission.check_capacity()
        data = await self._receiver.only(context)
        self._admission.hold(state, len(data))
        message = await self._decoder.message(data)
        del data  # the arrays keep it alive as long as needed
        answering = self._answering.answer(
            state,
            message,
            time_remaining_s=_time_remaining_s(context),
            trace_parent=self._trace_parent(context),
        )
        del message
        return await answering

    async def ModelStreamInfer(  # noqa: N802
        self, state: CallState, _requests: AsyncIterator[bytes], context: _Context
    ) -> None:
        """Answer the requests of a stream; an invalid message ends the stream with its status."""

        async def write(response: messages.ModelStreamInferResponse) -> None:
            data = response.SerializeToString()
            async with self._admission.streaming(state.peer, len(data)):
                await context.write(data)

        parent = self._trace_parent(context)
        stream = RequestStream(
            self._engine,
            write,
            admission=self._admission,
            decoder=self._decoder,
            catalog=self._catalog,
            peer=state.peer,
            trace_parent=parent,
            principal=state.principal,
        )
        await stream.serve(self._receiver.all(context))

    def _trace_parent(self, context: _Context) -> str | None:
        """Return the caller's trace context; ``None`` if nothing is traced."""
        if not self._admission.traces.active:
            return None
        metadata = dict(context.invocation_metadata() or ())
        value = metadata.get(TRACE_PARENT)
        return value if isinstance(value, str) else None


def _time_remaining_s(context: _Context) -> float | None:
    """Return the time until gRPC's deadline; ``None`` without one or if the model's SLO applies.

    Our clients always set one, so that no call waits forever, and mark those that use the SLO.
    """
    if SLO_METADATA in (context.invocation_metadata() or ()):
        return None
    return context.time_remaining()


def inference_methods(
    method: Callable[[str], Callable[..., Awaitable[Any]]], admission: RequestAdmission
) -> dict[str, Handler]:
    """Return the service's handlers by full name; ``method`` returns a method by its name."""
    methods = FILE.services_by_name[SERVICE.rpartition(".")[2]].methods
    return {
        method_path(each.name): _method_handler(method(each.name), admission, each)
        for each in methods
    }


def _method_handler(
    call: Callable[..., Awaitable[Any]], admission: RequestAdmission, method: MethodDescriptor
) -> grpc.RpcMethodHandler[Any, Any]:
    serialize = getattr(messages, method.output_type.name).SerializeToString
    if method.client_streaming:
        answer = answering_errors(admission, method.name, call, kind=CallKind.STREAM)
        return grpc.stream_stream_rpc_method_handler(answer)
    if method.name == "ModelInfer":
        # As a stream of one message, the message is received only once the request is admitted.
        answer = answering_errors(admission, method.name, call, serialize=serialize)
        return grpc.stream_unary_rpc_method_handler(answer)
    decode = getattr(messages, method.input_type.name).FromString
    decoded = _decoding(admission, method.name, call, decode)
    answer = answering_errors(admission, method.name, decoded, serialize=serialize)
    return grpc.unary_unary_rpc_method_handler(answer)


def _decoding(
    admission: RequestAdmission,
    name: str,
    call: Callable[..., Awaitable[_T]],
    decode: Callable[[bytes], Any],
) -> Method[_T]:
    """Wrap a method that takes a message: decode bytes, and check access to the message."""

    @wraps(call)
    async def decoded(state: CallState, data: bytes, context: _Context) -> _T:
        message = decode_small(data, decode)
        admission.access.check_message(state.principal, name, message)
        return await call(message, context)

    return decoded


class GuardedMethods:
    """Stand-in for a server to which generated code adds a service; collects the handlers."""

    def __init__(self, admission: RequestAdmission) -> None:
        self.methods: Final[dict[str, Handler]] = {}
        """Handlers by full method name."""
        self._admission = admission

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Do nothing: the same handlers are also added by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add the guarded methods of a service, by ``/SERVICE/METHOD``."""
        for name, made in handlers.items():
            self.methods[f"/{service}/{name}"] = _guarded(name, made, self._admission)


def _guarded(name: str, handler: Handler, admission: RequestAdmission) -> Handler:
    serialize = handler.response_serializer
    how = {"response_serializer": serialize}
    if handler.stream_stream:
        answer = answering_errors(admission, name, _of_many(handler), kind=CallKind.WATCH)
        return grpc.stream_stream_rpc_method_handler(answer, **how)
    if handler.unary_stream:
        method = _decoding(admission, name, handler.unary_stream, handler.request_deserializer)
        answer = answering_errors(admission, name, method, kind=CallKind.WATCH)
        return grpc.unary_stream_rpc_method_handler(answer, **how)
    method = _decoding(admission, name, handler.unary_unary, handler.request_deserializer)
    return grpc.unary_unary_rpc_method_handler(
        answering_errors(admission, name, method, serialize=serialize)
    )


def _of_many(handler: Handler) -> Method[None]:
    async def decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield decode_small(data, handler.request_deserializer)

    async def call(_state: CallState, requests: AsyncIterator[bytes], context: _Context) -> None:
        async for response in handler.stream_stream(decoded(requests), context):
            await context.write(response)

    return call
