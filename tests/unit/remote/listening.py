"""What tests of workers over a network share: ``eeworker``, and a backend that reaches it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offramp.engine.remote.backend import RemoteBackend
from offramp.engine.remote.tcp import HostPort, TlsTrust, parse_address
from offramp.engine.remote.tcp_launcher import PING_S, TcpLauncher
from offramp.testing.worker import ScriptedBackend

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle"
TOKEN = b"0123456789abcdef-of-tests"


class Worker:
    """A process of ``eeworker``; its address, and what it says."""

    def __init__(self, folder: Path, *words: str, module: str = "offramp.testing.worker") -> None:
        token = folder / "token"
        token.write_bytes(TOKEN + b"\n")
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", module, str(GOLDEN)),
                    *("--listen", "127.0.0.1:0", f"--token-file={token}", *words),
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
        """What it wrote to its log."""
        return self.log.read_text()

    def stop(self) -> int:
        """Have it end, and give its status."""
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
