"""The table of status codes."""

from __future__ import annotations

import asyncio
import logging
import string
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from offramp.engine.common import errors as engine_errors
from offramp.engine.common.errors import EngineError
from offramp.server.common.errors import REFUSALS, refusal_of, shortened
from offramp.server.requests.admission import RequestAdmission, answering_errors


def family(cls: type[EngineError]) -> Iterator[type[EngineError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == engine_errors.__name__:
            yield from family(child)


def test_every_engine_error_has_a_row_of_its_own() -> None:
    assert set(family(EngineError)) <= set(REFUSALS)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ModelNotServedError", "NOT_FOUND"),
        ("BadInputError", "INVALID_ARGUMENT"),
        ("QueueFullError", "RESOURCE_EXHAUSTED"),
        ("DeadlineExceededError", "DEADLINE_EXCEEDED"),
        ("DrainingError", "UNAVAILABLE"),
        ("BackendError", "INTERNAL"),
    ],
)
def test_codes_are_tritons(name: str, code: str) -> None:
    assert refusal_of(getattr(engine_errors, name)("…")).code is grpc.StatusCode[code]


def test_a_later_subclass_has_the_status_of_its_base() -> None:
    class TooManyError(engine_errors.QueueFullError):
        pass

    assert refusal_of(TooManyError()).code is grpc.StatusCode.RESOURCE_EXHAUSTED


class AbortedError(Exception):
    pass


class Context:
    """Records the abort."""

    aborted: tuple[Any, ...] = ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, *arguments: Any) -> None:
        self.aborted = arguments
        raise AbortedError


def abort_of(error: Exception) -> tuple[Any, ...]:
    async def method(_state: Any, _request: None, _context: Any) -> None:
        raise error

    context: Any = Context()
    with pytest.raises(AbortedError):
        asyncio.run(answering_errors(RequestAdmission(), "Method", method)(None, context))
    return tuple(context.aborted)


def test_an_engine_error_is_told_with_its_class() -> None:
    code, message, metadata = abort_of(engine_errors.QueueFullError("no room"))
    assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    assert metadata == (("offramp-error", "QueueFullError"),)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (engine_errors.InvalidRequestError, "RequestError"),
        (engine_errors.ModelNotServedError, "UnknownModelError"),
        (engine_errors.BadInputError, "InvalidInputError"),
    ],
)
def test_the_names_in_the_metadata_are_fixed(error: type[Exception], name: str) -> None:
    _, _, metadata = abort_of(error("wrong"))
    assert metadata == (("offramp-error", name),)


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        code, message, _ = abort_of(KeyError("secret"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600", "\n", "\udcff", "a\U0001f600"])
def test_a_long_message_fits_into_grpcs_metadata(character: str) -> None:
    _, message, _ = abort_of(engine_errors.BadInputError(character * 10_000))
    encoded = quote(message, safe=string.printable.strip() + " ")  # as gRPC encodes it
    assert 4000 < len(encoded) < 4600
    assert message.endswith("…")


@pytest.mark.parametrize("text", ["", "plain", "≥ 1 %", "x" * 4500])
def test_a_message_that_fits_is_left_as_it_is(text: str) -> None:
    assert shortened(text) == text
