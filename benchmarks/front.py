"""The server's front: requests a second, and processor time a request, with and without front ends.

    python -m benchmarks.front [--model MODEL.onnx] [--clients 1,32,128] [--rounds 2] [--json FILE]

Real ``eeserve`` processes in mode off, and ``benchmarks.bare_server`` as the yardstick, answer one
small request again and again, sent by ``h2load`` (Debian's nghttp2-client) over a connection for
each client, in interleaved rounds; figures are medians. Without ``--model`` it is a model of one
operator on four numbers. Processor time is that of all processes of the server.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import onnx
import onnxruntime
from benchmarks.common import make_parser

from offramp.proto.descriptors import method_path
from offramp.proto.messages import ModelInferRequest
from offramp.tools.bench.common.output import describe_environment, write_json

READY = re.compile(r"ready: gRPC on (\S+),")
SECONDS, WARM_UP_S = 4, 1
FRONTENDS = (0, 1, 2)


class MeasuredServer(NamedTuple):
    """A server that is measured."""

    name: str
    process: int
    address: str


def write_small_model(path: Path) -> None:
    """Write a model of one operator."""
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("n", 4)) for name in "xy"
    ]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "small", tensors[:1], tensors[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def request_to(path: Path) -> bytes:
    """Return a request with one row of ones."""
    (given,) = onnxruntime.InferenceSession(path).get_inputs()
    assert given.type == "tensor(float)", "one input of floats"
    shape = [1, *(size if isinstance(size, int) else 1 for size in given.shape[1:])]
    request = ModelInferRequest(model_name=path.stem)
    request.inputs.add(name=given.name, datatype="FP32", shape=shape)
    request.raw_input_contents.append(np.ones(shape, np.float32).tobytes())
    return request.SerializeToString()


@contextmanager
def offramp(path: Path, frontends: int, log: Path) -> Iterator[MeasuredServer]:
    """Serve a model by ``eeserve``."""
    command = [sys.executable, "-m", "offramp.server.cli", str(path), "--mode=off",
               "--grpc-port=0", "--http-port=0", f"--frontends={frontends}"]  # fmt: skip
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        while (ready := READY.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield MeasuredServer(f"{frontends} front ends", process.pid, ready[1])
        process.terminate()


@contextmanager
def bare(path: Path) -> Iterator[MeasuredServer]:
    """Serve a model by the yardstick."""
    command = [sys.executable, "-m", "benchmarks.bare_server", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield MeasuredServer(
            "bare grpc.aio", process.pid, f"127.0.0.1:{process.stdout.readline().strip()}"
        )
        process.kill()


def processor_s(process: int) -> float:
    """Return the processor time of a process and its children so far."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if process in (int(place.parent.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(served: MeasuredServer, clients: int, body: Path, log: Path) -> dict[str, float]:
    """Return what h2load found."""
    log.unlink(missing_ok=True)
    command = [
        "h2load", f"--clients={clients}", "--max-concurrent-streams=1", f"--duration={SECONDS}",
        f"--warm-up-time={WARM_UP_S}", f"--log-file={log}", f"--data={body}",
        "--header=content-type: application/grpc", "--header=te: trailers",
        f"http://{served.address}{method_path('ModelInfer')}",
    ]  # fmt: skip
    before_s = processor_s(served.process)
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used_s = processor_s(served.process) - before_s
    rate = float(re.findall(r"finished in \S+, (\S+) req/s", told)[0])
    took_us = np.array([int(line.split("\t")[2]) for line in log.read_text().splitlines()])
    return {
        "requests_per_s": rate,
        "processor_us_a_request": 1e6 * used_s / (rate * (SECONDS + WARM_UP_S)),
        "p50_ms": float(np.quantile(took_us, 0.5)) / 1e3,
        "p99_ms": float(np.quantile(took_us, 0.99)) / 1e3,
    }


def check(served: MeasuredServer, request: bytes) -> None:
    """Make sure that the request is answered: h2load does not look at gRPC's status."""
    with grpc.insecure_channel(served.address) as channel:
        call: Any = channel.unary_unary(method_path("ModelInfer"))
        call(request, timeout=60)


def compare(path: Path, clients: list[int], rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all servers in turn; medians by server and number of clients."""
    request, body = request_to(path), folder / "body"
    body.write_bytes(b"\0" + len(request).to_bytes(4, "big") + request)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(offramp(path, count, folder / f"log{count}")) for count in FRONTENDS
        ]
        servers.append(stack.enter_context(bare(path)))
        for served in servers:
            check(served, request)
        for _ in range(rounds):
            for count in clients:
                for served in servers:
                    figures = measure(served, count, body, folder / "times")
                    found.setdefault((served.name, count), []).append(figures)
    return {
        f"{name}, {count} clients": {
            figure: round(statistics.median(each[figure] for each in runs), 2) for figure in runs[0]
        }
        for (name, count), runs in found.items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="with one input of floats")
    parser.add_argument("--clients", default="1,32,128", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=2, help="of each server")
    options = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("there is no h2load; install nghttp2-client")
    with tempfile.TemporaryDirectory() as place:
        path = options.model or Path(place) / "small.onnx"
        if options.model is None:
            write_small_model(path)
        clients = [int(count) for count in options.clients.split(",")]
        figures = compare(path, clients, options.rounds, Path(place))
    for name, each in figures.items():
        sys.stdout.write(f"{name}: {each}\n")
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "figures": figures})


if __name__ == "__main__":
    main()
