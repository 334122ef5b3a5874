"""The command line of exporting: ``eecompile export``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from offramp.engine.plan import exit_label

if TYPE_CHECKING:
    from offramp.compiler.export.export import Exported

_DESCRIPTION = """\
Write a bundle as one ONNX file, which runs wherever ONNX Runtime does, without Offramp: inputs
and output are the source model's, and easy samples leave early inside the file. It is compared
with the bundle on every sample of --data, and written only if it answers the same at the same
exits.

  eecompile export model.ee --data calibration.npz --output fast.onnx
"""


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile export``."""
    parser = argparse.ArgumentParser(
        prog="eecompile export",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to export")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.onnx",
                        help="the file to write")  # fmt: skip
    # Not required=True: what is missing is told in one line that says why it is needed.
    parser.add_argument("--data", type=Path, metavar="NPZ",
                        help="the calibration data, to verify with: an array per input "
                        "(always needed: a bundle does not hold them)")  # fmt: skip
    parser.add_argument("--with-exits", action="store_true",
                        help="add the outputs exit (index of the exit that answered, -1 for the "
                        "model's end) and confidence")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


def run_export(options: argparse.Namespace, console: Console) -> int:
    """Export, and tell of it; gives the exit status."""
    from offramp.compiler.export.export import ExportOptions, export_bundle  # noqa: PLC0415
    from offramp.compiler.progress import TerminalProgress  # noqa: PLC0415

    with TerminalProgress(console) as progress:
        done = export_bundle(
            ExportOptions(
                bundle=options.bundle,
                data=options.data,
                output=options.output,
                overwrite=options.overwrite,
                with_exits=options.with_exits,
            ),
            progress,
        )
    _print(done, options.data, Console())
    return 0


def _print(done: Exported, data: Path, console: Console) -> None:
    say = partial(console.print, highlight=False, soft_wrap=True)
    count = len(done.names.thresholds)
    say(
        f"[bold]{escape(str(done.path))}[/bold]: {done.size_bytes / 2**20:.1f} MiB, "
        f"{count} {'exit' if count == 1 else 'exits'}"
    )
    for stage, name in zip(done.plan.stages, done.names.thresholds, strict=False):
        say(
            f"  {exit_label(stage.exit)}: leaves at confidence ≥ {stage.threshold:.3f}; "
            f"to override, feed {escape(name)} (float32)"
        )
    if done.with_exits:
        say(f"  further outputs: {escape(done.names.exit)}, {escape(done.names.confidence)}")
    verified = done.verified
    how = (
        "bit for bit"
        if not verified.largest_difference
        else f"within {verified.largest_difference:.1e} of the largest value"
    )
    say(
        f"Verified on {verified.samples} samples of {escape(str(data))}: the bundle's exits, its "
        f"answers {how}; {1 - verified.exit_shares.get(-1, 0.0):.1%} left early."
    )
    if not done.calibration_data:
        say("These are not the data that the bundle was compiled with.")
