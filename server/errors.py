"""The gRPC status codes of the engine's errors.

The codes are those that Triton answers with, so that its clients' retry rules fit. Beside code and
message, the trailing metadata names the error's class: gRPC itself answers with the same codes
(``UNAVAILABLE`` when nobody listens, ``RESOURCE_EXHAUSTED`` when a message is too large), and our
client tells them apart by it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Final, NoReturn, TypeVar

import grpc
import grpc.aio

from offramp.engine.errors import (
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
)

logger = logging.getLogger(__name__)

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
        BackendError: grpc.StatusCode.INTERNAL,
        OptionsError: grpc.StatusCode.INTERNAL,
        EngineError: grpc.StatusCode.INTERNAL,
    }
)

ERROR_METADATA_KEY: Final = "offramp-error"
"""Trailing metadata: name of the error's class."""

_WIRE_NAMES: Final[Mapping[type[EngineError], str]] = {
    InvalidRequestError: "RequestError",
    ModelNotServedError: "UnknownModelError",
    BadInputError: "InvalidInputError",
}
"""Names in the metadata of the classes that are called otherwise there, as the client's are."""

INTERNAL_ERROR: Final = "internal error of the server; its log has the details"
"""What a client is told of an exception that nobody expected."""

_MAX_DETAILS_CHARS: Final = 1500
"""gRPC drops a response whose metadata exceed 8 KiB; a character takes up to four bytes there."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[_Request, _Response]
_Method = Callable[[_Request, _Context[_Request, _Response]], Awaitable[_Response]]


class StartError(Exception):
    """The server cannot start; the message names the reason and the remedy."""


def status_code(error: EngineError) -> grpc.StatusCode:
    """The status of an error, or of the nearest class that it derives from."""
    return next(STATUS_CODES[cls] for cls in type(error).__mro__ if cls in STATUS_CODES)


def answering_errors(method: _Method[_Request, _Response]) -> _Method[_Request, _Response]:
    """Turn what a service method raises into the status of its call."""

    @wraps(method)
    async def answered(request: _Request, context: _Context[_Request, _Response]) -> _Response:
        try:
            return await method(request, context)
        except EngineError as error:
            name = _WIRE_NAMES.get(type(error), type(error).__name__)
            await _abort(context, status_code(error), str(error), name)
        except Exception:
            logger.exception("unexpected error in %s", method.__name__)
            await _abort(context, grpc.StatusCode.INTERNAL, INTERNAL_ERROR, "InternalError")

    return answered


async def _abort(
    context: _Context[_Request, _Response], code: grpc.StatusCode, message: str, name: str
) -> NoReturn:
    if code is grpc.StatusCode.INTERNAL:
        logger.error("answered INTERNAL: %s", message)
    if len(message) > _MAX_DETAILS_CHARS:
        message = f"{message[:_MAX_DETAILS_CHARS]}…"
    await context.abort(code, message, ((ERROR_METADATA_KEY, name),))
