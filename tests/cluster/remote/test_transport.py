"""Frames of any size arrive whole; memory is shared, and its parts are taken once."""

from __future__ import annotations

import errno
import os
import socket
import threading

import numpy as np
import pytest
from tests.facts import facts

from offramp.cluster.remote import transport
from offramp.cluster.remote.transport import (
    Connection,
    ConnectionLostError,
    Regions,
    SharedMemory,
    TransportTimeoutError,
)
from offramp.cluster.remote.worker_messages import FrameError, LargeBodyError, TensorForm, pack_head

BYTES = np.dtype(np.uint8)


@pytest.mark.parametrize(
    "sizes", [(), (5,), (0, 5), (70_000,), (64, 3, 5_000_000), (65_536, 131_072, 65_537, 64)]
)
def test_frames_arrive_whole_and_one_after_the_other(sizes: tuple[int, ...]) -> None:
    ours, theirs = Connection.pair()
    other = Connection(theirs)
    arrays = [np.random.default_rng(n).integers(0, 255, s, np.uint8) for n, s in enumerate(sizes)]

    def send() -> None:
        ours.send(b"first", arrays)
        ours.send(b"second")

    sender = threading.Thread(target=send)
    sender.start()
    frame, after = other.receive(), other.receive()
    sender.join()
    assert (frame.header, after.header, after.body) == (b"first", b"second", b"")
    start = 0
    for array in arrays:
        start = -(-start // 64) * 64
        assert frame.body[start : start + array.nbytes] == array.tobytes()
        start += array.nbytes
    assert len(frame.body) == start
    ours.close()
    other.close()


def test_arrays_that_are_not_contiguous_are_sent_in_their_order() -> None:
    ours, theirs = Connection.pair()
    ours.send(b"x", [np.arange(6).reshape(2, 3).T])
    other = Connection(theirs)
    assert np.frombuffer(other.receive().body, np.int64).tolist() == [0, 3, 1, 4, 2, 5]
    ours.close()
    other.close()


@pytest.mark.parametrize(
    "said", [b"", b"EEW1", pack_head(b"abc", 9) + b"abc1234", b"GET / HTTP/1.1"]
)
def test_a_connection_that_ends_or_speaks_otherwise_is_lost(said: bytes) -> None:
    ours, theirs = Connection.pair()
    with theirs:
        theirs.sendall(said)
    with pytest.raises(ConnectionLostError, match=r"closed the connection|begins with b'GET '"):
        ours.receive()
    with pytest.raises(ConnectionLostError):
        ours.send(b"x", [np.zeros(1 << 20, np.uint8)])
    ours.close()


def test_who_does_not_answer_in_time_is_late() -> None:
    ours, theirs = Connection.pair()
    with pytest.raises(TransportTimeoutError, match=r"no answer within 0\.001 s"):
        ours.receive(0.001)
    theirs.close()
    ours.close()


def test_who_does_not_take_a_message_in_time_is_late() -> None:
    ours, theirs = Connection.pair()
    with theirs, pytest.raises(TransportTimeoutError, match=facts("message", "0.001 s")):
        ours.send(b"x", [np.zeros(1 << 24, np.uint8)], 0.001)
    ours.close()


@pytest.mark.parametrize(("given", "asked", "most"), [(8, None, 8), (8, 0, 0), (0, None, 0)])
def test_a_body_larger_than_is_taken_is_refused_by_its_head(
    given: int, asked: int | None, most: int
) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, most_body=given)
    theirs.sendall(pack_head(b"x", 1 << 32))  # and nothing else comes
    with pytest.raises(LargeBodyError, match=facts("4294967296 bytes", f"at most {most}")):
        connection.receive(10.0, most_body=asked)
    theirs.close()
    connection.close()


def test_a_body_as_large_as_is_taken_arrives() -> None:
    ours, theirs = socket.socketpair()
    connection, other = Connection(ours, most_body=8), Connection(theirs)
    other.send(b"x", [bytes(8)])
    assert connection.receive().body == bytes(8)
    other.close()
    connection.close()


class SteppedTime:
    """Monotonic time of which each look takes a tenth of a second."""

    def __init__(self) -> None:
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self._looks / 10


def test_who_drips_is_late_when_the_limit_of_the_frame_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = pack_head(b"header", 20) + b"header" + bytes(20)
    for sizes in ([1] * len(content), [len(content) - 20] + [1] * 20):

        class Dripping(socket.socket):
            left = iter(sizes)

            def recv(self, size: int, *_: object) -> bytes:
                return super().recv(min(size, next(self.left)))

            def recv_into(self, buffer: memoryview, *_: object) -> int:  # type: ignore[override]
                return super().recv_into(buffer, next(self.left))

        plain, theirs = socket.socketpair()
        theirs.sendall(content)
        with theirs, Dripping(fileno=plain.detach()) as dripping:
            monkeypatch.setattr(transport, "time", SteppedTime())
            with pytest.raises(TransportTimeoutError, match="no answer within 1 s"):
                Connection(dripping).receive(1.0)
            assert len(list(dripping.left)) == len(sizes) - 10


def test_who_takes_a_message_in_drops_is_late_when_its_limit_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dripping(socket.socket):
        sent = 0

        def send(self, data: bytes, *_: object) -> int:  # type: ignore[override]
            self.sent += 1
            return super().send(data[:1])

    plain, theirs = socket.socketpair()
    with theirs, Dripping(fileno=plain.detach()) as dripping:
        monkeypatch.setattr(transport, "time", SteppedTime())
        with pytest.raises(TransportTimeoutError, match=facts("message", "1 s")):
            Connection(dripping).send(b"x", [b"y" * 100], 1.0)
        assert dripping.sent == 10


def test_a_limit_holds_for_what_is_received_next_only() -> None:
    ours, theirs = Connection.pair()
    other = Connection(theirs)
    for limit_s in (0.001, 0.002):
        with pytest.raises(TransportTimeoutError, match=f"no answer within {limit_s:g} s"):
            ours.receive(limit_s)
    answer = threading.Timer(0.02, other.send, (b"late",))
    answer.start()
    assert ours.receive(None).header == b"late"
    answer.join()
    other.close()
    ours.close()


def test_a_network_that_the_system_gave_up_is_lost_and_not_late() -> None:
    given_up = TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    class GivenUp(socket.socket):
        def recv(self, *_: object) -> bytes:
            raise given_up

        def send(self, *_: object) -> int:
            raise given_up

    with GivenUp() as connected:
        for call in (lambda c: c.receive(), lambda c: c.send(b"x", [b"y"], 5.0)):
            with pytest.raises(ConnectionLostError, match="Connection timed out"):
                call(Connection(connected))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_closed_peer_is_detected_without_a_pending_receive(leaves: bool) -> None:
    ours, theirs = Connection.pair()
    gone = threading.Event()
    theirs.sendall(b"EEW1")  # what is there to be read is no sign of it
    with ours.watched(gone.set):
        if leaves:
            theirs.close()
            assert gone.wait(30)
    assert gone.is_set() == leaves
    theirs.close()
    ours.close()


def test_descriptors_travel_and_memory_is_shared() -> None:
    ours, theirs = Connection.pair()
    other = Connection(theirs)
    memory = SharedMemory.create(4096)
    ours.send_fds(b"memory", [memory.fd])
    memory.close_fd()
    (fd,) = other.receive(fds=True).fds
    same = SharedMemory(fd, 4096)
    same.close_fd()
    form = TensorForm("x", np.dtype(np.int32), (2, 3))
    memory.array(form, 128)[...] = 7
    view = same.array(form, 128)
    assert view.tolist() == [[7] * 3] * 2
    view += 1
    assert memory.array(form, 128).sum() == 48
    with pytest.raises(FrameError, match=facts("24 bytes at 4080", "4096")):
        same.array(form, 4080)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    ours.close()
    other.close()


def test_parts_are_taken_once_and_freed_when_unreferenced() -> None:
    regions = Regions(256)
    first, second = regions.take(1), regions.take(65)
    assert first is not None
    assert second is not None
    assert [(b.start, b.size_bytes) for b in (first, second)] == [(0, 64), (64, 128)]
    assert regions.take(65) is None
    third = regions.take(64)
    assert third is not None
    assert third.start == 192
    del first, second
    again = regions.take(192)
    assert again is not None
    assert again.start == 0
    assert regions.take(1) is None


def test_a_socket_of_another_process_is_a_connection_too() -> None:
    ours, theirs = Connection.pair()
    duplicate = Connection(socket.socket(fileno=os.dup(theirs.fileno())))
    theirs.close()
    duplicate.send(b"hello")
    assert ours.receive().header == b"hello"
    duplicate.close()
    ours.close()
