"""The command line of ``eecompile plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from offramp.cluster.planning.goal import SLACK
from offramp.compiler.commands import values
from offramp.compiler.commands.arguments import add_bundle, add_json, make_parser

_DESCRIPTION: Final = """\
Plan a bundle on a cluster (E3): how many splits, which segments and exits in
each, on which and how many devices, at which batch size. Prints the plan next
to the unmodified model on the same devices, and the limits that bind. All is
predicted, from profiles and from how many rows leave at each exit; nothing
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
                        help="devices, their costs, and how they are connected")  # fmt: skip
    parser.add_argument("--slo-ms", type=values.above_0, metavar="MS",
                        help="latency objective (default: that of [goal] in the file, or "
                        "none)")  # fmt: skip
    parser.add_argument("--slack", type=values.share_from_0, metavar="SHARE",
                        help="share of the objective that is left for queues and bursts (default: "
                        f"that of the file, or {SLACK:g})")  # fmt: skip
    parser.add_argument("--rate", type=values.above_0, metavar="N",
                        help="rows per second to serve at the least cost (default: as many as the "
                        "devices can)")  # fmt: skip
    parser.add_argument("--cost-factor", type=values.above_0, metavar="X",
                        help="largest cost of a plan, as a factor of that of all devices together "
                        "(default: that of the file, or 1)")  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.html",
                        help="self-contained page to draw the plan in")  # fmt: skip
    parser.add_argument("--batch-profile", type=Path, metavar="FILE",
                        help="observations of the exits, window by window, to forecast from "
                        "(default: the bundle's own records)")  # fmt: skip
