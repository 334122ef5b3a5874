"""The arguments of ``eecompile plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.compiler.commands.argument_types import share_from_0
from offramp.engine.planning.goal import SLACK


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a plan is asked for."""
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml",
                        help="the devices, what they cost, and how they are connected")  # fmt: skip
    parser.add_argument("--slo-ms", type=_more_than_0, metavar="MS",
                        help="latency objective; without it and [goal] of the file, there is "
                        "none")  # fmt: skip
    parser.add_argument("--slack", type=share_from_0, metavar="SHARE",
                        help="of the objective, left for queues and bursts (default: that of "
                        f"the file, or {SLACK:g})")  # fmt: skip
    parser.add_argument("--rate", type=_more_than_0, metavar="N",
                        help="rows a second to be served at the least cost; without it, as many "
                        "as the devices can")  # fmt: skip
    parser.add_argument("--cost-factor", type=_more_than_0, metavar="X",
                        help="most that a plan may cost, of all devices together (default: that "
                        "of the file, or 1)")  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.html",
                        help="draw the plan as a page that needs nothing beside it")  # fmt: skip
    parser.add_argument("--batch-profile", type=Path, metavar="FILE",
                        help="what was observed of the exits, window by window, to forecast from; "
                        "without it, the bundle's own records")  # fmt: skip


def _more_than_0(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of more than 0")
    return value
