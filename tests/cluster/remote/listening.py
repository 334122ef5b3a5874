"""Shared parts of tests of workers over a network: listening workers, and backends for them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import offramp
from offramp.cluster.remote.launching import ON_THE_CPU, WorkerRuntime
from offramp.cluster.remote.listening import Admission, Listener
from offramp.cluster.remote.stage_orders import BundlesByHash
from offramp.cluster.remote.tcp import HostPort, TlsTrust, cut, parse_address
from offramp.cluster.remote.tcp_launcher import PING_S, TcpLauncher, TcpWorker
from offramp.cluster.remote.worker import MakeBackend
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.common.network import TlsIdentity
from offramp.testing.scripted_worker import ScriptedBackend

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle"
TOKEN = b"0123456789abcdef-of-tests"


HELLO = Hello(version=offramp.__version__, backend="scripted", threads=1)


def admission(
    *,
    identity: TlsIdentity | None = None,
    make: MakeBackend = lambda _hello: ScriptedBackend(),
    find: BundlesByHash | None = None,
    any_graph: bool = True,
    admit_s: float = 30.0,
    silence_s: float = 60.0,
) -> Admission:
    """Return the admission of workers in this process."""
    return Admission(
        token=TOKEN,
        context=None if identity is None else identity.context(),
        make=make,
        find=find or BundlesByHash([]),
        any_graph=any_graph,
        admit_s=admit_s,
        silence_s=silence_s,
    )


@contextmanager
def listener(**wanted: Any) -> Iterator[HostPort]:
    """A worker in a thread of this process; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = Listener(listening, admission(**wanted))
        threading.Thread(target=serving.serve, daemon=True).start()
        try:
            yield HostPort(*listening.getsockname())
        finally:
            cut(listening)


class ThreadLauncher:
    """Starts workers in threads of this process, and reaches them over a network all the same."""

    device_type = ""

    def __init__(self, make: MakeBackend, runtime: WorkerRuntime = ON_THE_CPU) -> None:
        self._make = make
        self.runtime = runtime

    def describe(self) -> str:
        return "a thread"

    def start(self, hello: Hello) -> TcpWorker:
        listening = socket.create_server(("127.0.0.1", 0))
        serving = Listener(listening, admission(make=self._make))

        def serve() -> None:
            serving.serve()
            cut(listening)
            listening.close()

        threading.Thread(target=serve, daemon=True).start()
        return TcpLauncher(HostPort(*listening.getsockname()), TOKEN, None).start(hello)

    def close(self) -> None:
        """Do nothing: a thread ends with its router."""


class Worker:
    """A process of ``eeworker``; its address, and what it says."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        module: str = "offramp.testing.scripted_worker",
        listen: str = "127.0.0.1:0",
    ) -> None:
        token = folder / "token"
        token.write_bytes(TOKEN + b"\n")
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", module, str(GOLDEN)),
                    *("--listen", listen, f"--token-file={token}", *words),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("eeworker: listening on "), self.log.read_text()
        self.address: HostPort = parse_address(line.rpartition(" ")[2].strip())

    def said(self) -> str:
        """Return the content of its log."""
        return self.log.read_text()

    def stop(self) -> int:
        """Stop the process, and return its status."""
        self.process.terminate()
        status = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextmanager
def listening_worker(folder: Path, *words: str) -> Iterator[Worker]:
    """A worker without a model that listens on this host."""
    worker = Worker(folder, *words)
    try:
        yield worker
    finally:
        worker.stop()


@contextmanager
def reaching(
    addresses: Sequence[HostPort],
    *,
    least_s: float = 30.0,
    ping_s: float = PING_S,
    token: bytes = TOKEN,
    tls: TlsTrust | None = None,
) -> Iterator[RemoteBackend]:
    """A backend of the workers that listen there."""
    launchers = [TcpLauncher(address, token, tls, ping_s=ping_s) for address in addresses]
    with contextlib.closing(
        RemoteBackend(ScriptedBackend(), launchers=launchers, least_s=least_s)
    ) as backend:
        yield backend
