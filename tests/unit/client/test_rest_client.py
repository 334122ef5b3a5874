"""The client over HTTP gives the answers and errors of the one over gRPC."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.facts import facts

from offramp.client import (
    Client,
    ConnectionFailedError,
    DeadlineError,
    InvalidInputError,
    RestClient,
    ServerBusyError,
    ServerUnavailableError,
    UnknownModelError,
)
from offramp.engine.common import errors as engine_errors
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95], [4, 5, 6, 0.25]], np.float32)


@pytest.fixture
def served() -> Any:
    with FakeServer(FakeEngine()) as server:
        yield server


def test_answers_are_those_of_grpc(served: Any) -> None:
    with RestClient(served.url) as rest, Client(served.address) as client:
        ours = rest.infer("fake", {"x": X}, outputs=["logits"], priority=1, timeout_s=20.0)
        theirs = client.infer("fake", {"x": X})
        assert rest.metadata("fake") == client.metadata("fake")
        assert rest.server_ready()
        assert rest.model_ready("fake")
        assert not rest.model_ready("other")
    np.testing.assert_array_equal(ours.outputs["logits"], theirs.outputs["logits"])
    assert ours.exits.tolist() == theirs.exits.tolist() == [0, -1]
    assert ours.confidences.tolist() == theirs.confidences.tolist()
    assert ours.policy_version == theirs.policy_version == 7
    call = served.engine.calls[0]
    assert call.priority == 4
    assert call.deadline_s is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (engine_errors.QueueFullError("full"), ServerBusyError),
        (engine_errors.DrainingError("leaving"), ServerUnavailableError),
        (engine_errors.DeadlineExceededError("late"), DeadlineError),
    ],
)
def test_errors_are_those_of_grpc(served: Any, error: Any, expected: type[Exception]) -> None:
    served.engine.failure = error
    with RestClient(served.url) as rest, pytest.raises(expected, match=str(error)):
        rest.infer("fake", {"x": X})


def test_what_the_server_refuses_is_told(served: Any) -> None:
    with RestClient(served.url) as rest:
        with pytest.raises(UnknownModelError, match="did you mean 'fake'"):
            rest.infer("fak", {"x": X})
        with pytest.raises(InvalidInputError, match="no input 'y'"):
            rest.infer("fake", {"y": X})
        assert rest.infer("fake", {"x": X}).exits.tolist() == [0, -1]


def test_a_connection_that_the_server_closed_is_opened_again(served: Any) -> None:
    with RestClient(served.url) as rest:
        rest.infer("fake", {"x": X})
        for transport in served.http._connections.transports():
            served.loop.call_soon_threadsafe(transport.abort)
        served.run(_turn())
        assert rest.infer("fake", {"x": X}).exits.tolist() == [0, -1]


async def _turn() -> None:
    """Let the server's loop run its pending tasks."""


def test_threads_share_a_client(served: Any) -> None:
    found: list[float] = []

    def ask(row: int) -> None:
        result = rest.infer("fake", {"x": np.full((1, 4), row, np.float32)})
        found.append(float(result.outputs["logits"][0, 0]))
        rest.close()

    with RestClient(served.url) as rest:
        threads = [threading.Thread(target=ask, args=(row,)) for row in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(found) == list(map(float, range(8)))


def test_limits_hold(served: Any) -> None:
    served.hold()
    with RestClient(served.url, timeout_s=0.2) as rest, pytest.raises(DeadlineError):
        rest.infer("fake", {"x": X})
    served.release()


def test_an_unreachable_server_is_reported() -> None:
    with (
        RestClient("http://127.0.0.1:1") as rest,
        pytest.raises(ConnectionFailedError, match="is eeserve running there"),
    ):
        rest.server_ready()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL such as http"):
        RestClient(url)


def test_a_token_is_not_sent_in_the_clear() -> None:
    with pytest.raises(ValueError, match=facts("in the clear", "https", "insecure_token=True")):
        RestClient("http://example.com:8000", token="abcdefghijklmnop")
    RestClient("http://127.0.0.1:8000", token="abcdefghijklmnop").close()


def test_the_port_of_grpc_is_no_port_of_http(served: FakeServer) -> None:
    with (
        RestClient(f"http://{served.address}") as rest,
        pytest.raises(ConnectionFailedError, match=facts("is not HTTP", "its HTTP port")),
    ):
        rest.metadata("fake")
