"""``eebench compare``: a bundle against its source model, batch by batch, in one process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from offramp.bundle.schema.policy import Promise
from offramp.calibration.data.dataset import read_samples
from offramp.commands.combinations import Illegal
from offramp.compiler.data.arguments import add_data_arguments, source_of
from offramp.engine.backends import BACKENDS, make_backend
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.backends.factory import CPU_RUNTIMES
from offramp.engine.tensorrt.probe import parse_device
from offramp.tools.bench import frontier_command
from offramp.tools.bench.common.arguments import COUNT, positives
from offramp.tools.bench.common.compare import (
    OFFRAMP,
    SOURCE,
    AlsoRunner,
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
from offramp.tools.bench.methods import TunedMethod, parse_methods, tune_methods

SHORT: Final = (
    *("--data", "--batch-sizes", "--rounds", "--samples", "--threads", "--backend"),
    *("--precision", "--also", "--json"),
)
_EXAMPLES: Final = {
    "eebench compare m.ee --data test.npz": "",
    "eebench compare m.ee --data test.npz --also small=s.onnx": "",
}
_FRONTIER: Final = (
    "it is for comparing with an int8 copy; leave it out, or add --precision, which says how to "
    "make one"
)
_NORMAL_95: Final = 1.96
"""Standard deviations within which 95 % of a normal distribution lie."""
ILLEGAL: Final = (
    *(
        Illegal(option=option, without="--precision", why=_FRONTIER)
        for option in ("--bounds", "--confidence", "--seed", "--html")
    ),
    *(
        Illegal(
            option=option,
            beside="--precision",
            why="that comparison is of the two bundles alone; leave one of them out",
        )
        for option in ("--also", "--method")
    ),
    Illegal(
        option="--method-data",
        without="--method",
        why="it tunes methods; leave it out, or add --method branchynet,deebert",
    ),
    Illegal(
        option="--method-seed",
        without="--method-data",
        why="it says how those data were split; leave it out, or add --method-data",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to the result of ``add_subparsers`` of eebench's parser."""
    command = commands.add_parser(
        "compare",
        help="a bundle against its source model, in one process",
        description="Run the source model, the bundle, and the bundle with no exit in use on the\n"
        "same batches, in turn, and compare. All figures are measured here and now.",
        short=SHORT,
        examples=_EXAMPLES,
        illegal=ILLEGAL,
    )
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder that eecompile wrote")
    _add_measuring(command.add_argument_group("measuring").add_argument)
    _add_others(command.add_argument_group("further systems, on the CPU").add_argument)
    frontier_command.add_arguments(command)
    add_data_arguments(command)
    add = command.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--html", type=Path, metavar="FILE", help="with --precision: write a page with plots there")
    command.set_defaults(run=run)


def _add_measuring(add: Callable[..., object]) -> None:
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
    add("--rounds", default=5, **COUNT, help="figures are medians of these")
    add("--samples", default=4000, **COUNT, help="most samples of the data, per batch size")
    add("--threads", default=1, **COUNT, help="CPU threads of each running graph")
    add(
        "--backend",
        metavar="NAME",
        choices=BACKENDS,
        default="auto",
        help=f"{', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}",
    )
    add("--device", default="cuda:0", metavar="cuda:N", help="GPU of tensorrt and cuda")
    add(
        "--no-cuda-graphs",
        dest="graphs",
        action="store_false",
        help="launch each kernel by itself on a GPU",
    )


def _add_others(add: Callable[..., object]) -> None:
    add(
        "--also",
        action="append",
        default=[],
        metavar="NAME=FILE.onnx",
        help="another model to measure, with the same inputs and an answer of the same name and "
        "shape, such as an exported bundle or a quantised model; may be repeated",
    )
    add(
        "--method",
        action="append",
        default=[],
        metavar="NAME,…",
        help="published methods to measure on the bundle's own exits: branchynet (entropy, a "
        "threshold for each exit), deebert (entropy, one threshold), pabee (exits in a row that "
        "agree); may be repeated",
    )
    add(
        "--method-data",
        metavar="DATA",
        help="data that the bundle was compiled with: branchynet and deebert are tuned on the "
        "samples that the bundle was tuned on, and all of --data is measured",
    )
    add("--method-seed", type=int, default=0, metavar="K", help="--seed of that compilation")


def run(options: argparse.Namespace) -> int:
    """Compare, and print the report; return the exit status."""
    if options.precision is not None:
        return frontier_command.run(options)
    console = Console()
    check_outputs(options.json)
    also, named = parse_also(options.also), parse_methods(options.method)
    bundle = open_runnable(options.bundle)
    dataset = read_samples(source_of(options.data, options), bundle.manifest)
    compiled_with = None
    if options.method_data is not None:
        compiled_with = read_samples(source_of(options.method_data, options), bundle.manifest)
    backend = make_backend(
        options.backend,
        threads=options.threads,
        device=parse_device(options.device),
        graphs=options.graphs,
        max_rows=max(options.batch_sizes),
        bundles=(options.bundle,),
    )
    if (also or named) and backend.name not in CPU_RUNTIMES:
        backend.close()
        raise ValueError(
            f"{'--also' if also else '--method'} runs on the CPU, the bundle on {backend.name}: "
            "not to be compared; add --backend onnxruntime"
        )
    others = {model.name: AlsoRunner(model, bundle, options.threads) for model in also}
    methods, measured = tune_methods(
        named,
        bundle,
        dataset,
        threads=options.threads,
        compiled_with=compiled_with,
        seed=options.method_seed,
    )
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
            methods={method.name: method.plan for method in methods},
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
        methods={m.name: _described(m) for m in methods},
    )
    title = f"{options.bundle}: measured on {backend.name}"
    print_rows(console, rows, title=title, baseline=baseline)
    if promise := bundle.policy.promise:
        console.print(chance_of(promise, rows, min(options.samples, len(measured))), soft_wrap=True)
    for method in methods:
        console.print(method.describe(), soft_wrap=True)
    if methods:
        console.print(f"{', '.join(named)}: no certificate; what holds holds of what tuned them.")
    document = {"rows": [asdict(row) for row in rows], "environment": environment}
    write_json(options.json, document)
    return 0


def _described(method: TunedMethod) -> dict[str, Any]:
    """Say how a method was tuned, for the JSON document."""
    return {
        "thresholds": method.thresholds,
        "tuned_on": method.tuned_on,
        "disagreement_there": method.disagreement,
        "predicted_savings_there": method.predicted_savings,
    }


def chance_of(promise: Promise, rows: Sequence[Row], samples: int) -> str:
    """Say how far chance moves the agreement that is measured on some samples, at 95 %."""
    agreement = min(row.agreement for row in rows if row.system == OFFRAMP)
    points = 100 * _NORMAL_95 * math.sqrt(agreement * (1 - agreement) / samples)
    return (
        f"On {samples:,} samples chance moves agreement by ±{points:.1f} points. The promise, "
        f"disagreement of at most {promise.max_disagreement:.2g}, is about all samples that are "
        "like those of calibration."
    )


def print_rows(console: Console, rows: Sequence[Row], *, title: str, baseline: str) -> None:
    """Print rows of :func:`compare`, each with its ratio to the source model at that batch size."""
    table = figure_table(
        title,
        f"Milliseconds per sample, and ×ratio to {SOURCE} ({baseline}). busy: time the machine was "
        "busy per sample. agree: answers like the source model's; right: like the labels.",
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
