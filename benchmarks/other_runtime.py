"""Is OpenVINO faster on this CPU than ONNX Runtime, in float32 and in the kinds of int8?

    python -m benchmarks.other_runtime MODEL.onnx --data SAMPLES.npz [--kinds int8-static int8-rows]
        [--batch-sizes 1 16] [--threads 1] [--seconds 20] [--json FILE]

Both runtimes run each graph in interleaved rounds; ``ratio`` is OpenVINO's time over ONNX Runtime's
in the same round, the median with its interval: below 1 OpenVINO is faster. Both are called from
Python with numpy arrays, as stages are. Needs the extra ``openvino``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.calibration.measure.profiling import TimedGraph
from offramp.calibration.precision.kinds import CpuPrecision, quantise
from offramp.calibration.precision.quantised_graphs import PrecisionError
from offramp.compiler.frontend.model import read_model
from offramp.engine.backends.openvino import OpenVinoBackend
from offramp.engine.common.environment import cpu_features, package_version
from offramp.engine.common.timing import Effort, disturbances, repeats_of, time_rounds
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

SCALE_SAMPLES = 256
SEED = 0


class OpenVinoGraph:
    """A graph loaded as :class:`.OpenVinoBackend` does, to be timed."""

    def __init__(self, graph: bytes, threads: int, output: str) -> None:
        self._graph = OpenVinoBackend(threads=threads).load(graph)
        self._output = output

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the first output."""
        (found,) = self._graph.execute([self._output], tensors, None)
        return found

    def time_ms(self, tensors: Mapping[str, NDArray[Any]]) -> float:
        """Run once; return the milliseconds."""
        started = time.perf_counter()
        self.run(tensors)
        return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Quantise a model, time both runtimes side by side, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="float32 ONNX file")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help=".npz of samples to run, and to measure scales of int8 on",
    )
    parser.add_argument("--kinds", nargs="*", default=["int8-static", "int8-rows"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds in which each graph is timed"
    )
    options = parser.parse_args()
    check_outputs(options.json)
    model = read_model(options.model)
    dataset = read_dataset(options.data, model.inputs)
    graph = model.proto.SerializeToString()
    graphs = {"float32": graph}
    some = dataset.subset(np.arange(min(SCALE_SAMPLES, len(dataset))))
    saturating = cpu_features().saturates is True
    for name in options.kinds:
        try:
            graphs[name] = quantise(
                graph, some, CpuPrecision(name), threads=options.threads, saturating=saturating
            )
        except PrecisionError as error:
            print(f"{name}: {error}")
    rows = [measured(name, made, dataset, options) for name, made in graphs.items()]
    every = [row["ratio"] for row in rows]
    print(f"geometric mean of the ratios: {prod(every) ** (1 / len(every)):.2f}")
    environment = describe_environment(
        model=options.model.name,
        model_sha256=hashlib.sha256(options.model.read_bytes()).hexdigest(),
        cpu_features=cpu_features().describe(),
        openvino=package_version("openvino"),
        threads=options.threads,
        seed=SEED,
    )
    write_json(options.json, {"rows": rows, "environment": environment})


def measured(name: str, graph: bytes, dataset: Dataset, options: Any) -> dict[str, Any]:
    """Time a graph in both runtimes, and compare their answers."""
    ours = TimedGraph(graph, options.threads)
    theirs = OpenVinoGraph(graph, options.threads, ours.session.get_outputs()[0].name)
    sizes = sorted(options.batch_sizes)
    batches = [dataset.take(np.arange(size) % len(dataset)) for size in sizes]
    effort = Effort(least=6, most=400, seconds=options.seconds, half_width=0.005)
    found = time_rounds(
        [[partial(g.time_ms, batch) for g in (ours, theirs)] for batch in batches],
        repeats_of(sizes),
        effort,
        lambda rounds: max(r.ratios()[0].half_width for r in rounds),
    )
    (answer, *_), other = ours.run(batches[-1]).values(), theirs.run(batches[-1])
    ratios = dict(zip(sizes, (r.ratios()[0] for r in found.rounds), strict=True))
    for size, ratio in ratios.items():
        print(f"{name}, batch {size}: ratio {ratio.value:.2f} ± {ratio.half_width:.2f}")
    return {
        "graph": name,
        "ratio": prod(r.value for r in ratios.values()) ** (1 / len(ratios)),
        "ratios": {
            str(size): {"value": r.value, "half_width": r.half_width, "rounds": r.rounds}
            for size, r in ratios.items()
        },
        "same_class": float((answer.argmax(axis=1) == other.argmax(axis=1)).mean()),
        "onnxruntime": ort.__version__,
        "disturbed": disturbances(name, found.load, found.rounds),
    }


if __name__ == "__main__":
    main()
