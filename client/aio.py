"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from types import ModuleType
from typing import Any, ClassVar, Final, Self

import grpc
import grpc.aio
from google.protobuf.message import Message
from numpy.typing import ArrayLike

from offramp.client.connection import ClientBase
from offramp.client.conversion import (
    build_request,
    generated_token,
    parse_metadata,
    parse_optional,
    parse_response,
    parse_streamed,
    text_inputs,
)
from offramp.client.results import GeneratedToken, InferResult, ModelMetadata, StreamedResult
from offramp.proto import messages

_ENDED: Final = (grpc.aio.InternalError, asyncio.InvalidStateError)
"""Errors that ``grpc.aio`` raises if a message is sent on a call that has ended; the errors state
no cause."""


class AsyncClient(ClientBase):
    """Asyncio client of one server, used in the event loop that creates it.

    Arguments and errors are those of :class:`offramp.client.Client`. Cancelling a call's
    task withdraws its request from the server.
    """

    _grpc: ClassVar[ModuleType] = grpc.aio

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> InferResult:
        """Return the answers to n samples; arguments and errors are those of ``Client.infer``."""
        request = build_request(model, inputs, outputs=outputs, priority=priority)
        return parse_response(await self._call(self._infer, request, timeout_s))

    async def infer_many(
        self,
        model: str,
        requests: Iterable[Mapping[str, ArrayLike]],
        *,
        concurrency: int = 16,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[InferResult, None]:
        """Send requests like ``Client.infer_many``; use ``contextlib.aclosing`` to end early."""
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency} is below 1")
        in_flight: deque[asyncio.Task[InferResult]] = deque()
        try:
            for inputs in requests:
                inference = self.infer(
                    model, inputs, outputs=outputs, timeout_s=timeout_s, priority=priority
                )
                in_flight.append(asyncio.create_task(inference))
                if len(in_flight) >= concurrency:
                    yield await in_flight.popleft()
            while in_flight:
                yield await in_flight.popleft()
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamedResult, None]:
        """Yield early answers first, final ones when they arrive, as ``Client.infer_stream``.

        Closing the iterator withdraws the request. A ``break`` leaves the closing to the garbage
        collector, so use ``contextlib.aclosing(client.infer_stream(...))`` to stop early.
        """
        request = build_request(
            model,
            inputs,
            outputs=outputs,
            priority=priority,
            deadline_s=timeout_s,
            decoupled=True,
        )
        call = self._stream(
            timeout=self._settings.stream_timeout_s(timeout_s),
            metadata=self._settings.metadata(),
        )
        try:
            async with asyncio.timeout(timeout_s):
                with suppress(*_ENDED):  # reading raises the status that the call ended with
                    await call.write(request)
                    await call.done_writing()
                response = await call.read()
            while isinstance(response, messages.ModelStreamInferResponse):  # otherwise EOF
                result = parse_streamed(response, address=self._settings.address)
                if result is not None:
                    yield result
                response = await call.read()
        except TimeoutError as error:
            assert timeout_s is not None
            raise self._settings.late(timeout_s) from error
        except grpc.RpcError as error:
            raise self._settings.error(error) from error
        finally:
            call.cancel()

    async def generate(
        self,
        model: str,
        prompt: str | ArrayLike,
        *,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[GeneratedToken, None]:
        """Yield tokens as ``Client.generate``; use ``contextlib.aclosing`` to stop early."""
        inputs = text_inputs(prompt, max_tokens)
        results = self.infer_stream(model, inputs, timeout_s=timeout_s, priority=priority)
        async with aclosing(results):
            async for result in results:
                yield generated_token(result)

    async def metadata(self, model: str, *, timeout_s: float | None = None) -> ModelMetadata:
        """Return inputs and outputs of a model; errors are those of :meth:`infer`."""
        request = messages.ModelMetadataRequest(name=model)
        return parse_metadata(await self._call(self._metadata, request, timeout_s))

    async def optional_inputs(
        self, model: str, *, timeout_s: float | None = None
    ) -> frozenset[str]:
        """Return the names of inputs that requests may omit; errors are those of :meth:`infer`."""
        request = messages.ModelConfigRequest(name=model)
        return parse_optional(await self._call(self._config, request, timeout_s))

    async def server_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether every model takes requests; DeadlineError or ConnectionFailedError."""
        request = messages.ServerReadyRequest()
        return bool((await self._call(self._server_ready, request, timeout_s)).ready)

    async def model_ready(self, model: str, *, timeout_s: float | None = None) -> bool:
        """Return whether a model is served and takes requests; errors as :meth:`server_ready`."""
        request = messages.ModelReadyRequest(name=model)
        return bool((await self._call(self._model_ready, request, timeout_s)).ready)

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Message, timeout_s: float | None) -> Any:
        try:
            return await method(request, **self._settings.limit(timeout_s))
        except grpc.RpcError as error:
            raise self._settings.error(error) from error
