"""Memory of compiling, verifying, exporting and serving a model beyond 2 GiB.

    python -m benchmarks.beyond_two_gib [--width 8192] [--layers 12] [--samples 400] [--seed 0]
        [--folder DIR] [--json FILE]

The model is a chain of matrix products with random weights, in external data: 3 GiB by default. It
is compiled without data and with some, verified, exported to a file and to a repository for Triton,
and bundle and file are served. Each step runs in its own process. The resident memory of that
process and its children is sampled fifty times a second: ``resident`` is all of it, ``anonymous``
excludes pages of files, which the system may reclaim. The limit is the model's size plus 3 GiB.
Answers of servers are compared with those that numpy computes from the weights.
The folder needs space for six times the model; it is emptied at the end.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import tritonclient.grpc as triton
from benchmarks.common import make_parser
from benchmarks.family_memory import WatchedFamily
from numpy.typing import NDArray
from onnx import helper
from rich.table import Table

from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

CLASSES, ASKED = 10, 3
_PAGE: Final = 4096
_KINDS: Final = 7
"""Kinds of samples that a model of random weights separates, so that exits learn and are used."""
_ALLOWED: Final = 3 * 2**30
"""Allowed bytes in addition to the model."""
_READY: Final = re.compile(r"ready: gRPC on (\S+),")
_COMMAND: Final = "import sys; from offramp.start import {0}; sys.exit({0}())"


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=8192, metavar="N")
    parser.add_argument("--layers", type=int, default=12, metavar="N")
    parser.add_argument("--samples", type=int, default=400, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for model, data and bundles, which are removed at the end",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        chain = LargeChain.made(Path(folder), options.width, options.layers, options.seed)
        size_bytes, runs = chain.size_bytes, list(measure(chain, options))
    table = Table("command", "s", "resident, GiB", "anonymous, GiB", "within", title=_title(chain))
    for run in runs:
        sizes = (f"{run[f'{kind}_bytes'] / 2**30:.2f}" for kind in ("resident", "anonymous"))
        table.add_row(run["command"], f"{run['seconds']:.0f}", *sizes, str(run["within"]))
    wide_console().print(table)
    found = {
        "measured": "MEASURED: resident memory of processes, bytes",
        "model_bytes": size_bytes,
        "allowed_bytes": size_bytes + _ALLOWED,
        "runs": runs,
        "environment": describe_environment(
            seed=options.seed, width=options.width, layers=options.layers, samples=options.samples
        ),
    }
    write_json(options.json, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeChain:
    """A model of matrix products that was written to its own folder."""

    path: Path
    width: int
    layers: int

    @classmethod
    def made(cls, folder: Path, width: int, layers: int, seed: int) -> LargeChain:
        """Write a model and its weights, one matrix after the other."""
        made, rng = (
            cls(path=folder / "big.onnx", width=width, layers=layers),
            np.random.default_rng(seed),
        )
        weights: list[onnx.TensorProto] = []
        with made._data.open("wb") as data:
            for name, columns in made._matrices():
                scale = np.float32(np.sqrt(2 / width))
                array = rng.standard_normal((width, columns), np.float32) * scale
                data.write(bytes(-data.tell() % _PAGE))
                weight = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT)
                weight.dims.extend(array.shape)
                told = {"location": made._data.name, "offset": data.tell(), "length": array.nbytes}
                for key, value in told.items():
                    weight.external_data.add(key=key, value=str(value))
                weight.data_location = onnx.TensorProto.EXTERNAL
                data.write(array.tobytes())
                weights.append(weight)
        nodes, read = [], "x"
        for name, _ in made._matrices():
            given = "logits" if name == "head" else f"{name}/relu"
            product = given if name == "head" else f"{name}/product"
            nodes.append(helper.make_node("MatMul", [read, name], [product], name=product))
            if given != product:
                nodes.append(helper.make_node("Relu", [product], [given], name=given))
            read = given
        kind = onnx.TensorProto.FLOAT
        inputs = [helper.make_tensor_value_info("x", kind, ["batch", width])]
        outputs = [helper.make_tensor_value_info("logits", kind, ["batch", CLASSES])]
        graph = helper.make_graph(nodes, "chain", inputs, outputs, weights)
        opsets = [helper.make_opsetid("", 17)]
        made.path.write_bytes(
            helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        )
        return made

    @property
    def size_bytes(self) -> int:
        """Size of the file with all weights, in bytes."""
        return self._data.stat().st_size

    def answer(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the model's answer [rows, classes] to x [rows, width], matrix by matrix."""
        with self._data.open("rb") as data:
            for name, columns in self._matrices():
                data.seek(-(-data.tell() // _PAGE) * _PAGE)
                weight = np.fromfile(data, np.float32, self.width * columns)
                x = x @ weight.reshape(self.width, columns)
                x = x if name == "head" else np.maximum(x, 0)
        return x

    @property
    def _data(self) -> Path:
        return self.path.with_name("big.onnx.data")

    def _matrices(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the number of columns of each matrix, in order."""
        yield from ((f"layer{number}", self.width) for number in range(self.layers))
        yield "head", CLASSES


def measure(chain: LargeChain, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all commands on a model, and yield the memory of each."""
    folder = chain.path.parent
    rng = np.random.default_rng(options.seed)
    of_kind = rng.standard_normal((_KINDS, chain.width), np.float32)
    noise = rng.standard_normal((options.samples, chain.width), np.float32)
    samples = of_kind[rng.integers(0, _KINDS, options.samples)] + 0.1 * noise
    np.savez(folder / "data.npz", x=samples)
    asked = samples[:ASKED]
    wanted = chain.answer(asked)
    made = ["--scratch", ".", "--epochs", "1", "--candidates", "4"]

    def compiling(*arguments: str) -> dict[str, Any]:
        return _ran(chain, ["eecompile", *arguments])

    dry = ["big.onnx", "--data", "random", "--max-samples", "300", "--output", "dry.ee"]
    yield compiling(*dry, *made)
    yield _served(chain, "dry.ee", ["--mode", "off"], asked, wanted)
    _removed(folder / "dry.ee")
    promise = ["--max-disagreement", "0.2"]
    yield compiling("big.onnx", "--data", "data.npz", "--output", "big.ee", *made, *promise)
    yield compiling("verify", "big.ee", "--data", "data.npz")
    yield _served(chain, "big.ee", ["--mode", "leave"], asked, None)
    targets = ["--output", "fast.onnx", "--triton", "m"]
    yield compiling("export", "big.ee", "--data", "data.npz", *targets)
    _removed(folder / "m")
    _removed(folder / "big.ee")
    yield _served(chain, "big.onnx", [], asked, wanted)


def _removed(folder: Path) -> None:
    subprocess.run(["rm", "-r", str(folder)], check=True)


def _started(folder: Path, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    name, *arguments = command
    print(" ".join(command), flush=True)
    with log.open("wb") as file:
        started = [sys.executable, "-c", _COMMAND.format(name), *arguments]
        return subprocess.Popen(started, cwd=folder, stdout=file, stderr=file)


def _ran(chain: LargeChain, command: Sequence[str]) -> dict[str, Any]:
    folder, started_s = chain.path.parent, time.monotonic()
    log = folder / "log"
    process = _started(folder, command, log)
    watched = WatchedFamily(process.pid)
    with watched.sampling():
        status = process.wait()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return _run(chain, " ".join(command), watched, started_s)


def _served(
    chain: LargeChain,
    model: str,
    flags: Sequence[str],
    asked: NDArray[np.float32],
    wanted: NDArray[np.float32] | None,
) -> dict[str, Any]:
    """Serve a model until it has answered some samples; ``wanted`` are the expected answers."""
    command = ["eeserve", model, "--grpc-port", "0", "--http-port", "0", *flags]
    folder, started_s = chain.path.parent, time.monotonic()
    log = folder / "log"
    process = _started(folder, command, log)
    watched = WatchedFamily(process.pid)
    with watched.sampling():
        try:
            while (ready := _READY.search(log.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
                time.sleep(0.1)
            found = _answered(ready[1], Path(model).stem, asked)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    run = _run(chain, " ".join(command), watched, started_s)
    if wanted is not None:
        run["largest_difference"] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        assert run["largest_difference"] < 1e-3, run
    return run


def _answered(address: str, model: str, asked: NDArray[np.float32]) -> NDArray[np.float32]:
    tensor = triton.InferInput("x", list(asked.shape), "FP32")
    tensor.set_data_from_numpy(asked)
    with triton.InferenceServerClient(address) as client:
        while not client.is_model_ready(model):
            time.sleep(0.1)
        found: NDArray[np.float32] = client.infer(model, [tensor]).as_numpy("logits")
    return found


def _run(
    chain: LargeChain, command: str, watched: WatchedFamily, started_s: float
) -> dict[str, Any]:
    resident = max(seen.resident for seen in watched.steps.values())
    return {
        "command": command,
        "seconds": time.monotonic() - started_s,
        "resident_bytes": resident,
        "anonymous_bytes": max(seen.anonymous for seen in watched.steps.values()),
        "within": resident <= chain.size_bytes + _ALLOWED,
    }


def _title(chain: LargeChain) -> str:
    size = "a model whose weights are in external data"
    return f"Memory of {size}, MEASURED ({chain.layers} layers, {chain.width} wide)"


if __name__ == "__main__":
    main()
