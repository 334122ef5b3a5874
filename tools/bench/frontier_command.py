"""``eebench compare --precision``: float32, int8, exits and both on one page, at several bounds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from offramp.calibration.data.dataset import read_samples
from offramp.compiler.data.arguments import source_of
from offramp.engine.backends import Backend, make_backend
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.backends.factory import CPU
from offramp.engine.tensorrt.probe import parse_device
from offramp.tools.bench.common.arguments import shares
from offramp.tools.bench.common.compare import baseline_of, samples_run
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    warn_of_calibration_data,
    wide_console,
    write_json,
)
from offramp.tools.bench.frontier.measurement import measure_frontier
from offramp.tools.bench.frontier.page import write_page
from offramp.tools.bench.frontier.policies import BundlePair, choose_policies, how_to_make
from offramp.tools.bench.frontier.report import WIDTH, print_frontier, to_json

_BOUNDS = (0.005, 0.01, 0.02)
_CONFIDENCE_LEVEL = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare`` for the frontier."""
    add = parser.add_argument_group(
        "comparison of precisions, on the CPU",
        "The source model, its int8 copy, exits, and both, certified again at several bounds\n"
        "from what the bundles keep, and measured in the same rounds.",
    ).add_argument
    # There are no defaults here: they are filled in where the frontier is asked for.
    add(
        "--precision",
        nargs="?",
        const="",
        metavar="OTHER",
        help="another bundle of the model: fp32 next to int8, or the other way round",
    )
    add(
        "--bounds",
        type=shares,
        metavar="SHARE,…",
        help="bounds of disagreement to certify (default: 0.005,0.01,0.02)",
    )
    add(
        "--confidence",
        type=float,
        metavar="SHARE",
        help="confidence level of each certificate (default: 0.95)",
    )
    add(
        "--seed",
        type=int,
        metavar="K",
        help="seed of the order in which samples are taken (default: 0)",
    )


def run(options: argparse.Namespace) -> int:
    """Certify, measure, and print the report; return the exit status."""
    asked = _Asked.of(options)
    check_outputs(options.json, options.html)
    bundle = open_runnable(options.bundle)
    if not options.precision:
        raise ValueError(f"--precision needs another bundle of the model. {how_to_make(bundle)}")
    pair = BundlePair.of(bundle, open_runnable(options.precision))
    dataset = read_samples(source_of(options.data, options), bundle.manifest)
    total = samples_run(
        dataset, options.batch_sizes, rounds=options.rounds, samples=options.samples
    )
    backend = _cpu_backend(options, pair)
    policies = choose_policies(pair, asked.bounds, asked.confidence_level)
    order = np.random.default_rng(asked.seed).permutation(len(dataset))
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
        seed=asked.seed,
        bounds=list(asked.bounds),
        confidence=asked.confidence_level,
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
        confidence_level=asked.confidence_level,
    )
    write_json(options.json, {**to_json(frontier), "environment": environment})
    if options.html is not None:
        title = source.original_name
        write_page(options.html, title=title, frontier=frontier, environment=environment)
    return 0


class _Asked(NamedTuple):
    """What was asked for, with the defaults filled in."""

    bounds: tuple[float, ...]
    confidence_level: float
    seed: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Asked:
        """Check it; ValueError where a value makes no sense."""
        level = _CONFIDENCE_LEVEL if options.confidence is None else options.confidence
        seed = options.seed or 0
        if not 0 < level < 1:
            raise ValueError(f"--confidence {level:g}: expected a share between 0 and 1, as 0.95")
        if seed < 0:
            raise ValueError(f"--seed {seed}: expected a whole number of at least 0")
        return cls(options.bounds or _BOUNDS, level, seed)


def _cpu_backend(options: argparse.Namespace, pair: BundlePair) -> Backend:
    backend = make_backend(
        "onnxruntime" if options.backend == "auto" else options.backend,
        threads=options.threads,
        device=parse_device(options.device),
        graphs=options.graphs,
        max_rows=max(options.batch_sizes),
        bundles=[bundle.path for bundle in pair.bundles],
    )
    if backend.name != CPU:
        backend.close()
        raise ValueError(
            f"--precision compares on the CPU, for which int8 copies are chosen, not on "
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
