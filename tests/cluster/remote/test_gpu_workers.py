"""Workers on GPUs: their assigned devices, and an engine whose streams they run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cluster.remote.listening import ThreadLauncher
from tests.cuda_fakes import FakeExecutables, fake_cuda
from tests.facts import facts
from tests.serving_checks import agree, options
from tests.small_bert import small_bert
from tests.small_bert import truth as truth_of

import offramp
from offramp.cluster.remote import worker
from offramp.cluster.remote.launching import (
    ON_THE_CPU,
    LocalLauncher,
    WorkerLauncher,
    WorkerRuntime,
)
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_messages import Hello, decode, encode
from offramp.engine.backends import Backend, factory
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError

MOST = 8
HELLO = Hello(
    version=offramp.__version__,
    backend="tensorrt",
    threads=3,
    device="cuda:1",
    graphs=False,
    max_rows=MOST,
)


def on_gpu(number: int, backend: str = "cuda") -> WorkerRuntime:
    return WorkerRuntime(backend=backend, device=f"cuda:{number}")


class Workers:
    """Workers in threads, each with its own fake GPU; records their assigned roles."""

    def __init__(self, runtimes: Sequence[WorkerRuntime]) -> None:
        self.hellos: list[Hello] = []
        self.factories: dict[str, FakeExecutables] = {}
        launchers: list[WorkerLauncher] = [ThreadLauncher(self._make, r) for r in runtimes]
        self.backend = RemoteBackend(
            OnnxRuntimeBackend(), launchers=launchers, threads=2, graphs=False, max_rows=MOST
        )

    def _make(self, hello: Hello) -> Backend:
        self.hellos.append(hello)
        if not hello.device:
            return OnnxRuntimeBackend()
        made, self.factories[hello.device], _ = fake_cuda(graphs=hello.graphs, max_rows=MOST)
        return made


def test_a_hello_travels_whole() -> None:
    assert decode(encode(HELLO)) == HELLO


def test_a_worker_makes_the_backend_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(factory, "make_backend", lambda name, **how: asked.append((name, how)))
    worker.make_local(HELLO)
    worker.make_local(Hello(version="", backend="onnxruntime", threads=2))
    (name, how), (other, on_cpu) = asked
    assert name == "tensorrt"
    assert how == {
        "threads": 3, "devices": (1,), "precision": "fp32", "graphs": False, "max_rows": MOST,
    }  # fmt: skip
    assert other == "onnxruntime"
    assert (on_cpu["threads"], on_cpu["devices"], on_cpu["precision"]) == (2, (), None)


@pytest.mark.parametrize("backend", ["tensorrt", "cuda"])
def test_a_process_without_the_gpu_says_which_it_was_to_be(backend: str) -> None:
    launcher = LocalLauncher(runtime=WorkerRuntime(backend=backend, device="cuda:4321"))
    remote = RemoteBackend(OnnxRuntimeBackend(), launchers=[launcher])
    with pytest.raises(BackendError, match=facts("cuda:4321")):
        remote.open_slot()
    remote.close()


@pytest.mark.parametrize(
    ("runtimes", "name", "on_cpu", "sizes"),
    [
        ([ON_THE_CPU], "onnxruntime-cpu", True, [1, 2, 3, 4, 5]),
        ([on_gpu(0), on_gpu(1)], "onnxruntime-cuda", False, [1, 2, 4, 5]),
        ([ON_THE_CPU, on_gpu(0, "tensorrt")], "onnxruntime-cpu+tensorrt", False, [1, 2, 3, 4, 5]),
    ],
)
def test_the_backend_tells_what_its_workers_are(
    runtimes: list[WorkerRuntime], name: str, on_cpu: bool, sizes: list[int]
) -> None:
    backend = Workers(runtimes).backend
    assert (backend.name, backend.on_cpu, list(backend.sizes(5))) == (name, on_cpu, sizes)
    backend.close()


@pytest.mark.parametrize("runtimes", [[on_gpu(0), on_gpu(1)], [ON_THE_CPU, on_gpu(1)]])
def test_an_engine_answers_as_the_cpu_by_workers_on_gpus(
    tmp_path: Path, runtimes: list[WorkerRuntime]
) -> None:
    bundle = small_bert(tmp_path)
    truth = truth_of(bundle, samples=64, tolerance=1e-5)
    workers = Workers(runtimes)
    left = asyncio.run(agree(workers.backend, bundle.path, truth, options(most=MOST), requests=40))
    workers.backend.close()
    assert min(left) > 10
    assert {(hello.backend, hello.device) for hello in workers.hellos} == {
        (runtime.backend or "onnxruntime", runtime.device) for runtime in runtimes
    }
    assert {(h.threads, h.graphs, h.max_rows) for h in workers.hellos} == {(2, False, MOST)}
    for made in workers.factories.values():
        assert sum(made.enqueued.values()) > 20
