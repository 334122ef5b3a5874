"""``eecompile wrap``: its command line, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.bundle import Bundle
from offramp.bundle.tasks import TASK_KINDS

DESCRIPTION = (
    "Make a bundle of an ONNX model as it is, without exits: no data are needed, and it takes "
    "seconds. eeserve does so by itself where it is given an ONNX file."
)
MISSING = "serving an ONNX file needs the packages of the extra `onnx`: pip install 'offramp[onnx]'"
"""What to do where a package is missing."""


def wrap_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile wrap``."""
    parser = argparse.ArgumentParser(prog="eecompile wrap", description=DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model to serve")
    parser.add_argument("--output", type=Path, metavar="DIR", help="MODEL.ee if not given")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there")
    parser.add_argument("--answer", metavar="NAME", help="the output to serve, if several")
    parser.add_argument("--task", choices=["auto", *TASK_KINDS], default="auto",
                        help="what the answer is, for the status page")  # fmt: skip
    parser.add_argument("--custom-ops", type=Path, action="append", default=[], metavar="LIB.so",
                        help="library with operators that ONNX Runtime does not have; may be "
                        "repeated")  # fmt: skip
    parser.set_defaults(criterion_module=[], missing=MISSING)
    return parser


def describe_wrapped(bundle: Bundle) -> str:
    """Return a line about a bundle that was written, for people."""
    alone = bundle.manifest.no_batching
    batches = f"every sample by itself: {alone}" if alone else "in batches"
    name = bundle.manifest.source.original_name
    return f"{bundle.path}: {name} as it is, without exits; served {batches}"
