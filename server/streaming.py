"""``ModelStreamInfer``: many requests on one stream, each answered once or twice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import grpc

from offramp.engine.errors import EngineError
from offramp.engine.results import AnswerKind
from offramp.proto.messages import ModelInferRequest, ModelStreamInferResponse
from offramp.server.errors import INTERNAL_ERROR, status_code
from offramp.server.requests import check_version, read_request
from offramp.server.responses import write_end, write_failure, write_streamed
from offramp.server.served import ServedEngine

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 256
"""Requests of one stream that are being answered. The next is read once all responses to one of
them are on their way: a client that does not read its answers cannot pile them up here."""


class RequestStream:
    """One stream; a request that fails is answered with its error, and the stream goes on.

    Args:
        engine: Answers.
        write: Sends a response, and waits until the connection has taken it.
        max_in_flight: See :data:`MAX_IN_FLIGHT`.
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
        check_version(request.model_name, request.model_version)
        # gRPC's deadline is the whole stream's, and says nothing about one request of it.
        call = read_request(request, model, now_s=time.monotonic(), time_remaining_s=None)
        results = self._engine.infer_stream(
            request.model_name, call.inputs, deadline_s=call.deadline_s, priority=call.priority
        )
        more = False
        async with aclosing(results):  # withdraws the request, should the client leave
            async for result in results:
                more = result.kind is AnswerKind.EARLY
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
