"""What clusters add to ``eecompile``: the command ``plan``."""

from __future__ import annotations

import argparse
from typing import Final

from rich.console import Console

from offramp.cluster.command.plan_arguments import plan_parser
from offramp.compiler.commands.arguments import Command
from offramp.compiler.commands.compiling import read_options
from offramp.compiler.common.errors import CompileError


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
    """See :class:`.CompilerExtension`."""

    commands: Final = {
        "plan": Command(
            plan_parser, _plan, "predict which devices of a cluster should run which segments"
        )
    }


EXTENSION: Final = _Extension()
