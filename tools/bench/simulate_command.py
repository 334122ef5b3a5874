"""``eebench simulate``: what a bundle would do under a load, policy by policy."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.deployment import STAGE_OVERHEAD_S
from offramp.engine.options import ModelOptions
from offramp.engine.plan import Mode
from offramp.engine.scheduling import POLICIES, ParallelLimit, PolicyName
from offramp.engine.served_model import scheduler_of
from offramp.tools.bench.arguments import COUNT, add_trace_arguments, share, trace_of
from offramp.tools.bench.dynamics import RunView, write_page
from offramp.tools.bench.outcomes import Outcomes, hdr_table, summarise, timeline
from offramp.tools.bench.output import (
    check_outputs,
    describe_environment,
    print_summaries,
    wide_console,
    write_json,
)
from offramp.tools.bench.planned_devices import placed, read_splits, slowed
from offramp.tools.bench.simulated_model import model_of
from offramp.tools.bench.simulation import draw_load, simulate
from offramp.tools.bench.traces import Trace

_DESCRIPTION = """\
Drive the server's own scheduler and policies on virtual time. Stages take as long as the bundle's
profile says; whether a sample leaves is what was recorded of it at calibration. All figures are
simulated."""

_MODES = {"source": Mode.OFF, "release": Mode.RELEASE, "audit": Mode.AUDIT}
"""By what stands before a policy's name."""


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A scheduling policy on the multi-exit model in some mode, or on the source model."""

    label: str
    mode: Mode
    scheduling: PolicyName

    @classmethod
    def parse(cls, text: str) -> SystemUnderTest:
        """Read ``slackfit``, ``source:clockwork`` or ``audit:run-through``; ValueError if none."""
        before, colon, name = text.partition(":")
        if colon and before in _MODES:
            return cls(text, _MODES[before], PolicyName.parse(name))
        return cls(text, Mode.LEAVE, PolicyName.parse(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One system's run."""

    label: str
    outcomes: Outcomes
    requests_per_second: float
    """How fast the simulator was."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to what ``add_subparsers`` of eebench's parser gave."""
    parser = commands.add_parser(
        "simulate",
        help="policies under a load on virtual time, by a bundle's profile and records",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder made by eecompile")
    add(
        "--policy",
        metavar="NAME,NAME,…",
        help=f"{', '.join(POLICIES)} (fixed:EXIT, fixed:final); with source: before it, on the "
        "source model; with release: or audit:, in that mode (default: run-through, with --plan "
        "refill, and source:clockwork)%(default).0s",
    )
    add(
        "--audit-probability",
        type=share,
        default=0.05,
        metavar="Q",
        help="of audit:, how likely a sample runs on after its answer",
    )
    add_trace_arguments(parser)
    add("--workers", **COUNT, help="devices, or streams of one (default: 1)%(default).0s")
    add(
        "--plan",
        type=Path,
        metavar="PLAN.json",
        help="serve by its splits on its devices: what eecompile plan --json wrote%(default).0s",
    )
    add(
        "--cluster",
        type=Path,
        metavar="CLUSTER.toml",
        help="the devices that the plan was made for%(default).0s",
    )
    add("--slo-ms", type=float, metavar="D", help="deadline of every request%(default).0s")
    add("--max-batch-size", default=32, **COUNT, help="of a batch")
    add("--max-queue-delay-ms", type=float, default=0.0, metavar="MS", help="wait for batch mates")
    add("--max-queue-samples", default=4096, **COUNT, help="that wait at most")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--parallel-below", **COUNT, help="PAME's τ_b%(default).0s")
    limit.add_argument(
        "--max-violations", type=float, metavar="SHARE", help="PAME's τ_l%(default).0s"
    )
    add("--forbid-forced-exits", action="store_true", help="no sample leaves below a threshold")
    add(
        "--stage-overhead-us",
        type=float,
        default=STAGE_OVERHEAD_S * 1e6,
        metavar="US",
        help="the server's own time a stage, beyond its graph",
    )
    add(
        "--slowdown",
        type=float,
        default=1.0,
        metavar="X",
        help="stages take so many times what the profile and --stage-overhead-us say",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there%(default).0s")
    add("--html", type=Path, metavar="FILE", help="write a page with plots there%(default).0s")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate, and tell of it; gives the exit status."""
    names = options.policy or f"{'refill' if options.plan else 'run-through'},source:clockwork"
    systems = [SystemUnderTest.parse(text.strip()) for text in names.split(",")]
    _check_devices(options)
    check_outputs(options.json, options.html)
    if options.slo_ms is not None and not options.slo_ms > 0:
        raise ValueError(f"--slo-ms is {options.slo_ms:g}; it must be more than 0")
    if not options.slowdown > 0 or not options.stage_overhead_us >= 0:
        raise ValueError(
            f"--slowdown is {options.slowdown:g}, expected more than 0; --stage-overhead-us is "
            f"{options.stage_overhead_us:g}, expected at least 0"
        )
    bundle, trace = Bundle.open(options.bundle), trace_of(options)
    if bundle.manifest.is_plain:
        raise ValueError(
            f"{bundle.path} was made without data (eecompile wrap), and simulations draw samples "
            "from the records of a bundle's data; compile the model with --data"
        )
    runs = list(_runs(bundle, systems, trace, options))
    _tell(runs, trace, options)
    return 0


def _check_devices(options: argparse.Namespace) -> None:
    """Refuse what says in two ways, or not at all, what there is to serve on."""
    if (options.plan is None) != (options.cluster is None):
        names = ["--plan", "--cluster"]
        given, missing = names[:: -1 if options.plan is None else 1]
        raise ValueError(f"{given} is given without {missing}; a plan is simulated by both")
    if options.plan is None:
        options.workers = options.workers or 1
        return
    for name, value in (
        ("--workers", options.workers),
        ("--parallel-below", options.parallel_below),
        ("--max-violations", options.max_violations),
    ):
        if value is not None:
            raise ValueError(
                f"{name} is {value:g}, expected none beside --plan, which names devices of its "
                "own; leave one of them out"
            )


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
    """[requests]: which run on after an early answer; ``None`` where none does."""
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
    speed = len(runs) / sum(1 / run.requests_per_second for run in runs)
    print_summaries(
        console,
        summaries,
        title=f"{options.bundle}: SIMULATED, {trace.name}, {_devices(options)}",
        caption=f"{speed:,.0f} requests a second were simulated.",
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
