"""Memory saved by sharing weights among six subnets of a supernet, and its cost in time.

    python -m benchmarks.variant_memory [--nets bert,resnet] [--rounds 5] [--runs 20] [--json FILE]

Two supernets of random weights, without training: a BERT of 6 layers of width 768 (heads of 64, 128
tokens, 1,000 words), whose heads and inner widths are elastic, and the elastic ResNet of
``tools/zoo/elastic_resnet.py`` with SubnetNorm's statistics. Six subnets of each are loaded into
one process, in one of three forms:

* ``own``: six graphs that contain their weights, in sessions with ONNX Runtime's defaults, as six
  separate models would be served;
* ``packed``: graphs that refer to their weights in one file, with prepacking and blocked layouts
  (``--share-weights never``);
* ``shared``: the same without either, on the file itself (``--share-weights always``).

Memory and loading: each form in its own process, in turns, ``--rounds`` times. Figures are the
increase over the process before loading (proportional set size, and its anonymous part), after a
few runs, and after malloc returned its reserve; MiB are 2^20 bytes. Speed: all forms in one
process, batch after batch in turns, in processor time of the one computing thread; ratios to
``packed``. Answers of ``packed`` and ``shared`` must equal those of ``own`` within 1e-5 of the
largest. Figures are medians of rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from benchmarks.common import in_a_process, make_parser, memory_mib
from numpy.typing import NDArray
from rich.table import Table

from offramp.bundle.graph_weights import WEIGHTS
from offramp.engine.backends.host import Execute
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend, shrink_arena
from offramp.engine.graphs.external_weights import WeightForm
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)

FORMS = ("own", "packed", "shared")
BATCH_SIZES = (1, 8)
TOLERANCE = 1e-5
"""Largest difference of answers, as a share of the largest answer."""
BERT_SUBNETS = ((3, 0.25), (4, 0.5), (4, 0.75), (5, 0.75), (6, 0.75), (6, 1.0))
"""Layers of each subnet, and width of its heads and inner layers as a share of the full width."""
RESNET_SUBNETS = ((2, 0.25), (1, 0.5), (1, 0.75), (0, 0.5), (0, 0.75), (0, 1.0))
"""Blocks skipped at each resolution, and width inside the other blocks as a share of the full
width."""
_MEASURES = ("load_s", "pss_mib", "anonymous_mib")


def main() -> None:
    """Measure, print, and write if asked."""
    options = _parser().parse_args()
    if options.step is not None:
        steps = {"load": _load, "speed": _speed}
        print(json.dumps(steps[options.step](options)))
        return
    check_outputs(options.json)
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for net in options.nets.split(","):
            place = Path(folder) / net
            place.mkdir()
            sizes = {"bert": _make_bert, "resnet": _make_resnet}[net](place)
            found[net] = {**sizes, **_measure(place, options)}
    for net, of_net in found.items():
        _print(net, of_net)
    environment = describe_environment(rounds=options.rounds, runs=options.runs, threads=1)
    write_json(options.json, {"measured": found, "environment": environment})


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--nets", default="bert,resnet", help="supernets to measure: bert, resnet or both"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--runs", type=int, default=20, metavar="N", help="number of runs of each batch size"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for models that are made and then removed"
    )
    parser.add_argument("--step", choices=["load", "speed"], help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser


# ---------------------------------------------------------------------------------------------
# The supernets


def _make_bert(folder: Path) -> dict[str, Any]:
    import onnx  # noqa: PLC0415

    from offramp.supernet.graphs import SubnetChoice  # noqa: PLC0415
    from offramp.tools.gpu.berts import BertSize, bert  # noqa: PLC0415

    layers, width = 6, 768
    size = BertSize(layers=layers, width=width, heads=width // 64, vocabulary=1000)
    onnx.save(bert(size), folder / "model.onnx")
    skipped = [f'{{ from = "layer{n - 1}.out", to = "layer{n}.out" }}' for n in (4, 3, 2)]
    parts = [f"layer{n}.{part}.weight" for n in range(layers) for part in ("q", "k", "v", "up")]
    (folder / "spec.toml").write_text(
        f"[[depth]]\nskip = [{', '.join(skipped)}]\n"
        f"[[width]]\nweights = {json.dumps(parts)}\nratios = [0.25, 0.5, 0.75]\n"
        '[norm]\nlayers = "none"\n'
    )
    choices = [SubnetChoice(skipped=(layers - n,), ratios=(r,)) for n, r in BERT_SUBNETS]
    return _write_subnets(folder, choices, None)


def _make_resnet(folder: Path) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from offramp.supernet.graphs import SubnetChoice  # noqa: PLC0415
    from offramp.supernet.training import calibrate_norms, export_supernet  # noqa: PLC0415
    from offramp.tools.zoo.elastic_resnet import make_supernet  # noqa: PLC0415

    torch.set_num_threads(1)
    supernet = make_supernet(0)
    supernet.eval()
    images = np.random.default_rng(0).integers(0, 256, (256, 1, 28, 28), np.uint8)
    batches = [(torch.from_numpy(part),) for part in np.split(images, 4)]
    supernet.record_norms(calibrate_norms(supernet, supernet.space.largest(), batches))
    export_supernet(supernet, folder / "model.onnx", inputs=["image"], outputs=["logits"])
    groups = len(supernet.space.depth)
    choices = [
        SubnetChoice(skipped=(skipped,) * groups, ratios=(ratio,) * groups)
        for skipped, ratio in RESNET_SUBNETS
    ]
    return _write_subnets(folder, choices, images)


def _write_subnets(
    folder: Path, choices: Sequence[Any], images: NDArray[Any] | None
) -> dict[str, Any]:
    """Write each subnet with its weights, and all of them with one file of weights."""
    from offramp.calibration.data.dataset import read_dataset  # noqa: PLC0415
    from offramp.compiler.frontend.model import read_model  # noqa: PLC0415
    from offramp.compiler.graphs.weight_parts import in_parts  # noqa: PLC0415
    from offramp.compiler.graphs.weights import pack_weights  # noqa: PLC0415
    from offramp.supernet.graphs import (  # noqa: PLC0415
        SubnetNorm,
        Supernet,
        extract_subnet,
        laid_out,
        read_spec,
    )

    model = read_model(folder / "model.onnx")
    supernet = laid_out(Supernet.of(model, read_spec(folder / "spec.toml")))
    norm = None
    if images is not None:
        np.savez(folder / "data.npz", image=images)
        norm = SubnetNorm.of(supernet, read_dataset(folder / "data.npz", model.inputs))
    subnets = [extract_subnet(supernet, choice, norm) for choice in choices]
    graphs = {f"{n}.onnx": s.proto.SerializeToString() for n, s in enumerate(subnets)}
    packed = pack_weights(in_parts(graphs, None), None)
    for name, graph in graphs.items():
        (folder / f"own-{name}").write_bytes(graph)
        (folder / name).write_bytes(packed.graphs[name])
    with (folder / WEIGHTS).open("wb") as file:
        file.writelines(packed.pieces())
    return {
        "subnets": [s.description for s in subnets],
        "file_mib": packed.sizes.file_bytes / 2**20,
        "in_every_graph_mib": packed.sizes.graph_bytes / 2**20,
    }


# ---------------------------------------------------------------------------------------------
# Measuring


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    loaded: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for number in range(options.rounds):
        for form in FORMS if number % 2 == 0 else FORMS[::-1]:
            loaded[form].append(_child("load", folder, f"--form={form}"))
    medians = {
        form: {m: statistics.median(one[m] for one in rounds) for m in _MEASURES}
        for form, rounds in loaded.items()
    }
    ratios = [
        own["pss_mib"] / shared["pss_mib"]
        for own, shared in zip(loaded["own"], loaded["shared"], strict=True)
    ]
    speed = _child("speed", folder, f"--runs={options.runs}")
    if speed["largest_difference"] > TOLERANCE:
        raise SystemExit(
            f"{folder.name}: answers differ by {speed['largest_difference']:.1e} of the largest, "
            f"at most {TOLERANCE:.0e} are expected: nothing was measured of what is not equal"
        )
    less = [statistics.median(ratios), min(ratios), max(ratios)]
    return {"loaded": medians, "times_less_than_own": less, "speed": speed}


def _child(step: str, folder: Path, *arguments: str) -> Any:
    given = (f"--step={step}", f"--folder={folder}", *arguments)
    return in_a_process("benchmarks.variant_memory", *given)


def _execute(folder: Path, form: str) -> list[Execute]:
    """Load the subnets; return a function for each, from output names and inputs."""
    count = len(list(folder.glob("own-*.onnx")))
    if form == "own":
        return [_ordinary(folder / f"own-{n}.onnx").run for n in range(count)]
    backend, graphs = OnnxRuntimeBackend(), [folder / f"{n}.onnx" for n in range(count)]
    return [backend.load(g.read_bytes(), folder, WeightForm(form)).execute for g in graphs]


def _ordinary(graph: Path) -> ort.InferenceSession:
    """Load a graph with ONNX Runtime's defaults, its own arena, on one thread.

    It is loaded from its file: Python's sessions keep the bytes that they receive.
    """
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    return ort.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])


def _load(options: argparse.Namespace) -> dict[str, float]:
    """Load all subnets in one form, run them, and return memory and times."""
    shrink_arena()  # makes the arena, and its session
    inputs, output = _inputs(options.folder, 1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, begun = memory_mib(), time.perf_counter()
    subnets = _execute(options.folder, options.form)
    loaded = time.perf_counter()
    for _ in range(3):
        for execute in subnets:
            execute([output], inputs, None)
    gc.collect()
    shrink_arena()
    ctypes.CDLL(None).malloc_trim(0)
    after = memory_mib()
    held = {f"{name}_mib": after[name] - before[name] for name in ("pss", "anonymous")}
    return {"load_s": loaded - begun, **held}


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    """Run all forms of each subnet in turns, and count the time of the thread that computes."""
    subnets = {form: _execute(options.folder, form) for form in FORMS}
    found: dict[str, Any] = {"largest_difference": 0.0}
    for size in BATCH_SIZES:
        inputs, output = _inputs(options.folder, size)
        rows = []
        for number in range(len(subnets["own"])):
            runs = {form: _runner(of[number], output, inputs) for form, of in subnets.items()}
            answers = {form: run() for form, run in runs.items()}
            scale = np.abs(answers["own"]).max()
            for form in FORMS[1:]:
                difference = float(np.abs(answers[form] - answers["own"]).max() / scale)
                found["largest_difference"] = max(found["largest_difference"], difference)
            rows.append(_times(runs, options.runs))
        found[f"batch_{size}"] = rows
    return found


def _runner(
    execute: Execute, output: str, inputs: Mapping[str, NDArray[Any]]
) -> Callable[[], NDArray[Any]]:
    def run() -> NDArray[Any]:
        (answer,) = execute([output], inputs, None)
        return answer

    return run


def _times(runs: Mapping[str, Callable[[], object]], count: int) -> dict[str, Any]:
    """Return the median milliseconds of each form, and the ratios of shared to packed by round."""
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for number in range(count):
        turn = number % len(FORMS)
        for form in (*FORMS[turn:], *FORMS[:turn]):
            start = time.thread_time()
            runs[form]()
            times[form].append(1e3 * (time.thread_time() - start))
    ratios = [b / a for a, b in zip(times["packed"], times["shared"], strict=True)]
    medians = {f"{form}_ms": statistics.median(taken) for form, taken in times.items()}
    return {**medians, "shared_to_packed": statistics.median(ratios)}


def _inputs(folder: Path, rows: int) -> tuple[dict[str, NDArray[Any]], str]:
    """Return random samples with a free batch size, and the name of the answer."""
    rng, session = np.random.default_rng(0), _ordinary(folder / "own-0.onnx")
    made: dict[str, NDArray[Any]] = {}
    for tensor in session.get_inputs():
        shape = [rows, *tensor.shape[1:]]
        dtype = {"tensor(uint8)": np.uint8, "tensor(int64)": np.int64}[tensor.type]
        made[tensor.name] = rng.integers(0, 200, shape).astype(dtype)
        if "mask" in tensor.name:
            made[tensor.name] = np.ones(shape, dtype)
    return made, session.get_outputs()[0].name


# ---------------------------------------------------------------------------------------------
# For people


def _print(net: str, found: Mapping[str, Any]) -> None:
    middle, least, most = found["times_less_than_own"]
    title = (
        f"{net}: weights {found['file_mib']:,.1f} MiB in one file, "
        f"{found['in_every_graph_mib']:,.1f} in every graph; shared, six subnets take "
        f"{middle:.2f} ({least:.2f} to {most:.2f}) times less than as models of their own; MEASURED"
    )
    table = Table("", *FORMS, title=title)
    for measure in _MEASURES:
        table.add_row(measure, *(f"{found['loaded'][form][measure]:,.2f}" for form in FORMS))
    for size in BATCH_SIZES:
        for name, row in zip(found["subnets"], found["speed"][f"batch_{size}"], strict=True):
            cells = [f"{row[f'{form}_ms']:,.2f} ms" for form in FORMS]
            cells[-1] += f" ({row['shared_to_packed']:.2f})"
            table.add_row(f"batch {size}: {name}", *cells)
    wide_console(140).print(table)


if __name__ == "__main__":
    main()
