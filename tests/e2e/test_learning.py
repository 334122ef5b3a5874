"""A server learns exits while it serves; killed in any phase, it goes on without a wrong answer."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from tests.bundles import EXAMPLE
from tests.e2e.conftest import Launch, Server, wait_until

from offramp.client import Client

MODEL = "fashion_resnet56"
SAMPLES = 2000
LIMIT_S = 280.0


class LearningClient:
    """Sends images, each once, and holds the answers against the model's own."""

    def __init__(self, model: Path) -> None:
        with np.load(EXAMPLE / "test.npz") as archive:
            (name,) = [key for key in archive.files if "label" not in key]
            self._name, self._images = name, archive[name]
        self._session = ort.InferenceSession(model.read_bytes())
        self._next = 0
        self.agreed: list[bool] = []

    def ask(self, server: Server, images: int, *, rows: int = 20) -> None:
        with Client(server.address) as client:
            for _ in range(images // rows):
                sent = self._images[self._next : self._next + rows]
                self._next = (self._next + rows) % (len(self._images) - rows)
                (found,) = client.infer(MODEL, {self._name: sent}).outputs.values()
                (wanted,) = self._session.run(None, {self._name: sent})
                self.agreed += self._same(found, wanted)

    @staticmethod
    def _same(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> list[bool]:
        same: list[bool] = (found.argmax(1) == wanted.argmax(1)).tolist()
        return same


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / f"{MODEL}.onnx"
    shutil.copy(EXAMPLE / path.name, path)
    return path


@pytest.fixture
def start(launch: Launch, model: Path) -> Iterator[Callable[[], Server]]:
    def begin() -> Server:
        return launch(model, "--learn", f"--learn-samples={SAMPLES}", "--threads=1")

    yield begin


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def recorded(server: Server) -> float:
    return server.metric("offramp_learning_recorded_samples", model=MODEL)


def phase(server: Server) -> str:
    found = re.findall(
        r'^offramp_learning_phase\{.*phase="(\w+)"\} 1\.0$', server.get("/metrics"), re.MULTILINE
    )
    return str(found[0])


def children_of(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = place.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(place.parent.name))
    return found


def compiler_of(server: Server) -> int | None:
    for pid in children_of(server.process.pid):
        try:
            if b"compile_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exits_are_learned_from_load_and_no_request_fails(launch: Launch, model: Path) -> None:
    """From the ONNX file to certified exits; how long it takes is benchmarks/learning.py's."""
    server = launch(model, "--learn", "--learn-samples=6000", "--threads=1")
    with np.load(EXAMPLE / "calibration.npz") as archive:
        images = archive["image"]
    answered, stopped = 0, threading.Event()

    def load() -> None:
        nonlocal answered
        with Client(server.address) as client:
            for start in itertools.cycle(range(0, len(images) - 16, 16)):
                # The compiler takes what the server leaves it of the processors.
                if stopped.wait(0.02 if answered < 6000 else 0.5):
                    return
                client.infer(MODEL, {"image": images[start : start + 16]})
                answered += 16

    with ThreadPoolExecutor(1) as sender:
        loading = sender.submit(load)
        try:
            wait_until(lambda: loading.done() or phase(server) == "serving", 800.0)
        finally:
            stopped.set()
        loading.result()  # raises where a request failed
    assert phase(server) == "serving"
    wait_until(lambda: "certified: disagreement ≤ 1 % at 95 %" in server.log.read_text())
    assert answered >= 6000

    learning_client = LearningClient(model)
    learning_client.ask(server, 3960)  # of 4,000 that the server never saw
    early = server.metric("offramp_answers_total", model=MODEL) - server.metric(
        "offramp_answers_total", model=MODEL, exit="final"
    )
    assert early > 0.5 * 3960
    assert np.mean(learning_client.agreed) >= 0.985, (
        "the promise's 0.99, less the noise of 3,960 samples"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by Linux")
def test_a_server_killed_in_any_phase_goes_on(
    start: Callable[[], Server], model: Path, tmp_path: Path
) -> None:
    folder, learning_client = tmp_path / f"{MODEL}.learn", LearningClient(model)

    server = start()
    learning_client.ask(server, 600)
    wait_until(lambda: recorded(server) == 600)
    kill(server)  # while it records

    server = start()
    assert recorded(server) == 600
    learning_client.ask(server, SAMPLES)
    wait_until(lambda: phase(server) == "compiling")
    compiler = wait_until(lambda: compiler_of(server))
    wait_until(lambda: "step 3 of 9" in server.log.read_text(), LIMIT_S)
    kill(server)  # while it compiles
    wait_until(lambda: not Path(f"/proc/{compiler}").exists())

    server = start()
    compiler = wait_until(lambda: compiler_of(server))
    os.kill(compiler, signal.SIGKILL)
    wait_until(lambda: phase(server) == "waiting")
    assert "its process was ended by SIGKILL" in server.get("/")
    learning_client.ask(server, 100)
    bundle = folder / "1.ee"
    wait_until(bundle.exists, LIMIT_S)
    kill(server)  # while it switches, or before it saw that there is a bundle
    assert all(learning_client.agreed), "until now the unmodified model answered"

    server = start()
    assert phase(server) == "serving"
    learning_client.agreed.clear()
    learning_client.ask(server, 2000)
    assert np.mean(learning_client.agreed) >= 0.98
    assert server.metric("offramp_answers_total", model=MODEL) == 2000
    assert server.metric("offramp_answers_total", model=MODEL, exit="final") < 2000
    kill(server)

    server = start()
    assert phase(server) == "serving"
    assert "serving with exits since" in server.get("/")
    learning_client.ask(server, 100)
    kept = {path.name for path in folder.iterdir() if not path.name.startswith("1.ee")}
    assert kept == {"learning.json", "lock"}
