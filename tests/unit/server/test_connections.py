"""Connections that are opened and left: few of them, for a short time, and others get through."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.facts import facts, tells

from offramp.client import Client, ConnectionFailedError, ServerUnavailableError
from offramp.server.arguments.options import MIB
from offramp.server.common.errors import StartError
from offramp.server.grpc_endpoint import GrpcEndpoint
from offramp.server.ports import grpc_listener, http_endpoint, sockets
from offramp.server.ports.sockets import (
    LEAST_CONNECTIONS,
    MAX_HTTP_CONNECTIONS,
    SPARE_DESCRIPTORS,
    fit_limits,
    open_connections,
)
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

LIMIT_S = 30.0
HALF_HEAD = b"GET /health/live HTTP/1.1\r\nHost: here\r\nX-"
GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
HALF_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM"
WHOLE_REQUEST = b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture
def connect() -> Iterator[Callable[[str, bytes], socket.socket]]:
    """Connect to ``host:port``, and send a few bytes."""
    with ExitStack() as stack:

        def connect(address: str, data: bytes) -> socket.socket:
            host, _, port = address.rpartition(":")
            connection = stack.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
            connection.sendall(data)
            return connection

        yield connect


def is_open(connection: socket.socket) -> bool:
    """Return True if the server has not closed it yet; received data is discarded."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def live(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health/live", timeout=LIMIT_S) as response:
        return bool(response.status == 200)


def assert_answers(connection: socket.socket) -> None:
    connection.sendall(WHOLE_REQUEST)
    answer = b""
    while not answer.endswith(b"live\n"):
        more = connection.recv(4096)
        assert more, "the server hung up"
        answer += more
    assert answer.startswith(b"HTTP/1.1 200")


def test_the_idlest_http_connection_is_closed_at_the_limit(served: Any, connect: Any) -> None:
    address = served.url.removeprefix("http://")
    used = connect(address, b"")
    assert_answers(used)
    for _ in range(10):
        left = [connect(address, HALF_HEAD) for _ in range(30)]
        assert live(served.url)
        assert_answers(used)
    assert all(map(is_open, left))
    assert len(served.http._connections._used_s) <= MAX_HTTP_CONNECTIONS


def test_half_open_http_connections_beyond_the_cap_are_closed(served: Any, connect: Any) -> None:
    address = served.url.removeprefix("http://")
    opened = [connect(address, HALF_HEAD) for _ in range(300)]
    wait_until(lambda: sum(map(is_open, opened)) <= MAX_HTTP_CONNECTIONS)
    assert live(served.url)


def test_idle_http_connections_are_closed(
    served: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HTTP_IDLE_S", 0.0)
    address = served.url.removeprefix("http://")
    opened = [connect(address, data) for data in (b"", HALF_HEAD, WHOLE_REQUEST)]
    wait_until(lambda: not any(map(is_open, opened)))


@pytest.fixture
def large_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of more than the kernel takes for a peer that reads nothing."""
    monkeypatch.setattr(http_endpoint, "render_metrics", lambda *_, **__: bytes(32 * MIB))


def waiting_bytes(served: Any) -> int:
    """Return the bytes that the server holds for peers that do not read."""
    return sum(each.get_write_buffer_size() for each in served.http._connections.transports())


def http_sockets(served: Any) -> int:
    port = int(served.url.rpartition(":")[2])
    return sum(map(sockets._connected, sockets._sockets(port)))


@pytest.mark.usefixtures("large_page")
def test_idle_connections_end_though_their_peers_do_not_read(
    served: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(served.url.removeprefix("http://"), GET_METRICS)
    wait_until(lambda: waiting_bytes(served) > MIB)
    monkeypatch.setattr(sockets, "HTTP_IDLE_S", 0.0)
    wait_until(lambda: http_sockets(served) == 0)


@pytest.mark.usefixtures("large_page")
def test_connections_with_unread_responses_are_closed_at_the_limit(
    served: Any, connect: Any
) -> None:
    address = served.url.removeprefix("http://")
    connect(address, GET_METRICS)
    wait_until(lambda: waiting_bytes(served) > MIB)
    for _ in range(MAX_HTTP_CONNECTIONS):
        assert_answers(connect(address, b""))
    wait_until(lambda: waiting_bytes(served) == 0)
    wait_until(lambda: http_sockets(served) <= MAX_HTTP_CONNECTIONS)


@pytest.mark.usefixtures("large_page")
def test_a_server_stops_though_a_peer_does_not_read(connect: Any) -> None:
    with FakeServer(FakeEngine()) as server:
        connect(server.url.removeprefix("http://"), GET_METRICS)
        wait_until(lambda: waiting_bytes(server) > MIB)


def test_a_socket_that_was_reset_belongs_to_no_port(
    served: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: socket.socket) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    connect(served.address, b"")
    monkeypatch.setattr(socket.socket, "getsockname", refuse)
    assert not open_connections(int(served.address.rpartition(":")[2])).peers


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer[FakeEngine]]:
    """A server of 20 gRPC connections, whose timeouts are short."""
    options = [
        (name, 500 if name in {"grpc.server_handshake_timeout_ms"} else value)
        for name, value in grpc_listener._CONNECTION_OPTIONS
    ]
    monkeypatch.setattr(grpc_listener, "_CONNECTION_OPTIONS", options)
    monkeypatch.setattr(
        "offramp.testing.server.GrpcEndpoint",
        lambda services, **known: GrpcEndpoint(services, **known, max_connections=20),
    )
    with FakeServer(FakeEngine()) as server:
        yield server


def test_grpc_connections_are_few_and_half_open_ones_end(hasty: Any, connect: Any) -> None:
    with Client(hasty.address) as client:
        assert client.server_ready(timeout_s=LIMIT_S)
        opened = [connect(hasty.address, HALF_PREFACE) for _ in range(300)]
        wait_until(lambda: sum(map(is_open, opened)) < 20)
        assert client.server_ready(timeout_s=LIMIT_S)
        wait_until(lambda: not any(map(is_open, opened)))
        assert client.server_ready(timeout_s=LIMIT_S)
    wait_until(lambda: answers(hasty.address))


def answers(address: str) -> bool:
    try:
        with Client(address) as client:
            return client.server_ready(timeout_s=LIMIT_S)
    except (ConnectionFailedError, ServerUnavailableError):
        return False


@pytest.mark.slow
def test_a_server_with_few_descriptors_survives_half_open_connections(
    connect: Any, tmp_path: Path
) -> None:
    command = f"ulimit -n 128; exec {sys.executable} -m offramp.testing.engine"
    log = tmp_path / "log"
    with log.open("w") as stderr, ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                ["/bin/sh", "-c", f"{command} --grpc-port=0 --http-port=0"], stderr=stderr
            )
        )
        stack.callback(process.kill)
        wait_until(lambda: "ready: gRPC" in log.read_text())
        line = log.read_text().partition("ready: gRPC on ")[2]
        address, url = line.split(",")[0], line.partition("http://")[2].partition("/")[0]
        for _ in range(200):
            connect(url, HALF_HEAD)
            connect(address, HALF_PREFACE)
        assert live(f"http://{url}")
        wait_until(lambda: answers(address))
        assert live(f"http://{url}")
    tells(log.read_text(), "open files", "128")
    assert "File descriptor limit reached" not in log.read_text()


class Descriptors:
    """The limits of descriptors of a process that has ``in_use`` open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, in_use: int) -> None:
        for number in range(in_use):
            (folder / str(number)).touch()
        self.limits = (0, 0)
        monkeypatch.setattr(sockets, "DESCRIPTORS", folder)
        monkeypatch.setattr(resource, "getrlimit", lambda _what: self.limits)
        monkeypatch.setattr(resource, "setrlimit", self.set)

    def set(self, _what: int, limits: tuple[int, int]) -> None:
        assert limits[0] <= limits[1] == self.limits[1]
        self.limits = limits


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Descriptors:
    return Descriptors(monkeypatch, tmp_path, in_use=40)


NEEDED = 40 + SPARE_DESCRIPTORS + 2 * MAX_HTTP_CONNECTIONS + 1000


def test_the_soft_limit_of_descriptors_is_raised_as_needed(descriptors: Descriptors) -> None:
    descriptors.limits = (1024, 4096)
    limits = fit_limits(1000)
    assert (limits.grpc, limits.http) == (1000, MAX_HTTP_CONNECTIONS)
    assert descriptors.limits == (NEEDED, 4096)


def test_few_descriptors_are_told_and_shared(
    descriptors: Descriptors, caplog: pytest.LogCaptureFixture
) -> None:
    descriptors.limits = (100, 272)
    with caplog.at_level(logging.WARNING):
        limits = fit_limits(1000)
    assert (limits.grpc, limits.http) == (150, 25)
    assert descriptors.limits == (272, 272)
    [said] = caplog.messages
    tells(said, "272", "150", "1000", "--max-connections", f"ulimit -n {NEEDED}")


def test_too_few_descriptors_are_refused(descriptors: Descriptors) -> None:
    descriptors.limits = (64, 64)
    with pytest.raises(
        StartError,
        match=facts("open files", "64", "0", f"{3 * LEAST_CONNECTIONS}", f"ulimit -n {NEEDED}"),
    ):
        fit_limits(1000)
