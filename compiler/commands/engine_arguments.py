"""The options of ``eecompile build``, most of which ``--backend tensorrt`` has too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from offramp.compiler.engines.options import (
    DEFAULT_BATCHES,
    OPTIMIZATION_LEVELS,
    EngineBuildOptions,
    parse_batches,
    parse_buckets,
    parse_parts,
    parse_units,
)
from offramp.compiler.errors import EngineOptionsError
from offramp.compiler.options import AskedPrecision

DEFAULT_DEVICE = "cuda:0"
_GIB, _MOST_GIB = 2**30, 2**20


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what ``eecompile build`` and ``--backend tensorrt`` have in common.

    What is not given is absent, so that it is seen what was given (:func:`given_engine_options`).
    """
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--device", metavar="DEVICE",
        help=f"the GPU to build on and for (default: {DEFAULT_DEVICE})")  # fmt: skip
    add("--batch-profiles", metavar="A,B-C,…",
        help="batch sizes that an engine takes, each range tuned for its upper "
        f"end (default: {DEFAULT_BATCHES})")  # fmt: skip
    add("--buckets", metavar="NAME=A,B,…", action="append",
        help="upper ends of ranges of another symbolic size, such as "
        "sequence=32,64,128; may be repeated (default: up to the size of the "
        "calibration data)")  # fmt: skip
    add("--parts", metavar="A,B",
        help="what to build, of source, stages and segments (default: all)")  # fmt: skip
    add("--units", metavar="NAME,NAME",
        help="what to build instead, by the names of the table that a build prints, such as "
        "00-01-exit1: the stages that end there if other exits come into use")  # fmt: skip
    add("--workspace", type=float, metavar="GIB",
        help="most memory of the GPU for scratch (default: all that is free)")  # fmt: skip
    add("--optimization-level", type=int, metavar="N",
        help="0 to 5: how long TensorRT looks for faster engines (default: 3)")  # fmt: skip
    add("--accept-disagreement", action="store_true",
        help="build although fp16 or int8 spends the bundle's promise without any exit, and serve "
        "its policy as it is")  # fmt: skip


_ENGINE_ARGUMENTS = ("device", "precision", "batch_profiles", "buckets", "parts", "units",
                     "workspace", "optimization_level", "accept_disagreement")  # fmt: skip
_AS_THERE = ("batch_profiles", "buckets", "workspace", "optimization_level")
"""Of these the ones that ``--beside-serving`` takes from what was built."""


def given_engine_options(options: argparse.Namespace) -> list[str]:
    """Name the engine options that were given, as they are spelled.

    A precision that is asked of a bundle is none.
    """
    given = [name for name in _ENGINE_ARGUMENTS if name in options]
    if getattr(options, "precision", None) in get_args(AskedPrecision):
        given.remove("precision")
    return [f"--{name.replace('_', '-')}" for name in given]


def chooses_precision(options: argparse.Namespace) -> bool:
    """Whether engines of several precisions are to be tried."""
    return getattr(options, "precision", None) == "auto"


def bundle_precision(options: argparse.Namespace) -> AskedPrecision:
    """Read the precision of the bundle: with engines, ``--precision`` is theirs."""
    if options.backend == "tensorrt":
        return "fp32"
    precision: AskedPrecision = getattr(options, "precision", "fp32")
    return precision


def engine_options(options: argparse.Namespace) -> EngineBuildOptions:
    """Read the engine options, and fill in the defaults; EngineOptionsError if malformed."""
    given = {name: value for name, value in vars(options).items() if name in _ENGINE_ARGUMENTS}
    if chooses_precision(options):
        del given["precision"]  # of every build that is tried, another
    _refuse_both(given, "units", ["parts"])
    if getattr(options, "beside_serving", False):
        _refuse_both({**given, "beside_serving": True}, "beside_serving", _AS_THERE)
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "batch_profiles": ("batches", parse_batches),
        "buckets": ("buckets", lambda texts: tuple(parse_buckets(texts).items())),
        "parts": ("parts", parse_parts),
        "units": ("units", parse_units),
        "workspace": ("workspace_bytes", _bytes),
        "optimization_level": ("optimization_level", _level),
    }
    for name, (field, read) in readers.items():
        if name in given:
            given[field] = read(given.pop(name))
    return EngineBuildOptions(**given)


def _refuse_both(given: Mapping[str, Any], one: str, others: Sequence[str]) -> None:
    """Refuse an option together with those that say the same otherwise."""
    both = [name for name in others if one in given and name in given]
    if both:
        first, second = (f"--{name.replace('_', '-')}" for name in (one, both[0]))
        raise EngineOptionsError(f"{first} says what {second} does; give one of the two")


def _bytes(gib: float) -> int:
    if not 0 < gib < _MOST_GIB:
        raise EngineOptionsError(f"--workspace {gib:g} is no number of GiB; give for instance 4")
    return max(round(gib * _GIB), 1)


def _level(level: int) -> int:
    if level not in OPTIMIZATION_LEVELS:
        raise EngineOptionsError(f"--optimization-level {level} is not in 0 to 5")
    return level
