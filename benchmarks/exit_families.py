"""Pooled heads, bridges, and the model trained with its exits, compared on one model.

    python -m benchmarks.exit_families MODEL.onnx --data calibration.npz --test test.npz
        --output demo/families [--ways pooled bridges both joint] [--samples 6000]
        [--repeats 3] [--json FILE]

Compiles the model once for each way, with no other flag than those that name it, and compares every
bundle with the unmodified model as ``benchmarks/trained_models.py`` does, on test data that neither
training nor compiling used: agreement, busy time and mean latency. Certified and predicted figures
are the bundle's own; the agreement of each exit is counted on the certify split. ``joint`` is
``--train joint`` with the default family; ``entropy`` and the other criteria also use that family.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from benchmarks.trained_models import compile_by_default, exits_of, measure
from rich.table import Table

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import read_dataset
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)

WAYS: Mapping[str, Sequence[str]] = {
    "pooled": ("--heads", "pooled"),
    "bridges": ("--heads", "bridges"),
    "both": ("--heads", "both"),
    "joint": ("--train", "joint"),
    "joint bridges": ("--heads", "bridges", "--train", "joint"),
    "joint labels": ("--train", "joint", "--teach", "labels"),
    "entropy": ("--criterion", "entropy"),
    "margin": ("--criterion", "margin"),
    "learned": ("--criterion", "learned"),
    "patience": ("--criterion", "patience"),
}
"""Flags of ``eecompile`` for each way."""
BATCH_SIZES = (1, 8)


def main() -> None:
    """Compile, measure, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="calibration data")
    parser.add_argument(
        "--test",
        type=Path,
        required=True,
        help="test data, used by neither training nor compiling",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["pooled", "bridges", "joint"])
    parser.add_argument(
        "--samples", type=int, help="number of calibration samples to use (default: all)"
    )
    parser.add_argument(
        "--test-samples", type=int, help="number of test samples to use (default: all)"
    )
    parser.add_argument(
        "--flags",
        nargs="*",
        default=[],
        help="further eecompile flags for all ways, such as task=pose",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="number of repetitions of the comparison",
    )
    options = parser.parse_args()
    check_outputs(options.json)
    options.output.mkdir(parents=True, exist_ok=True)
    data = part_of(options.data, options.samples, options.output / "calibration.npz")
    test = part_of(options.test, options.test_samples, options.output / "test.npz")
    flags = [text for flag in options.flags for text in ("--" + flag).split("=", 1)]
    ways = {way: examine(way, data, test, flags, options) for way in options.ways}
    show(options.model.name, ways)
    environment = describe_environment(threads=1, repeats=options.repeats)
    found = {"model": options.model.name, "ways": ways, "environment": environment}
    write_json(options.json, found)


def part_of(data: Path, samples: int | None, target: Path) -> Path:
    """Write the first samples of some data, unless all are needed."""
    if samples is None:
        return data
    with np.load(data) as archive:
        np.savez(target, **{name: archive[name][:samples] for name in archive.files})
    return target


def examine(
    way: str, data: Path, test: Path, flags: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Compile a model in one way, and measure the bundle."""
    path = options.output / f"{way.replace(' ', '_')}.ee"
    took = compile_by_default(options.model, data, path, *flags, *WAYS[way])
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    agreement = {
        f"after {exit_.after_segment}: {exit_.head.describe()}": exit_.agreement
        for exit_ in manifest.exits
    }
    found = {
        "compile": took,
        "flags": [*flags, *WAYS[way]],
        "exits": exits_of(bundle) | {"agreement": agreement},
        "reason": manifest.precision_reason,
        "copy_is_used": manifest.is_cascade,
    }
    dataset = read_dataset(test, manifest.inputs, answer=manifest.answer)
    return found | measure(bundle, dataset, options.repeats, BATCH_SIZES)


def show(model: str, ways: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each way."""
    table = Table(title=f"{model}: times relative to the unmodified model, MEASURED in CPU time")
    columns = ("way", "exits in use", "best agrees", "saves, predicted", "busy at 1", "busy at 8",
               "latency at 8", "agreement", "compiled, s")  # fmt: skip
    for title in columns:
        table.add_column(title, justify="left" if title == "way" else "right")
    for way, found in ways.items():
        one, many = (found["batches"][str(size)] for size in BATCH_SIZES)
        exits = found["exits"]
        saved = exits["predicted_savings"]
        table.add_row(
            way + (" (copy)" if found["copy_is_used"] else ""),
            f"{len(exits['in_use'])} of {exits['built']}",
            f"{max(exits['agreement'].values(), default=0):.1%}",
            "–" if saved is None else f"{saved:.1%}",
            *(_ratio(batch["cpu"]["busy"]) for batch in (one, many)),
            _ratio(many["cpu"]["mean_latency"]),
            f"{many['agreement']:.2%}",
            str(found["compile"]["seconds"]),
        )
    wide_console(140).print(table)


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['least']:.2f}–{found['most']:.2f})"


if __name__ == "__main__":
    main()
