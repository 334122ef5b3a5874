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
from typing import Final, TypeVar

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
    WorkerLostError,
)

STATUS_CODES: Final[Mapping[type[EngineError], grpc.StatusCode]] = MappingProxyType(
    {
        ModelNotServedError: grpc.StatusCode.NOT_FOUND,
        BadInputError: grpc.StatusCode.INVALID_ARGUMENT,
        InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
        QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
        DrainingError: grpc.StatusCode.UNAVAILABLE,
        CapacityError: grpc.StatusCode.UNAVAILABLE,
        OutOfServiceError: grpc.StatusCode.UNAVAILABLE,
        WorkerLostError: grpc.StatusCode.INTERNAL,  # five in a row: who sends it again kills more
        BackendError: grpc.StatusCode.INTERNAL,
        OptionsError: grpc.StatusCode.INTERNAL,
        EngineError: grpc.StatusCode.INTERNAL,
    }
)


class UndecodableError(InvalidRequestError):
    """The bytes of a request are not a message of the protocol."""


class RequestLimitError(InvalidRequestError):
    """A request has more fields, or more beside its tensors' elements, than is read."""


class RequestCountError(QueueFullError):
    """As many requests are being answered as may be."""


class HeldBytesError(QueueFullError):
    """The messages of the requests that are being answered take all the memory they may."""


REASONS: Final[Mapping[type[EngineError], str]] = MappingProxyType(
    {
        ModelNotServedError: "unknown_model",
        BadInputError: "bad_input",
        UndecodableError: "undecodable",
        RequestLimitError: "too_many_fields",
        InvalidRequestError: "invalid_request",
        RequestCountError: "concurrency",
        HeldBytesError: "bytes",
        QueueFullError: "queue_full",
        DeadlineExceededError: "deadline",
        DrainingError: "draining",
        OutOfServiceError: "out_of_service",
        CapacityError: "capacity",
        WorkerLostError: "worker_lost",
        BackendError: "backend",
        EngineError: "internal",
    }
)
"""Why requests are refused, in the words of the metrics."""

ERROR_METADATA_KEY: Final = "offramp-error"
"""Trailing metadata: name of the error's class."""

_WIRE_NAMES: Final[Mapping[type[EngineError], str]] = {
    InvalidRequestError: "RequestError",
    ModelNotServedError: "UnknownModelError",
    BadInputError: "InvalidInputError",
    WorkerLostError: "BackendError",
}
"""Names in the metadata of the classes that are called otherwise there, as the client's are."""

INTERNAL_ERROR: Final = "internal error of the server; its log has the details"
"""What a client is told of an exception that nobody expected."""

_MOST_DETAILS_BYTES: Final = 4500
"""gRPC drops a response whose metadata exceed 8 KiB; all but printable ASCII takes three times its
bytes there, percent-encoded."""


_T = TypeVar("_T")


class StartError(Exception):
    """The server cannot start; the message names the reason and the remedy."""


def status_code(error: EngineError) -> grpc.StatusCode:
    """The status of an error, or of the nearest class that it derives from."""
    return _nearest(STATUS_CODES, type(error))


def reason_of(error: EngineError) -> str:
    """Why a request is refused, or the reason of the nearest class that its error derives from."""
    return _nearest(REASONS, type(error))


def _nearest(table: Mapping[type[EngineError], _T], cls: type[EngineError]) -> _T:
    return next(table[base] for base in cls.__mro__ if base in table)


REFUSALS: Final = tuple(
    (_nearest(STATUS_CODES, cls).name, reason) for cls, reason in REASONS.items()
)
"""Every pair of a status code's name and a reason that a request can be refused with."""


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
