"""Gains of tasks beyond one class with default flags: pixels, key points, words, labels, values.

    python -m benchmarks.tasks --output demo/tasks [--only tokens …] [--images DIR]
        [--repeats 3] [--json FILE]

Trains models that are not in ``--output`` yet (:mod:`offramp.tools.zoo.task_models`, about five
minutes each on a core), compiles each model with no flag but the task of ``pose`` and ``values``,
which the compiler cannot detect, and measures it as in ``benchmarks/trained_models.py``. An answer
agrees as the bundle defines it: 95 % of the pixels, 98 % of the words, all key points within 5 % of
the map, all labels, or all values within a tenth of their standard deviation. How often the promise
is broken on new data is counted as in ``benchmarks/promise.py``. ``mean_latency`` is from the start
of a batch until a sample's own answer is available, ``busy`` until the last one is, both relative
to the unmodified model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from benchmarks.promise import resample
from benchmarks.trained_models import compiled, measure
from rich.table import Table

from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)
from offramp.tools.zoo import task_models

BATCH_SIZES = (1, 8, 16)
FLAGS: Mapping[str, Sequence[str]] = {
    "pose": ("--task", "pose"),
    "values": ("--task", "regression"),
}
"""Flags of ``eecompile`` for tasks that it cannot detect."""
DRAWS = 1_000
"""Number of times that the certify split is drawn again."""


def main() -> None:
    """Train missing models, compile, measure, print, and optionally write JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    tasks = list(task_models.TASKS)
    parser.add_argument("--only", nargs="+", choices=tasks, default=tasks, metavar="TASK")
    task_models.add_arguments(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
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
    folder = options.output / name
    training = argparse.Namespace(**{**vars(options), "output": folder})
    facts, made, dataset = compiled(
        folder / "model.onnx",
        lambda: task_models.make(name, training),
        *FLAGS.get(name, ()),
        keep=options.compiled,
    )
    facts["agrees_if"] = made.manifest.answer.task.describe()
    if made.policy.promise is not None:
        facts["promise"] = resample(made.path, folder / "test.npz", draws=DRAWS, seed=options.seed)
    return facts | measure(made, dataset, options.repeats, BATCH_SIZES)


def show(models: Sequence[dict[str, Any]]) -> None:
    """Print a line a model and batch size."""
    table = Table(title="Times relative to the unmodified model, MEASURED in CPU time")
    columns = ("model", "batch", "source, ms", "mean latency", "busy", "busy, nothing exits",
               "latency by the wall", "agreement", "answered at the end")  # fmt: skip
    for title in columns:
        table.add_column(title, justify="left" if title == "model" else "right")
    for model in models:
        for size, found in model["batches"].items():
            table.add_row(
                model["model"],
                size,
                f"{found['cpu']['source_ms']:.3g}",
                *(_ratio(found["cpu"][name]) for name in ("mean_latency", "busy")),
                _ratio(found["cpu"]["busy_nothing_exits"]),
                _ratio(found["wall"]["mean_latency"]),
                f"{found['agreement']:.2%}",
                f"{found['exit_shares']['final']:.1%}",
            )
    wide_console(140).print(table)


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['least']:.2f}–{found['most']:.2f})"


if __name__ == "__main__":
    main()
