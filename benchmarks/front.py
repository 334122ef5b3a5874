"""The server's front: requests a second, and processor time a request, with and without front ends.

    python -m benchmarks.front [--model MODEL.onnx [--bundle BUNDLE]] [--data TEST.npz]
        [--triton FOLDER] [--clients 1,32,128] [--rounds 2] [--json FILE]

Real ``eeserve`` processes, in mode off, or in leave mode on ``--bundle``, and as yardsticks
``benchmarks.bare_server`` and Triton on the model answer small requests in interleaved rounds;
figures are medians. One request is sent again and again by ``h2load`` (Debian's nghttp2-client)
over a connection for each client. With ``--data`` the requests are samples of that file, sent by
this process over one connection, which takes more processor time of the machine. Without
``--model`` the model has one operator, on four numbers. Processor time is that of all processes of
the server.

``--triton`` is PyPI's nvidia-pytriton 0.7.0 (Triton 2.51), unpacked: ``pip download --no-deps``
and ``unzip``. That has Triton's Python backend only, in which ONNX Runtime runs the model: two
instances with a thread each, and dynamic batching.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import onnx
import onnxruntime
import uvloop
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.proto.descriptors import method_path
from offramp.proto.messages import ModelInferRequest
from offramp.tools.bench.common.output import describe_environment, write_json

READY = re.compile(r"ready: gRPC on (\S+),")
SECONDS, WARM_UP_S = 4, 1
FRONTENDS = (0, 1, 2)
NAME = "model"
"""Name of the model on all servers."""
SAMPLES = 1000
TRITON_TYPES = {"tensor(float)": "TYPE_FP32", "tensor(uint8)": "TYPE_UINT8"}
MODEL_PY = """
import os
import numpy as np
import onnxruntime
import triton_python_backend_utils as triton

class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.path.join(os.path.dirname(__file__), "model.onnx")
        self._session = onnxruntime.InferenceSession(path, options)
        (self._input,), (self._output,) = self._session.get_inputs(), self._session.get_outputs()

    def execute(self, requests):
        given = [triton.get_input_tensor_by_name(r, self._input.name).as_numpy() for r in requests]
        (found,) = self._session.run(None, {self._input.name: np.concatenate(given)})
        parts = np.split(found, np.cumsum([len(rows) for rows in given])[:-1])
        return [triton.InferenceResponse([triton.Tensor(self._output.name, p)]) for p in parts]
"""


class MeasuredServer(NamedTuple):
    """A running server: its name, process id, and gRPC address."""

    name: str
    process: int
    address: str


def write_small_model(path: Path) -> None:
    """Write an ONNX model of one Relu, from ``x`` to ``y``, float32 [n, 4]."""
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("n", 4)) for name in "xy"
    ]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "small", tensors[:1], tensors[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def requests_to(path: Path, data: Path | None) -> list[bytes]:
    """Return requests of one row each: ones, or the first samples of the data."""
    (given,) = onnxruntime.InferenceSession(path).get_inputs()
    if data is None:
        assert given.type == "tensor(float)", "one input of floats"
        shape = [1, *(size if isinstance(size, int) else 1 for size in given.shape[1:])]
        rows = [np.ones(shape, np.float32)]
    else:
        with np.load(data) as arrays:
            rows = list(arrays[given.name][:SAMPLES, None])
    requests = []
    for row in rows:
        request = ModelInferRequest(model_name=NAME)
        datatype = "UINT8" if row.dtype == np.uint8 else "FP32"
        request.inputs.add(name=given.name, datatype=datatype, shape=row.shape)
        request.raw_input_contents.append(row.tobytes())
        requests.append(request.SerializeToString())
    return requests


@contextmanager
def offramp(path: Path, mode: str, frontends: int, log: Path) -> Iterator[MeasuredServer]:
    """Serve a model or a bundle by ``eeserve``."""
    command = [sys.executable, "-m", "offramp.server.cli", f"--model={NAME}={path}",
               f"--mode={mode}", "--grpc-port=0", "--http-port=0",
               f"--frontends={frontends}"]  # fmt: skip
    command += ["--no-state"] if mode != "off" else []
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        while (ready := READY.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        name = f"{frontends} front ends" if mode == "off" else f"{mode}, {frontends} front ends"
        yield MeasuredServer(name, process.pid, ready[1])
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


@contextmanager
def triton(unpacked: Path, path: Path, folder: Path) -> Iterator[MeasuredServer]:
    """Serve a model by Triton."""
    home = unpacked.resolve() / "pytriton" / "tritonserver"
    stub = home / "backends" / "python" / "triton_python_backend_stub"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / stub.name, stub)
    for program in (stub, home / "bin" / "tritonserver"):
        program.chmod(0o755)
    model = folder / "repository" / NAME / "1"
    model.mkdir(parents=True)
    session = onnxruntime.InferenceSession(path)
    (given,), (answer,) = session.get_inputs(), session.get_outputs()
    (model.parent / "config.pbtxt").write_text(
        f"""backend: "python" max_batch_size: 32 dynamic_batching {{ }}
input [{{ name: "{given.name}" data_type: {TRITON_TYPES[given.type]} dims: {given.shape[1:]} }}]
output [{{ name: "{answer.name}" data_type: TYPE_FP32 dims: {answer.shape[1:]} }}]
instance_group [{{ kind: KIND_CPU count: 2 }}]
"""
    )
    packages = sysconfig.get_path("purelib")
    (model / "model.py").write_text(f"import sys\nsys.path.insert(0, {packages!r})\n{MODEL_PY}")
    (model / "model.onnx").write_bytes(path.read_bytes())
    ports = free_ports(2)
    command = [str(home / "bin" / "tritonserver"), f"--model-repository={model.parent.parent}",
               f"--backend-directory={home / 'backends'}", "--allow-metrics=false",
               f"--http-port={ports[0]}", f"--grpc-port={ports[1]}"]  # fmt: skip
    libraries = (
        f"{unpacked.resolve() / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    )
    log = folder / "triton.log"
    with (
        log.open("wb") as told,
        subprocess.Popen(
            command, stdout=told, stderr=told, env={**os.environ, "LD_LIBRARY_PATH": libraries}
        ) as process,
    ):
        while "Started GRPCInferenceService" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield MeasuredServer("Triton 2.51", process.pid, f"127.0.0.1:{ports[1]}")
        process.terminate()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


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


def measure(
    served: MeasuredServer, clients: int, requests: Sequence[bytes], folder: Path
) -> dict[str, float]:
    """Return the rate, latencies, and the server's processor time."""
    before_s = processor_s(served.process)
    if len(requests) == 1:
        rate, took_us = by_h2load(served, clients, requests[0], folder)
    else:
        rate, took_us = uvloop.run(by_this_process(served, clients, requests))
    used_s = processor_s(served.process) - before_s
    return {
        "requests_per_s": rate,
        "processor_us_a_request": 1e6 * used_s / (rate * (SECONDS + WARM_UP_S)),
        "p50_ms": float(np.quantile(took_us, 0.5)) / 1e3,
        "p99_ms": float(np.quantile(took_us, 0.99)) / 1e3,
    }


async def by_this_process(
    served: MeasuredServer, clients: int, requests: Sequence[bytes]
) -> tuple[float, NDArray[np.float64]]:
    """Keep requests in flight; return requests per second, and the time of each in µs."""
    took_us: list[float] = []
    began_s = time.perf_counter()
    counted_s, end_s = began_s + WARM_UP_S, began_s + WARM_UP_S + SECONDS

    async def keep_one(call: Any, number: int) -> None:
        while (sent_s := time.perf_counter()) < end_s:
            await call(requests[number % len(requests)])
            number += clients
            if counted_s <= (now_s := time.perf_counter()) < end_s:
                took_us.append(1e6 * (now_s - sent_s))

    async with grpc.aio.insecure_channel(served.address) as channel:
        call = channel.unary_unary(method_path("ModelInfer"))
        await asyncio.gather(*(keep_one(call, number) for number in range(clients)))
    return len(took_us) / SECONDS, np.array(took_us)


def by_h2load(
    served: MeasuredServer, clients: int, request: bytes, folder: Path
) -> tuple[float, NDArray[np.float64]]:
    """Return h2load's result: requests per second, and the time of each in µs."""
    body, log = folder / "body", folder / "times"
    body.write_bytes(b"\0" + len(request).to_bytes(4, "big") + request)
    log.unlink(missing_ok=True)
    command = [
        "h2load", f"--clients={clients}", "--max-concurrent-streams=1", f"--duration={SECONDS}",
        f"--warm-up-time={WARM_UP_S}", f"--log-file={log}", f"--data={body}",
        "--header=content-type: application/grpc", "--header=te: trailers",
        f"http://{served.address}{method_path('ModelInfer')}",
    ]  # fmt: skip
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate = float(re.findall(r"finished in \S+, (\S+) req/s", told)[0])
    return rate, np.array([int(line.split("\t")[2]) for line in log.read_text().splitlines()])


def check(served: MeasuredServer, request: bytes) -> None:
    """Make sure that the request is answered: h2load does not look at gRPC's status."""
    with grpc.insecure_channel(served.address) as channel:
        call: Any = channel.unary_unary(method_path("ModelInfer"))
        call(request, timeout=60)


def compare(path: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all servers in turn; return medians by server and number of clients."""
    requests = requests_to(path, options.data)
    clients = [int(count) for count in options.clients.split(",")]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        own, mode = (path, "off") if options.bundle is None else (options.bundle, "leave")
        started = [offramp(own, mode, count, folder / f"log{count}") for count in FRONTENDS]
        started.append(bare(path))
        if options.triton is not None:
            started.append(triton(options.triton, path, folder))
        servers = [stack.enter_context(each) for each in started]
        for served in servers:
            check(served, requests[0])
        for _ in range(options.rounds):
            for count in clients:
                for served in servers:
                    figures = measure(served, count, requests, folder)
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
    parser.add_argument("--model", type=Path, help="ONNX file of one input and one output")
    parser.add_argument(
        "--bundle", type=Path, help="bundle of the model, which eeserve serves in the model's place"
    )
    parser.add_argument("--data", type=Path, help=".npz of samples to send")
    parser.add_argument("--triton", type=Path, help="folder of the unpacked nvidia-pytriton")
    parser.add_argument("--clients", default="1,32,128", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds for each server")
    options = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("there is no h2load; install nghttp2-client")
    with tempfile.TemporaryDirectory() as place:
        path = options.model or Path(place) / "small.onnx"
        if options.model is None:
            write_small_model(path)
        figures = compare(path, options, Path(place))
    for name, each in figures.items():
        sys.stdout.write(f"{name}: {each}\n")
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "figures": figures})


if __name__ == "__main__":
    main()
