"""Front ends: frames, and processes that hold connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.unit.server.test_service import X, wait_until
from tests.unit.server.test_tls import Authority

from offramp.client import AuthenticationError, Client
from offramp.proto.descriptors import method_path
from offramp.proto.messages import ModelInferRequest
from offramp.server.app import StopSignals, serve_until_stopped
from offramp.server.arguments.options import ServerOptions
from offramp.server.common.errors import StartError
from offramp.server.frontends import frontends
from offramp.server.frontends.frames import FrameKind, FrameLink, Payload
from offramp.server.frontends.heads import CallHead, CallStatus
from offramp.server.frontends.relay import MethodShape, Relay
from offramp.server.requests.admission import RequestAdmission
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

INFER = method_path("ModelInfer")


def message() -> bytes:
    request = ModelInferRequest(model_name="fake", raw_input_contents=[X[:1].tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return request.SerializeToString()


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServer[FakeEngine]]:
    with FakeServer(FakeEngine(), ServerOptions(frontends=2, max_message_mib=64)) as server:
        yield server


def processes() -> set[int]:
    """The front ends of this process."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            told = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"frontends.process" in told:
            found.add(int(place.name))
    return found


def exchange(frames: list[tuple[FrameKind, int, bytes]]) -> list[tuple[FrameKind, int, bytes]]:
    """Return the received frames of sent frames."""
    received: list[tuple[FrameKind, int, bytes]] = []

    async def run() -> None:
        ended = asyncio.Event()

        def receive(kind: FrameKind, call: int, payload: Payload, message: Payload | None) -> None:
            received.append((kind, call, bytes(payload) + bytes(message or b"")))
            if len(received) == len(frames):
                theirs.close()

        ours, theirs = FrameLink(lambda *_: None, lambda: None), FrameLink(receive, ended.set)
        loop = asyncio.get_running_loop()
        for link, end in zip((ours, theirs), socket.socketpair(), strict=True):
            await loop.create_unix_connection(lambda link=link: link, sock=end)  # type: ignore[misc]
        for kind, call, payload in frames:
            await ours.writable()
            head = payload[: len(payload) % 100]
            await ours.send_message(kind, call, payload[len(head) :], head=head)
        await asyncio.wait_for(ended.wait(), 30)
        ours.send(FrameKind.DONE)  # nobody is there; nothing happens
        ours.close()

    asyncio.run(run())
    return received


@pytest.mark.parametrize("large", [0, 65_536, 262_143, 262_200, 262_300, 9_000_000])
def test_frames_arrive_as_they_were_sent(large: int) -> None:
    rng = np.random.default_rng(large)
    frames = [
        (FrameKind(number % 12), number**3, rng.bytes(large if number % 3 == 1 else number))
        for number in range(60)
    ]
    assert exchange(frames) == frames


def test_heads_are_read_as_they_were_written() -> None:
    head = CallHead(
        "/a.B/C", "ipv4:1.2.3.4:5", 1.5, (("key", "value"), ("offramp-deadline", "slo"))
    )
    assert CallHead.split(head.encode() + b"message") == (head, b"message")
    status = CallStatus(grpc.StatusCode.NOT_FOUND, "not here – no", (("offramp-error", "E"),))
    assert CallStatus.decode(status.encode()) == status


def test_large_requests_are_answered(served: Any) -> None:
    rows = np.random.default_rng(0).random((600_000, 4)).astype(np.float32)
    with Client(served.address) as client:
        result = client.infer("fake", {"x": rows})
    np.testing.assert_array_equal(result.outputs["logits"], rows[:, :3])
    assert wait_until(lambda: served.admission.held_bytes == 0)


def test_what_a_front_end_refuses_is_counted(served: Any) -> None:
    with grpc.insecure_channel(served.address) as channel:
        infer: Any = channel.stream_unary(INFER)
        call = infer.future(iter(()), timeout=30)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert wait_until(lambda: served.admission.refused["INVALID_ARGUMENT", "undecodable"] == 1)


def test_a_front_end_that_dies_takes_its_own_connections_alone(served: Any) -> None:
    """Their requests are withdrawn, the others are answered, and another front end comes."""
    before = processes()
    assert len(before) == 2
    answered_before, cancelled_before = sum(served.engine.answered), served.engine.cancelled
    served.hold()
    with ExitStack() as stack:
        calls = []
        for _ in range(12):
            apart = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
            channel = stack.enter_context(grpc.insecure_channel(served.address, apart))
            calls.append(channel.stream_unary(INFER).future(iter([message()]), timeout=60))
        assert wait_until(lambda: served.engine.waiting == 12)
        os.kill(min(before), signal.SIGKILL)
        assert wait_until(lambda: served.engine.waiting < 12)
        served.release()
        codes = Counter(call.code() for call in calls)
    lost = codes[grpc.StatusCode.UNAVAILABLE]
    assert codes[grpc.StatusCode.OK] == 12 - lost < 12
    served.engine.hold = None
    assert served.engine.cancelled - cancelled_before == lost
    assert sum(served.engine.answered) - answered_before == 12 - lost
    assert wait_until(lambda: len(processes()) == 2)
    assert processes() != before
    with Client(served.address) as client:
        assert len(client.infer("fake", {"x": X}).exits) == 2


def test_they_encrypt_and_the_engines_process_knows_the_tokens(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:ann-0123456789abcdef\n")
    tokens.chmod(0o600)
    security = replace(authority.options(), token_file=tokens)
    with FakeServer(FakeEngine(), ServerOptions(frontends=1, security=security)) as server:
        with Client(server.address, tls=authority.client(), token="ann-0123456789abcdef") as client:
            assert len(client.infer("fake", {"x": X}).exits) == 2
        with (
            Client(server.address, tls=authority.client(), token="eve-0123456789abcdef") as client,
            pytest.raises(AuthenticationError, match="the token is not valid"),
        ):
            client.infer("fake", {"x": X})
        assert server.admission.refused["UNAUTHENTICATED", "unauthenticated"] == 1


def test_a_server_is_ready_once_its_front_ends_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as grpc_port, ExitStack() as stack:
        http_port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        grpc_, http = (one.getsockname()[1] for one in (grpc_port, http_port))

    def first_answer() -> int:
        """Poll the readiness over HTTP, and ask over gRPC as soon as it is there."""
        url = f"http://127.0.0.1:{http}/v2/health/ready"
        assert wait_until(lambda: answers(url))
        with Client(f"127.0.0.1:{grpc_}", retries=0) as client:
            return len(client.infer("fake", {"x": X}, timeout_s=30).exits)

    async def opened() -> FakeEngine:
        return FakeEngine()

    async def scenario() -> int:
        stop = StopSignals()
        options = ServerOptions(grpc_port=grpc_, http_port=http, frontends=1, drain_delay_s=0)
        asking = asyncio.create_task(asyncio.to_thread(first_answer))
        asking.add_done_callback(lambda _: stop.request("SIGTERM"))
        assert await serve_until_stopped(opened, options, stop) == 0
        return await asking

    assert asyncio.run(scenario()) == 2


def answers(url: str) -> bool:
    """Whether a page is answered; an answer may take long."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_what_keeps_them_from_starting_is_said(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    security = authority.options()
    before = processes()
    server = FakeServer(FakeEngine(), ServerOptions(frontends=2, security=security))
    assert security.tls_key is not None
    security.tls_key.write_text("no key")
    with pytest.raises(StartError, match="cannot be used"), server:
        pytest.fail("it has started")
    assert wait_until(lambda: processes() == before)


def test_they_end_with_the_server() -> None:
    before = processes()
    with FakeServer(FakeEngine(), ServerOptions(frontends=2)) as server:
        ours = processes() - before
        with Client(server.address) as client:
            client.infer("fake", {"x": X})
        server.run(server.grpc.leaving())
        server.run(server.grpc.send_goaway(5.0))
        assert len(ours & processes()) == 2
    assert wait_until(lambda: not ours & processes())


def test_one_that_hangs_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontends, "_PATIENCE_S", 0.1)
    before = processes()
    with FakeServer(FakeEngine(), ServerOptions(frontends=1)):
        (ours,) = processes() - before
        os.kill(ours, signal.SIGSTOP)
    assert wait_until(lambda: ours not in processes())


class LinkWithoutMemory:
    """The link of a front end that can send nothing large."""

    def __init__(self) -> None:
        self.sent: list[FrameKind] = []

    def send(self, kind: FrameKind, _call: int = 0, _payload: bytes = b"") -> None:
        self.sent.append(kind)

    async def writable(self) -> None: ...

    async def send_message(self, *_: Any, **__: Any) -> None:
        raise OSError("no memory")


class StreamContext:
    """Fake of ``grpc.aio``'s context, for a stream with one message."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None

    async def read(self) -> bytes:
        return b"message"

    def add_done_callback(self, _: Any) -> None: ...

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None: ...

    async def abort(self, code: grpc.StatusCode, *_: Any, **__: Any) -> None:
        self.status = code
        raise grpc.aio.AbortError


def test_a_stream_whose_message_cannot_be_passed_on_ends() -> None:
    link, context = LinkWithoutMemory(), StreamContext()
    path = method_path("ModelStreamInfer")
    relay = Relay(link, RequestAdmission(), {path: MethodShape(True, True)})  # type: ignore[arg-type]
    handler = relay.handlers[path]

    async def run() -> None:
        with pytest.raises(grpc.aio.AbortError):
            await asyncio.wait_for(handler.stream_stream(None, context), 10)

    asyncio.run(run())
    assert context.status is grpc.StatusCode.INTERNAL
    assert link.sent == [FrameKind.OPEN, FrameKind.DONE]
