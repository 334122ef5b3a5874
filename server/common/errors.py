"""The gRPC status codes of the engine's errors.

The codes are those that Triton answers with, so that its clients' retry rules fit. Beside code and
message, the trailing metadata names the error's class: gRPC itself answers with the same codes
(``UNAVAILABLE`` when nobody listens, ``RESOURCE_EXHAUSTED`` when a message is too large), and our
client tells them apart by it.
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
    """A request has more fields, or more beside its tensors' elements, than is read."""


class RequestCountError(QueueFullError):
    """As many requests are being answered as may be."""


class HeldBytesError(QueueFullError):
    """The messages of the requests that are being answered take all the memory they may."""


class ModelControlError(EngineError):
    """Clients may not load or unload models here."""


class ModelLoadError(EngineError):
    """A model could not be loaded; what was served before is served on."""


class UnsupportedError(EngineError):
    """The server has no such function."""


class ForbiddenOriginError(EngineError):
    """A web page of another site sent the request."""


class UnauthenticatedError(EngineError):
    """A request has no token, or none that is valid."""


class ForbiddenError(EngineError):
    """A request is not allowed to whoever sent it."""


class Refusal(NamedTuple):
    """What an error is answered with."""

    code: grpc.StatusCode
    reason: str
    """In the words of the metrics."""


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
        # Five in a row: whoever sends it again kills more workers.
        WorkerLostError: Refusal(grpc.StatusCode.INTERNAL, "worker_lost"),
        TensorsLostError: Refusal(grpc.StatusCode.INTERNAL, "tensors_lost"),
        StageNotLoadedError: Refusal(grpc.StatusCode.INTERNAL, "stage_not_loaded"),
        BackendError: Refusal(grpc.StatusCode.INTERNAL, "backend"),
        OptionsError: Refusal(grpc.StatusCode.INTERNAL, "internal"),
        EngineError: Refusal(grpc.StatusCode.INTERNAL, "internal"),
    }
)
"""By class of the error; other classes are answered as the nearest class that they derive from."""

ERROR_METADATA_KEY: Final = "offramp-error"
"""Trailing metadata: name of the error's class."""

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
"""Names in the metadata of the classes that are called otherwise there, as the client's are."""

INTERNAL_ERROR: Final = "internal error of the server; its log has the details"
"""What a client is told of an exception that nobody expected."""

_MOST_DETAILS_BYTES: Final = 4500
"""gRPC drops a response whose metadata exceed 8 KiB; all but printable ASCII takes three times its
bytes there, percent-encoded."""


class StartError(Exception):
    """The server cannot start; the message names the reason and the remedy."""


def refusal_of(error: EngineError) -> Refusal:
    """What an error is answered with, or the nearest class that it derives from."""
    return next(REFUSALS[base] for base in type(error).__mro__ if base in REFUSALS)


def wire_name(error: Exception) -> str:
    """The name of an error in the trailing metadata."""
    if not isinstance(error, EngineError):
        return "InternalError"
    return _WIRE_NAMES.get(type(error), type(error).__name__)


def shortened(message: str) -> str:
    """Return a message that fits into gRPC's metadata, cut where it would not."""
    text = message.encode(errors="replace").decode()  # what was no UTF-8 cannot be sent
    sizes = accumulate(
        1 if character.isascii() and character.isprintable() else 3 * len(character.encode())
        for character in text
    )
    fitting = sum(size <= _MOST_DETAILS_BYTES for size in sizes)
    return text if fitting == len(text) else f"{text[:fitting]}…"
