"""``python -m benchmarks.frontier``: float32, int8, exits and both, at several bounds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from benchmarks.frontier.measurement import measure_frontier
from benchmarks.frontier.page import write_page
from benchmarks.frontier.policies import BundlePair, choose_policies, how_to_make
from benchmarks.frontier.report import WIDTH, print_frontier, to_json
from rich.console import Console
from rich.progress import Progress

from offramp.calibration.data.dataset import read_samples
from offramp.commands.parser import LayeredParser
from offramp.compiler.data.data_flags import add_data_arguments, source_of
from offramp.engine.backends import Backend, make_backend
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.backends.factory import CPU
from offramp.engine.tensorrt.probe import parse_device
from offramp.tools.bench.cli import add_own_code, run_command
from offramp.tools.bench.common.bench_flags import shares
from offramp.tools.bench.common.compare import baseline_of, samples_run
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    warn_of_calibration_data,
    wide_console,
    write_json,
)
from offramp.tools.bench.compare_command import add_measuring

_BOUNDS = (0.005, 0.01, 0.02)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the frontier; return the exit status."""
    return run_command(make_parser(), argv)


def make_parser() -> LayeredParser:
    """Make the parser of the command line."""
    parser = LayeredParser(
        prog="python -m benchmarks.frontier",
        description="Measure the source model, its int8 copy, exits, and both, certified again at "
        "several bounds\nfrom the records of two bundles, in the same rounds, on the CPU.",
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder that eecompile wrote")
    add(
        "other",
        nargs="?",
        type=Path,
        metavar="OTHER",
        help="another bundle of the model: fp32 next to int8, or the other way round",
    )
    add_measuring(parser)
    add = parser.add_argument_group("promise").add_argument
    add(
        "--bounds",
        type=shares,
        default=_BOUNDS,
        metavar="SHARE,…",
        help="bounds of disagreement to certify (default: 0.005,0.01,0.02)",
    )
    add(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="confidence level of each certificate (default: 0.95)",
    )
    add("--seed", type=int, default=0, metavar="K", help="seed of the samples' order")
    add_data_arguments(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")
    add("--html", type=Path, metavar="FILE", help="HTML file to write a page with plots to")
    parser.set_defaults(run=run)
    add_own_code(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Certify, measure, and print the report; return the exit status."""
    if not 0 < options.confidence < 1:
        raise ValueError(
            f"--confidence {options.confidence:g}: expected a share between 0 and 1, as 0.95"
        )
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed}: expected a whole number of at least 0")
    check_outputs(options.json, options.html)
    bundle = open_runnable(options.bundle)
    if options.other is None:
        raise ValueError(f"OTHER is missing, another bundle of the model. {how_to_make(bundle)}")
    pair = BundlePair.of(bundle, open_runnable(options.other))
    dataset = read_samples(source_of(options.data, options), bundle.manifest)
    total = samples_run(
        dataset, options.batch_sizes, rounds=options.rounds, samples=options.samples
    )
    backend = _cpu_backend(options, pair)
    policies = choose_policies(pair, options.bounds, options.confidence)
    order = np.random.default_rng(options.seed).permutation(len(dataset))
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("Compare", total=total)
        frontier = measure_frontier(
            pair,
            policies,
            backend,
            dataset.subset(order),
            threads=options.threads,
            batch_sizes=options.batch_sizes,
            rounds=options.rounds,
            samples=options.samples,
            progress=lambda amount: bars.advance(task, amount),
        )
    backend.close()
    baseline = baseline_of(backend, options.threads)
    calibrated_on = [one.manifest.calibration.data_sha256 for one in pair.bundles]
    source = bundle.manifest.source
    environment = describe_environment(
        data_is_calibration_data=dataset.sha256 in calibrated_on,
        same_calibration_data=len(set(calibrated_on)) == 1,
        backend=backend.name,
        baseline=baseline,
        threads=options.threads,
        rounds=options.rounds,
        data=Path(options.data).name,
        seed=options.seed,
        bounds=list(options.bounds),
        confidence=options.confidence,
        bundles={one.manifest.precision: one.path.name for one in pair.bundles},
        source=source.original_name,
        source_sha256=source.original_sha256,
    )
    console = wide_console(WIDTH)
    _warn(console, environment)
    print_frontier(
        console,
        frontier,
        title=f"{source.original_name}: measured on {backend.name}",
        baseline=f"source model ({baseline})",
        confidence_level=options.confidence,
    )
    write_json(options.json, {**to_json(frontier), "environment": environment})
    if options.html is not None:
        title = source.original_name
        write_page(options.html, title=title, frontier=frontier, environment=environment)
    return 0


def _cpu_backend(options: argparse.Namespace, pair: BundlePair) -> Backend:
    backend = make_backend(
        "onnxruntime" if options.backend == "auto" else options.backend,
        threads=options.threads,
        devices=(parse_device(options.device),),
        graphs=options.graphs,
        max_rows=max(options.batch_sizes),
        bundles=[bundle.path for bundle in pair.bundles],
    )
    if backend.name != CPU:
        backend.close()
        raise ValueError(
            f"the frontier is measured on the CPU, for which int8 copies are chosen, not on "
            f"{backend.name}; add --backend onnxruntime"
        )
    return backend


def _warn(console: Console, environment: Mapping[str, object]) -> None:
    if environment["data_is_calibration_data"]:
        warn_of_calibration_data(console)
    if not environment["same_calibration_data"]:
        console.print(
            "[bold]The two bundles were calibrated on different data:[/] what they bring may "
            "differ for that reason too.",
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
