"""Memory of compiling, step by step, for a large model and for growing data.

    python -m benchmarks.compile_memory [--model bert,convolutions] [--samples 96,768]
        [--tokens 128] [--epochs 1] [--sweeps N] [--seed 0] [--folder DIR]
        [--json FILE]

Models are made in torch with random weights: ``bert`` has BERT-base's sizes (12 layers, 768 wide,
30,522 words), ``resnet50`` those of ResNet-50, ``convolutions`` is small; both take 3x64x64. Each
is compiled in its own process, once for each number of samples. The resident memory of that process
and its children is sampled fifty times a second: ``resident`` is all of it, ``anonymous`` excludes
pages of files, which the system may reclaim. MB are 10^6 bytes. Samples are of seven kinds, so that
exits learn from few of them and are used; only memory and time are measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from benchmarks.family_memory import WatchedFamily
from rich.table import Table

from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

CLASSES, SIDE = 10, 64
MODELS = ("bert", "resnet50", "convolutions")
_KINDS = 7
"""Kinds of samples that a model of random weights separates, so that exits learn and are used."""
_MARK = "step: "


def main() -> None:
    """Measure, print, and write if asked."""
    options = _parser().parse_args()
    if options.step is not None:
        {"export": _export, "compile": _compile}[options.step](options)
        return
    runs = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.model.split(","):
            for samples in options.samples.split(","):
                runs.append(_measure(name, int(samples), Path(folder), options))
                _print(runs[-1])
    environment = describe_environment(
        seed=options.seed, tokens=options.tokens, epochs=options.epochs
    )
    found = {"measured": "resident memory", "runs": runs, "environment": environment}
    write_json(options.json, found)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="bert", metavar="A,B,…", help=", ".join(MODELS))
    parser.add_argument("--samples", default="96", metavar="A,B,…")
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="number of tokens of bert's inputs"
    )
    parser.add_argument(
        "--epochs", type=int, default=1, metavar="N", help="number of epochs that train the heads"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sweeps",
        type=int,
        metavar="N",
        help="number of profiling sweeps and of measuring rounds (default: as eecompile)",
    )
    parser.add_argument("--scratch-limit", type=float, default=4.0, metavar="GIB")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for models, data and bundles, which are removed at the end",
    )
    parser.add_argument("--step", choices=["export", "compile"], help=argparse.SUPPRESS)
    return parser


def _measure(name: str, samples: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    place = folder / f"{name}-{samples}"
    place.mkdir()
    asked = [f"--model={name}", f"--samples={samples}", f"--folder={place}",
             f"--seed={options.seed}", f"--tokens={options.tokens}", f"--epochs={options.epochs}",
             f"--scratch-limit={options.scratch_limit}"]  # fmt: skip
    if options.sweeps is not None:
        asked.append(f"--sweeps={options.sweeps}")
    command = [sys.executable, "-m", "benchmarks.compile_memory", *asked]
    subprocess.run([*command, "--step=export"], check=True)
    started = time.monotonic()
    process = subprocess.Popen([*command, "--step=compile"], stdout=subprocess.PIPE, text=True)
    watched = WatchedFamily(process.pid)
    with watched.sampling():
        for line in process.stdout or ():
            if line.startswith(_MARK):
                watched.step = line.removeprefix(_MARK).strip()
            else:
                print(line, end="")
    if process.wait():
        raise SystemExit(f"compiling {name} failed, see above")
    return {
        "model": name,
        "samples": samples,
        "model_mb": _mb((place / "model.onnx").stat().st_size),
        "data_mb": _mb((place / "data.npz").stat().st_size),
        "seconds": time.monotonic() - started,
        "peak_resident_mb": max(seen.resident for seen in watched.steps.values()) / 1e6,
        "peak_anonymous_mb": max(seen.anonymous for seen in watched.steps.values()) / 1e6,
        "bundle_mb": _mb(sum(p.stat().st_size for p in (place / "out.ee").rglob("*"))),
        "steps": [
            {
                "step": step,
                "seconds": seen.seconds,
                "resident_mb": seen.resident / 1e6,
                "anonymous_mb": seen.anonymous / 1e6,
            }
            for step, seen in watched.steps.items()
        ],
    }


def _print(run: dict[str, Any]) -> None:
    title = (
        f"{run['model']} ({run['model_mb']:,.0f} MB) on {run['samples']:,} samples "
        f"({run['data_mb']:,.0f} MB), {run['seconds']:,.0f} s, MEASURED"
    )
    table = Table("step", "s", "resident, MB", "anonymous, MB", title=title)
    for step in run["steps"]:
        figures = (step["seconds"], step["resident_mb"], step["anonymous_mb"])
        table.add_row(step["step"], *(f"{figure:,.0f}" for figure in figures))
    peaks = (run["seconds"], run["peak_resident_mb"], run["peak_anonymous_mb"])
    table.add_row("peak", *(f"{figure:,.0f}" for figure in peaks))
    wide_console().print(table)


def _mb(size: int) -> float:
    return size / 1e6


def _compile(options: argparse.Namespace) -> None:
    from offramp.calibration.data.training_options import TrainingOptions  # noqa: PLC0415
    from offramp.calibration.measure import measuring, profiling  # noqa: PLC0415
    from offramp.compiler.common.options import CompileOptions  # noqa: PLC0415
    from offramp.compiler.steps.compile import compile_model  # noqa: PLC0415
    from offramp.engine.common.timing import Effort  # noqa: PLC0415

    if options.sweeps is not None:  # times are then worth nothing, and memory is the same
        profiling.Effort = partial(Effort, least=options.sweeps, most=options.sweeps)
        measuring.Budget = partial(measuring.Budget, seconds=0, least_rounds=options.sweeps)
    asked = CompileOptions.of(
        model=options.folder / "model.onnx",
        data=options.folder / "data.npz",
        output=options.folder / "out.ee",
        scratch=options.folder,
        scratch_limit=options.scratch_limit,
        max_disagreement=0.2,
        training=TrainingOptions(epochs=options.epochs, threads=2),
        seed=options.seed,
    )
    compile_model(asked, _PrintedProgress())


class _PrintedProgress:
    """Progress as lines that the measuring process reads."""

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Any]:  # noqa: ARG002
        print(f"{_MARK}{title}", flush=True)
        yield lambda _: None
        print(f"{_MARK}(after) {title}", flush=True)


def _export(options: argparse.Namespace) -> None:
    """Write a model and data for it."""
    import torch  # noqa: PLC0415
    from benchmarks.torch_models import MAKERS  # noqa: PLC0415

    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model, names = MAKERS[options.model](CLASSES)
    count, tokens = int(options.samples), options.tokens
    kinds = rng.integers(0, _KINDS, count)
    data: dict[str, Any]
    if options.model == "bert":
        lengths = rng.integers(tokens // 4, tokens + 1, count)
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        words = rng.integers(1, 30_000, (count, tokens)) * mask
        words[:, 0] = 1 + kinds
        data = {"input_ids": words, "attention_mask": mask}
    else:
        image = (3, SIDE, SIDE)
        noise = rng.standard_normal((count, *image), np.float32)
        data = {"image": rng.standard_normal((_KINDS, *image), np.float32)[kinds] + 0.3 * noise}
    example = tuple(torch.from_numpy(data[name][:2]) for name in names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), example, str(options.folder / "model.onnx"), dynamo=False,
            input_names=list(names), output_names=["logits"], opset_version=17,
            dynamic_axes={name: {0: "batch"} for name in (*names, "logits")},
        )  # fmt: skip
    np.savez(options.folder / "data.npz", **data)


if __name__ == "__main__":
    main()
