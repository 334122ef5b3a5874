"""Response time of ``ServerLive`` during attacks on a server, and memory after them.

    python -m benchmarks.attacks BUNDLE [--seconds 10] [--rounds 3] [--only NAME …] [--json FILE]

A server with default flags, attackers, and a process that calls ``ServerLive`` every 50 ms share
this machine's cores. A round lasts ``--seconds`` for each attack, on a new server each, and once
without one (``quiet``). Reported for the calls: median, maximum, and the number above 100 ms; an
attacker is one process that sends as fast as it can. Memory is the server's resident set before the
attack, its peak, and 15 s after the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import shutil
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import grpc
import numpy as np
from benchmarks.common import make_parser
from tests.chaos.supervisor import Supervisor
from tests.chaos.watch import Beat, pulse, resident_mib
from tests.http2 import PREFACE, data, frame, headers

from offramp.bundle import Bundle
from offramp.client.conversion import build_request
from offramp.proto.descriptors import method_path
from offramp.proto.messages import ModelInferRequest
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

LIMIT_MS: Final = 100.0
AFTERWARDS_S: Final = 15.0
INFER: Final = method_path("ModelInfer")
STREAM: Final = method_path("ModelStreamInfer")
_OPTIONS: Final = (("grpc.max_send_message_length", -1),)


class AttackedServer:
    """The server's addresses and a request, in an attacker's process."""

    def __init__(self, address: str, http: str, request: bytes, until_s: float) -> None:
        self.address, self.http, self.request = address, http, request
        self.until_s = until_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s

    def calls(self, content: bytes, at_once: int, *, connections: int = 1) -> None:
        """Send a message repeatedly, ``at_once`` calls at a time."""
        each = at_once // connections
        together(connections, lambda _: self._calls(content, each))

    def _calls(self, content: bytes, at_once: int) -> None:
        with grpc.insecure_channel(self.address, (*_OPTIONS, next_option())) as channel:
            method = channel.unary_unary(INFER)

            def one(_: int) -> None:
                while not self.over:
                    with contextlib.suppress(grpc.RpcError):
                        method(content, timeout=30)

            together(at_once, one)

    def streams(self, messages: Callable[[], Iterator[bytes]], at_once: int) -> None:
        """Open streams again and again, and read one response of each."""
        with grpc.insecure_channel(self.address, (*_OPTIONS, next_option())) as channel:
            method = channel.stream_stream(STREAM)

            def one(_: int) -> None:
                while not self.over:
                    call = method(messages(), timeout=30)
                    with contextlib.suppress(grpc.RpcError, StopIteration):
                        next(call)
                    call.cancel()

            together(at_once, one)

    def connections(self, where: str, greeting: bytes, count: int) -> None:
        """Open ``count`` connections, send an incomplete request, and keep them open."""
        host, _, port = where.rpartition(":")
        open_ones = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                one = socket.create_connection((host, int(port)), timeout=5)
                one.sendall(greeting)
                open_ones.append(one)
        while not self.over:
            time.sleep(0.1)
        for one in open_ones:
            one.close()

    def frames(self, settings: bytes, calls: Iterator[bytes], pause_s: float) -> None:
        """Send frames of HTTP/2 on a connection until it is closed, and answer its pings."""
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as one:
            one.settimeout(5)
            one.sendall(PREFACE + frame(4, 0, 0, settings))
            threading.Thread(target=self._answer_pings, args=(one,), daemon=True).start()
            for call in calls:
                one.sendall(call)
                time.sleep(pause_s)
                if self.over:
                    break

    def _answer_pings(self, connection: socket.socket) -> None:
        kept = b""
        with contextlib.suppress(OSError):
            while more := connection.recv(1 << 16):
                kept += more
                while len(kept) >= 9 and len(kept) >= 9 + int.from_bytes(kept[:3], "big"):
                    end = 9 + int.from_bytes(kept[:3], "big")
                    if kept[3] == _PING and not kept[4]:
                        connection.sendall(frame(_PING, 1, 0, kept[9:end]))
                    kept = kept[end:]


_PING: Final = 6

_numbers: Final = itertools.count()


def next_option() -> tuple[str, int]:
    """Return a channel option that gives the channel its own connection."""
    return "benchmark.number", next(_numbers)


def together(count: int, one: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _fields(mib: int) -> bytes:
    """Return a message of empty repeated fields, two bytes each."""
    return b"\n\x01g" + b"\x2a\x00" * (mib << 19)


def _for_no_model(mib: int) -> bytes:
    request = ModelInferRequest(model_name="none")
    request.raw_input_contents.append(bytes(mib << 20))
    return bytes(request.SerializeToString())


def _unread(server: AttackedServer) -> None:
    """Send valid requests on streams whose answers are never read."""

    def endless() -> Iterator[bytes]:
        while not server.over:
            yield server.request

    with grpc.insecure_channel(server.address, _OPTIONS) as channel:
        calls = [channel.stream_stream(STREAM)(endless(), timeout=60) for _ in range(16)]
        while not server.over:
            time.sleep(0.1)
        for call in calls:
            call.cancel()


def _pages(server: AttackedServer) -> None:
    def one(_: int) -> None:
        while not server.over:
            with contextlib.suppress(OSError):
                urlopen(f"http://{server.http}/metrics", timeout=30).read()

    together(16, one)


def _half_open(server: AttackedServer) -> None:
    where = (
        (server.http, b"GET / HTTP/1.1\r\nHost: a\r\n"),
        (server.address, b"PRI * HTTP/2.0\r\n"),
    )
    together(2, lambda n: server.connections(*where[n], 800))


def _shapes(server: AttackedServer) -> None:
    request = ModelInferRequest.FromString(server.request)
    request.inputs[0].shape[:] = [2**40, 2**40, 0, 1]
    server.calls(request.SerializeToString(), 32)


def _resets(server: AttackedServer) -> None:
    """Send calls that are cancelled immediately, on connections that are opened repeatedly."""
    cancel = struct.pack(">I", 8)

    def calls() -> Iterator[bytes]:
        for first in range(1, 2**30, 100):
            yield b"".join(
                headers(n, INFER) + data(n, server.request, end=True) + frame(3, 0, n, cancel)
                for n in range(first, first + 100, 2)
            )

    def one(_: int) -> None:
        while not server.over:
            server.frames(b"", calls(), 0.0)

    together(2, one)


def _unread_unary(server: AttackedServer) -> None:
    """Send as many valid requests as a connection allows, without reading the answers."""
    no_window = struct.pack(">HI", 4, 0)

    def calls() -> Iterator[bytes]:
        for n in range(1, 2000, 2):
            yield headers(n, INFER) + data(n, server.request, end=True)
        while True:
            yield b""

    together(8, lambda _: server.frames(no_window, calls(), 0.002))


ATTACKS: Final[dict[str, Callable[[AttackedServer], None] | None]] = {
    "quiet": None,
    "57 MiB of empty fields, 4 at once": lambda t: t.calls(_fields(57), 4),
    "6 MiB of empty fields, 16 at once": lambda t: t.calls(_fields(6), 16),
    "58 MiB for no model, 24 at once": lambda t: t.calls(_for_no_model(58), 24, connections=24),
    "undecodable, 64 at once": lambda t: t.calls(b"\xff" * 200, 64),
    "shapes of 2^80 elements, 32 at once": _shapes,
    "undecodable on streams, 32 at once": lambda t: t.streams(lambda: iter([b"\xff" * 20]), 32),
    "800 half heads of HTTP and of HTTP/2": _half_open,
    "16 streams that nobody reads": _unread,
    "8,000 answers that nobody reads": _unread_unary,
    "calls that are reset at once, 2 connections": _resets,
    "right requests, 256 at once": lambda t: t.calls(t.request, 256, connections=4),
    "metrics pages, 16 at once": _pages,
}


def attack(name: str, address: str, http: str, request: bytes, seconds: float) -> None:
    """Run an attack in its own process."""
    run = ATTACKS[name]
    assert run is not None
    run(AttackedServer(address, http, request, time.monotonic() + seconds))


async def measure(
    name: str, bundle: Path, request: bytes, seconds: float
) -> tuple[list[Beat], list[float]]:
    """Run one round of an attack; return the beats, and MiB before, at the peak, and after."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / bundle.name  # its state is kept next to it
        await asyncio.to_thread(shutil.copytree, bundle, copy)
        server = Supervisor(copy, Path(folder))
        await server.start()
        try:
            memory = [resident_mib(server.pid)]
            async with pulse(server.address) as beats:
                await asyncio.sleep(1.0)
                beats.clear()
                peak = await _attacked(name, server, request, seconds)
                counted = list(beats)
                await asyncio.sleep(AFTERWARDS_S)
            memory += [peak, resident_mib(server.pid)]
        finally:
            await server.kill()
    return counted, memory


async def _attacked(name: str, server: Supervisor, request: bytes, seconds: float) -> float:
    peak, until_s = 0.0, time.monotonic() + seconds
    process = None
    if ATTACKS[name] is not None:
        http = f"127.0.0.1:{server.http_port}"
        process = multiprocessing.get_context("spawn").Process(
            target=attack, args=(name, server.address, http, request, seconds)
        )
        process.start()
        until_s += 3.0  # it takes a while to import
    while time.monotonic() < until_s or (process is not None and process.is_alive()):
        peak = max(peak, resident_mib(server.pid))
        await asyncio.sleep(0.1)
    return peak


def row(name: str, rounds: list[tuple[list[Beat], list[float]]]) -> dict[str, Any]:
    took = [1e3 * beat.took_s for beats, _ in rounds for beat in beats]
    before, peak, after = (
        statistics.median(memory[place] for _, memory in rounds) for place in range(3)
    )
    return {
        "attack": name,
        "answers": len(took),
        "not_ok": sum(beat.status != "OK" for beats, _ in rounds for beat in beats),
        "median_ms": statistics.median(took),
        "p99_ms": float(np.quantile(took, 0.99)),
        "longest_ms": max(took),
        "above_100_ms": sum(one > LIMIT_MS for one in took),
        "memory_before_mib": before,
        "memory_peak_mib": peak,
        "memory_after_mib": after,
    }


def main() -> None:
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=list(ATTACKS), help="names of attacks, or parts of names"
    )
    given = parser.parse_args()
    check_outputs(given.json)
    bundle = Bundle.open(given.bundle)
    request = right_request(bundle)
    names = [name for name in ATTACKS if any(part in name for part in given.only)]
    found: dict[str, list[tuple[list[Beat], list[float]]]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name in names:
            found[name].append(asyncio.run(measure(name, given.bundle, request, given.seconds)))
            print(json.dumps(row(name, found[name][-1:])), flush=True)
    rows = [row(name, rounds) for name, rounds in found.items()]
    if given.json is not None:
        environment = describe_environment(rounds=given.rounds, seconds=given.seconds)
        write_json(given.json, {"attacks": rows, "environment": environment})


def right_request(bundle: Bundle) -> bytes:
    rng = np.random.default_rng(0)
    inputs = {
        spec.name: rng.random((4, *spec.shape[1:]), np.float32) for spec in bundle.manifest.inputs
    }
    message = build_request(bundle.manifest.name, inputs, outputs=None, priority=0, deadline_s=None)
    return bytes(message.SerializeToString())


if __name__ == "__main__":
    main()
