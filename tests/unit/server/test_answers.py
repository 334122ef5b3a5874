"""Unread answers, reset calls, watchers and pings: the connections that are closed for them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import tells
from tests.http2 import PREFACE, data, frame, headers
from tests.unit.server.test_connections import is_open, wait_until

from offramp.client import Client
from offramp.client.conversion import build_request
from offramp.proto.descriptors import method_path
from offramp.server.arguments.options import KeepaliveOptions, ServerOptions
from offramp.server.ports.sockets import addresses_of
from offramp.server.requests import admission
from offramp.server.requests.admission import (
    CROWDED_S,
    MAX_RESETS,
    UNREAD_S,
    PendingAnswers,
    ResetCounts,
)
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95]], np.float32)
INFER = method_path("ModelInfer")
REQUEST = build_request("fake", {"x": X}, outputs=None, priority=0).SerializeToString()
NO_WINDOW = frame(4, 0, 0, struct.pack(">HI", 4, 0))
"""SETTINGS by which the server may send no data of any call."""


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.booleans())
def test_only_answers_that_wait_too_long_are_unread(old: list[bool], crowded: bool) -> None:
    pending = PendingAnswers()
    limit_s = CROWDED_S if crowded else UNREAD_S
    ages_s = sorted((limit_s + 1 if one else limit_s - 1 for one in old), reverse=True)
    for number, age_s in enumerate(ages_s):
        pending.add(f"peer {number}", 0, -age_s)
    unread = pending.unread(0.0, crowded=crowded)
    assert list(unread) == [f"peer {number}" for number in range(sum(old))]


def test_a_large_answer_gets_more_time_and_a_stream_has_no_limit() -> None:
    pending = PendingAnswers()
    pending.add("large", 2**20, 0.0)
    pending.add("streamed", 0, 0.0, streamed=True)
    assert pending.unread(UNREAD_S + 7.9, crowded=False) == {}
    assert list(pending.unread(UNREAD_S + 8.1, crowded=False)) == ["large"]
    assert pending.unread(CROWDED_S + 7.9, crowded=True) == {}
    assert list(pending.unread(CROWDED_S + 8.1, crowded=True)) == ["large"]


def test_what_is_read_is_forgotten() -> None:
    pending = PendingAnswers()
    answer = pending.add("peer", 0, 0.0)
    pending.remove(answer)
    assert pending.unread(1e9, crowded=True) == {}


def test_answers_wait_while_they_are_held_back() -> None:
    async def scenario() -> list[str]:
        pending, events = PendingAnswers(), []

        async def send(name: str) -> None:
            await pending.turn()
            events.append(name)

        before = pending.add("peer", 0, 0.0)
        asyncio.get_running_loop().call_later(0.01, pending.remove, before)
        async with pending.held() as writing:
            events.append(f"held, {len(writing)} are being written")
            sending = asyncio.create_task(send("sent"))
            await asyncio.sleep(0.01)
            events.append("released")
        await sending
        return events

    assert asyncio.run(scenario()) == ["held, 0 are being written", "released", "sent"]


@given(st.integers(1, 5))
def test_connections_that_reset_too_much_are_named(peers: int) -> None:
    counts = ResetCounts()
    for number in range(peers):
        for _ in range(MAX_RESETS - number):
            counts.add(f"peer {number}", 0.0)
    assert list(counts.take_beyond()) == ["peer 0"]
    assert counts.take_beyond() == {}  # it is closed, and its port may be another client's
    counts.add("peer 1", admission.RESET_WINDOW_S)
    assert counts.take_beyond() == {}


def connect(server: FakeServer[FakeEngine]) -> socket.socket:
    """Return a connection of HTTP/2 that has greeted, and gives the server no window."""
    host, _, port = server.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 30.0)
    connection.sendall(PREFACE + NO_WINDOW)
    return connection


@pytest.fixture
def connection(served: Any) -> Iterator[socket.socket]:
    """A connection that :func:`connect` makes."""
    with connect(served) as connection:
        yield connection


def call(number: int, request: bytes = REQUEST) -> bytes:
    return headers(number, INFER) + data(number, request, end=True)


def test_a_request_counts_until_its_answer_is_read(served: Any, connection: socket.socket) -> None:
    connection.sendall(call(1))
    wait_until(lambda: served.admission.answers.unread(1e12, crowded=True))
    assert (served.admission.requests, served.admission.held_bytes > 0) == (1, True)
    connection.sendall(frame(8, 0, 1, struct.pack(">I", 2**16)))  # now it may send
    wait_until(lambda: served.admission.requests == 0)
    assert served.admission.held_bytes == 0


def test_a_connection_that_reads_no_answers_is_closed(
    served: Any, connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNREAD_S", "CROWDED_S"):
        monkeypatch.setattr(admission, name, 0.1)
    connection.sendall(b"".join(call(number) for number in range(1, 20, 2)))
    with Client(served.address) as client:
        wait_until(lambda: not is_open(connection))
        wait_until(lambda: served.admission.requests == 0)
        assert client.infer("fake", {"x": X}).exits.tolist() == [0]


def test_clients_that_read_nothing_lose_their_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "CROWDED_S", 0.1)
    options = ServerOptions(max_concurrent_requests=4)
    with (
        FakeServer(FakeEngine(), options) as server,
        Client(server.address) as client,
        connect(server) as connection,
    ):
        connection.sendall(b"".join(call(number) for number in (1, 3, 5, 7)))
        wait_until(lambda: not is_open(connection))
        assert client.infer("fake", {"x": X}).exits.tolist() == [0]


def test_a_connection_that_resets_its_calls_is_closed(
    served: Any, connection: socket.socket
) -> None:
    cancel = struct.pack(">I", 8)
    with Client(served.address) as client:
        for number in range(1, 2 * MAX_RESETS + 20, 2):
            connection.sendall(headers(number, INFER) + frame(3, 0, number, cancel))
        wait_until(lambda: not is_open(connection))
        assert client.infer("fake", {"x": X}).exits.tolist() == [0]


def test_a_client_that_cancels_what_is_being_answered_is_not_closed(served: Any) -> None:
    served.hold()
    with grpc.insecure_channel(served.address) as channel:
        infer = channel.unary_unary(INFER)
        for _ in range(5):
            calls = [infer.future(REQUEST) for _ in range(MAX_RESETS // 5 + 1)]
            wait_until(lambda: served.admission.requests == MAX_RESETS // 5 + 1)
            for one in calls:
                one.cancel()
            wait_until(lambda: served.admission.requests == 0)
    assert served.run(offenders(served)) == {}


async def offenders(served: Any) -> Any:
    return served.admission.offenders()


def test_watchers_of_a_connection_are_few_and_leave_streams_their_room(served: Any) -> None:
    most = admission.MAX_WATCHES_OF_A_PEER
    with grpc.insecure_channel(served.address) as channel, Client(served.address) as client:
        watch: Callable[..., Any] = health_pb2_grpc.HealthStub(channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(most)]
        assert all(next(one).status == health_pb2.HealthCheckResponse.SERVING for one in watches)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(health_pb2.HealthCheckRequest(), timeout=30))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        tells(error.details(), f"{most} open streams")
        assert served.admission.streams == 0
        assert [one.exits.tolist() for one in client.infer_stream("fake", {"x": X})] == [[0]]
        for one in watches:
            one.cancel()
        wait_until(lambda: not served.admission._watches)


def test_pings_every_second_are_taken_and_a_flood_is_not(
    served: Any, connection: socket.socket
) -> None:
    assert KeepaliveOptions().grpc_http2_min_recv_ping_interval_without_data_ms <= 1000
    stop = threading.Event()
    connection.sendall(frame(6, 0, 0, bytes(8)))
    assert not stop.wait(1.1)
    connection.sendall(frame(6, 0, 0, bytes(8)))
    assert is_open(connection)
    connection.setblocking(True)
    connection.sendall(frame(6, 0, 0, bytes(8)) * 10)
    wait_until(lambda: not is_open(connection))


def test_watches_that_end_at_their_deadline_leave_their_room(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_WATCHES_OF_A_PEER", 2)
    with grpc.insecure_channel(served.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        for _ in range(40):
            with pytest.raises(grpc.RpcError) as ended:
                list(watch(health_pb2.HealthCheckRequest(), timeout=0.02))
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_peers_without_a_name_are_left_out() -> None:
    named = ("ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000", "", "unknown")
    assert addresses_of(named) == {("127.0.0.1", 5000), ("::1", 5000)}
