"""The requests of one bidirectional stream, and the order of their responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeAlias

import grpc

from offramp.engine.common.errors import ModelNotServedError
from offramp.proto.messages import ModelInferRequest, ModelStreamInferResponse
from offramp.proto.request_bytes import InferMessage
from offramp.server.common.catalog import Catalog, ServedName
from offramp.server.common.served import ServedEngine
from offramp.server.requests.admission import CallState, RequestAdmission
from offramp.server.requests.answering import RequestAnswering
from offramp.server.requests.codec import (
    InferCall,
    is_decoupled,
    write_end,
    write_failure,
    write_only,
    write_streamed,
)
from offramp.server.requests.decoding import RequestDecoder
from offramp.server.security.tokens import Principal

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 256
"""Largest number of requests of one stream that are in progress or whose response waits for earlier
ones. The next request is read once all responses to one of them are sent, so that a client that
does not read its answers cannot accumulate them here."""

_Send: TypeAlias = Callable[[ModelStreamInferResponse], None]
"""Function that sends a response after earlier ones, without waiting."""


class RequestStream:
    """One stream of requests; a failed request gets an error response, and the stream continues.

    Requests run concurrently. Each has one response, in the order of requests. Decoupled requests
    (:mod:`.codec`), and all requests to decoupled models, are excluded from that order: their
    answers are written as soon as they exist.

    ``write`` sends a response and waits until the connection has taken it.
    """

    def __init__(
        self,
        engine: ServedEngine,
        write: Callable[[ModelStreamInferResponse], Awaitable[None]],
        *,
        admission: RequestAdmission | None = None,
        decoder: RequestDecoder | None = None,
        catalog: Catalog | None = None,
        peer: str = "",
        trace_parent: str | None = None,
        principal: Principal | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._write = write
        self._admission = admission or RequestAdmission()
        self._decoder = decoder or RequestDecoder()
        self._catalog = catalog or Catalog(engine)
        self._answering = RequestAnswering(engine, self._admission, self._catalog, self._decoder)
        self._peer = peer
        self._trace_parent = trace_parent
        self._principal = principal
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(max_in_flight)
        self._written = asyncio.Event()
        """Set once the latest ordered request is answered."""
        self._written.set()

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Answer requests until the client sends no more; cancelling withdraws all of them.

        Raises:
            UndecodableError: A message is not a request.
            RequestLimitError: A message exceeds a limit.

        On an error, all requests in flight are withdrawn, and no response is being written.
        """
        try:
            async with asyncio.TaskGroup() as answering:
                await self._read(requests, answering)
        except ExceptionGroup as ended:
            if ended.subgroup(_StreamLostError) is None:
                raise ended.exceptions[0] from None
            logger.debug("a stream broke off with requests in flight")

    async def _read(self, requests: AsyncIterator[bytes], answering: asyncio.TaskGroup) -> None:
        try:
            await self._room.acquire()
            async for raw in requests:
                message = await self._decoder.message(raw)
                answering.create_task(self._answer(message, len(raw)))
                del raw, message  # so that they are freed while the next message is awaited
                await self._room.acquire()
        except Exception:
            # gRPC continues a write whose task is cancelled, and cannot end the call during a
            # write: the client would wait for its deadline. So the write must end, and no other may
            # begin.
            await self._writing.acquire()
            raise

    def _answer(self, message: InferMessage, size_bytes: int) -> Coroutine[Any, Any, None]:
        """Return the coroutine that answers a request; call it in the order of requests."""
        if self._is_decoupled(message.head):
            return self._answer_at_once(message, size_bytes)
        before, self._written = self._written, asyncio.Event()
        return self._answer_in_order(message, size_bytes, before, self._written)

    def _is_decoupled(self, request: ModelInferRequest) -> bool:
        """Return whether a request, or the model that it is for, is decoupled."""
        if is_decoupled(request):
            return True
        try:
            return self._catalog.model(request.model_name, request.model_version).decoupled
        except ModelNotServedError:  # it is answered with that error
            return False

    async def _answer_in_order(
        self,
        message: InferMessage,
        size_bytes: int,
        before: asyncio.Event,
        written: asyncio.Event,
    ) -> None:
        answering = self._only_response(message, size_bytes)
        del message  # so that its tensors are freed while the response waits for earlier ones
        response = await answering
        await before.wait()
        await self._send(response)
        written.set()
        self._room.release()

    async def _only_response(
        self, message: InferMessage, size_bytes: int
    ) -> ModelStreamInferResponse:
        request = message.head
        with self._state(request) as state:
            try:
                served, call = await self._read_call(state, message, size_bytes)
                del message
                result = await self._answering.infer(state, served, call)
                return write_only(request, result, call, served.version)
            except Exception as error:
                return self._failure(state, request, error)

    async def _answer_at_once(self, message: InferMessage, size_bytes: int) -> None:
        async with asyncio.TaskGroup() as sending:

            def send(response: ModelStreamInferResponse) -> None:
                sending.create_task(self._send(response))

            answering = self._all_responses(message, size_bytes, send)
            del message  # so that its tensors are freed while responses wait for the client to read
            await answering
        self._room.release()

    async def _all_responses(self, message: InferMessage, size_bytes: int, send: _Send) -> None:
        request = message.head
        with self._state(request) as state:
            try:
                served, call = await self._read_call(state, message, size_bytes)
                del message
                await self._send_all(state, request, served, call, send)
            except Exception as error:
                send(self._failure(state, request, error))

    async def _send_all(
        self,
        state: CallState,
        request: ModelInferRequest,
        served: ServedName,
        call: InferCall,
        send: _Send,
    ) -> None:
        results = self._answering.infer_stream(state, served, call)
        more = False
        async with aclosing(results):  # withdraws the request, if the client leaves
            async for result in results:
                more = result.kind.more
                send(write_streamed(request, result, call, served.version))
        if more and call.empty_final_response:  # the final answer was lost
            send(write_end(request, served.version))

    @contextmanager
    def _state(self, request: ModelInferRequest) -> Iterator[CallState]:
        state = self._admission.enter("ModelStreamInfer", self._peer)
        state.model, state.principal = request.model_name, self._principal
        try:
            yield state
        except BaseException:
            state.code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._admission.leave(state)

    async def _read_call(
        self, state: CallState, message: InferMessage, size_bytes: int
    ) -> tuple[ServedName, InferCall]:
        """Return the version that answers, and the arguments of the engine call."""
        self._admission.hold(state, size_bytes)
        # gRPC's deadline applies to the whole stream, not to one request.
        return await self._answering.read(
            state, message, time_remaining_s=None, trace_parent=self._trace_parent
        )

    def _failure(
        self, state: CallState, request: ModelInferRequest, error: Exception
    ) -> ModelStreamInferResponse:
        """Return the response to a failed request."""
        return write_failure(request, *self._admission.refuse(state, error))

    async def _send(self, response: ModelStreamInferResponse) -> None:
        async with self._writing:  # gRPC takes one message of a call at a time
            try:
                await self._write(response)
            except Exception as error:  # of various classes; always a lost connection
                raise _StreamLostError from error


class _StreamLostError(Exception):
    """The client has closed the connection."""
