"""Meaning of a status for the caller."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.facts import Told, facts, tells

from offramp import client
from offramp.client import AsyncClient, Client, ConnectionFailedError, OfframpError, RequestError
from offramp.client.connection import ConnectionSettings
from offramp.client.errors import error_from_status


@pytest.mark.parametrize(
    ("code", "from_server", "kind"),
    [
        ("NOT_FOUND", True, client.UnknownModelError),
        ("INVALID_ARGUMENT", True, client.InvalidInputError),
        ("UNAUTHENTICATED", True, client.AuthenticationError),
        ("UNAUTHENTICATED", False, client.AuthenticationError),
        ("PERMISSION_DENIED", True, client.PermissionDeniedError),
        ("PERMISSION_DENIED", False, client.PermissionDeniedError),
        ("RESOURCE_EXHAUSTED", True, client.ServerBusyError),
        ("RESOURCE_EXHAUSTED", False, client.MessageTooLargeError),
        ("DEADLINE_EXCEEDED", True, client.DeadlineError),
        ("DEADLINE_EXCEEDED", False, client.DeadlineError),
        ("UNAVAILABLE", True, client.ServerUnavailableError),
        ("UNAVAILABLE", False, client.ConnectionFailedError),
        ("CANCELLED", False, client.ConnectionFailedError),
        ("INTERNAL", True, client.ServerError),
        ("UNIMPLEMENTED", False, client.ServerError),
    ],
)
def test_each_status_has_its_error(code: str, from_server: bool, kind: type[OfframpError]) -> None:
    status = grpc.StatusCode[code]
    error = error_from_status(status, "why", address="a:1", from_server=from_server)
    assert type(error) is kind
    assert "why" in str(error)
    assert ("a:1" in str(error)) is not from_server


def test_a_connection_that_broke_while_sending_is_no_fault_of_the_server() -> None:
    """grpc.aio says INTERNAL then, in these words."""
    told = "Internal error from Core"
    status = grpc.StatusCode.INTERNAL
    lost = error_from_status(status, told, address="a:1", from_server=False)
    assert type(lost) is client.ConnectionFailedError
    said = error_from_status(status, told, address="a:1", from_server=True)
    assert type(said) is client.ServerError


class EndedCall:
    """Stream that ended before the request was sent: reading raises its status."""

    def __init__(self, sending: type[Exception]) -> None:
        self.sending = sending
        self.cancelled = False

    async def write(self, _request: object) -> None:
        pass

    async def done_writing(self) -> None:
        raise self.sending("Failed")

    async def read(self) -> object:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "Socket closed")

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("sending", [grpc.aio.InternalError, asyncio.InvalidStateError])
def test_a_stream_that_ended_while_the_request_was_sent_raises_its_status(
    sending: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = EndedCall(sending)

    async def scenario() -> None:
        async with AsyncClient("127.0.0.1:1") as asking:
            monkeypatch.setattr(asking, "_stream", lambda **_: call)
            with pytest.raises(ConnectionFailedError, match="Socket closed"):
                await anext(asking.infer_stream("m", {"x": np.zeros(1, np.float32)}))

    asyncio.run(scenario())
    assert call.cancelled


def test_the_callers_own_faults_are_request_errors() -> None:
    for kind in (client.UnknownModelError, client.InvalidInputError, client.MessageTooLargeError):
        assert issubclass(kind, RequestError)
    assert not issubclass(client.ServerBusyError, RequestError)


def test_all_errors_are_exported() -> None:
    exported = {name for name in client.__all__ if name.endswith("Error")}
    assert exported == {
        name for name in vars(client.errors) if name.endswith("Error") and name != "grpc"
    }


def test_a_missing_server_is_reported() -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(ConnectionFailedError) as caught:
        nobody.server_ready(timeout_s=30)
    assert "127.0.0.1:1: UNAVAILABLE" in str(caught.value)
    assert "is eeserve running there" in str(caught.value)
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "localhost"}, ("'localhost'", "host:port")),
        (
            {"address": "http://localhost:8000/"},
            ("'http://localhost:8000/'", "scheme", "host:port"),
        ),
        ({"address": "grpc://a"}, ("a:8001",)),
        ({"address": "unix://a"}, ("host:port",)),
        ({"address": "a:1", "timeout_s": 0}, ("timeout_s 0", "above 0")),
        ({"address": "a:1", "max_message_mib": 0}, ("max_message_mib 0", "1")),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: Told) -> None:
    with pytest.raises(ValueError, match=facts(*message)):
        ConnectionSettings(**settings)  # type: ignore[arg-type]


def test_a_limit_that_nothing_can_keep_is_told_as_that() -> None:
    settings = ConnectionSettings(address="a:1")
    tells(str(settings.late(0.25)), "a:1", "no answer", "0.25 s")
    tells(str(settings.late(-1.0)), "a:1", "timeout_s -1", "above 0")
