"""Workers, here and on a network, are killed under load, and every client has its answers."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.cluster.remote.listening import Worker

from offramp.bundle import Bundle
from offramp.client import AsyncClient, Client, OfframpError
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.environment import available_cores
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "bundle"
REQUESTS, AT_ONCE, KILLS = 2000, 32, 8
WORKER = b"offramp.cluster.remote.worker"
EEWORKER = "offramp.cluster.remote.eeworker"
CLUSTER = """
[devices.cpu]
count = 2
cost_per_hour = 0
speed = 1

[[workers]]
device = "cpu"

[[workers]]
device = "cpu"
address = "{address}"

[router]
token_file = "token"
"""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
    pytest.mark.skipif(available_cores() < 2, reason="two workers need two cores"),
]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Looks up what was recorded: its input is the number of a sample."""
    shutil.copytree(GOLDEN, tmp_path / "recorded.ee")
    return Bundle.open(tmp_path / "recorded.ee")


def children(pid: int, module: bytes = WORKER) -> Iterator[int]:
    """The workers of a server, or the serving process of ``eeworker``."""
    for place in Path("/proc").iterdir():
        if not place.name.isdecimal():
            continue
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            command = (place / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and module in command:
            yield int(place.name)


def truth(bundle: Bundle, samples: np.ndarray) -> dict[int, tuple[int, list[float]]]:
    """Stage that answers each sample, and the answer: by ONNX Runtime in this process."""
    pipeline = Pipeline(OnnxRuntimeBackend(), make_plan(bundle))
    found = {}
    for left in pipeline.run(pipeline.backend.open_slot(), {"sample": samples[:, None]}):
        exit_index = pipeline.plan.stages[left.stage].answered_by
        for row, answer in zip(left.rows.tolist(), left.answer.tolist(), strict=True):
            found[int(samples[row])] = exit_index, answer
    return found


def ask_while_killing(
    server: Any, bundle: Bundle, requests: int, kills: int, pids: Callable[[], list[int]]
) -> None:
    """Compare every answer, while processes of ``pids`` are killed now and then."""
    samples = np.random.default_rng(0).integers(0, 2400, requests)
    expected, random = truth(bundle, np.unique(samples)), Random(0)
    answered, killed = 0, 0

    async def ask(client: AsyncClient, mine: list[int]) -> None:
        nonlocal answered, killed
        for sample in mine:
            result = await client.infer("recorded", {"sample": np.array([[sample]])})
            exit_index, answer = expected[sample]
            assert result.exits.tolist() == [exit_index]
            assert result.outputs["logits"].tolist() == [answer]
            answered += 1
            due = answered >= (killed + 1) * requests // (kills + 1)
            if due and killed < kills and (workers := pids()):
                os.kill(random.choice(workers), signal.SIGKILL)
                killed += 1

    async def run() -> None:
        async with AsyncClient(server.address, timeout_s=60) as client:
            parts = [samples[n::AT_ONCE].tolist() for n in range(AT_ONCE)]
            await asyncio.gather(*(ask(client, part) for part in parts))

    asyncio.run(run())
    assert (answered, killed) == (requests, kills)
    assert server.metric("offramp_answers_total") == requests
    until_s = time.monotonic() + 60
    while server.metric("offramp_worker_restarts_total") < 1:
        # That one is gone is noticed when it is to run something: others may have run all.
        assert time.monotonic() < until_s, "no killed process was started again"
        asyncio.run(run())
    assert server.metric("offramp_failures_total") == 0


def test_killed_workers_cost_clients_nothing(launch: Any, bundle: Bundle) -> None:
    server = launch(bundle.path, "--mode=leave", "--workers=2", "--backend=onnxruntime")
    pid = server.process.pid
    ask_while_killing(server, bundle, REQUESTS, KILLS, lambda: list(children(pid)))
    assert "workers in service" in server.get("/")


def test_a_killed_worker_on_a_network_costs_clients_nothing(
    launch: Any, bundle: Bundle, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, "--threads=1", module=EEWORKER)
    try:
        cluster = tmp_path / "cluster.toml"
        cluster.write_text(CLUSTER.format(address=worker.address))
        server = launch(
            bundle.path, "--mode=leave", f"--cluster={cluster}", "--backend=onnxruntime"
        )
        pids = list(children(worker.process.pid, EEWORKER.encode()))
        assert len(pids) == 1
        assert server.metric("offramp_workers") == 2
        ask_while_killing(
            server, bundle, 600, 3, lambda: list(children(worker.process.pid, EEWORKER.encode()))
        )
    finally:
        assert worker.stop() == 0


def test_ctrl_c_reaches_the_server_alone_and_workers_end_with_it(
    launch: Any, bundle: Bundle
) -> None:
    server = launch(bundle.path, "--mode=leave", "--workers=2", "--backend=onnxruntime")
    workers = list(children(server.process.pid))
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert os.getpgid(pid) != os.getpgid(server.process.pid)
    with Client(server.address) as client:
        assert len(client.infer("recorded", {"sample": np.array([[1], [2]])}).exits) == 2
    assert server.metric("offramp_worker_restarts_total") == 0
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def test_workers_end_with_a_server_that_is_killed(launch: Any, bundle: Bundle) -> None:
    server = launch(bundle.path, "--mode=leave", "--workers=2", "--backend=onnxruntime")
    ended = [os.pidfd_open(pid) for pid in children(server.process.pid)]
    assert len(ended) == 2
    server.process.kill()

    for descriptor in ended:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000), "a worker outlived its server"
        os.close(descriptor)
    with pytest.raises(OfframpError), Client(server.address, timeout_s=1) as client:
        client.infer("recorded", {"sample": np.array([[1]])})
