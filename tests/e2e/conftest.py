"""Real ``eeserve`` processes over the bundle of ``bundle_path``."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from offramp.client import Client, ModelMetadata

READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/, serving (.+)")
START_LIMIT_S = 120.0


def wait_until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Return the result of ``condition`` once it is true; fail after ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not (met := condition()):
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.01)
    return met


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running ``eeserve``."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    url: str
    models: tuple[str, ...]

    @property
    def model(self) -> str:
        return self.models[0]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            text: bytes = response.read()
            return text.decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name and those labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def metadata(self) -> ModelMetadata:
        with Client(self.address) as client:
            return client.metadata(self.model)

    def inputs(self, samples: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
        """Random values for every input, as its metadata ask for; free sizes are 8."""
        rng = np.random.default_rng(seed)
        arrays = {}
        for name, tensor in self.metadata().inputs.items():
            shape = (samples, *(8 if size < 0 else size for size in tensor.shape[1:]))
            values = rng.standard_normal(shape) if tensor.dtype.kind == "f" else rng.random(shape)
            arrays[name] = (values if tensor.dtype.kind == "f" else values * 2).astype(tensor.dtype)
        return arrays


Launch = Callable[..., Server]
PROGRAM = (sys.executable, "-m", "offramp.server.cli")


def launcher(stack: ExitStack, folder: Path) -> Launch:
    def launch(*arguments: str | Path, program: Sequence[str] = PROGRAM) -> Server:
        log = folder / f"eeserve-{time.monotonic_ns()}.log"
        command = [*program, "--grpc-port=0", "--http-port=0"]
        told = set(map(str, arguments))
        if not {"--mode=leave", "--mode=off", "--config"} & told:
            # State that is kept is the other tests' too; and what these send is like no
            # calibration data, which is an alarm to the default controller.
            command += {"--no-state", "--controller=static"} - told
        with log.open("wb") as stderr:
            process = subprocess.Popen([*command, *map(str, arguments)], stderr=stderr)
        stack.callback(_end, process)

        def ready() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return READY.search(log.read_text())

        address, url, models = wait_until(ready, START_LIMIT_S).groups()
        return Server(
            process=process, log=log, address=address, url=url, models=tuple(models.split(", "))
        )

    return launch


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start servers with the arguments given; they are gone after the test."""
    with ExitStack() as stack:
        yield launcher(stack, tmp_path)


@pytest.fixture(scope="session")
def server(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with default options, shared by the tests that change nothing."""
    with ExitStack() as stack:
        yield launcher(stack, tmp_path_factory.mktemp("server"))(bundle_path)


@pytest.fixture(scope="session")
def refused() -> Callable[..., tuple[int, str]]:
    """Run a server that cannot start: its exit status, and what it told on stderr."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        command = [*PROGRAM, *map(str, arguments)]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        return ended.returncode, ended.stderr

    return run
