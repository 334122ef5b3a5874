"""Learning while serving: from an ONNX file to certified exits, under a steady load.

    python -m benchmarks.learning MODEL.onnx --load LOAD.npz --unseen UNSEEN.npz
        [--samples 6000] [--rate 40] [--json FILE]

A real ``eeserve MODEL.onnx --learn`` answers requests of one sample at a fixed rate, through the
SDK over gRPC, from before it records to after it serves with exits. Latencies are grouped by the
phase of the server when the request was sent; each figure is measured. Requests follow a schedule:
one that is late because the previous one took long counts from its due time. Then answers on
samples that the server never received are compared with those of ONNX Runtime on the file, and
``eebench compare`` measures the bundle's savings.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.client import Client
from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

READY = re.compile(r"ready: gRPC on (\S+), status page on (\S+)/, serving (\S+)")
PHASE = re.compile(r'^offramp_learning_phase\{(?=.*phase="(\w+)").*\} 1\.0$', re.MULTILINE)
BATCH = 16
"""Number of samples in a request with unseen samples."""
SENDERS = 8
"""Sending threads, and so the largest number of concurrent requests."""


@dataclass(slots=True)
class Load:
    """Requests of one sample at a fixed rate, and their outcomes."""

    client: Client
    model: str
    samples: dict[str, NDArray[Any]]
    rate: float
    phase: str = "starting"
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send requests until the load is stopped."""
        count = len(next(iter(self.samples.values())))
        with ThreadPoolExecutor(SENDERS) as senders:
            began_s = time.monotonic()
            for number in itertools.count():
                due_s = began_s + number / self.rate
                if self.stopped.wait(max(due_s - time.monotonic(), 0.0)):
                    return
                senders.submit(self._send, number % count, due_s)

    def _send(self, row: int, due_s: float) -> None:
        phase = self.phase
        try:
            self.client.infer(self.model, {n: a[row : row + 1] for n, a in self.samples.items()})
        except Exception as error:
            self.failed.append(f"{phase}: {error}")
        else:
            self.took_s[phase].append(time.monotonic() - due_s)


def main() -> None:
    """Serve, load, wait for exits, compare, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="ONNX file with one input")
    parser.add_argument(
        "--load", type=Path, required=True, help=".npz of the samples that the load sends"
    )
    parser.add_argument(
        "--unseen", type=Path, required=True, help=".npz of unseen samples to compare answers on"
    )
    parser.add_argument("--samples", type=int, default=6000, help="number of samples to learn from")
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, help="largest number of seconds until exits serve"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    wide_console().print_json(json.dumps(figures))
    if options.json:
        write_json(options.json, {"environment": describe_environment(), "figures": figures})


def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Return all figures of one run."""
    command = [sys.executable, "-m", "offramp.server.cli", str(options.model)]
    command += ["--learn", "--learn-samples", str(options.samples)]
    command += ["--learn-folder", str(folder), "--grpc-port", "0", "--http-port", "0"]
    began_s = time.monotonic()
    log = (folder / "eeserve.log").open("w+")
    server = subprocess.Popen(command, stderr=log)
    try:
        address, url, model = _ready(server, folder / "eeserve.log")
        ready_s = time.monotonic() - began_s
        with Client(address) as client:
            load = Load(client, model, _inputs(options.load, client, model), options.rate)
            sender = threading.Thread(target=load.run)
            sender.start()
            try:
                reached_s = _follow(load, url, began_s, options.limit_s)
                time.sleep(30.0)  # some requests with exits
            finally:
                load.stopped.set()
                sender.join()
            agreement = _agreement(options, client, model)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        print((folder / "eeserve.log").read_text(), file=sys.stderr)
    return {
        "model": options.model.name,
        "learned_from": options.samples,
        "requests_a_second": options.rate,
        "ready_s": ready_s,
        "phases_reached_s": reached_s,
        "latency_ms": {
            phase: {
                "requests": len(took_s),
                "p50": 1e3 * float(np.quantile(took_s, 0.5)),
                "p99": 1e3 * float(np.quantile(took_s, 0.99)),
            }
            for phase, took_s in load.took_s.items()
        },
        "failed_requests": load.failed,
        **agreement,
        "compare": _compare(next(folder.rglob("*.ee/manifest.json")).parent, options.unseen),
    }


def _ready(server: subprocess.Popen[bytes], log: Path) -> tuple[str, str, str]:
    while server.poll() is None:
        if found := READY.search(log.read_text()):
            return found[1], found[2], found[3]
        time.sleep(0.05)
    raise SystemExit(log.read_text())


def _inputs(data: Path, client: Client, model: str) -> dict[str, NDArray[Any]]:
    with np.load(data) as arrays:
        return {name: arrays[name] for name in client.metadata(model).inputs}


def _follow(load: Load, url: str, began_s: float, limit_s: float) -> dict[str, float]:
    """Record the phase twice a second until exits serve; return when each phase was first seen."""
    reached_s: dict[str, float] = {}
    while load.phase != "serving" and time.monotonic() - began_s < limit_s:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            found = PHASE.search(response.read().decode())
        if found:
            load.phase = found[1]
            reached_s.setdefault(load.phase, time.monotonic() - began_s)
        time.sleep(0.5)
    return reached_s


def _agreement(options: Any, client: Client, model: str) -> dict[str, Any]:
    """Compare answers on unseen samples with ONNX Runtime's on the file."""
    session = onnxruntime.InferenceSession(options.model)
    inputs = _inputs(options.unseen, client, model)
    count, output = len(next(iter(inputs.values()))), session.get_outputs()[0].name
    same, early = 0, 0
    for start in range(0, count, BATCH):
        batch = {name: array[start : start + BATCH] for name, array in inputs.items()}
        result = client.infer(model, batch)
        wanted = session.run([output], batch)[0]
        same += int((result.outputs[output].argmax(1) == wanted.argmax(1)).sum())
        early += int((result.exits >= 0).sum())
    return {"unseen_samples": count, "agreement": same / count, "answered_early": early / count}


def _compare(bundle: Path, unseen: Path) -> Any:
    """Run ``eebench compare`` at batch 1 and 16, without a running server."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "offramp.tools.bench.cli", "compare", str(bundle)]
        command += ["--data", str(unseen), "--batch-sizes", "1,16", "--json", file.name]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(Path(file.name).read_text())


if __name__ == "__main__":
    main()
