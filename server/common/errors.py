"""The gRPC status codes of the engine's errors.

The codes are those of Triton, so that its clients' retry rules apply. In addition, the trailing
metadata name the error's class: gRPC itself uses the same codes (``UNAVAILABLE`` if nothing
listens, ``RESOURCE_EXHAUSTED`` if a message is too large), and the class lets our client
distinguish the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc

from offramp.engine.common.errors import (
    BackendError,
    BadInputError,
    CapacityError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    ModelNotServedError,
    OptionsError,
    OutOfServiceError,
    QueueFullError,
    StageNotLoadedError,
    TensorsLostError,
    WorkerLostError,
)


class UndecodableError(InvalidRequestError):
    """The bytes of a request are not a message of the protocol."""


class RequestLimitError(InvalidRequestError):
    """A request has more fields, or more bytes apart from tensor elements, than allowed."""


class RequestCountError(QueueFullError):
    """The limit of requests in progress is reached."""


class HeldBytesError(QueueFullError):
    """The messages of the requests in progress fill the memory limit."""


class ModelControlError(EngineError):
    """This server does not let clients load or unload models."""


class ModelLoadError(EngineError):
    """A model could not be loaded; the versions served before are still served."""


class UnsupportedError(EngineError):
    """The server does not support this function."""


class ForbiddenOriginError(EngineError):
    """A web page of another site sent the request."""


class UnauthenticatedError(EngineError):
    """A request has no token, or no valid one."""


class ForbiddenError(EngineError):
    """The sender may not make this request."""


class Refusal(NamedTuple):
    """Status code of an error, and its reason in the metrics."""

    code: grpc.StatusCode
    reason: str
    """Label of the refusal in the metrics."""


REFUSALS: Final[Mapping[type[EngineError], Refusal]] = MappingProxyType(
    {
        ModelNotServedError: Refusal(grpc.StatusCode.NOT_FOUND, "unknown_model"),
        BadInputError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad_input"),
        UndecodableError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "undecodable"),
        RequestLimitError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too_many_fields"),
        InvalidRequestError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
        ModelControlError: Refusal(grpc.StatusCode.UNAVAILABLE, "model_control"),
        ModelLoadError: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "model_load"),
        UnauthenticatedError: Refusal(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"),
        ForbiddenError: Refusal(grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
        ForbiddenOriginError: Refusal(grpc.StatusCode.PERMISSION_DENIED, "origin"),
        UnsupportedError: Refusal(grpc.StatusCode.UNIMPLEMENTED, "unsupported"),
        RequestCountError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "concurrency"),
        HeldBytesError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "bytes"),
        QueueFullError: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full"),
        DeadlineExceededError: Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
        DrainingError: Refusal(grpc.StatusCode.UNAVAILABLE, "draining"),
        OutOfServiceError: Refusal(grpc.StatusCode.UNAVAILABLE, "out_of_service"),
        CapacityError: Refusal(grpc.StatusCode.UNAVAILABLE, "capacity"),
        # INTERNAL, because five workers died on it in a row: a retry would kill more of them.
        WorkerLostError: Refusal(grpc.StatusCode.INTERNAL, "worker_lost"),
        TensorsLostError: Refusal(grpc.StatusCode.INTERNAL, "tensors_lost"),
        StageNotLoadedError: Refusal(grpc.StatusCode.INTERNAL, "stage_not_loaded"),
        BackendError: Refusal(grpc.StatusCode.INTERNAL, "backend"),
        OptionsError: Refusal(grpc.StatusCode.INTERNAL, "internal"),
        EngineError: Refusal(grpc.StatusCode.INTERNAL, "internal"),
    }
)
"""Refusals by error class; other classes use their nearest listed base class."""

ERROR_METADATA_KEY: Final = "offramp-error"
"""Key of the trailing metadata with the name of the error's class."""

_WIRE_NAMES: Final[Mapping[type[EngineError], str]] = {
    InvalidRequestError: "RequestError",
    ModelNotServedError: "UnknownModelError",
    BadInputError: "InvalidInputError",
    WorkerLostError: "BackendError",
    TensorsLostError: "BackendError",
    StageNotLoadedError: "BackendError",
    UnauthenticatedError: "AuthenticationError",
    ForbiddenError: "PermissionDeniedError",
}
"""Names in the metadata that differ from the class names; the client uses them."""

INTERNAL_ERROR: Final = "internal error of the server; its log has the details"
"""Message that a client gets for an unexpected exception."""

_MOST_DETAILS_BYTES: Final = 4500
"""Largest size of a message: gRPC drops a response whose metadata exceed 8 KiB, and
percent-encoding triples the size of all bytes that are not printable ASCII."""


class StartError(Exception):
    """The server cannot start; the message names the reason and the remedy."""


def refusal_of(error: EngineError) -> Refusal:
    """Return the refusal for an error, from the nearest listed class in its hierarchy."""
    return next(REFUSALS[base] for base in type(error).__mro__ if base in REFUSALS)


def wire_name(error: Exception) -> str:
    """Return the name of an error in the trailing metadata."""
    if not isinstance(error, EngineError):
        return "InternalError"
    return _WIRE_NAMES.get(type(error), type(error).__name__)


def shortened(message: str) -> str:
    """Return a message, cut to the size that fits into gRPC's metadata."""
    text = message.encode(errors="replace").decode()  # invalid UTF-8 cannot be sent
    sizes = accumulate(
        1 if character.isascii() and character.isprintable() else 3 * len(character.encode())
        for character in text
    )
    fitting = sum(size <= _MOST_DETAILS_BYTES for size in sizes)
    return text if fitting == len(text) else f"{text[:fitting]}…"
