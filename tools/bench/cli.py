"""``eebench``: measurements and simulations of Offramp's benefit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from offramp.bundle import BundleError
from offramp.calibration.data.dataset import DataError
from offramp.commands.completion import complete
from offramp.commands.parser import LayeredParser
from offramp.engine.answers.criteria import CriterionError, load_criterion
from offramp.engine.backends.custom_ops import using_libraries
from offramp.engine.common.errors import BackendError
from offramp.tools.bench import compare_command, load_command, simulate_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``eebench``; return the exit status."""
    complete(make_parser)
    return run_command(make_parser(), argv)


def run_command(parser: LayeredParser, argv: Sequence[str] | None) -> int:
    """Run the command of a command line; return the exit status."""
    options = parser.parse_args(argv)
    try:
        for text in options.criterion_module:
            load_criterion(text)
        with using_libraries(options.custom_ops):
            return int(options.run(options))
    except (BundleError, DataError, BackendError, CriterionError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def make_parser() -> LayeredParser:
    """Make the parser of ``eebench``."""
    parser = LayeredParser(
        prog="eebench",
        description="Measure bundles and servers, or simulate them under a load.",
        examples={
            "eebench compare m.ee --data test.npz": "a bundle",
            "eebench load HOST:8001 --model m --data test.npz --rate 200": "a server",
            "eebench COMMAND --help": "its options",
        },
        commands={"eecompile": "makes a bundle of an ONNX model", "eeserve": "serves it"},
    )
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", help="one of these:"
    )
    for command in (compare_command, load_command, simulate_command):
        command.add_parser(commands)
    for subparser in commands.choices.values():
        add_own_code(subparser)
    return parser


def add_own_code(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the user's own code, which :func:`run_command` loads."""
    add = parser.add_argument_group("code of your own").add_argument
    add(
        "--custom-ops",
        metavar="LIB.so",
        action="append",
        default=[],
        type=Path,
        help="library with operators that ONNX Runtime does not have; may be repeated",
    )
    add(
        "--criterion-module",
        metavar="FILE.py:NAME",
        action="append",
        default=[],
        help="your own criterion, which a bundle was compiled with; may be repeated",
    )


if __name__ == "__main__":
    sys.exit(main())
