"""``eecompile wrap``: its command line, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.bundle import Bundle
from offramp.bundle.schema.answers import TASK_KINDS
from offramp.commands.parser import LayeredParser

DESCRIPTION = """\
Make a bundle of an ONNX model as it is, without exits: no data are needed, and
it takes seconds. eeserve does so by itself where it is given an ONNX file."""
MISSING = "serving an ONNX file needs the packages of the extra `onnx`: pip install 'offramp[onnx]'"
"""What to do where a package is missing."""


def wrap_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile wrap``."""
    parser = LayeredParser(prog="eecompile wrap", description=DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="model to serve")
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="bundle to write (default: MODEL.ee)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there")
    parser.add_argument("--answer", metavar="NAME",
                        help="output to serve (default: the only one)")  # fmt: skip
    parser.add_argument("--task", choices=["auto", *TASK_KINDS], default="auto", metavar="TASK",
                        help="kind of the answer, for the status page (default: by its shape): "
                        f"{', '.join(TASK_KINDS)}")  # fmt: skip
    parser.add_argument("--custom-ops", type=Path, action="append", default=[], metavar="LIB.so",
                        help="library of operators that ONNX Runtime lacks; may be "
                        "repeated")  # fmt: skip
    parser.set_defaults(criterion_module=[], missing=MISSING)
    return parser


def describe_wrapped(bundle: Bundle) -> str:
    """Return a line about a bundle that was written, for people."""
    alone = bundle.manifest.no_batching
    batches = f"every sample by itself: {alone}" if alone else "in batches"
    name = bundle.manifest.source.original_name
    return f"{bundle.path}: {name} as it is, without exits; served {batches}"
