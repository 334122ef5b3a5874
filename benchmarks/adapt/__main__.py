"""``python -m benchmarks.adapt``: controllers while the distribution of samples shifts."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.adapt.contenders import KINDS, ControllerInputs, contenders_of, make_contender
from benchmarks.adapt.corruptions import KINDS as CORRUPTIONS
from benchmarks.adapt.corruptions import WORST
from benchmarks.adapt.page import write_page
from benchmarks.adapt.replay import ReplaySettings, replay
from benchmarks.adapt.report import (
    WIDTH,
    Comparison,
    ControllerRun,
    print_comparison,
    to_json,
)
from benchmarks.adapt.scenarios import (
    SCENARIOS,
    ScenarioData,
    ScenarioSettings,
    answering,
    scenarios_of,
)
from benchmarks.adapt.scores import course, hindsight, score
from benchmarks.adapt.sequence import Population, SampleSequence, draw
from rich.console import Console
from rich.progress import Progress

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import Dataset, read_samples
from offramp.commands.parser import LayeredParser
from offramp.compiler.data.data_flags import add_data_arguments, source_of
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.cli import add_own_code, run_command
from offramp.tools.bench.common.bench_flags import COUNT, SHARE
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    wide_console,
    write_json,
)

_DESCRIPTION: Final = """\
Serve the same sequence of samples under several controllers, and compare how
often answers were the source model's, and how much compute was saved. The model
answers each sample once, at every exit; then the controllers are driven on
these answers, in batches instead of time. Agreement is measured; the cost of
answers is predicted from the bundle's profile. The samples of a segment are
drawn at random from the data, with replacement, so that the long-run
disagreement of a policy is known.
"""
SHORT: Final = (
    *("--data", "--scenario", "--controllers", "--samples", "--max-disagreement"),
    *("--json", "--html"),
)
_EXAMPLES: Final = {
    "python -m benchmarks.adapt m.ee --data test.npz": "all scenarios",
    "python -m benchmarks.adapt m.ee --data test.npz --scenario abrupt": "one of them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    return run_command(make_parser(), argv)


def make_parser() -> LayeredParser:
    """Make the parser of the command line."""
    parser = LayeredParser(
        prog="python -m benchmarks.adapt",
        description=_DESCRIPTION,
        short=SHORT,
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder that eecompile wrote")
    add(
        "--data",
        action="append",
        required=True,
        metavar="DATA",
        help=(
            "test data that the compiler did not use, labels optional; the scenario "
            "domain needs two or more"
        ),
    )
    add(
        "--scenario",
        default="all",
        metavar="NAME,…",
        help=f"{', '.join(SCENARIOS)} (default: all that the data allow)",
    )
    add(
        "--controllers",
        default="all",
        metavar="NAME,…",
        help="controllers to compare, see --help-all",
    )
    _add_sequence(parser.add_argument_group("sequence"))
    _add_serving(parser.add_argument_group("serving"))
    output = parser.add_argument_group("output").add_argument
    output("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")
    output("--html", type=Path, metavar="FILE", help="HTML file to write a page with plots to")
    add_data_arguments(parser)
    described = {name: s.description for name, s in SCENARIOS.items()}
    parser.add_argument_group("scenarios", "\n".join(_columns(described)))
    described = {name: f"{k.description} ({k.mode.value} mode)" for name, k in KINDS.items()}
    parser.add_argument_group("controllers", "\n".join(_columns(described)))
    parser.set_defaults(run=run)
    add_own_code(parser)
    return parser


def _columns(described: Mapping[str, str]) -> Iterator[str]:
    for name, text in described.items():
        first, *rest = textwrap.wrap(text, 57)
        yield f"{name:19}{first}"
        yield from (f"{'':19}{line}" for line in rest)


def _add_sequence(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--samples", default=8000, **COUNT, help="number of samples in each segment of a scenario")
    add(
        "--corruption",
        metavar="KIND",
        choices=CORRUPTIONS,
        default="noise",
        help=f"corruption of images: {', '.join(CORRUPTIONS)}",
    )
    add(
        "--severity",
        type=int,
        metavar="K",
        choices=range(1, WORST + 1),
        default=3,
        help=f"severity of abrupt, and the last one of corruption, 1 to {WORST}",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="K",
        help="seed of samples, corruptions and audits",
    )


def _add_serving(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-disagreement",
        **SHARE,
        help="bound of disagreement (default: the bundle's promise, or 0.01)",
    )
    add("--confidence", default=0.95, **SHARE, help="confidence level of certificates")
    add(
        "--audit-budget",
        default=0.05,
        **SHARE,
        help="largest share of all compute that audits may take",
    )
    add(
        "--ramp-budget",
        **SHARE,
        help=(
            "largest time that all exits in use may add to the whole model, as a "
            "share (default: 0.02 in release mode, as Apparate publishes it, else "
            "what the bundle's own exits add)"
        ),
    )
    add("--batch-size", default=32, **COUNT, help="number of samples in a batch")
    add(
        "--feedback-delay",
        type=int,
        default=2,
        metavar="N",
        help="batches that start before a controller learns the results of one",
    )
    add(
        "--rate",
        type=float,
        default=2000.0,
        metavar="R",
        help=(
            "assumed samples per second: converts the run time of a tuning into "
            "samples (default: 2000)"
        ),
    )
    add(
        "--tuning-delay",
        type=int,
        metavar="N",
        help=(
            "number of samples until a tuning's result arrives; with it, a seed "
            "always gives the same figures (default: computed from the run time)"
        ),
    )
    add("--threads", default=1, **COUNT, help="CPU threads that record the answers")


def run(options: argparse.Namespace) -> int:
    """Compare, and print the report; return the exit status."""
    check_outputs(options.json, options.html)
    kinds = contenders_of(_names(options.controllers))
    bundle = open_runnable(options.bundle)
    workplace = _workplace(bundle, options)
    settings = _replay_settings(options)
    datasets = _datasets(bundle, options)
    console = wide_console(WIDTH)
    _warn(console, bundle, datasets)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        comparisons = [
            _compare(sequence, list(kinds), workplace, settings)
            for sequence in _sequences(bundle, datasets, options, bars)
        ]
    for comparison in comparisons:
        print_comparison(console, comparison, max_disagreement=workplace.max_disagreement)
    _write(comparisons, workplace, options)
    return 0


def _compare(
    sequence: SampleSequence,
    names: list[str],
    workplace: ControllerInputs,
    settings: ReplaySettings,
) -> Comparison:
    """Serve a sequence under one controller after another."""
    bound, runs = workplace.max_disagreement, []
    for name in names:
        contender = make_contender(name, workplace)
        trace = replay(sequence, contender, workplace.costs, settings)
        runs.append(
            ControllerRun(
                contender=contender,
                trace=trace,
                score=score(sequence, trace, max_disagreement=bound),
                course=course(sequence, trace),
            )
        )
    in_use = [a.exit for a in workplace.bundle.policy.active]
    best = hindsight(sequence, workplace.costs, in_use, bound) if in_use else ()
    return Comparison(sequence=sequence, runs=tuple(runs), hindsight=best)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _workplace(bundle: Bundle, options: argparse.Namespace) -> ControllerInputs:
    promise = bundle.policy.promise
    constraint = options.max_disagreement
    if constraint is None:
        constraint = promise.max_disagreement if promise else 0.01
    for name, value in (("max-disagreement", constraint), ("confidence", options.confidence)):
        if value >= 1:
            raise ValueError(f"--{name} is {value:g}, expected a share below 1")
    costs = CostModel.of(bundle.manifest, bundle.profile(), options.batch_size)
    return ControllerInputs(
        bundle=bundle,
        batch_size=options.batch_size,
        costs=costs,
        max_disagreement=constraint,
        confidence_level=options.confidence,
        ramp_budget=options.ramp_budget,
        audit_budget=options.audit_budget,
    )


def _replay_settings(options: argparse.Namespace) -> ReplaySettings:
    if not options.rate > 0 or options.feedback_delay < 0:
        raise ValueError(
            f"--rate is {options.rate:g}, expected more than 0; --feedback-delay is "
            f"{options.feedback_delay}, expected at least 0"
        )
    return ReplaySettings(
        chunk=options.batch_size,
        delay_chunks=options.feedback_delay,
        tuning_delay=options.tuning_delay,
        rate=options.rate,
        seed=options.seed,
    )


def _datasets(bundle: Bundle, options: argparse.Namespace) -> dict[str, Dataset]:
    texts: list[str] = options.data
    names = [Path(text).stem for text in texts]
    if len(set(names)) < len(names):
        names = texts
    return {
        name: read_samples(source_of(text, options), bundle.manifest)
        for name, text in zip(names, texts, strict=True)
    }


def _warn(console: Console, bundle: Bundle, datasets: dict[str, Dataset]) -> None:
    for name, dataset in datasets.items():
        if dataset.sha256 == bundle.manifest.calibration.data_sha256:
            console.print(
                f"[bold red]{name} is the data that the bundle was calibrated on:[/] its exits "
                "know these samples. Give --data that the compiler never saw.",
                soft_wrap=True,
            )


def _sequences(
    bundle: Bundle, datasets: dict[str, Dataset], options: argparse.Namespace, bars: Progress
) -> Iterator[SampleSequence]:
    settings = ScenarioSettings(
        samples=options.samples,
        corruption=options.corruption,
        severity=options.severity,
        seed=options.seed,
    )
    answer = answering(bundle, threads=options.threads)

    def record(dataset: Dataset) -> Population:
        task = bars.add_task("Answer at every exit", total=len(dataset))
        try:
            return answer(dataset, lambda amount: bars.advance(task, amount))
        finally:
            bars.remove_task(task)

    material = ScenarioData(datasets, record, settings)
    for name, scenario in scenarios_of(_names(options.scenario), material).items():
        rng = np.random.default_rng(options.seed)
        yield draw(name, scenario.description, scenario.segments(material), rng)


def _write(
    comparisons: list[Comparison], workplace: ControllerInputs, options: argparse.Namespace
) -> None:
    environment = describe_environment(
        bundle=options.bundle.name,
        data=[Path(text).name for text in options.data],
        max_disagreement=workplace.max_disagreement,
        confidence=workplace.confidence_level,
        audit_budget=workplace.audit_budget,
        ramp_budget=workplace.ramp_budget,
        batch_size=options.batch_size,
        feedback_delay_batches=options.feedback_delay,
        tuning_delay=options.tuning_delay,
        assumed_rate=options.rate,
        samples_per_segment=options.samples,
        corruption=options.corruption,
        severity=options.severity,
        seed=options.seed,
        agreement="measured on recorded answers of the real model",
        times="predicted from the bundle's profile; run times of tunings are measured",
    )
    document = {"comparisons": [to_json(c) for c in comparisons], "environment": environment}
    write_json(options.json, document)
    if options.html is not None:
        write_page(
            options.html,
            title=f"{options.bundle.name} while the load shifts",
            comparisons=comparisons,
            max_disagreement=workplace.max_disagreement,
            environment=environment,
        )


if __name__ == "__main__":
    sys.exit(main())
