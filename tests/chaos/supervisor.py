"""The server of a chaos run: starts it, ends it, starts it again, reads its log and metrics."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.account import Disturbance, ServerCounts, Trouble
from tests.chaos.server import SWITCH

_STAMP: Final = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ +")
"""Prefix of a line of the log."""
_VARIES: Final = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|\[[^]]*\]")
"""Parts that differ between lines of one kind: quotations, including clients' bytes."""
READY: Final = "ready: gRPC on "
START_LIMIT_S: Final = 600.0
"""Far more than a start takes on a machine that does ten other things."""
_SOCKETS: Final = tuple(Path("/proc/net", name) for name in ("tcp", "tcp6"))
"""Tables of the sockets of this machine; a dual-stack server listens on one of IPv6."""
_LISTENS: Final = "0A"
"""A socket's state, in these tables."""
LEAVE_LIMIT_S: Final = 60.0
"""Time limit of a server that was asked to leave: its own limit is 30 s."""
AFTERWARDS_S: Final = {
    Trouble.ABSENT: 3.0,  # connections that are not renewed are tried again after 0.3 s
    Trouble.LEAVING: 1.0,
    Trouble.STOPPED: 3.0,
    Trouble.BACKEND: 8.0,
    Trouble.DISK: 1.0,
}
"""Time after its end in which a disturbance may have effects: new connections, queued work, streams
that wait for a retry."""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of the server."""

    number: int
    process: asyncio.subprocess.Process
    began_s: float
    ended: str = ""
    """Reason of the end; empty while it runs."""


@dataclass(slots=True)
class Supervisor:
    """Runs one server at a time, always at the same addresses."""

    bundle: Path
    folder: Path
    """For the log and the switch that makes the backend fail."""
    arguments: Sequence[str] = ()
    lives: list[Life] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    tracebacks: Counter[str] = field(default_factory=Counter)
    """Tracebacks by the line of the log before each."""
    starting: Callable[[], None] = lambda: None
    """Called when a server is about to be started, and the one before it has ended."""
    grpc_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None
    _absence: Disturbance | None = None
    """From the end of a server until the next one is ready."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def model(self) -> str:
        return self.bundle.resolve().name.removesuffix(".ee")

    @property
    def pid(self) -> int:
        return self.lives[-1].process.pid

    @property
    def switch(self) -> Path:
        return self.folder / "backend-fails"

    async def start(self) -> None:
        """Start a server and wait until it is ready; RuntimeError if it ends instead."""
        ports = (f"--grpc-port={self.grpc_port}", f"--http-port={self.http_port}")
        self._ready = asyncio.Event()
        self.starting()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.chaos.server", str(self.bundle), *ports, *self.arguments),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, SWITCH: str(self.switch)},
        )
        self.lives.append(Life(number=len(self.lives), process=process, began_s=time.monotonic()))
        self._reading = asyncio.create_task(self._read(process))
        ready = asyncio.create_task(self._ready.wait())
        async with asyncio.timeout(START_LIMIT_S):
            await asyncio.wait((ready, self._reading), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise RuntimeError(f"the server ended while it started, see {self.log}")
        self._is_back()

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Copy the log; the server's limit of file sizes must not stop it, so it is a pipe."""
        assert process.stderr is not None
        told: deque[str] = deque(maxlen=1)
        with self.log.open("a") as log:
            while True:
                try:
                    line = (await process.stderr.readline()).decode(errors="replace")
                except ValueError:  # a line of more than 64 KiB
                    continue
                if not line:
                    return
                self._note(line, log, told)

    def _note(self, line: str, log: IO[str], told: deque[str]) -> None:
        log.write(line)
        log.flush()
        if READY in line:
            self._ready.set()
        if line.startswith("Traceback"):
            self.tracebacks[told[-1] if told else ""] += 1
        elif _STAMP.match(line):
            told.append(_VARIES.sub("…", _STAMP.sub("", line.strip()))[:200])

    async def leave(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the server to leave, and wait for it."""
        life = self.lives[-1]
        with self.trouble(Trouble.LEAVING):
            life.process.send_signal(number)
            try:
                async with asyncio.timeout(LEAVE_LIMIT_S):
                    status = await life.process.wait()
            except TimeoutError:
                self.faults.append(f"life {life.number} did not leave within {LEAVE_LIMIT_S:g} s")
                life.process.kill()
                status = await life.process.wait()
            self._is_gone()
        await self._ended(life, number.name)
        if status != 0:
            self.faults.append(f"life {life.number} left with status {status} after {number.name}")

    async def kill(self) -> None:
        """End the server without a word."""
        self._is_gone()
        life = self.lives[-1]
        life.process.kill()
        await life.process.wait()
        await self._ended(life, "SIGKILL")

    async def _ended(self, life: Life, how: str) -> None:
        life.ended = how
        if self._reading is not None:
            await self._reading

    def died(self) -> bool:
        """Return True if it ended without being asked."""
        life = self.lives[-1]
        if life.ended or life.process.returncode is None:
            return False
        self._is_gone()
        life.ended = f"by itself, with status {life.process.returncode}"
        self.faults.append(f"life {life.number} ended {life.ended}")
        return True

    def _is_gone(self) -> None:
        """Record that no server listens, from now until the next one is ready.

        The duration does not matter, nor do the harness's actions in the meantime.
        """
        if self._absence is None:
            self._absence = Disturbance(trouble=Trouble.ABSENT, began_s=time.monotonic())
            self.disturbances.append(self._absence)

    def _is_back(self) -> None:
        absence, self._absence = self._absence, None
        if absence is not None:
            absence.ended_s = time.monotonic() + AFTERWARDS_S[Trouble.ABSENT]

    def listens(self) -> bool:
        """Return True if a server may have received a request by now, even before it reports
        ready.
        """
        return self._absence is None or self._port_is_open()

    def _port_is_open(self) -> bool:
        place = f":{self.grpc_port:04X}"
        return any(
            (fields := line.split())[1].endswith(place) and fields[3] == _LISTENS
            for table in _SOCKETS
            if table.exists()
            for line in table.read_text().splitlines()[1:]
        )

    @contextmanager
    def trouble(self, trouble: Trouble) -> Iterator[None]:
        """Note a disturbance; it is felt a while longer than it lasts."""
        disturbance = Disturbance(trouble=trouble, began_s=time.monotonic())
        self.disturbances.append(disturbance)
        try:
            yield
        finally:
            disturbance.ended_s = time.monotonic() + AFTERWARDS_S[trouble]

    async def counts(self) -> ServerCounts:
        """Return the server's counts since its start."""
        return parse_counts(await self.get("/metrics"))

    async def get(self, path: str) -> str:
        """A page of the status port."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.http_port}{path}")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content.decode()


def parse_counts(page: str) -> ServerCounts:
    """Read the metrics page."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("cause") != "rejected":
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    held = ("queued_samples", "in_flight_samples")
    return ServerCounts(
        accepted=int(totals["offramp_samples_total"]),
        answered=int(totals["offramp_answers_total"]),
        failed=int(totals["offramp_failures_total"]),
        held=int(sum(totals[f"offramp_{name}"] for name in held)),
    )
