"""The blocking client over HTTP, for networks that block gRPC.

Tensors are sent as binary data, so JSON costs neither time nor precision. Answers are the same as
those of :class:`offramp.client.Client`.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

import grpc
import numpy as np
from numpy.typing import ArrayLike

from offramp.client.connection import DEFAULT_TIMEOUT_S, Tls, is_loopback
from offramp.client.conversion import build_request, parse_response
from offramp.client.errors import (
    ConnectionFailedError,
    DeadlineError,
    OfframpError,
    ResponseError,
    error_from_status,
)
from offramp.client.results import InferResult, ModelMetadata, TensorMetadata
from offramp.proto.messages import ModelInferRequest, ModelInferResponse
from offramp.proto.tensors import TensorError, dtype_of

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Codes of gRPC for HTTP statuses."""


class RestClient:
    """Client of one server over HTTP; threads may share it, each with its own connection.

    Args:
        url: URL of the server's HTTP port, for instance ``http://127.0.0.1:8000``.
        timeout_s: Limit, in seconds, of calls that set none; ``None`` waits forever.
        tls: Certificates for ``https``; ``None`` trusts the system's authorities.
        token: Token to send with every call, for a server that requires one.
        insecure_token: Whether the token may be sent to another machine by ``http``.

    Raises:
        ValueError: The URL is invalid, or the token would be sent without encryption.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls: Tls | None = None,
        token: str | None = None,
        insecure_token: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is not a URL such as http://127.0.0.1:8000")
        clear = parts.scheme == "http" and not is_loopback(parts.hostname)
        if token is not None and clear and not insecure_token:
            raise ValueError(
                f"the token would be sent to {url} in the clear; use https, or insecure_token=True "
                "where the network is trusted"
            )
        self._host, self._port, self._url = parts.hostname, parts.port, url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._context = _context_of(tls) if parts.scheme == "https" else None
        self._headers = {} if token is None else {"Authorization": f"Bearer {token.strip()}"}
        self._local = threading.local()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> InferResult:
        """Return the answers to n samples; arguments and errors are those of ``Client.infer``."""
        request = build_request(
            model, inputs, outputs=outputs, priority=priority, deadline_s=timeout_s
        )
        header, body = write_body(request)
        headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
        answer, data = self._call(
            "POST", f"/v2/models/{quote(model, safe='')}/infer", header + body, headers, timeout_s
        )
        return parse_response(read_body(answer.headers.get(HEADER_LENGTH), data))

    def metadata(self, model: str, *, timeout_s: float | None = None) -> ModelMetadata:
        """Return inputs and outputs of a model; errors are those of :meth:`infer`."""
        path = f"/v2/models/{quote(model, safe='')}"
        _, data = self._call("GET", path, None, {}, timeout_s)
        document = _document(data)
        try:
            return ModelMetadata(
                name=document["name"],
                platform=document["platform"],
                inputs={t["name"]: _tensor(t) for t in document["inputs"]},
                outputs={t["name"]: _tensor(t) for t in document["outputs"]},
            )
        except (KeyError, TypeError, TensorError) as error:
            raise ResponseError(f"the model's metadata: {error!r}") from error

    def server_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether every model takes requests."""
        return self._answers("/v2/health/ready", timeout_s)

    def model_ready(self, model: str, *, timeout_s: float | None = None) -> bool:
        """Return whether a model is served and takes requests."""
        return self._answers(f"/v2/models/{quote(model, safe='')}/ready", timeout_s)

    def close(self) -> None:
        """Close this thread's connection; other threads' connections end with their threads."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _answers(self, path: str, timeout_s: float | None) -> bool:
        response, _ = self._exchange("GET", path, None, {}, timeout_s)
        return response.status == http.HTTPStatus.OK

    def _call(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return a response with its body, or raise its error."""
        response, data = self._exchange(verb, path, body, headers, timeout_s)
        if response.status != http.HTTPStatus.OK:
            raise self._error(response, data)
        return response, data

    def _exchange(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self._connection()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        connection.timeout = limit_s
        if connection.sock is not None:
            connection.sock.settimeout(limit_s)
        try:
            connection.request(verb, f"{self._path}{path}", body, {**self._headers, **headers})
            response = connection.getresponse()
            return response, response.read()
        except TimeoutError as error:
            self.close()
            raise DeadlineError(f"{self._url}: no answer within {limit_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            found = repr(error)
            if type(error) is http.client.BadStatusLine:  # its subclass is a closed connection
                found = "the answer is not HTTP"
            raise ConnectionFailedError(
                f"{self._url}: {found} (is eeserve running there, and is this its HTTP port?)"
            ) from error

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection; a new one if the server has closed it."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None and _is_closed(connection):
            connection.close()
            connection = None
        if connection is None:
            connection = (
                http.client.HTTPConnection(self._host, self._port)
                if self._context is None
                else http.client.HTTPSConnection(self._host, self._port, context=self._context)
            )
            self._local.connection = connection
        return connection

    def _error(self, response: http.client.HTTPResponse, data: bytes) -> OfframpError:
        try:
            text = str(json.loads(data)["error"])
        except (KeyError, TypeError, ValueError):
            text = f"HTTP status {response.status}"
        code = code_of(response.status)
        from_server = response.headers.get("offramp-error") is not None
        return error_from_status(code, text, address=self._url, from_server=from_server)


def code_of(status: int) -> grpc.StatusCode:
    """Return gRPC's code for an HTTP status."""
    return _CODES.get(status, grpc.StatusCode.INTERNAL)


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server has closed an idle connection."""
    sock = connection.sock
    if sock is None:
        return False  # it connects with its next request
    sock.settimeout(0.0)
    try:
        return not sock.recv(1)  # closed, or an unexpected byte
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(None)


def _context_of(tls: Tls | None) -> ssl.SSLContext:
    return ssl.create_default_context() if tls is None else tls.context()


def write_body(request: ModelInferRequest) -> tuple[bytes, bytes]:
    """Return a request's JSON, and the elements of its inputs, which follow the JSON."""
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(raw)},
        }
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    ]
    parameters: dict[str, Any] = {"binary_data_output": True}
    for name in request.parameters:
        value = request.parameters[name]
        parameters[name] = getattr(value, value.WhichOneof("parameter_choice") or "int64_param")
    document: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if request.outputs:
        document["outputs"] = [
            {"name": output.name, "parameters": {"binary_data": True}} for output in request.outputs
        ]
    return json.dumps(document).encode(), b"".join(request.raw_input_contents)


def read_body(header_bytes: str | None, data: bytes) -> ModelInferResponse:
    """Return the message in the body of a response; ResponseError if there is none.

    ``header_bytes`` is the header with the length of the JSON, if any.
    """
    length = int(header_bytes or len(data))
    document, rest = _document(data[:length]), data[length:]
    message = ModelInferResponse(
        model_name=document.get("model_name", ""), model_version=document.get("model_version", "")
    )
    for name, value in document.get("parameters", {}).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.parameters[name], kind, value)
    try:
        for output in document["outputs"]:
            tensor = message.outputs.add(name=output["name"], datatype=output["datatype"])
            tensor.shape.extend(output["shape"])
            size = output["parameters"]["binary_data_size"]
            message.raw_output_contents.append(rest[:size])
            rest = rest[size:]
    except (KeyError, TypeError) as error:
        raise ResponseError(f"the response is malformed: {error!r} is missing") from error
    return message


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ResponseError(f"the response is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ResponseError("the response is not a JSON object")
    return document


def _tensor(spec: Mapping[str, Any]) -> TensorMetadata:
    return TensorMetadata(
        name=spec["name"],
        dtype=np.dtype(dtype_of(spec["datatype"], spec["name"])),
        shape=tuple(spec["shape"]),
    )
