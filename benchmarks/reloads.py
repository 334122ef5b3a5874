"""Reloads under load: requests that are lost or answered by a wrong version, and memory.

    python -m benchmarks.reloads [--reloads 1000] [--clients 4] [--json FILE]

A real ``eeserve --model-repository`` serves a model whose answers identify its version. Clients of
``tritonclient`` send requests with pauses of at most 2 ms; during that time new versions are
repeatedly added to the repository and loaded, and the previous ones removed. Every answer's version
is compared with the computed one. The resident memory of the server is read after every hundredth
reload.
"""

from __future__ import annotations

import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as triton
from benchmarks.common import make_parser
from tritonclient.utils import InferenceServerException

from offramp.tools.bench.common.output import describe_environment, write_json

READY = re.compile(r"ready: gRPC on (\S+),")
MODELS = 5
"""Number of distinguishable models; version n is the model n % 5."""
EVERY = 100
"""Reloads between two looks at the memory."""


def write_model(path: Path, bias: float) -> None:
    """Write a model that adds ``bias`` to its input."""
    node = onnx.helper.make_node("Add", ["x", "bias"], ["y"])
    shape = ("n", 64)
    graph = onnx.helper.make_graph(
        [node],
        "adds",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(np.array(bias, np.float32), "bias")],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def make_bundles(folder: Path) -> list[Path]:
    """Return a bundle for each model."""
    bundles = []
    for number in range(MODELS):
        source, bundle = folder / f"{number}.onnx", folder / f"{number}.ee"
        write_model(source, float(number))
        command = [sys.executable, "-m", "offramp.compiler.commands.cli", "wrap", str(source)]
        subprocess.run([*command, "--output", str(bundle)], check=True, capture_output=True)
        bundles.append(bundle)
    return bundles


@dataclass(slots=True)
class SteadyClients:
    """Clients that ask all the time."""

    address: str
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self) -> None:
        """Ask until stopped."""
        tensor = triton.InferInput("x", [1, 64], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 64), np.float32))
        with triton.InferenceServerClient(self.address) as client:
            while not self.stopped.wait(0.002):
                try:
                    result = client.infer("adds", [tensor])
                except InferenceServerException as error:
                    with self.lock:
                        self.failed.append(str(error))
                    continue
                told = round(float(result.as_numpy("y").flat[0]))
                version = int(result.get_response().model_version)
                with self.lock:
                    self.answered += 1
                    self.wrong += version % MODELS != told


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, "there is such a line"
    return int(found[1]) / 1024


def add_version(repository: Path, version: int, bundles: list[Path]) -> None:
    """Add a version to the repository atomically."""
    new = repository / f"{version}.new"
    shutil.copytree(bundles[version % MODELS], new)
    new.rename(repository / f"{version}.ee")


@contextmanager
def serving(repository: Path, log: Path) -> Iterator[tuple[int, str]]:
    """Serve the repository; yield the process and its address."""
    command = [
        sys.executable, "-m", "offramp.server.cli", "--grpc-port=0", "--http-port=0",
        f"--model-repository={repository}", "--model-control=explicit", "--load-model=adds",
        "--mode=off",
    ]  # fmt: skip
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as server:
        while (ready := READY.search(log.read_text())) is None:
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield server.pid, ready[1]
        server.send_signal(signal.SIGTERM)


def reload_often(folder: Path, reloads: int, clients: int) -> dict[str, Any]:
    """Reload under load; return the outcomes of requests, and memory."""
    bundles = make_bundles(folder)
    model = folder / "models" / "adds"
    model.mkdir(parents=True)
    add_version(model, 1, bundles)
    memory_mib, took_s = [], []
    with serving(model.parent, folder / "log") as (process, address):
        load = SteadyClients(address)
        senders = [threading.Thread(target=load.ask) for _ in range(clients)]
        for sender in senders:
            sender.start()
        with triton.InferenceServerClient(address) as client:
            for version in range(2, reloads + 2):
                add_version(model, version, bundles)
                began_s = time.perf_counter()
                client.load_model("adds")
                took_s.append(time.perf_counter() - began_s)
                shutil.rmtree(model / f"{version - 1}.ee")
                if (version - 1) % EVERY == 0:
                    memory_mib.append(round(resident_mib(process), 1))
                    sys.stdout.write(f"{version - 1} reloads: {memory_mib[-1]} MiB\n")
                    sys.stdout.flush()
        load.stopped.set()
        for sender in senders:
            sender.join()
    return {
        "reloads": reloads,
        "clients": clients,
        "answered": load.answered,
        "failed": len(load.failed),
        "failures": load.failed[:10],
        "wrong_version": load.wrong,
        "resident_mib_each_100": memory_mib,
        "reload_ms_median": round(1e3 * statistics.median(took_s), 1),
    }


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--reloads", type=int, default=1000, help="number of reloads")
    parser.add_argument("--clients", type=int, default=4, help="number of concurrent clients")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = reload_often(Path(folder), options.reloads, options.clients)
    for name, value in figures.items():
        sys.stdout.write(f"{name}: {value}\n")
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "figures": figures})


if __name__ == "__main__":
    main()
