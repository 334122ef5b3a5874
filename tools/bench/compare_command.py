"""``eebench compare``: a bundle against its source model, batch by batch, in one process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from offramp.bundle import Bundle
from offramp.bundle.schema.policy import Promise
from offramp.calibration.data.dataset import Dataset, read_samples
from offramp.certify.binomial import upper_bound
from offramp.compiler.data.data_flags import add_data_arguments, source_of
from offramp.engine.backends import BACKENDS, make_backend
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.backends.factory import CPU_RUNTIMES
from offramp.engine.stages.plan import Plan
from offramp.engine.tensorrt.probe import parse_device
from offramp.tools.bench.common.bench_flags import COUNT, positives
from offramp.tools.bench.common.compare import (
    OFFRAMP,
    SOURCE,
    AdditionalRunner,
    Row,
    baseline_of,
    compare,
    describe_also,
    parse_also,
    samples_run,
)
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    figure_table,
    warn_of_calibration_data,
    write_json,
)

SHORT: Final = (
    *("--data", "--batch-sizes", "--rounds", "--samples", "--threads", "--backend"),
    *("--also", "--json"),
)
_EXAMPLES: Final = {
    "eebench compare m.ee --data test.npz": "",
    "eebench compare m.ee --data test.npz --also small=s.onnx": "",
}
_NORMAL_95: Final = 1.96
"""95 % of a normal distribution are within this number of standard deviations of the mean."""
_FEW: Final = 5
"""Below this number of differing answers, the normal distribution is no approximation."""


class AdditionalPlans(NamedTuple):
    """Plans of a bundle's exits that are measured next to its own, and their data."""

    measured: Dataset
    """Part of the data that is measured; the rest was used to tune the plans."""
    plans: Mapping[str, Plan] = MappingProxyType({})
    """Additional plans to compare, by name."""
    facts: Mapping[str, object] = MappingProxyType({})
    """Facts about each plan for the JSON document, by name."""
    notes: Sequence[str] = ()
    """Remarks to print for the user."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the result of ``add_subparsers`` of eebench's parser."""
    command = commands.add_parser(
        "compare",
        help="compare a bundle with its source model, in one process",
        description="Run the source model, the bundle, and the bundle with no exit in use on the\n"
        "same batches, in turn, and compare. All figures are measured here and now.",
        short=SHORT,
        examples=_EXAMPLES,
    )
    add_arguments(command)
    command.set_defaults(run=run)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of a comparison that :func:`run` runs."""
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder that eecompile wrote")
    add_measuring(command)
    command.add_argument_group("further systems, on the CPU").add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=FILE.onnx",
        help="another model to measure, with the same inputs and an answer of the same name and "
        "shape, such as an exported bundle or a quantised model; may be repeated",
    )
    add_data_arguments(command)
    add = command.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")


def add_measuring(command: argparse.ArgumentParser) -> None:
    """Add the options that define what is measured, how often, and on which data."""
    add = command.add_argument_group("measuring").add_argument
    add(
        "--data",
        required=True,
        metavar="DATA",
        help="test data; labels are optional",
    )
    add(
        "--batch-sizes",
        type=positives,
        default="1,4,8,16,32",
        metavar="N,N,…",
        help="batch sizes to measure",
    )
    add("--rounds", default=5, **COUNT, help="number of rounds; every figure is a median over them")
    add("--samples", default=4000, **COUNT, help="largest number of samples to use, per batch size")
    add("--threads", default=1, **COUNT, help="CPU threads of each running graph")
    add(
        "--backend",
        metavar="NAME",
        choices=BACKENDS,
        default="auto",
        help=f"{', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}",
    )
    add(
        "--device",
        default="cuda:0",
        metavar="cuda:N",
        help="GPU for the backends tensorrt and cuda",
    )
    add(
        "--no-cuda-graphs",
        dest="graphs",
        action="store_false",
        help="launch each kernel separately on a GPU",
    )


def run(
    options: argparse.Namespace,
    further: Callable[[Bundle, Dataset], AdditionalPlans] | None = None,
) -> int:
    """Compare, with ``further`` plans of the bundle's exits; print, and return the exit status."""
    console = Console()
    check_outputs(options.json)
    also = parse_also(options.also)
    bundle = open_runnable(options.bundle)
    dataset = read_samples(source_of(options.data, options), bundle.manifest)
    backend = make_backend(
        options.backend,
        threads=options.threads,
        devices=(parse_device(options.device),),
        graphs=options.graphs,
        max_rows=max(options.batch_sizes),
        bundles=(options.bundle,),
    )
    if (also or further) and backend.name not in CPU_RUNTIMES:
        backend.close()
        raise ValueError(
            f"{'--also' if also else '--method'} runs on the CPU, the bundle on {backend.name}, so "
            "they cannot be compared; add --backend onnxruntime"
        )
    others = {model.name: AdditionalRunner(model, bundle, options.threads) for model in also}
    other = AdditionalPlans(dataset) if further is None else further(bundle, dataset)
    measured = other.measured
    total = samples_run(
        measured, options.batch_sizes, rounds=options.rounds, samples=options.samples
    )
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("Compare", total=total)
        rows = compare(
            bundle,
            backend,
            measured,
            threads=options.threads,
            batch_sizes=options.batch_sizes,
            rounds=options.rounds,
            samples=options.samples,
            others=others,
            methods=other.plans,
            progress=lambda amount: bars.advance(task, amount),
        )
    backend.close()
    same = dataset.sha256 == bundle.manifest.calibration.data_sha256
    if same:
        warn_of_calibration_data(console)
    baseline = baseline_of(backend, options.threads)
    environment = describe_environment(
        data_is_calibration_data=same,
        backend=backend.name,
        baseline=baseline,
        threads=options.threads,
        rounds=options.rounds,
        data=Path(options.data).name,
        also=describe_also(also),
        methods=dict(other.facts),
    )
    title = f"{options.bundle}: measured on {backend.name}"
    print_rows(console, rows, title=title, baseline=baseline)
    if promise := bundle.policy.promise:
        console.print(chance_of(promise, rows, min(options.samples, len(measured))), soft_wrap=True)
    for note in other.notes:
        console.print(note, soft_wrap=True)
    document = {"rows": [asdict(row) for row in rows], "environment": environment}
    write_json(options.json, document)
    return 0


def chance_of(promise: Promise, rows: Sequence[Row], samples: int) -> str:
    """Return how far, with 95 % probability, the measured agreement is from that of all samples."""
    agreement = min(row.agreement for row in rows if row.system == OFFRAMP)
    differ = round((1 - agreement) * samples)
    if differ < _FEW:
        most = upper_bound(differ, samples, 0.95)
        chance = (
            f"{differ} of {samples:,} samples were answered differently; of all samples like them, "
            f"up to {most:.1%} may be"
        )
    else:
        points = 100 * _NORMAL_95 * math.sqrt(agreement * (1 - agreement) / samples)
        chance = f"On {samples:,} samples chance moves agreement by ±{points:.1f} points"
    return (
        f"{chance}. The promise, "
        f"disagreement of at most {promise.max_disagreement:.2g}, is about all samples that are "
        "like those of calibration."
    )


def print_rows(console: Console, rows: Sequence[Row], *, title: str, baseline: str) -> None:
    """Print rows of :func:`compare`, each with its ratio to the source model at that batch size."""
    table = figure_table(
        title,
        f"Milliseconds, and ×ratio to {SOURCE} ({baseline}). mean to p99: from the start of a "
        "batch to a sample's answer. busy: time of the batch, divided by its samples. "
        "agree: answers like the source model's; right: like the labels.",
        ("batch", "system", "mean", "median", "p95", "p99", "busy", "agree", "right"),
        names=("system",),
    )
    source = rows[0]
    for row in rows:
        if row.system == SOURCE:
            source = row
        figures = [
            _with_ratio(getattr(row, name), None if row is source else getattr(source, name))
            for name in ("mean_ms", "median_ms", "p95_ms", "p99_ms", "busy_ms_per_sample")
        ]
        accuracy = "–" if row.accuracy is None else f"{row.accuracy:.2%}"
        style = "bold" if row.system == OFFRAMP else None
        batch = str(row.batch_size) if row is source else ""
        table.add_row(batch, row.system, *figures, f"{row.agreement:.2%}", accuracy, style=style)
    console.print(table)
    for row in rows:
        if row.system == OFFRAMP and row.batch_size == rows[-1].batch_size:
            shares = ", ".join(f"{label} {share:.1%}" for label, share in row.exit_shares.items())
            console.print(f"Answered at: {shares}", soft_wrap=True)


def _with_ratio(value: float, base: float | None) -> str:
    return f"{value:.3g}" if not base else f"{value:.3g}\n×{value / base:.2f}"
