"""Ways to send requests to a server: calls, one stream, shared memory, or HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import aiohttp
import grpc
import grpc.aio
import numpy as np

from offramp.client.rest import HEADER_LENGTH, code_of, read_body, write_body
from offramp.client.shared_memory import SharedInputs, aligned
from offramp.proto.descriptors import method_path
from offramp.proto.messages import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryUnregisterRequest,
)
from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.server_access import ServerAccess

PROTOCOLS: Final = ("grpc", "stream", "shm", "rest")
"""Names of the ways: one gRPC call per request, one gRPC stream, gRPC calls with inputs in shared
memory, and HTTP with binary tensors."""

CONNECT_LIMIT_S: Final = 10.0
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class RequestFailedError(Exception):
    """A request was answered with an error."""

    def __init__(self, code: str, details: str) -> None:
        """Keep the error; ``code`` is the name of the gRPC code."""
        super().__init__(f"{code}: {details}")
        self.code = code


class Transport(Protocol):
    """A connection to a server; call :meth:`open` first."""

    async def open(self) -> None:
        """Connect; raise LoadError if this fails."""
        ...

    async def ask(self, sample: int) -> ModelInferResponse:
        """Send the request of a sample, and return its answer.

        Raise RequestFailedError if the server answers with an error.
        """
        ...

    async def close(self) -> None:
        """Close the transport; calls in flight fail."""
        ...


class CallTransport:
    """One gRPC call for each request."""

    def __init__(self, address: str, requests: Mapping[int, bytes], access: ServerAccess) -> None:
        self._address, self._requests, self._metadata = address, requests, access.metadata
        tls = access.tls()
        self._channel = (
            grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), _CHANNEL_OPTIONS)
        )
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, ModelInferResponse] = (
            self._channel.unary_unary(
                method_path("ModelInfer"),
                request_serializer=bytes,
                response_deserializer=ModelInferResponse.FromString,
            )
        )

    async def open(self) -> None:
        """Connect; raise LoadError if this fails."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), CONNECT_LIMIT_S)
        except TimeoutError:
            raise LoadError(
                f"{self._address} did not accept a connection within {CONNECT_LIMIT_S:g} s; is it "
                "still running?"
            ) from None

    async def ask(self, sample: int) -> ModelInferResponse:
        """Send a request."""
        try:
            return await self._infer(self._requests[sample], metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error.code().name, error.details() or "") from error

    async def close(self) -> None:
        """Close the gRPC channel."""
        await self._channel.close()


class SharedTransport(CallTransport):
    """gRPC calls with inputs in shared memory, which holds all samples from the start."""

    def __init__(self, address: str, requests: Mapping[int, bytes], access: ServerAccess) -> None:
        messages = {row: ModelInferRequest.FromString(data) for row, data in requests.items()}
        sizes = (aligned(len(raw)) for m in messages.values() for raw in m.raw_input_contents)
        self._memory = SharedInputs(max(sum(sizes), 1))
        offset = 0
        for message in messages.values():
            for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
                offset = self._memory.put(tensor, np.frombuffer(raw, np.uint8), offset)
            del message.raw_input_contents[:]
        placed = {row: message.SerializeToString() for row, message in messages.items()}
        super().__init__(address, placed, access)

    async def open(self) -> None:
        """Connect, and make the server open the memory; raise LoadError if this fails."""
        await super().open()
        request = SystemSharedMemoryRegisterRequest(
            name=self._memory.name, key=self._memory.key, byte_size=self._memory.size_bytes
        )
        try:
            await self._call("SystemSharedMemoryRegister", request)
        except grpc.aio.AioRpcError as error:
            raise LoadError(
                f"{self._address} does not take shared memory: {error.details()}; is it on this "
                "machine?"
            ) from error

    async def close(self) -> None:
        """Unregister the memory at the server, and remove it."""
        with suppress(grpc.aio.AioRpcError):
            await self._call(
                "SystemSharedMemoryUnregister",
                SystemSharedMemoryUnregisterRequest(name=self._memory.name),
            )
        await super().close()
        self._memory.close()

    async def _call(self, method: str, request: Any) -> None:
        call: grpc.aio.UnaryUnaryMultiCallable[Any, bytes] = self._channel.unary_unary(
            method_path(method), request_serializer=type(request).SerializeToString
        )
        await call(request, metadata=self._metadata, timeout=CONNECT_LIMIT_S)


class StreamTransport(CallTransport):
    """One stream of gRPC for all requests; answers come in the order of requests."""

    def __init__(self, address: str, requests: Mapping[int, bytes], access: ServerAccess) -> None:
        super().__init__(address, requests, access)
        self._waiting: deque[asyncio.Future[ModelInferResponse]] = deque()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._stream: Any = None

    async def open(self) -> None:
        """Connect, and open the stream; raise LoadError if this fails."""
        await super().open()
        method = self._channel.stream_stream(
            method_path("ModelStreamInfer"),
            request_serializer=bytes,
            response_deserializer=ModelStreamInferResponse.FromString,
        )
        self._stream = method(metadata=self._metadata)
        self._reader = asyncio.create_task(self._read())

    async def ask(self, sample: int) -> ModelInferResponse:
        """Send a request; if it is cancelled, its answer is dropped when it arrives."""
        answer: asyncio.Future[ModelInferResponse] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                self._waiting.append(answer)
                await self._stream.write(self._requests[sample])
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(error.code().name, error.details() or "") from error
        return await answer

    async def close(self) -> None:
        """End the stream of requests, and close the channel."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._stream.cancel()
        await super().close()

    async def _read(self) -> None:
        failure = RequestFailedError("UNAVAILABLE", "the stream ended")
        try:
            while isinstance(response := await self._stream.read(), ModelStreamInferResponse):
                answer = self._waiting.popleft()
                if not answer.done():
                    _resolve(answer, response)
        except grpc.aio.AioRpcError as error:
            failure = RequestFailedError(error.code().name, error.details() or "")
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(failure)


def _resolve(
    answer: asyncio.Future[ModelInferResponse], response: ModelStreamInferResponse
) -> None:
    if not response.error_message:
        answer.set_result(response.infer_response)
        return
    code = response.infer_response.parameters["offramp_status"].string_param or "UNKNOWN"
    answer.set_exception(RequestFailedError(code, response.error_message))


class RestTransport:
    """HTTP, with tensors as binary data, over one connection for each concurrent request."""

    def __init__(self, address: str, requests: Mapping[int, bytes], access: ServerAccess) -> None:
        self._bodies = {}
        for row, data in requests.items():
            message = ModelInferRequest.FromString(data)
            self._model = message.model_name
            self._bodies[row] = write_body(message)
        self._access = access
        scheme = "http" if access.ca is None else "https"
        self._url = f"{scheme}://{address}/v2/models/{self._model}/infer"
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Connect; raise LoadError if this fails."""
        context = self._access.context()
        connector = aiohttp.TCPConnector(limit=0, ssl=True if context is None else context)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._access.headers, auto_decompress=True
        )
        ready = self._url.partition("/v2/")[0] + "/v2/health/live"
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._session.get(ready) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            await self._session.close()
            raise LoadError(
                f"{self._address} does not answer over HTTP ({error!r}); give the HTTP port as "
                "--http"
            ) from error

    async def ask(self, sample: int) -> ModelInferResponse:
        """Send a request."""
        assert self._session is not None, "open() comes first"
        header, body = self._bodies[sample]
        headers = {HEADER_LENGTH: str(len(header)), "Accept-Encoding": "identity"}
        try:
            async with self._session.post(self._url, data=header + body, headers=headers) as answer:
                data = await answer.read()
        except aiohttp.ClientError as error:
            raise RequestFailedError("UNAVAILABLE", repr(error)) from error
        if answer.status != 200:
            raise RequestFailedError(code_of(answer.status).name, _error_in(data))
        return read_body(answer.headers.get(HEADER_LENGTH), data)

    async def close(self) -> None:
        """Close all HTTP connections."""
        if self._session is not None:
            await self._session.close()


def _error_in(body: bytes) -> str:
    """Return the text of an error from a response's body."""
    try:
        return str(json.loads(body)["error"])
    except (KeyError, TypeError, ValueError):
        return body.decode(errors="replace")


def make_transport(
    protocol: str, address: str, requests: Mapping[int, bytes], access: ServerAccess
) -> Transport:
    """Return the transport with a name of :data:`PROTOCOLS`."""
    kinds: Mapping[str, Any] = {
        "grpc": CallTransport,
        "stream": StreamTransport,
        "shm": SharedTransport,
        "rest": RestTransport,
    }
    transport: Transport = kinds[protocol](address, requests, access)
    return transport
