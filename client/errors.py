"""Errors of the client, grouped by whose fault they are.

Each is raised from the ``grpc.RpcError`` that it explains, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc


class OfframpError(Exception):
    """Base of all errors of :mod:`offramp.client`."""


class RequestError(OfframpError):
    """The request is wrong; a retry will not help."""


class UnknownModelError(RequestError):
    """The server has no model of that name or version."""


class InvalidInputError(RequestError):
    """A tensor's name, shape, dtype or content is wrong."""


class MessageTooLargeError(RequestError):
    """The request or the response is larger than the limit of server or client."""


class AuthenticationError(RequestError):
    """The server requires a token, or does not accept the one that was sent."""


class PermissionDeniedError(RequestError):
    """The token does not allow this model or method."""


class ServerBusyError(OfframpError):
    """The server's queue is full; try again later."""


class DeadlineError(OfframpError):
    """No answer arrived in time."""


class ServerUnavailableError(OfframpError):
    """The server is shutting down; try another server."""


class ConnectionFailedError(OfframpError):
    """No server answers at the address, or the connection broke."""


class ServerError(OfframpError):
    """The server failed on a valid request."""


class ResponseError(OfframpError):
    """The response is not in the form that an Offramp server sends."""


_BY_SERVER: Final[Mapping[grpc.StatusCode, type[OfframpError]]] = {
    grpc.StatusCode.NOT_FOUND: UnknownModelError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInputError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusyError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
}
"""Error classes of statuses that the server's own code set."""

_BY_GRPC: Final[Mapping[grpc.StatusCode, type[OfframpError]]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,  # as a proxy may answer
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLargeError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: ConnectionFailedError,
    grpc.StatusCode.CANCELLED: ConnectionFailedError,
}
"""Error classes of statuses that gRPC set, on either side."""

BROKEN_OFF: Final = "Internal error from Core"
"""Details of the INTERNAL status that ``grpc.aio`` reports if a connection breaks during
sending."""

_REMEDIES: Final[Mapping[type[OfframpError], str]] = {
    MessageTooLargeError: "send fewer samples at a time, or raise the limit: "
    "--max-message-mib of eeserve for requests, max_message_mib of the client for responses",
    AuthenticationError: "pass the token as Client(..., token=...)",
    ConnectionFailedError: "is eeserve running there, and is this its gRPC port?",
}


def error_from_status(
    code: grpc.StatusCode, details: str, *, address: str, from_server: bool
) -> OfframpError:
    """Return the error for a call's status.

    ``from_server`` is true if the server's own code set the status, according to the metadata
    ``offramp-error``, and false if gRPC did, on either side.
    """
    kind = (_BY_SERVER if from_server else _BY_GRPC).get(code, ServerError)
    if details == BROKEN_OFF and not from_server:
        kind = ConnectionFailedError
    remedy = f" ({_REMEDIES[kind]})" if kind in _REMEDIES else ""
    where = "" if from_server else f"{address}: {code.name}: "
    return kind(f"{where}{details}{remedy}")
