"""The command lines of ``eecompile``: a parser for each subcommand, and the types of its values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from offramp.bundle.engines import PRECISIONS
from offramp.compiler.engines.options import (
    DEFAULT_BATCHES,
    OPTIMIZATION_LEVELS,
    EngineBuildOptions,
    parse_batches,
    parse_buckets,
    parse_parts,
)
from offramp.compiler.errors import EngineOptionsError
from offramp.compiler.options import AskedPrecision

_COMPILE = """\
Make a multi-exit bundle of an ONNX classifier: slice it at its cut points, train exits on
calibration data, and certify a policy under which disagreement with the unmodified model stays
within --max-disagreement.

  eecompile model.onnx --data calibration.npz     writes model.ee
  eecompile inspect model.onnx                    lists the cut points
  eecompile rehearse model.ee --data new.npz      adapts a bundle to a load that has changed
  eecompile profile model.ee                      measures its profile anew on this machine
  eecompile build model.ee --device cuda:0        builds its TensorRT engines, where the GPU is
  eecompile export model.ee --data calibration.npz --output fast.onnx
                                                  makes one ONNX file of it, for any ONNX Runtime
"""
_INSPECT = "List where a model can be cut, and why it cannot be cut elsewhere."
_REHEARSE = (
    "Adapt a bundle to a load that has changed: exits that would make batches late move towards "
    "the model's end, thresholds are raised as far as the promise asks for on the new data, and "
    "certified on a part of it. Graphs and profile stay. What is not given is as the bundle was "
    "made."
)
_PROFILE = (
    "Measure a bundle's profile anew on this machine, say what its policy is predicted to save "
    "here, and write it. Graphs, policy and promise stay."
)
_BUILD = """\
Build the TensorRT engines of a bundle, on the machine that will serve it: of the unmodified
model, of the stages of its policy, and of every segment. They are kept in BUNDLE/engines, by
GPU, version of TensorRT and precision; what is there and still fits is not built again. Each
engine is run beside ONNX Runtime before it is kept.

  eecompile build model.ee                                     fp32, on the first GPU
  eecompile build model.ee --precision fp16 --device cuda:1
  eecompile build model.ee --batch-profiles 1,2-8,9-64 --buckets sequence=32,64,128
"""
_EXPORT = """\
Write a bundle as one ONNX file, which runs wherever ONNX Runtime does, without Offramp: inputs
and output are the source model's, and easy samples leave early inside the file. It is compared
with the bundle on every sample of --data, and written only if it answers the same at the same
exits.

  eecompile export model.ee --data calibration.npz --output fast.onnx
"""
DEFAULT_DEVICE = "cuda:0"
_GIB, _MOST_GIB = 2**30, 2**20
_SEEDS = 2**63
"""How many there are: torch takes no larger one, numpy no negative one."""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and shows defaults."""


def compile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile MODEL.onnx``."""
    parser = _parser("", _COMPILE, _Formatter)
    _add_model(parser)
    parser.add_argument("--data", type=Path, required=True, metavar="NPZ",
                        help="calibration data: an array per input; labels (optional) only for "
                        "the report")  # fmt: skip
    _add_target(parser, "MODEL.ee if not given", "a bundle that is there")
    _add_promise(parser, 0.01, 0.95)
    exits = parser.add_argument_group("exits")
    exits.add_argument("--exits", metavar="A,B,…",
                       help="cut points to build exits at, as inspect lists them")  # fmt: skip
    exits.add_argument("--candidates", type=_positive, default=12, metavar="N",
                       help="most exits that are built, if --exits is not given")  # fmt: skip
    exits.add_argument("--max-overhead", type=_share, metavar="SHARE",
                       help="hard limit on the time that exits may add where none is taken, at the "
                       "reference batch size; not given, that time is a price in the savings "
                       "(with --selection savings)")  # fmt: skip
    exits.add_argument("--mask", metavar="NAME", help="input that says which tokens count")
    exits.add_argument("--epochs", type=_positive, default=8, metavar="N", help="of training")
    exits.add_argument("--augment", choices=["auto", "off"], default="auto",
                       help="auto: heads train on samples made from the data too, labelled by the "
                       "model: mixed images and vectors, spliced texts")  # fmt: skip
    rehearsal = parser.add_argument_group("choosing the exits in use")
    rehearsal.add_argument("--selection", choices=["savings", "pame"], default="savings",
                           help="savings: those that save most time together; pame: one by one, "
                           "by rehearsing batches, such that batches do not become late. "
                           "Thresholds are certified alike")  # fmt: skip
    _add_rehearsing(rehearsal, 32, 0.02)
    engines = parser.add_argument_group("engines", "With --backend tensorrt only, but --precision.")
    engines.add_argument("--backend", choices=["onnxruntime", "tensorrt"], default="onnxruntime",
                         help="tensorrt: build the bundle's engines too, as eecompile build "
                         "does")  # fmt: skip
    _add_precision(engines, "auto and int8, without engines: exits follow an int8 copy of the "
                   "model, for CPUs, if that saves more here; its own answer is the last exit, and "
                   "the unmodified model answers the rest, under the same promise. With engines: "
                   "of their arithmetic; the bundle is of fp32 (default: fp32)",
                   also=["auto"])  # fmt: skip
    _add_engine_arguments(engines)
    tuning = parser.add_argument_group("measuring")
    tuning.add_argument("--reference-batch-size", type=_positive, default=8, metavar="N",
                        help="savings are predicted at this size")  # fmt: skip
    tuning.add_argument("--threads", type=_positive, default=1, metavar="N",
                        help="of each graph while profiling")  # fmt: skip
    tuning.add_argument("--tolerance", type=_share, default=None, metavar="X",
                        help="relative difference allowed between slices and model (default: 1e-5; "
                        "1e-2 of fp16 models, 5e-2 of bfloat16 and int8 ones)")  # fmt: skip
    _add_seed(tuning, "of splits and training")
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile inspect``."""
    parser = _parser("inspect", _INSPECT)
    _add_model(parser)
    return parser


def rehearse_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile rehearse``."""
    parser = _parser("rehearse", _REHEARSE)
    _add_bundle(parser, "adapt")
    parser.add_argument("--data", type=Path, required=True, metavar="NPZ",
                        help="samples of the new load: an array per input; labels (optional) only "
                        "for the report")  # fmt: skip
    _add_target(parser, _REPLACED, "a bundle that is at --output")
    _add_dry_run(parser, "only print what would change")
    parser.add_argument("--anew", action="store_true",
                        help="search the exits from scratch by rehearsal, instead of moving those "
                        "in use; thresholds may fall too")  # fmt: skip
    _add_promise(parser, None, None)
    _add_rehearsing(parser.add_argument_group("rehearsing"), None, None)
    _add_seed(parser, "of split and batches")
    return parser


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile profile``."""
    parser = _parser("profile", _PROFILE)
    _add_bundle(parser, "measure")
    _add_target(parser, _REPLACED, "a bundle that is at --output")
    _add_dry_run(parser, "only print what was measured")
    parser.add_argument("--threads", type=_positive, metavar="N",
                        help="of each graph; as the bundle was profiled if not given")  # fmt: skip
    return parser


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile build``."""
    parser = _parser("build", _BUILD, argparse.RawDescriptionHelpFormatter)
    _add_bundle(parser, "build for")
    parser.add_argument("--data", type=Path, metavar="NPZ",
                        help="calibration data: an array per input. Engines are verified on it, "
                        "and it says what fp16 and int8 cost in answers")  # fmt: skip
    _add_seed(parser, "that of the compilation, by which the samples that certified are "
              "found again in its data (default: 0)")  # fmt: skip
    engines = parser.add_argument_group("engines")
    _add_precision(engines, "of the arithmetic inside; inputs, outputs and exits stay fp32 "
                   "(default: fp32)")  # fmt: skip
    _add_engine_arguments(engines)
    run = parser.add_argument_group("what is done")
    run.add_argument("--rebuild", action="store_true", help="build what still fits too")
    run.add_argument("--prune", action="store_true",
                     help="remove engines that this run does not ask for, also those of other "
                     "GPUs, versions and precisions")  # fmt: skip
    _add_dry_run(run, "only list what would be built, and why; needs no GPU")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile export``."""
    parser = _parser("export", _EXPORT, argparse.RawDescriptionHelpFormatter)
    _add_bundle(parser, "export")
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


def _parser(
    name: str, description: str, formatter: type[argparse.HelpFormatter] = argparse.HelpFormatter
) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"eecompile {name}".strip(), description=description, formatter_class=formatter
    )


_REPLACED = "write there; BUNDLE is replaced if not given"


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model to slice")
    parser.add_argument("--answer", metavar="NAME",
                        help="the output that exits imitate, if several")  # fmt: skip
    parser.add_argument("--no-simplify", action="store_true", help="do not run onnxslim on the "
                        "model")  # fmt: skip


def _add_bundle(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help=f"the bundle to {purpose}")


def _add_target(parser: argparse.ArgumentParser, where: str, replaced: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaced}")


def _add_dry_run(parser: argparse._ActionsContainer, help_: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=help_)


def _add_seed(parser: argparse._ActionsContainer, help_: str) -> None:
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help=help_)


def _add_promise(
    parser: argparse.ArgumentParser, disagreement: float | None, confidence_level: float | None
) -> None:
    promise = parser.add_argument_group("the promise")
    promise.add_argument("--max-disagreement", type=_share, default=disagreement, metavar="SHARE",
                         help="largest share of answers unlike the model's")  # fmt: skip
    promise.add_argument("--confidence", dest="confidence_level", type=_share, metavar="SHARE",
                         default=confidence_level,
                         help="that this holds on unseen data")  # fmt: skip


def _add_rehearsing(
    group: argparse._ArgumentGroup, batch: int | None, violations: float | None
) -> None:
    group.add_argument("--rehearsal-batch", type=_positive, default=batch, metavar="N",
                       help="rows of a batch that is rehearsed")  # fmt: skip
    group.add_argument("--max-violations", type=_tolerance, default=violations, metavar="SHARE",
                       help="largest share of such batches that an exit may make later than the "
                       "unmodified model would")  # fmt: skip


def _add_precision(group: argparse._ArgumentGroup, help_: str, *, also: Sequence[str] = ()) -> None:
    choices = (*also, *PRECISIONS)
    group.add_argument("--precision", choices=choices, default=argparse.SUPPRESS, help=help_)


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
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
    add("--workspace", type=float, metavar="GIB",
        help="most memory of the GPU for scratch (default: all that is free)")  # fmt: skip
    add("--optimization-level", type=int, metavar="N",
        help="0 to 5: how long TensorRT looks for faster engines (default: 3)")  # fmt: skip
    add("--accept-disagreement", action="store_true",
        help="build although fp16 or int8 spends the bundle's promise without any exit, and serve "
        "its policy as it is")  # fmt: skip


_ENGINE_ARGUMENTS = ("device", "precision", "batch_profiles", "buckets", "parts", "workspace",
                     "optimization_level", "accept_disagreement")  # fmt: skip


def given_engine_options(options: argparse.Namespace) -> list[str]:
    """Name the engine options that were given, as they are spelled.

    A precision that is asked of a bundle is none.
    """
    given = [name for name in _ENGINE_ARGUMENTS if name in options]
    if getattr(options, "precision", None) in get_args(AskedPrecision):
        given.remove("precision")
    return [f"--{name.replace('_', '-')}" for name in given]


def bundle_precision(options: argparse.Namespace) -> AskedPrecision:
    """Read the precision of the bundle: with engines, ``--precision`` is theirs."""
    if options.backend == "tensorrt":
        return "fp32"
    precision: AskedPrecision = getattr(options, "precision", "fp32")
    return precision


def engine_options(options: argparse.Namespace) -> EngineBuildOptions:
    """Read the engine options, and fill in the defaults; EngineOptionsError if malformed."""
    given = {name: value for name, value in vars(options).items() if name in _ENGINE_ARGUMENTS}
    if given.get("precision") == "auto":
        raise EngineOptionsError(
            "--precision auto is for bundles without engines; engines are of one of "
            + ", ".join(PRECISIONS)
        )
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
    return EngineBuildOptions(**given)


def _bytes(gib: float) -> int:
    if not 0 < gib < _MOST_GIB:
        raise EngineOptionsError(f"--workspace {gib:g} is no number of GiB; give for instance 4")
    return max(round(gib * _GIB), 1)


def _level(level: int) -> int:
    if level not in OPTIMIZATION_LEVELS:
        raise EngineOptionsError(f"--optimization-level {level} is not in 0 to 5")
    return level


def seed(text: str) -> int:
    """Read a seed of random numbers; argparse names this function where it refuses one."""
    value = int(text)
    if not 0 <= value < _SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 to {_SEEDS - 1}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or between 0 and 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
