"""The command ``plan``, which clusters add to ``eecompile``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from offramp.cluster.planning.forecasting import LAST, METHODS
from offramp.cluster.planning.goal import SLACK
from offramp.compiler.commands import values
from offramp.compiler.commands.arguments import Command, add_bundle, add_json, make_parser
from offramp.compiler.commands.compiling import read_options
from offramp.compiler.common.errors import CompileError

_DESCRIPTION: Final = """\
Plan a bundle on a cluster (E3): how many splits, which segments and exits in
each, on which and how many devices, at which batch size. Prints the plan next
to the unmodified model on the same devices, and the limits that bind. All is
predicted from profiles and from how many rows leave at each exit; nothing
runs. eeserve --cluster makes such plans while it serves, and serves by them."""
_EXAMPLES: Final = {
    "eecompile plan model.ee --cluster cluster.toml --slo-ms 100": "",
    "eecompile plan model.ee --cluster cluster.toml --rate 6000 --json plan.json": "",
}


def plan_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile plan``."""
    parser = make_parser("plan", _DESCRIPTION, examples=_EXAMPLES)
    add_bundle(parser, "plan for")
    _add_arguments(parser)
    add_json(parser)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the goal of a plan, and its files."""
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml",
                        help="file of the devices, their costs and connections")  # fmt: skip
    parser.add_argument("--slo-ms", type=values.above_0, metavar="MS",
                        help="latency objective (default: that of [goal] in the file, or "
                        "none)")  # fmt: skip
    parser.add_argument("--slack", type=values.share_from_0, metavar="SHARE",
                        help="share of the objective reserved for queues and bursts (default: "
                        f"that of the file, or {SLACK:g})")  # fmt: skip
    parser.add_argument("--rate", type=values.above_0, metavar="N",
                        help="rows per second to serve at the least cost (default: as many as the "
                        "devices can)")  # fmt: skip
    parser.add_argument("--cost-factor", type=values.above_0, metavar="X",
                        help="largest cost of a plan, as a factor of the cost of all devices "
                        "together (default: that of the file, or 1)")  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.html",
                        help="HTML file to write, with a drawing of the plan")  # fmt: skip
    parser.add_argument("--batch-profile", type=Path, metavar="FILE",
                        help="file with the observed shares of samples at each exit, by time "
                        "window, to forecast from (default: the bundle's own records)")  # fmt: skip
    parser.add_argument("--forecast", choices=sorted(METHODS),
                        help="method that forecasts the next window from --batch-profile "
                        f"(default: {LAST}, which has the least loss; arima needs the extra "
                        "forecast)")  # fmt: skip


def _plan(options: argparse.Namespace, console: Console) -> int:
    from offramp.cluster.command.plan_command import PlanOptions, plan_bundle  # noqa: PLC0415
    from offramp.cluster.command.plan_printing import print_plan, render_page  # noqa: PLC0415
    from offramp.cluster.planning.cluster_plan import PlanError  # noqa: PLC0415

    try:
        with console.status("planning"):
            planned = plan_bundle(read_options(PlanOptions, options))
    except PlanError as error:
        raise CompileError(str(error)) from error
    if options.report is not None:
        options.report.write_text(render_page(planned, options.bundle.name), encoding="utf-8")
    print_plan(planned, Console(width=max(Console().width, 100)))
    return 0


class _Extension:
    """Adds ``eecompile plan`` (:class:`.CompilerExtension`)."""

    commands: Final = {
        "plan": Command(
            plan_parser, _plan, "predict which devices of a cluster should run which segments"
        )
    }


EXTENSION: Final = _Extension()
