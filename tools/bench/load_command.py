"""``eebench load``: measures a server under load, from outside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, TaskID

from offramp.bundle import Bundle
from offramp.client import ModelMetadata
from offramp.commands.combinations import Illegal
from offramp.compiler.data.data_flags import add_data_arguments, source_of
from offramp.engine.backends.custom_ops import open_runnable
from offramp.tools.bench.common.bench_flags import add_trace_arguments
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    warn_of_calibration_data,
)
from offramp.tools.bench.common.traces import Trace
from offramp.tools.bench.load.generator import GeneratedLoad, generate
from offramp.tools.bench.load.load_settings import LoadSettings, read_options
from offramp.tools.bench.load.metrics_poll import MetricsPoll
from offramp.tools.bench.load.reference import (
    LoadData,
    Reference,
    ask_source,
    check_server,
    given_reference,
    group_key,
    input_specs,
    optional_inputs,
    read_data,
)
from offramp.tools.bench.load.report import (
    WINDOWS,
    LoadReport,
    make_report,
    print_report,
    settings_json,
    warning,
)
from offramp.tools.bench.load.sender import Task
from offramp.tools.bench.load.server_access import (
    ServerAccess,
    add_access_arguments,
    read_access,
)
from offramp.tools.bench.load.shares import (
    Share,
    deal,
    deal_concurrency,
    serialise_requests,
    used_samples,
)
from offramp.tools.bench.load.transports import PROTOCOLS

_LEAST_POLL_S: Final = 0.25
"""Smallest time between two readings of the metrics: each costs the server some milliseconds."""

_DESCRIPTION: Final = """\
Send requests of one sample each to a server and measure the answers. The loop
is open by default: a trace says when each request is sent, and latency counts
from that time, however late it is sent. The k-th request is the k-th sample of
the data; at the end of the data the first sample follows.
"""
SHORT: Final = (
    *("--model", "--data", "--rate", "--trace", "--duration-s", "--slo-ms", "--closed-loop"),
    *("--reference", "--metrics", "--json", "--html"),
)
_EXAMPLES: Final = {
    "eebench load HOST:8001 --model m --data test.npz --rate 200": "open loop",
    "eebench load HOST:8001 --model m --data test.npz --closed-loop 8": "",
}
_CLOSED: Final = "a closed loop sends a request when another one is answered; leave one of them out"
ILLEGAL: Final = (
    *(
        Illegal(option=f"--{name}", other="--closed-loop", why=_CLOSED)
        for name in ("trace", "rate", "base-rate", "cv2", "rate-to", "acceleration", "seed")
    ),
    *(
        Illegal(
            option=f"--{name}",
            without="--tls-ca",
            why="nothing is encrypted; leave it out, or add --tls-ca",
        )
        for name in ("tls-certificate", "tls-key")
    ),
    Illegal(
        option="--http",
        without="--protocol rest",
        why="nothing is sent over HTTP; leave it out, or add --protocol rest",
    ),
    Illegal(
        option="--no-deadline",
        without="--slo-ms",
        why="there is no deadline that the server could be told; leave it out, or add --slo-ms",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to the result of ``add_subparsers`` of eebench's parser."""
    parser = commands.add_parser(
        "load",
        help="latency, attainment and agreement of a server under load",
        description=_DESCRIPTION,
        short=SHORT,
        examples=_EXAMPLES,
        illegal=ILLEGAL,
    )
    add = parser.add_argument
    add("address", metavar="HOST:PORT", help="gRPC port of the server")
    add("--model", required=True, metavar="NAME", help="name of the model on the server")
    add("--data", required=True, metavar="DATA", help="samples to send")
    add("--samples", type=int, default=4000, metavar="N", help="largest number of samples to use")
    add(
        "--group",
        metavar="KEY",
        help="array of the data with the group of each row, as for eecompile: it is not "
        "sent (default: the one that the bundle of --reference was compiled with)",
    )
    add_trace_arguments(parser)
    _add_sending(parser.add_argument_group("sending"))
    _add_judging(parser.add_argument_group("judging and output"))
    add_access_arguments(parser)
    add_data_arguments(parser)
    parser.set_defaults(run=run)


def _add_sending(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--closed-loop",
        type=int,
        metavar="N",
        help="no trace: keep N requests in flight for --duration-s",
    )
    add(
        "--protocol",
        choices=PROTOCOLS,
        default="grpc",
        metavar="NAME",
        help="grpc: one call per request; stream: one stream per process; shm: calls with inputs "
        "in shared memory, on the server's machine; rest: HTTP with binary tensors (default: "
        "grpc)",
    )
    add("--http", metavar="HOST:PORT", help="HTTP port of the server, for --protocol rest")
    add("--processes", type=int, default=1, metavar="P", help="processes that send in turn")
    add(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="1 is served first; 0 is the server's default",
    )
    add(
        "--drain-s",
        type=float,
        default=10.0,
        metavar="S",
        help="longest wait for the last answers",
    )
    add(
        "--max-in-flight",
        type=int,
        default=10_000,
        metavar="N",
        help="largest number of requests in flight per process; further ones are not sent and "
        "count as unanswered",
    )


def _add_judging(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--slo-ms",
        type=float,
        metavar="MS",
        help="largest latency that attains the objective; sent to the server as the deadline",
    )
    add(
        "--no-deadline",
        action="store_true",
        help="only judge latencies by --slo-ms: do not send it as a deadline",
    )
    add(
        "--warm-up-s",
        type=float,
        default=1.0,
        metavar="S",
        help="beginning of the load that is left out of the figures",
    )
    add(
        "--reference",
        type=Path,
        metavar="BUNDLE",
        help="compare with the answers of this bundle's source model, which runs here before the "
        "load (default: with the classes in the array 'reference' of the data, if there is one)",
    )
    add(
        "--metrics",
        metavar="HOST:PORT",
        help="HTTP port of the server, to read batch sizes and queue from",
    )
    add("--json", type=Path, metavar="FILE", help="JSON file to write the figures to")
    add("--html", type=Path, metavar="FILE", help="HTML file to write a report to")


def run(options: argparse.Namespace) -> int:
    """Run the load and print the report; return the exit status."""
    settings, trace = read_options(options)
    check_outputs(options.json, options.html)
    access = read_access(options)
    metadata = check_server(settings.address, settings.model, access)
    optional = optional_inputs(settings.address, settings.model, access)
    bundle = None if options.reference is None else open_runnable(options.reference)
    data = read_data(
        source_of(options.data, options),
        input_specs(metadata),
        samples=options.samples,
        optional=optional,
        group=group_key(options.group, bundle),
    )
    shares = make_shares(settings, trace, samples=len(data))
    poll: MetricsPoll | None = None
    if options.metrics is not None:
        every_s = max(_LEAST_POLL_S, settings.duration_s / WINDOWS)
        poll = MetricsPoll(options.metrics, settings.model, every_s=every_s, access=access)
    reference = _find_reference(bundle, data, metadata, shares)
    environment = describe_environment(
        trace=None if trace is None else trace.name,
        data=Path(options.data).name,
        samples=len(data),
        data_is_calibration_data=reference.on_calibration_data,
        **settings_json(settings),
    )
    load = _generate(settings, shares, data, reference.answer, poll, access=access)
    report = make_report(
        settings,
        load,
        load.records.to_outcomes(reference.classes, settings.duration_s),
        readings=poll.readings if poll else (),
        environment=environment,
    )
    _tell(options, settings, report)
    return 0


def make_shares(settings: LoadSettings, trace: Trace | None, *, samples: int) -> list[Share]:
    """Distribute a trace, or the concurrent requests of a closed loop, over processes."""
    if trace is not None:
        return list(deal(trace.arrivals_s, samples, settings.processes))
    assert settings.concurrency is not None
    return list(deal_concurrency(settings.concurrency, samples, settings.processes))


def _find_reference(
    bundle: Bundle | None, data: LoadData, metadata: ModelMetadata, shares: Sequence[Share]
) -> Reference:
    if bundle is None:
        return given_reference(data, metadata)
    rows = used_samples(shares)
    with _progress("Source model", len(rows)) as (bars, bar):
        return ask_source(
            bundle, data, rows, served=metadata, progress=lambda n: bars.advance(bar, n)
        )


def _generate(
    settings: LoadSettings,
    shares: Sequence[Share],
    data: LoadData,
    answer: str | None,
    poll: MetricsPoll | None,
    *,
    access: ServerAccess,
) -> GeneratedLoad:
    tasks = [
        Task(
            settings=settings,
            share=share,
            requests=serialise_requests(settings, data.inputs, share.samples),
            answer=answer,
            access=access,
        )
        for share in shares
    ]
    with _progress(f"Load, {settings.loop}", settings.duration_s) as (bars, bar):

        def on_tick(at_s: float) -> None:
            bars.update(bar, completed=max(0.0, at_s))
            if poll is not None:
                poll.poll(at_s)

        return generate(tasks, on_tick=on_tick)


@contextmanager
def _progress(name: str, total: float) -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    # the default of 10 refreshes per second would disturb the measured load
    with Progress(
        console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bars:
        yield bars, bars.add_task(name, total=total)


def _tell(options: argparse.Namespace, settings: LoadSettings, report: LoadReport) -> None:
    console = Console()
    name = str(report.environment["trace"] or settings.loop)
    title = f"{settings.model} at {settings.address}, {name}"
    if report.environment["data_is_calibration_data"]:
        warn_of_calibration_data(console)
    print_report(
        console, report, title=f"{title}: measured without the first {settings.warm_up_s:g} s"
    )
    if (text := warning(report)) is not None:
        print(f"eebench: {text}", file=sys.stderr)
    if options.json is not None:
        report.write_json(options.json)
    if options.html is not None:
        # imported here because it needs the compiler's report
        from offramp.tools.bench.common.dynamics import RunView, write_page  # noqa: PLC0415

        shown = RunView(
            name=name,
            summary=report.summary,
            timeline=report.timeline,
            percentiles=report.percentiles,
            environment=report.environment,
        )
        write_page(options.html, title=title, measured=True, runs=[shown])
