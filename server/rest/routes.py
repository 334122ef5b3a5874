"""Routes of the protocol over HTTP (KServe's v2 protocol with Triton's extensions).

Every route calls the method that gRPC calls, so that both return the same answers. HTTP statuses
follow from gRPC codes as in Triton's ``http_server.cc``; RESOURCE_EXHAUSTED, which Triton does not
use, is 429, and a failed health check is 400.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from aiohttp import web
from google.protobuf.message import Message

from offramp.engine.common.errors import BadInputError, DeadlineExceededError, EngineError
from offramp.engine.common.network import is_loopback
from offramp.proto import messages
from offramp.proto.request_bytes import InferMessage
from offramp.server.common.errors import (
    ERROR_METADATA_KEY,
    ForbiddenError,
    ForbiddenOriginError,
    RequestLimitError,
    wire_name,
)
from offramp.server.requests.admission import SLOWEST_BYTES_PER_S, UNREAD_S, CallState
from offramp.server.requests.codec import write_streamed
from offramp.server.requests.http_access import PRINCIPAL, http_peer
from offramp.server.requests.receiving import ARRIVAL_S
from offramp.server.requests.tracing import TRACE_PARENT
from offramp.server.rest.generate import read_generate, write_event, write_generate
from offramp.server.rest.json_requests import JsonRequest, decode_object
from offramp.server.rest.json_responses import (
    HEADER_LENGTH,
    JsonBody,
    to_document,
    write_inference,
)
from offramp.server.security.access import ADMIN_METHODS
from offramp.server.services.protocol_services import ProtocolServices

STATUSES: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP statuses by gRPC code; all other codes are 500."""

_NOT_HEALTHY: Final = 400
_MAX_SMALL_BYTES: Final = 64 * 1024
"""Largest size, in bytes, of a body that only has names and settings."""
_MAX_GENERATE_BYTES: Final = 1024 * 1024
"""Largest size, in bytes, of a body of the generate extension."""
_QUICK_JSON_BYTES: Final = 64 * 1024
"""Size up to which a body is decoded within a few milliseconds."""
_COMPRESSED_FROM_BYTES: Final = 1024
"""Size from which bodies are compressed, for clients that accept it."""

Answer = Callable[[Any], Any]
"""Function that converts a method's response to the JSON document of the answer."""
RequestFields = Callable[[Mapping[str, str], dict[str, Any]], Mapping[str, Any]]
"""Function that converts names in the path, and the body, to the fields of a method's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route that is answered by a protocol method with small messages."""

    verb: str
    path: str
    method: str
    """Name of the protocol method."""
    answer: Answer = to_document
    request: RequestFields = lambda _path, _body: {}
    """Function that converts names in the path, and the body, to the method's request fields."""


def _model(path: Mapping[str, str], _body: dict[str, Any]) -> Mapping[str, Any]:
    return {"name": path.get("model", ""), "version": path.get("version", "")}


def _region(path: Mapping[str, str], body: dict[str, Any]) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"name": path.get("region", "")}
    return fields | {name: body[name] for name in ("key", "offset", "byte_size") if name in body}


def _load(path: Mapping[str, str], body: dict[str, Any]) -> Mapping[str, Any]:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadInputError("the body has parameters that are not an object")
    return {
        "model_name": path["model"],
        "parameters": {
            name: messages.ModelRepositoryParameter(**{_choice(value): value})
            for name, value in parameters.items()
        },
    }


def _choice(value: object) -> str:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    if type(value) not in kinds:
        raise BadInputError(f"a parameter is {value!r:.80}, expected a boolean, number or string")
    return kinds[type(value)]


def _trace(path: Mapping[str, str], body: dict[str, Any]) -> Mapping[str, Any]:
    settings = {}
    for name, value in body.items():
        values = [] if value is None else value if isinstance(value, list) else [value]
        settings[name] = messages.TraceSettingRequest.SettingValue(value=map(str, values))
    return {"model_name": path.get("model", ""), "settings": settings}


def _log(_path: Mapping[str, str], body: dict[str, Any]) -> Mapping[str, Any]:
    settings = {}
    for name, value in body.items():
        choice = "uint32_param" if type(value) is int else _choice(value)
        settings[name] = messages.LogSettingsRequest.SettingValue(**{choice: value})
    return {"settings": settings}


def _nothing(_response: Any) -> dict[str, Any]:
    return {}


def _traces(response: messages.TraceSettingResponse) -> dict[str, Any]:
    values = {name: list(response.settings[name].value) for name in response.settings}
    return {name: value if name == "trace_level" else value[0] for name, value in values.items()}


def _logs(response: messages.LogSettingsResponse) -> dict[str, Any]:
    found = {}
    for name in response.settings:
        setting = response.settings[name]
        found[name] = getattr(setting, setting.WhichOneof("parameter_choice") or "bool_param")
    return found


def _regions(response: Any) -> list[Any]:
    return [to_document(response.regions[name]) for name in response.regions]


_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = f"{_MODEL}/versions/{{version}}"


def _of_models(verb: str, rest: str, method: str, answer: Answer = to_document) -> list[Route]:
    """Return the routes of a method whose request names a model, or a version of it."""
    return [
        Route(verb=verb, path=f"{path}{rest}", method=method, answer=answer, request=_model)
        for path in (_MODEL, _VERSION)
    ]


def _of_memory(kind: str, method: str) -> list[Route]:
    """Return the routes of one kind of shared memory."""
    one, all_of_them = f"/v2/{kind}/region/{{region}}", f"/v2/{kind}"
    return [
        *(
            Route(verb="GET", path=f"{path}/status", method=f"{method}Status", answer=_regions,
                  request=_region)
            for path in (one, all_of_them)
        ),
        *(
            Route(verb="POST", path=f"{path}/unregister", method=f"{method}Unregister",
                  answer=_nothing, request=_region)
            for path in (one, all_of_them)
        ),
        Route(verb="POST", path=f"{one}/register", method=f"{method}Register", answer=_nothing,
              request=_region),
    ]  # fmt: skip


ROUTES: Final = (
    Route(verb="GET", path="/v2", method="ServerMetadata"),
    Route(verb="GET", path="/v2/health/live", method="ServerLive"),
    Route(verb="GET", path="/v2/health/ready", method="ServerReady"),
    Route(verb="GET", path="/v2/models/stats", method="ModelStatistics", request=_model),
    *_of_models("GET", "", "ModelMetadata"),
    *_of_models("GET", "/ready", "ModelReady"),
    *_of_models("GET", "/config", "ModelConfig", lambda response: to_document(response.config)),
    *_of_models("GET", "/stats", "ModelStatistics"),
    Route(verb="POST", path="/v2/repository/index", method="RepositoryIndex",
          answer=lambda response: [to_document(model) for model in response.models],
          request=lambda _, body: {"ready": body.get("ready") is True}),
    Route(verb="POST", path="/v2/repository/models/{model}/load", method="RepositoryModelLoad",
          answer=_nothing, request=_load),
    Route(verb="POST", path="/v2/repository/models/{model}/unload",
          method="RepositoryModelUnload", answer=_nothing, request=_load),
    *_of_memory("systemsharedmemory", "SystemSharedMemory"),
    *_of_memory("cudasharedmemory", "CudaSharedMemory"),
    *(
        Route(verb=verb, path=path, method="TraceSetting", answer=_traces, request=_trace)
        for verb in ("GET", "POST")
        for path in ("/v2/trace/setting", f"{_MODEL}/trace/setting")
    ),
    *(
        Route(verb=verb, path="/v2/logging", method="LogSettings", answer=_logs, request=_log)
        for verb in ("GET", "POST")
    ),
)  # fmt: skip
"""Routes of the HTTP API, except those of inference."""

INFER_PATHS: Final = (f"{_MODEL}/infer", f"{_VERSION}/infer")
"""Paths of inference (POST)."""
GENERATE_PATHS: Final = (f"{_MODEL}/generate", f"{_VERSION}/generate")
"""Paths of :mod:`.generate` (POST); the same paths with ``_stream`` appended return one event per
response."""


class RestApi:
    """Adds the routes to an aiohttp application; used on the event loop's thread."""

    def __init__(
        self,
        services: ProtocolServices,
        *,
        max_body_bytes: int,
    ) -> None:
        self._services = services
        self._decoder = services.decoder
        self._admission = services.admission
        self._max_body_bytes = max_body_bytes

    def add_to(self, application: web.Application) -> None:
        """Add the routes of this API to an application."""
        for route in ROUTES:
            call = self._services.method(route.method)
            handler = self._handler(route.method, partial(self._call, route, call))
            application.router.add_route(route.verb, route.path, handler)
        for path in INFER_PATHS:
            application.router.add_post(path, self._handler("ModelInfer", self._infer))
        for path in GENERATE_PATHS:
            application.router.add_post(path, self._handler("ModelInfer", self._generate))
            stream = self._handler("ModelStreamInfer", self._generate_stream)
            application.router.add_post(f"{path}_stream", stream)
        application.router.add_route("*", "/v2{rest:.*}", self._handler("unknown", _unknown))

    def _handler(
        self,
        method: str,
        answer: Callable[[CallState, web.Request], Awaitable[web.StreamResponse]],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            state = self._admission.enter(f"rest/{method}", http_peer(request))
            state.principal = request.get(PRINCIPAL)
            try:
                self._admission.access.check_method(state.principal, method, state.peer)
                _check_origin(request)
                if method in ADMIN_METHODS and state.principal is None:
                    _check_host(request)
                response = await answer(state, request)
                return await _written(request, response)
            except asyncio.CancelledError:
                state.code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                return self._refused(state, error)
            finally:
                self._admission.leave(state)

        return handle

    def _refused(self, state: CallState, error: Exception) -> web.Response:
        if isinstance(error, web.HTTPException):  # raised by aiohttp if it cannot read a body
            error = BadInputError(f"the body cannot be read: {error.reason}")
        code, message = self._admission.refuse(state, error)
        response = _json({"error": message}, status=STATUSES.get(code, 500))
        response.headers[ERROR_METADATA_KEY] = wire_name(error)
        return response

    async def _call(
        self, route: Route, call: Callable[..., Awaitable[Message]], state: CallState,
        request: web.Request,
    ) -> web.Response:  # fmt: skip
        body = {}
        if route.verb == "POST":
            body = decode_object(await self._body(state, request, _MAX_SMALL_BYTES))
        kind = getattr(messages, f"{route.method}Request")
        try:
            message = kind(**route.request(request.match_info, body))
        except (TypeError, ValueError) as error:
            raise BadInputError(f"the body has a value of another type: {error}") from None
        self._admission.access.check_message(state.principal, route.method, message)
        response = await call(message, None)
        document = route.answer(response)
        ill = isinstance(document, dict) and False in (document.get("live"), document.get("ready"))
        return _json(document, status=_NOT_HEALTHY if ill else 200)

    async def _infer(self, state: CallState, request: web.Request) -> web.Response:
        self._admission.check_capacity()
        body = await self._body(state, request, self._max_body_bytes)
        self._admission.hold(state, 0)
        path = request.match_info
        decode = partial(
            JsonRequest, memoryview(body), _header_bytes(request, len(body)), path["model"],
            path.get("version", ""),
        )  # fmt: skip
        asked = await self._decoder.run(decode, slow=len(body) > _QUICK_JSON_BYTES)
        del body, decode
        response = await self._services.answering.answer(
            state,
            asked.message,
            time_remaining_s=None,
            trace_parent=request.headers.get(TRACE_PARENT),
        )
        write = partial(write_inference, response, asked.wants_binary)
        size = sum(map(len, response.raw_output_contents))
        written = await self._decoder.run(write, slow=size > _QUICK_JSON_BYTES)
        return _body_of(written)

    async def _generate(self, state: CallState, request: web.Request) -> web.Response:
        message = await self._read_generate(state, request)
        response = await self._services.answering.answer(
            state, message, time_remaining_s=None, trace_parent=request.headers.get(TRACE_PARENT)
        )
        return _json(write_generate(response))

    async def _generate_stream(self, state: CallState, request: web.Request) -> web.StreamResponse:
        message = await self._read_generate(state, request)
        answering, head = self._services.answering, message.head
        served, call = await answering.read(
            state, message, time_remaining_s=None, trace_parent=request.headers.get(TRACE_PARENT)
        )
        events = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Content-Type-Options": "nosniff",
            }
        )
        results = answering.infer_stream(state, served, call)
        async with aclosing(results):  # withdraws the request, if the client leaves
            try:
                async for result in results:
                    if not events.prepared:
                        await events.prepare(request)
                    response = write_streamed(head, result, call, served.version).infer_response
                    await _write_event(request, events, write_generate(response))
            except EngineError as error:
                if not events.prepared:
                    raise
                _, text = self._admission.refuse(state, error)
                await _write_event(request, events, {"error": text})
        await events.write_eof()
        return events

    async def _read_generate(self, state: CallState, request: web.Request) -> InferMessage:
        """Receive a request of the generate extension as a message."""
        self._admission.check_capacity()
        path, version = request.match_info, request.match_info.get("version", "")
        body = decode_object(await self._body(state, request, _MAX_GENERATE_BYTES))
        self._admission.hold(state, 0)
        self._admission.access.check_model(state.principal, path["model"])
        model = self._services.repository.catalog.model(path["model"], version)
        return read_generate(body, model, path["model"], version)

    async def _body(self, state: CallState, request: web.Request, most: int) -> bytes:
        """Receive and decompress a body; its bytes count as held from then on."""
        if (request.content_length or 0) > most:
            raise _too_large(request.content_length or 0, most)
        parts, size = [], 0
        try:
            async with asyncio.timeout(ARRIVAL_S):
                async for part in request.content.iter_any():
                    size += len(part)
                    if size > most:
                        raise _too_large(size, most)
                    self._admission.hold_more(state, len(part))
                    parts.append(part)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the body did not arrive within {ARRIVAL_S:g} s; send it at once, or a smaller one"
            ) from None
        return b"".join(parts)


def _too_large(size: int, most: int) -> RequestLimitError:
    return RequestLimitError(
        f"the body has {size} bytes or more, decompressed, expected at most {most}; send fewer "
        "samples at a time (the limit of inference is --max-message-mib)"
    )


def _header_bytes(request: web.Request, size: int) -> int:
    """Return the number of JSON bytes in a body."""
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and int(text) <= size):
        raise BadInputError(
            f"{HEADER_LENGTH} is {text!r:.40}, and the body has {size} bytes; send the length of "
            "the JSON before the binary data"
        )
    return int(text)


def _check_origin(request: web.Request) -> None:
    """Refuse requests that a browser sends for a web page of another site."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise ForbiddenOriginError(
            f"requests of web pages of another origin ({origin:.80}) are refused; call the server "
            "from that site's own server"
        )


def _check_host(request: web.Request) -> None:
    """Refuse requests that reach this machine under a host name: local clients use an address.

    A proxy forwards the host name that its clients use. So does a browser that runs another site's
    page whose host name was changed to resolve to this machine (DNS rebinding).
    """
    name = urlsplit(f"//{request.host}").hostname or ""
    if not is_loopback(name):
        raise ForbiddenError(
            f"calls that change the server are accepted from its own machine only, at 127.0.0.1 or "
            f"localhost, not {name!r:.80}; for others, start it with --admin-token-file"
        )


async def _unknown(_state: CallState, request: web.Request) -> web.Response:
    others = (*INFER_PATHS, *GENERATE_PATHS, *(f"{path}_stream" for path in GENERATE_PATHS))
    known = sorted({route.path for route in ROUTES} | set(others))
    same = [route.verb for route in ROUTES if route.path == request.path]
    if same:
        text = f"{request.path} takes {' and '.join(same)}, not {request.method}"
        return _json({"error": text}, status=405)
    text = f"there is no {request.method} {request.path:.200}; there are: {', '.join(known)}"
    return _json({"error": text}, status=404)


def _json(document: Any, *, status: int = 200) -> web.Response:
    body = json.dumps(document, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def _body_of(written: JsonBody) -> web.Response:
    if written.header_bytes is None:
        return web.Response(body=written.data, content_type="application/json")
    return web.Response(
        body=written.data,
        content_type="application/octet-stream",
        headers={HEADER_LENGTH: str(written.header_bytes)},
    )


async def _written(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Write a response; close the connection of a client that does not read it."""
    if not isinstance(response, web.Response):
        return response  # events, which were written as they came
    body = response.body
    size = len(body) if isinstance(body, bytes) else 0
    if size >= _COMPRESSED_FROM_BYTES:
        response.enable_compression()
    response.headers["X-Content-Type-Options"] = "nosniff"
    try:
        async with asyncio.timeout(UNREAD_S + size / SLOWEST_BYTES_PER_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _write_event(
    request: web.Request, events: web.StreamResponse, document: Mapping[str, Any]
) -> None:
    """Write an event; close the connection of a client that does not read it."""
    try:
        async with asyncio.timeout(UNREAD_S):
            await events.write(write_event(document))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
