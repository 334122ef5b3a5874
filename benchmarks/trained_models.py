"""Gains of models trained for minutes, with default flags: ViT, MobileNet, MLP, text encoder.

    python -m benchmarks.trained_models --output demo/small [--only vit …] [--images DIR]
        [--repeats 5] [--json FILE]

Trains models that are not in ``--output`` yet (:mod:`offramp.tools.zoo.small_models`, four to eight
minutes each on a core), compiles each as ``eecompile MODEL --data CALIBRATION`` does, without a
further flag, in its own process (``--compiled`` keeps existing bundles), and measures the bundle as
``eebench compare`` does: in rounds that alternate with the unmodified model, on test data that
neither training nor compiling used. Measurements are repeated; ratios are medians of the
repetitions, with minimum and maximum. Each repetition is done twice: in wall time, and in CPU time
of the computing thread, which other processes do not affect.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from rich.table import Table

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.certify import upper_bound
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend.model import read_model
from offramp.engine.backends import make_backend
from offramp.engine.stages.plan import exit_label
from offramp.tools.bench.common.compare import NO_EXIT, OFFRAMP, SOURCE, Row, compare, samples_run
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)
from offramp.tools.zoo import small_models

BATCH_SIZES = (1, 8, 16)
ROUNDS = 5
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
_COMPILE = "import sys; from offramp.start import eecompile; sys.exit(eecompile())"


def main() -> None:
    """Train missing models, compile, measure, print, and optionally write JSON."""
    parser = make_parser(__doc__)
    small_models.add_arguments(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="number of repetitions of the comparison",
    )
    parser.add_argument("--compiled", action="store_true", help="keep existing bundles")
    options = parser.parse_args()
    check_outputs(options.json)
    models = [examine(name, options) for name in options.only]
    show(models)
    environment = describe_environment(seed=options.seed, threads=1, repeats=options.repeats)
    write_json(options.json, {"models": models, "environment": environment})


def examine(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model if it is not there, compile it, and measure it."""
    model = options.output / name / f"{name}.onnx"
    facts, made, dataset = compiled(
        model, lambda: small_models.make(name, options), keep=options.compiled
    )
    return facts | measure(made, dataset, options.repeats)


def compiled(
    model: Path, train: Callable[[], None], *flags: str, keep: bool
) -> tuple[dict[str, Any], Bundle, Dataset]:
    """Train a model if it is missing, and compile it with default flags.

    ``flags`` describe the model; the answer tokens of a decoder are known from its training. With
    ``keep`` an existing bundle is used unchanged. Return the facts of the model, its bundle, and
    test data.
    """
    folder, bundle = model.parent, model.with_suffix(".ee")
    if not (folder / "training.json").exists():
        train()
    facts: dict[str, Any] = json.loads((folder / "training.json").read_text())
    tokens = facts.get("answer_tokens", ())
    facts["cut_points"] = len(find_cuts(read_model(model, answer_tokens=tokens)).cuts)
    if tokens:
        flags = (*flags, "--answer-tokens", ",".join(map(str, tokens)))
    took = folder / "compile.json"
    if not (keep and bundle.exists()):
        write_json(took, compile_by_default(model, folder / "calibration.npz", bundle, *flags))
    facts["compile"] = json.loads(took.read_text())
    made = Bundle.open(bundle)
    facts["exits"] = exits_of(made)
    manifest = made.manifest
    dataset = read_dataset(folder / "test.npz", manifest.inputs, answer=manifest.answer)
    return facts, made, dataset


def compile_by_default(model: Path, data: Path, bundle: Path, *flags: str) -> dict[str, float]:
    """Run ``eecompile`` in its own process; return its time and memory.

    ``flags`` describe the model, such as ``--answer-tokens``, not how it is compiled.
    """
    arguments = [str(model), "--data", str(data), "--output", str(bundle), "--overwrite", *flags]
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", _COMPILE, *arguments])
    _, status, used = os.wait4(process.pid, 0)  # includes the memory of this process only
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(
            f"eecompile {model} ended with {process.returncode}; what it printed says why"
        )
    return {
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
    }


def exits_of(bundle: Bundle) -> dict[str, Any]:
    """Return built exits, exits in use, and the promise."""
    policy, manifest = bundle.policy, bundle.manifest
    active = {a.exit: a.threshold for a in policy.active}
    promise = policy.promise
    return {
        "built": len(manifest.exits),
        "in_use": {
            exit_label(exit_.index): {
                "after_segment": exit_.after_segment,
                "head": exit_.head.describe(),
                "agreement": exit_.agreement,
                "threshold": active[exit_.index],
            }
            for exit_ in manifest.exits
            if exit_.index in active
        },
        "predicted_savings": None if promise is None else promise.predicted_savings,
        "certify_errors": None if promise is None else promise.certify_errors,
        "certify_samples": None if promise is None else promise.certify_samples,
        "disturbed": list(bundle.profile().disturbed),
    }


def measure(
    bundle: Bundle, dataset: Dataset, repeats: int, sizes: Sequence[int] = BATCH_SIZES
) -> dict[str, Any]:
    """Compare several times; return figures by batch size, and the exits of samples."""
    backend = make_backend("auto", threads=1, max_rows=max(sizes), bundles=(bundle.path,))
    samples = len(dataset)
    try:
        runs = {
            name: [
                compare(
                    bundle,
                    backend,
                    dataset,
                    threads=1,
                    batch_sizes=sizes,
                    rounds=ROUNDS,
                    samples=samples,
                    clock=clock,
                )
                for _ in range(repeats)
            ]
            for name, clock in CLOCKS.items()
        }
    finally:
        backend.close()
    figures = {
        str(size): summarise(
            {name: [_of_size(run, size) for run in found] for name, found in runs.items()},
            samples_run(dataset, [size], rounds=ROUNDS, samples=samples),
        )
        for size in sizes
    }
    return {"backend": backend.name, "batches": figures}


def summarise(runs: Mapping[str, Sequence[Mapping[str, Row]]], samples: int) -> dict[str, Any]:
    """Summarise repeated comparisons at one batch size, with ``samples`` samples each.

    ``runs`` has, for each clock, the rows of each repetition by system.
    """
    first = runs["wall"][0]
    answered = first[OFFRAMP]
    errors = round((1 - answered.agreement) * samples)
    return {
        **{name: _times(found) for name, found in runs.items()},
        "samples": samples,
        "agreement": answered.agreement,
        "disagreement_at_most": upper_bound(errors, samples),
        "source_accuracy": first[SOURCE].accuracy,
        "accuracy": answered.accuracy,
        "exit_shares": answered.exit_shares,
    }


def _times(runs: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    def ratios(system: str, time_of: Callable[[Row], float]) -> dict[str, float]:
        found = [time_of(run[system]) / time_of(run[SOURCE]) for run in runs]
        return {"median": statistics.median(found), "least": min(found), "most": max(found)}

    source_ms = statistics.median(_busy(run[SOURCE]) for run in runs)
    return {
        "source_ms": source_ms * runs[0][SOURCE].batch_size,
        "busy": ratios(OFFRAMP, _busy),
        "busy_nothing_exits": ratios(NO_EXIT, _busy),
        "mean_latency": ratios(OFFRAMP, lambda row: row.mean_ms),
    }


def _busy(row: Row) -> float:
    return row.busy_ms_per_sample


def _of_size(rows: Sequence[Row], size: int) -> dict[str, Row]:
    return {row.system: row for row in rows if row.batch_size == size}


def show(models: Sequence[dict[str, Any]]) -> None:
    """Print one line for each model."""
    columns = ("model", "weights", "cuts", "in use", "source, ms", "busy at 1", "busy at 16",
               "wall clock", "agreement", "right", "compiled, s", "MiB")  # fmt: skip
    table = Table(title="Busy time relative to the unmodified model, MEASURED in CPU time")
    for title in columns:
        table.add_column(title, justify="left" if title == "model" else "right")
    for model in models:
        one, many = (model["batches"][str(size)] for size in (1, BATCH_SIZES[-1]))
        table.add_row(
            model["model"],
            f"{model['parameters']:,}",
            str(model["cut_points"]),
            str(len(model["exits"]["in_use"])),
            f"{many['cpu']['source_ms']:.3g}",
            _ratio(one["cpu"]["busy"]),
            _ratio(many["cpu"]["busy"]),
            _ratio(many["wall"]["busy"]),
            f"{many['agreement']:.2%}",
            f"{model['test_accuracy']:.1%}",
            str(model["compile"]["cpu_seconds"]),
            str(model["compile"]["peak_mib"]),
        )
    wide_console(140).print(table)


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['least']:.2f}–{found['most']:.2f})"


if __name__ == "__main__":
    main()
