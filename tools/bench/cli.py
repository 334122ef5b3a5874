"""``eebench``: measure what Offramp brings, and simulate what it would."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from offramp import __version__
from offramp.bundle import BundleError
from offramp.calibration.dataset import DataError
from offramp.engine.backends.custom_ops import using_libraries
from offramp.engine.criteria import CriterionError, load_criterion
from offramp.engine.errors import BackendError
from offramp.tools.bench import adapt_command, compare_command, load_command, simulate_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eebench``; gives the exit status."""
    options = _parser().parse_args(argv)
    try:
        for text in options.criterion_module:
            load_criterion(text)
        with using_libraries(options.custom_ops):
            return int(options.run(options))
    except (BundleError, DataError, BackendError, CriterionError, OSError, ValueError) as error:
        print(f"eebench: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eebench", description="Measure what a bundle brings over its source model."
    )
    parser.add_argument("--version", action="version", version=f"offramp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help="what to do")
    for command in (compare_command, load_command, simulate_command, adapt_command):
        command.add_parser(commands)
    for subparser in commands.choices.values():
        subparser.add_argument(
            "--custom-ops",
            metavar="LIB.so",
            action="append",
            default=[],
            type=Path,
            help="library with operators that ONNX Runtime does not have; may be repeated",
        )
        subparser.add_argument(
            "--criterion-module",
            metavar="FILE.py:NAME",
            action="append",
            default=[],
            help="the criterion of your own that a bundle was compiled with; may be repeated",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
