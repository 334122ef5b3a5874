"""``eebench simulate``: prediction of a bundle under a load, policy by policy."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.commands.combinations import Illegal
from offramp.engine.models.deployment import STAGE_OVERHEAD_S
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import scheduler_of
from offramp.engine.scheduling import ParallelLimit
from offramp.engine.scheduling.policies import POLICIES, PolicyName
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.bench_flags import COUNT, add_trace_arguments, share, trace_of
from offramp.tools.bench.common.dynamics import RunView, write_page
from offramp.tools.bench.common.outcomes import Outcomes, hdr_table, summarise, timeline
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    print_summaries,
    wide_console,
    write_json,
)
from offramp.tools.bench.common.traces import Trace
from offramp.tools.bench.planned_devices import placed, read_splits, slowed
from offramp.tools.bench.simulated_model import model_of
from offramp.tools.bench.simulation import draw_load, simulate

_DESCRIPTION: Final = """\
Drive the server's own scheduler and policies on virtual time. Stages take as
long as the bundle's profile says; which samples exit was recorded when the
bundle was calibrated. All figures are simulated.
"""
SHORT: Final = (
    *("--policy", "--rate", "--trace", "--duration-s", "--slo-ms", "--max-batch-size"),
    *("--workers", "--json", "--html"),
)
_EXAMPLES: Final = {
    "eebench simulate m.ee --rate 800 --slo-ms 20": "",
    "eebench simulate m.ee --rate 800 --slo-ms 20 --policy slackfit,refill": "",
}
_PLANNED: Final = "a plan names devices of its own; leave one of them out"
ILLEGAL: Final = (
    Illegal(option="--workers", other="--plan", why=_PLANNED),
    Illegal(option="--parallel-below", other="--plan", why=_PLANNED),
    Illegal(option="--max-violations", other="--plan", why=_PLANNED),
    Illegal(
        option="--parallel-below",
        other="--max-violations",
        why="the number follows from that share; leave one of them out",
    ),
    Illegal(option="--plan", without="--cluster", why="a plan is simulated on its cluster; add it"),
    Illegal(option="--cluster", without="--plan", why="a cluster is simulated by a plan; add it"),
)

_MODES = {"source": Mode.OFF, "release": Mode.RELEASE, "audit": Mode.AUDIT}
"""Modes by the prefix of a policy's name."""


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A scheduling policy with the multi-exit model in some mode, or with the source model."""

    label: str
    mode: Mode
    scheduling: PolicyName

    @classmethod
    def parse(cls, text: str) -> SystemUnderTest:
        """Read a name such as ``slackfit``, ``source:clockwork`` or ``audit:run-through``.

        Raise ValueError for an unknown name.
        """
        before, colon, name = text.partition(":")
        if colon and before in _MODES:
            return cls(text, _MODES[before], PolicyName.parse(name))
        return cls(text, Mode.LEAVE, PolicyName.parse(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The result of one system's run."""

    label: str
    outcomes: Outcomes
    requests_per_second: float
    """Speed of the simulator, in simulated requests per second."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the result of ``add_subparsers`` of eebench's parser."""
    parser = commands.add_parser(
        "simulate",
        help="scheduling policies under a load, on virtual time",
        description=_DESCRIPTION,
        short=SHORT,
        examples=_EXAMPLES,
        illegal=ILLEGAL,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder that eecompile wrote")
    add_trace_arguments(parser)
    _add_serving(parser)
    _add_devices(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")
    add("--html", type=Path, metavar="FILE", help="HTML file to write a page with plots to")
    parser.set_defaults(run=run)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "serving",
        "Policies: "
        + textwrap.fill(", ".join(POLICIES), 68, break_on_hyphens=False)
        + "\n(fixed:EXIT, fixed:final). With source: in front, a policy runs the source model;\n"
        "with release: or audit:, the bundle in that mode.",
    )
    add = group.add_argument
    add(
        "--policy",
        metavar="NAME,…",
        help="policies to compare (default: run-through, with --plan refill, and source:clockwork)",
    )
    add(
        "--audit-probability",
        type=share,
        default=0.05,
        metavar="Q",
        help="audit: share of samples that run on after their answer",
    )
    add("--slo-ms", type=float, metavar="MS", help="deadline of every request (default: none)")
    add("--max-batch-size", default=32, **COUNT, help="largest number of samples in a batch")
    add(
        "--max-queue-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="longest wait for more samples of a batch (default: 0, none)",
    )
    add("--max-queue-samples", default=4096, **COUNT, help="largest number of samples that wait")
    add(
        "--parallel-below",
        **COUNT,
        help="start a batch next to running ones once each of these has fewer samples (PAME's "
        "tau_b)",
    )
    add(
        "--max-violations",
        type=float,
        metavar="SHARE",
        help="choose the number of --parallel-below by this share of late samples (PAME's tau_l)",
    )
    add(
        "--forbid-forced-exits",
        action="store_true",
        help="never force a sample out at an exit that is not sure enough",
    )


def _add_devices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices").add_argument
    add("--workers", **COUNT, help="number of devices, or of streams of one device (default: 1)")
    add(
        "--plan",
        type=Path,
        metavar="PLAN.json",
        help="serve by the splits of a plan on its devices: eecompile plan --json writes it",
    )
    add(
        "--cluster",
        type=Path,
        metavar="CLUSTER.toml",
        help="devices that the plan was made for",
    )
    add(
        "--stage-overhead-us",
        type=float,
        default=STAGE_OVERHEAD_S * 1e6,
        metavar="US",
        help="the server's own time for a stage, besides its graph (default: "
        f"{STAGE_OVERHEAD_S * 1e6:g})",
    )
    add(
        "--slowdown",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on the time of every stage (default: 1)",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, and print the report; return the exit status."""
    names = options.policy or f"{'refill' if options.plan else 'run-through'},source:clockwork"
    systems = [SystemUnderTest.parse(text.strip()) for text in names.split(",")]
    check_outputs(options.json, options.html)
    if options.slo_ms is not None and not options.slo_ms > 0:
        raise ValueError(f"--slo-ms is {options.slo_ms:g}; it must be more than 0")
    if not options.slowdown > 0 or not options.stage_overhead_us >= 0:
        raise ValueError(
            f"--slowdown is {options.slowdown:g}, expected more than 0; --stage-overhead-us is "
            f"{options.stage_overhead_us:g}, expected at least 0"
        )
    options.workers = options.workers or 1
    bundle, trace = Bundle.open(options.bundle), trace_of(options)
    if bundle.manifest.is_plain:
        raise ValueError(
            f"{bundle.path} was made without data (eecompile wrap), and simulations draw samples "
            "from the records of a bundle's data; compile the model with --data"
        )
    runs = list(_runs(bundle, systems, trace, options))
    _tell(runs, trace, options)
    return 0


def _runs(
    bundle: Bundle, systems: list[SystemUnderTest], trace: Trace, options: argparse.Namespace
) -> Iterator[Simulated]:
    splits = None
    if options.plan is not None:
        splits = read_splits(bundle, options.plan, options.cluster, options.max_batch_size)
        options.workers = len(splits.roles)
    for system in systems:
        batch_size = options.max_batch_size
        if splits is not None and system.mode is not Mode.OFF:
            batch_size = splits.batch_size(batch_size)
        settings = ModelOptions(
            scheduling=system.scheduling,
            max_batch_size=batch_size,
            max_queue_delay_ms=options.max_queue_delay_ms,
            max_queue_samples=options.max_queue_samples,
            forced_exits=not options.forbid_forced_exits,
        )
        overhead_s = options.stage_overhead_us / 1e6
        model = model_of(
            bundle,
            system.mode,
            settings,
            stage_overhead_s=overhead_s,
            slowdown=options.slowdown,
            borders=splits.borders if splits else (),
        )
        placement = placed(splits, bundle, system.mode, batch_size, overhead_s) if splits else None
        scheduler = scheduler_of(
            model.points,
            settings,
            streams=options.workers,
            parallel=ParallelLimit(
                settings.max_batch_size,
                fixed=options.parallel_below,
                max_violations=options.max_violations,
            ),
            placement=placement,
        )
        load = draw_load(
            trace.arrivals_s,
            trace.duration_s,
            model.behaviour.leaves_at.size,
            slo_s=float("inf") if options.slo_ms is None else options.slo_ms / 1e3,
            seed=options.seed,
        )
        runs_on = running_on(system.mode, len(trace.arrivals_s), options)
        started_s = time.perf_counter()
        behaviour, stage_s, streams = model.behaviour, model.seconds, options.workers
        outcomes = simulate(
            behaviour,
            scheduler,
            stage_s,
            load,
            streams=streams,
            runs_on=runs_on,
            smaller=model.smaller,
            placement=slowed(placement, options.slowdown) if placement else None,
        )
        speed = len(trace.arrivals_s) / (time.perf_counter() - started_s)
        yield Simulated(label=system.label, outcomes=outcomes, requests_per_second=speed)


def running_on(mode: Mode, requests: int, options: argparse.Namespace) -> NDArray[np.bool_] | None:
    """Return [requests]: true if a request runs on after an early answer; ``None`` if none does."""
    if not mode.observed:
        return None
    probability = 1.0 if mode is Mode.RELEASE else options.audit_probability
    drawn: NDArray[np.bool_] = np.random.default_rng(options.seed).random(requests) < probability
    return drawn


def _devices(options: argparse.Namespace) -> str:
    if options.plan is None:
        return f"{options.workers} worker(s)"
    return f"{options.workers} device(s) by {options.plan}"


def _tell(runs: list[Simulated], trace: Trace, options: argparse.Namespace) -> None:
    summaries = {run.label: summarise(run.outcomes, slo_ms=options.slo_ms) for run in runs}
    console = wide_console()
    took_s = len(trace.arrivals_s) * sum(1 / run.requests_per_second for run in runs)
    print_summaries(
        console,
        summaries,
        title=f"{options.bundle}: SIMULATED, {trace.name}, {_devices(options)}",
        caption=f"The simulation took {took_s:.1f} s.",
    )
    environment = describe_environment(
        simulated=True,
        trace=trace.name,
        requests=len(trace.arrivals_s),
        workers=options.workers,
        seed=options.seed,
        **({"plan": str(options.plan), "cluster": str(options.cluster)} if options.plan else {}),
    )
    views = [
        RunView(
            name=run.label,
            summary=summaries[run.label],
            timeline=timeline(run.outcomes, slo_ms=options.slo_ms),
            percentiles=hdr_table(run.outcomes.latency_s),
            environment=environment,
        )
        for run in runs
    ]
    documents = [
        {
            "policy": view.name,
            "summary": view.summary.to_json(),
            "timeline": view.timeline.to_json(),
            "percentiles": view.percentiles,
        }
        for view in views
    ]
    write_json(options.json, {"simulated": True, "runs": documents, "environment": environment})
    if options.html is not None:
        title = f"{Path(options.bundle).name} under {trace.name}"
        write_page(options.html, title=title, measured=False, runs=views)
