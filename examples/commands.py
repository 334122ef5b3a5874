"""Runs our commands as a user would, after printing them; also runs servers for a while."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/, serving")

console = Console(highlight=False, soft_wrap=True)


def title(text: str) -> None:
    """Print the title of a step."""
    console.print(f"\n[bold]{text}[/bold]")


def run(module: str, name: str, *arguments: object) -> None:
    """Print a command, and run its module."""
    words = [str(argument) for argument in arguments]
    console.print(f"$ {name} {' '.join(words)}", style="cyan")
    subprocess.run([sys.executable, "-m", module, *words], check=True, cwd=ROOT)


@contextmanager
def serving(bundle: Path, *flags: str) -> Iterator[tuple[str, str]]:
    """Run ``eeserve`` on free ports; yield the gRPC address and the status page's URL."""
    words = [str(bundle), *flags, "--grpc-port", "0", "--http-port", "0"]
    console.print(f"$ eeserve {' '.join(words)}", style="cyan")
    command = [sys.executable, "-m", "offramp.server.cli", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield _wait_ready(process)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=60)
        console.print(f"eeserve stopped with exit status {status}")


def _wait_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        console.print(line.rstrip(), markup=False)
        if ready := READY.search(line):
            return ready[1], ready[2]
    raise SystemExit("eeserve did not start; its messages are above")
