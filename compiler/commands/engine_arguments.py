"""Options that say which TensorRT engines ``eecompile build`` builds, and how."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from offramp.bundle.engines import PRECISIONS
from offramp.compiler.commands import values
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.options import (
    DEFAULT_BATCHES,
    OPTIMIZATION_LEVELS,
    EngineBuildOptions,
    parse_batches,
    parse_buckets,
    parse_parts,
    parse_units,
)

_GIB = 2**30


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options; one that is not given is absent from the namespace."""
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--device", metavar="DEVICE",
        help="GPU to build on and for (default: cuda:0)")  # fmt: skip
    add("--precision", choices=["auto", *PRECISIONS],
        help="arithmetic inside the engines (default: fp32).\nInputs, outputs and exits stay "
        "fp32. auto: the precision that saves most time of those that --data certify, timed "
        "here")  # fmt: skip
    add("--batch-profiles", metavar="A,B-C,…",
        help=f"batch sizes that an engine takes (default: {DEFAULT_BATCHES}).\nEach range is tuned "
        "for its upper end")  # fmt: skip
    add("--buckets", metavar="NAME=A,B,…", action="append",
        help="upper ends of ranges of another symbolic size, such as sequence=32,64,128; may be "
        "repeated (default: up to the size of the calibration data)")  # fmt: skip
    add("--parts", metavar="A,B",
        help="parts to build engines of: source, stages, segments (default: all)")  # fmt: skip
    add("--units", metavar="NAME,NAME",
        help="single engines to build, by their names in the table that a build prints, such as "
        "00-01-exit1: needed when other exits come into use")  # fmt: skip
    add("--workspace", type=values.gib, metavar="GIB",
        help="most GPU memory for scratch (default: all that is free)")  # fmt: skip
    add("--optimization-level", type=int, metavar="N",
        help="0 to 5: how long TensorRT searches for faster engines (default: 3)")  # fmt: skip
    add("--accept-disagreement", action="store_true",
        help="build although fp16 or int8 alone uses up the bundle's promise, and serve its policy "
        "as it is")  # fmt: skip


_ENGINE_ARGUMENTS = ("device", "precision", "batch_profiles", "buckets", "parts", "units",
                     "workspace", "optimization_level", "accept_disagreement")  # fmt: skip


def chooses_precision(options: argparse.Namespace) -> bool:
    """Whether engines of several precisions are to be tried."""
    return getattr(options, "precision", None) == "auto"


def engine_options(options: argparse.Namespace) -> EngineBuildOptions:
    """Read the engine options, and fill in the defaults; EngineOptionsError if malformed."""
    given = {name: value for name, value in vars(options).items() if name in _ENGINE_ARGUMENTS}
    if chooses_precision(options):
        del given["precision"]  # each build that is tried has another one
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "batch_profiles": ("batches", parse_batches),
        "buckets": ("buckets", lambda texts: tuple(parse_buckets(texts).items())),
        "parts": ("parts", parse_parts),
        "units": ("units", parse_units),
        "workspace": ("workspace_bytes", lambda gib: max(round(gib * _GIB), 1)),
        "optimization_level": ("optimization_level", _level),
    }
    for name, (field, read) in readers.items():
        if name in given:
            given[field] = read(given.pop(name))
    return EngineBuildOptions(**given)


def _level(level: int) -> int:
    if level not in OPTIMIZATION_LEVELS:
        raise EngineOptionsError(f"--optimization-level {level} is not in 0 to 5")
    return level
