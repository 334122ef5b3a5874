"""The campaign against a real server: messages over gRPC, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
import grpc.aio

from offramp.client import AsyncClient, OfframpError
from offramp.proto import messages
from offramp.proto.descriptors import method_path
from tests.chaos import watch
from tests.chaos.supervisor import Supervisor
from tests.fuzz.campaign import KEPT
from tests.fuzz.mutators import havoc
from tests.fuzz.subject import ALLOWED, METHODS, MODEL, Subject, method_of, mutate
from tests.http2 import PREFACE, data, frame, headers

CHANNELS: Final = 4
AT_ONCE: Final = 16
"""Concurrent calls per channel."""
ON_A_STREAM: Final = 20
"""Messages of a stream."""
LIMIT_S: Final = 60.0
"""A call that has no status by then hangs."""
MOST_MIB: Final = 400
"""Allowed growth of the server's memory under the load, in MiB."""


@dataclass(slots=True)
class Wire:
    """Feeds a server from many connections, and asks it something sensible in between."""

    subject: Subject
    folder: Path
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, bytes] = field(default_factory=dict)
    """Defects, each with the first case that showed it."""
    beats: list[watch.Beat] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    grown_mib: float = 0.0

    async def run(self, *, seconds: float, count: int) -> None:
        """Feed until the time is over or there were enough."""
        server = Supervisor(self.subject.bundle.path, self.folder, ("--no-state",))
        self.kept = self.subject.seeds()
        await server.start()
        try:
            before = watch.read_resources(server.pid, life=0, at_s=0.0)
            async with watch.pulse(server.address) as beats:
                self.beats = beats
                await self._feed(server, time.monotonic() + seconds, count)
            if server.died():
                self.findings.setdefault(server.faults[-1], b"")
                return
            after = watch.read_resources(server.pid, life=0, at_s=seconds)
            self.grown_mib = after.rss_mib - before.rss_mib
            if self.grown_mib > MOST_MIB:
                self.findings.setdefault(f"the server grew by {self.grown_mib:.0f} MiB", b"")
            await server.leave()
        finally:
            if not server.lives[-1].ended:
                await server.kill()
        for line, times in server.tracebacks.items():
            self.findings.setdefault(f"{times} tracebacks in the log, after: {line}", b"")
        for fault in server.faults:
            self.findings.setdefault(fault, b"")

    async def _feed(self, server: Supervisor, ends_s: float, count: int) -> None:
        going = _Going(server=server, ends_s=ends_s, count=count, counts=self.counts)
        channels = [
            grpc.aio.insecure_channel(server.address, [("fuzz.number", number)])
            for number in range(CHANNELS)
        ]
        senders = [self._send(going, c) for c in channels for _ in range(AT_ONCE)]
        await asyncio.gather(
            *senders, self._ask(going), self._no_http(going, server.grpc_port, _http2()),
            self._no_http(going, server.http_port, _HTTP),
        )  # fmt: skip
        for channel in channels:
            await channel.close()

    async def _send(self, going: _Going, channel: grpc.aio.Channel) -> None:
        calls = {method: _call(channel, method) for method in METHODS}
        while going:
            case = mutate(self.random.choice(self.kept), self.random)
            method = method_of(case)
            if method == "ModelStreamInfer":
                cases = [case]
                while len(cases) < ON_A_STREAM:
                    cases.append(case[:1] + mutate(self.random.choice(self.kept), self.random)[1:])
                await self._stream(calls[method], cases)
            else:
                await self._unary(calls[method], method, case)

    async def _unary(self, call: Any, method: str, case: bytes) -> None:
        try:
            await call(case[1:], timeout=LIMIT_S)
            self._note(method, "OK", "", case)
        except grpc.aio.AioRpcError as error:
            self._note(method, error.code().name, error.details() or "", case)

    async def _stream(self, call: Any, cases: list[bytes]) -> None:
        """Send them one after the other, until one ends the stream."""
        stream = call(timeout=LIMIT_S)
        answered = 0
        try:
            for case in cases:
                await stream.write(case[1:])
                response = await stream.read()
                if response is grpc.aio.EOF:
                    break
                status = response.infer_response.parameters["offramp_status"].string_param
                self._note("ModelStreamInfer", status or "OK", response.error_message, case)
                answered += 1
            else:
                await stream.done_writing()
                if await stream.read() is not grpc.aio.EOF:
                    self._wrong("a stream had more responses than requests", cases[-1])
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has ended, and says why
        if answered < len(cases):
            code, details = await stream.code(), await stream.details()
            self._note("ModelStreamInfer", f"{code.name}", details or "", cases[answered])

    def _note(self, method: str, status: str, details: str, case: bytes) -> None:
        self.counts[f"{method} {status}"] += 1
        kind = re.sub(r"[\d.]+|'[^']*'|\"[^\"]*\"", "", details)[:60]
        if status not in ALLOWED:
            self._wrong(f"{method}: {status}: {kind}", case)
        outcome = f"{method} {status} {kind}"
        if outcome not in self.seen and len(self.seen) < KEPT and len(case) < 20_000:
            self.seen.add(outcome)
            self.kept.append(case)

    def _wrong(self, what: str, case: bytes) -> None:
        self.counts["WRONG"] += 1
        self.findings.setdefault(what, case)

    async def _ask(self, going: _Going) -> None:
        """Check the answers of valid requests during the campaign."""
        truth = self.subject.truth
        async with AsyncClient(going.server.address, timeout_s=LIMIT_S) as client:
            while going:
                rows = [self.random.randrange(len(truth)) for _ in range(3)]
                try:
                    result = await client.infer(MODEL, truth.take(rows))
                except OfframpError as error:
                    self._wrong(f"a valid request failed: {error!r}"[:200], b"")
                else:
                    wrong = truth.wrong(
                        rows,
                        result.exits.tolist(),
                        result.outputs[truth.output],
                        result.confidences.tolist(),
                    )
                    self.counts["valid, right" if wrong is None else "valid, WRONG"] += 1
                    if wrong is not None:
                        self._wrong(f"a wrong answer: {wrong}", b"")
                await asyncio.sleep(0.05)

    async def _no_http(self, going: _Going, port: int, valid: bytes) -> None:
        """Changed bytes of a connection; what comes back is of no interest."""
        while going:
            case = havoc(valid, self.random)
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(case)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.02):
                            await reader.read(4096)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
                self.counts[f"bytes on the port of {'HTTP' if valid is _HTTP else 'gRPC'}"] += 1


@dataclass(slots=True, kw_only=True)
class _Going:
    """Flag that is true while the campaign continues."""

    server: Supervisor
    ends_s: float
    count: int
    counts: Counter[str]

    def __bool__(self) -> bool:
        gone = self.server.lives[-1].process.returncode is not None
        return not gone and time.monotonic() < self.ends_s and self.counts.total() < self.count


def _call(channel: grpc.aio.Channel, method: str) -> Any:
    streams = method == "ModelStreamInfer"
    make = channel.stream_stream if streams else channel.unary_unary
    return make(
        method_path(method),
        request_serializer=bytes,
        response_deserializer=messages.ModelStreamInferResponse.FromString if streams else bytes,
    )


_HTTP: Final = (
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\nCookie: x=y\r\n\r\nabc"
)


def _http2() -> bytes:
    """A whole call as a client sends it, one that is reset, and one whose answer may not come."""
    path = method_path("ModelInfer")
    cancel = (8).to_bytes(4, "big")
    return b"".join(
        (
            PREFACE,
            frame(4, 0, 0, b"\x00\x03\x00\x00\x00\x64"),
            headers(1, method_path("ServerLive")) + data(1, b"", end=True),
            headers(3, path) + data(3, b"", end=True) + frame(3, 0, 3, cancel),
            frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00"),
            headers(5, path) + data(5, b"", end=True),
            frame(8, 0, 0, b"\x00\x00\xff\xff"),
            frame(6, 0, 0, bytes(8)),
        )
    )
