"""Additions of supernets to ``eecompile``: the command ``supernet``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from offramp.compiler.commands.arguments import SHORT, Command, add_compiling, make_parser
from offramp.compiler.commands.compiling import run_compile
from offramp.compiler.common.options import COMPILE
from offramp.supernet.combinations import COMBINATIONS

_DESCRIPTION: Final = """\
Make a bundle of a supernet: a model that contains smaller ones in its weights
(SuperServe). Blocks are skipped, weights are sliced to their first channels,
and statistics are collected again for each subnet. The best trade-offs of time
and agreement become variants of the bundle, each with its own exits;
policies that choose by the time left (--policy slackfit) serve them."""
_EXAMPLES: Final = {
    "eecompile supernet model.onnx --elastic spec.toml --data samples.npz": "",
}


def supernet_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile supernet``: options of compiling and of elastic parts."""
    parser = make_parser(
        "supernet",
        _DESCRIPTION,
        short=("--elastic", *SHORT),
        illegal=(*COMPILE, *COMBINATIONS),
        examples=_EXAMPLES,
    )
    parser.add_argument("--elastic", type=Path, required=True, metavar="TOML",
                        help="file of the model's elastic parts.\nIt names blocks that can be "
                        "skipped, weights that can be sliced, and the number of operating "
                        "points to keep")  # fmt: skip
    add_compiling(parser, needs_data=True)
    return parser


def _compile(options: argparse.Namespace, console: Console) -> int:
    from offramp.supernet.subnets import ElasticSource  # noqa: PLC0415

    options.variants = ElasticSource(options.elastic)
    return run_compile(options, console)


class _Extension:
    """Adds ``eecompile supernet`` (:class:`.CompilerExtension`)."""

    commands: Final = {
        "supernet": Command(
            supernet_parser,
            _compile,
            "compile a model that contains smaller models in its weights",
        )
    }


EXTENSION: Final = _Extension()
