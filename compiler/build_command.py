"""The command line of building engines: ``eecompile build``, and ``--backend tensorrt``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offramp.bundle.engines import PRECISIONS
from offramp.compiler.engines.builder import OPTIMIZATION_LEVELS
from offramp.compiler.engines.ranges import DEFAULT_BATCHES, parse_batches, parse_buckets
from offramp.compiler.errors import EngineOptionsError

if TYPE_CHECKING:
    from offramp.compiler.build import BuildOptions, EngineOptions

DEFAULT_DEVICE = "cuda:0"
_DESCRIPTION = """\
Build the TensorRT engines of a bundle, on the machine that will serve it: of the unmodified
model, of the stages of its policy, and of every segment. They are kept in BUNDLE/engines, by
GPU, version of TensorRT and precision; what is there and still fits is not built again. Each
engine is run beside ONNX Runtime before it is kept.

  eecompile build model.ee                                     fp32, on the first GPU
  eecompile build model.ee --precision fp16 --device cuda:1
  eecompile build model.ee --batch-profiles 1,2-8,9-64 --buckets sequence=32,64,128
"""
_GIB, _MOST_GIB = 2**30, 2**20
_SEEDS = 2**63
"""How many there are: torch takes no larger one, numpy no negative one."""


def seed(text: str) -> int:
    """Read a seed of random numbers, for argparse."""
    value = int(text)
    if not 0 <= value < _SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 to {_SEEDS - 1}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile build``."""
    parser = argparse.ArgumentParser(
        prog="eecompile build",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to build for")
    parser.add_argument("--data", type=Path, metavar="NPZ",
                        help="calibration data: an array per input. Engines are verified on it, "
                        "and it says what fp16 and int8 cost in answers")  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, metavar="N",
                        help="that of the compilation, by which the samples that certified are "
                        "found again in its data (default: 0)")  # fmt: skip
    add_engine_arguments(parser.add_argument_group("engines"))
    run = parser.add_argument_group("what is done")
    run.add_argument("--rebuild", action="store_true", help="build what still fits too")
    run.add_argument("--prune", action="store_true",
                     help="remove engines that this run does not ask for, also those of other "
                     "GPUs, versions and precisions")  # fmt: skip
    run.add_argument("--dry-run", action="store_true",
                     help="only list what would be built, and why; needs no GPU")  # fmt: skip
    return parser


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add what ``eecompile build`` and ``--backend tensorrt`` have in common.

    What is not given is absent, so that it is seen what was given (:func:`given_engine_options`).
    """
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--device", metavar="DEVICE",
        help=f"the GPU to build on and for (default: {DEFAULT_DEVICE})")  # fmt: skip
    add("--precision", choices=PRECISIONS,
        help="of the arithmetic inside; inputs, outputs and exits stay fp32 "
        "(default: fp32)")  # fmt: skip
    add("--batch-profiles", metavar="A,B-C,…",
        help="batch sizes that an engine takes, each range tuned for its upper "
        f"end (default: {DEFAULT_BATCHES})")  # fmt: skip
    add("--buckets", metavar="NAME=A,B,…", action="append",
        help="upper ends of ranges of another symbolic size, such as "
        "sequence=32,64,128; may be repeated (default: up to the size of the "
        "calibration data)")  # fmt: skip
    add("--parts", metavar="A,B",
        help="what to build, of source, stages and segments (default: all)")  # fmt: skip
    add("--workspace", type=float, metavar="GIB",
        help="most memory of the GPU for scratch (default: all that is free)")  # fmt: skip
    add("--optimization-level", type=int, metavar="N",
        help="0 to 5: how long TensorRT looks for faster engines (default: 3)")  # fmt: skip
    add("--accept-disagreement", action="store_true",
        help="build although fp16 or int8 breaks the bundle's promise")  # fmt: skip


_ENGINE_ARGUMENTS = ("device", "precision", "batch_profiles", "buckets", "parts", "workspace",
                     "optimization_level", "accept_disagreement")  # fmt: skip


def given_engine_options(options: argparse.Namespace) -> list[str]:
    """Name the engine options that were given, as they are spelled."""
    given = [name for name in _ENGINE_ARGUMENTS if name in options]
    return [f"--{name.replace('_', '-')}" for name in given]


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """Read the engine options, and fill in the defaults.

    Raises:
        EngineOptionsError: One is malformed.
    """
    from offramp.compiler.build import EngineOptions, parse_parts  # noqa: PLC0415

    given = {name: value for name, value in vars(options).items() if name in _ENGINE_ARGUMENTS}
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "batch_profiles": ("batches", parse_batches),
        "buckets": ("buckets", lambda texts: tuple(parse_buckets(texts).items())),
        "parts": ("parts", parse_parts),
        "workspace": ("workspace_bytes", _bytes),
        "optimization_level": ("optimization_level", _level),
    }
    for name, (field, read) in readers.items():
        if name in given:
            given[field] = read(given.pop(name))
    return EngineOptions(**given)


def _bytes(gib: float) -> int:
    if not 0 < gib < _MOST_GIB:
        raise EngineOptionsError(f"--workspace {gib:g} is no number of GiB; give for instance 4")
    return max(round(gib * _GIB), 1)


def _level(level: int) -> int:
    if level not in OPTIMIZATION_LEVELS:
        raise EngineOptionsError(f"--optimization-level {level} is not in 0 to 5")
    return level


def run_build(options: argparse.Namespace, console: Console) -> int:
    """Run ``eecompile build``; gives the exit status."""
    from offramp.compiler.build import BuildOptions  # noqa: PLC0415

    return build_and_print(
        BuildOptions(
            bundle=options.bundle,
            engines=engine_options(options),
            data=options.data,
            seed=options.seed,
            rebuild=options.rebuild,
            prune=options.prune,
            dry_run=options.dry_run,
        ),
        console,
    )


def build_and_print(options: BuildOptions, console: Console) -> int:
    """Build, and print what came of it; gives the exit status."""
    from offramp.compiler.build import Reports, build_bundle  # noqa: PLC0415
    from offramp.compiler.build_table import print_building  # noqa: PLC0415
    from offramp.compiler.progress import TerminalProgress  # noqa: PLC0415

    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        with TerminalProgress(console) as progress:
            building = build_bundle(options, Reports(progress=progress, say=say))
    except KeyboardInterrupt:
        say("eecompile: interrupted; the engines built so far are kept, the same command goes on")
        return 130
    print_building(building, Console())
    failed = building.summary.failed if building.summary else ()
    for result in failed:
        say(f"eecompile: {result.problem}")
    return 1 if failed else 0
