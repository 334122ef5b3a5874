"""The arguments of ``eecompile plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.compiler.commands import values
from offramp.engine.planning.goal import SLACK


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
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
