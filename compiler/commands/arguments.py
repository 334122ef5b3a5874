"""The command lines of ``eecompile``: a parser for each subcommand, and the types of its values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from offramp.bundle.distinct import COPIES_WITHIN
from offramp.bundle.engines import PRECISIONS
from offramp.bundle.tasks import TASK_KINDS
from offramp.compiler.commands import help_texts
from offramp.compiler.commands.argument_types import share_from_0
from offramp.compiler.commands.engine_arguments import add_engine_arguments
from offramp.compiler.commands.plan_arguments import add_plan_arguments
from offramp.compiler.data.arguments import add_data_arguments
from offramp.compiler.options import SEEDS
from offramp.engine.options import MOST_SHARE

_MOST_GIB = 2**20


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and shows defaults."""


def supernet_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile supernet``: that of compiling, and what is elastic."""
    parser = _parser("supernet", help_texts.SUPERNET, _Formatter)
    parser.add_argument("--elastic", type=Path, required=True, metavar="TOML",
                        help="what of the model is elastic: blocks that may be skipped, weights "
                        "that may be sliced, and how many operating points to keep")  # fmt: skip
    return _add_compiling(parser)


def compile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile MODEL.onnx``."""
    return _add_compiling(_parser("", help_texts.COMPILE, _Formatter))


def _add_compiling(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what a compilation takes."""
    _add_model(parser)
    parser.add_argument("--data", required=True, metavar="DATA",
                        help="calibration data: npz, images, texts, tables, or a function; see "
                        "docs/data.md; labels (optional) only for the report")  # fmt: skip
    _add_grouping(parser, COPIES_WITHIN)
    _add_target(parser, "MODEL.ee if not given", "a bundle that is there")
    _add_promise(parser, 0.01, 0.95)
    parser.add_argument("--agree-share", type=_part, metavar="X",
                        help="an answer agrees if so many of its tokens, pixels or key points do "
                        "(default: 0.98 of tokens, 0.95 of pixels, all key points)")  # fmt: skip
    parser.add_argument("--agree-within", type=_distance, metavar="D",
                        help="how far values of a regression may differ (default: 0.1 standard "
                        "deviations of the model's answers), or key points be apart (0.05 of the "
                        "map's longer side)")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--exits", metavar="A,B,…",
                       help="cut points to build exits at: numbers or names as inspect lists them, "
                       "patterns of names (*/Add*), shares of the work before them (25%%: the "
                       "nearest; 10%%-60%%: all between)")  # fmt: skip
    exits.add_argument("--heads", choices=["auto", "pooled", "bridges", "both"], default="auto",
                       help="pooled: heads that pool; bridges: some of the model's own blocks, "
                       "then its own head (PAME); both: at each place what saves more; auto: "
                       "bridges where answers have places, else pooled")  # fmt: skip
    exits.add_argument("--criterion", default="probability", metavar="NAME",
                       help="what says how sure an exit is: probability, its largest; entropy, its "
                       "reverse; margin, between the two largest; learned, a regression over "
                       "these; patience, how many exits in a row agree (PABEE); or your "
                       "own")  # fmt: skip
    exits.add_argument("--candidates", type=_positive, default=12, metavar="N",
                       help="most exits that are built, if --exits is not given")  # fmt: skip
    _add_max_cut_tensors(exits)
    exits.add_argument("--max-overhead", type=_share, metavar="SHARE",
                       help="hard limit on the time that exits may add where none is taken, at the "
                       "reference batch size; not given, that time is a price in the savings "
                       "(with --selection savings)")  # fmt: skip
    exits.add_argument("--mask", metavar="NAME", help="input that says which tokens count")
    exits.add_argument("--epochs", type=_positive, default=8, metavar="N", help="of training")
    exits.add_argument("--augment", choices=["auto", "off"], default="auto",
                       help="auto: heads train on samples made from the data too, labelled by the "
                       "model: mixed images and vectors, spliced texts")  # fmt: skip
    exits.add_argument("--train", choices=["frozen", "joint"], default="frozen",
                       help="frozen: exits on the model as it is; joint: then a copy of the model "
                       "together with them (PAME), which is used if it saves more: its own answer "
                       "is the last exit, and the unmodified model answers the rest, under the "
                       "same promise")  # fmt: skip
    exits.add_argument("--teach", choices=["model", "labels"], default="model",
                       help="what --train joint learns: the model's own answers, or the data's "
                       "labels")  # fmt: skip
    exits.add_argument("--joint-rate", type=_share, default=1e-4, metavar="X",
                       help="learning rate of --train joint")  # fmt: skip
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
    add_engine_arguments(engines)
    tuning = parser.add_argument_group("measuring")
    tuning.add_argument("--reference-batch-size", type=_positive, default=8, metavar="N",
                        help="savings are predicted at this size")  # fmt: skip
    tuning.add_argument("--threads", type=_positive, default=1, metavar="N",
                        help="of each graph while profiling")  # fmt: skip
    tuning.add_argument("--tolerance", type=_share, default=None, metavar="X",
                        help="relative difference allowed between slices and model (default: 1e-5; "
                        "1e-2 of fp16 models, 5e-2 of bfloat16 and int8 ones)")  # fmt: skip
    _add_seed(tuning, "of splits and training")
    tuning.add_argument("--scratch", type=Path, metavar="DIR",
                        help="where features are recorded, and removed again; the system's folder "
                        "for temporary files if not given")  # fmt: skip
    tuning.add_argument("--scratch-limit", type=_gib, default=4.0, metavar="GIB",
                        help="most that they take there at once: what is beyond it is recorded in "
                        "later passes over the data")  # fmt: skip
    parser.add_argument("--progress-file", type=Path, help=argparse.SUPPRESS)
    add_data_arguments(parser)
    return parser


def _add_max_cut_tensors(group: argparse._ActionsContainer) -> None:
    group.add_argument("--max-cut-tensors", type=_positive, default=4, metavar="K",
                       help="most tensors that a cut point has, where no single one carries "
                       "everything, as in parallel branches")  # fmt: skip


def inspect_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile inspect``."""
    parser = _parser("inspect", help_texts.INSPECT)
    _add_model(parser, "the model to slice, or a bundle")
    _add_max_cut_tensors(parser)
    _add_json(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile verify``."""
    parser = _parser("verify", help_texts.VERIFY)
    _add_bundle(parser, "verify")
    parser.add_argument("--data", required=True, metavar="DATA",
                        help="samples, best such that the bundle was not made of; labels "
                        "(optional) for its accuracy")  # fmt: skip
    add_data_arguments(parser)
    parser.add_argument("--threads", type=_positive, default=1, metavar="N",
                        help="of ONNX Runtime")  # fmt: skip
    _add_json(parser)
    return parser


def rehearse_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile rehearse``."""
    parser = _parser("rehearse", help_texts.REHEARSE)
    _add_bundle(parser, "adapt")
    parser.add_argument("--data", required=True, metavar="DATA",
                        help="samples of the new load; labels (optional) only for the "
                        "report")  # fmt: skip
    add_data_arguments(parser)
    _add_grouping(parser, None)
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
    parser = _parser("profile", help_texts.PROFILE)
    _add_bundle(parser, "measure")
    _add_target(parser, _REPLACED, "a bundle that is at --output")
    _add_dry_run(parser, "only print what was measured")
    parser.add_argument("--threads", type=_positive, metavar="N",
                        help="of each graph; as the bundle was profiled if not given")  # fmt: skip
    return parser


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile build``."""
    parser = _parser("build", help_texts.BUILD, argparse.RawDescriptionHelpFormatter)
    _add_bundle(parser, "build for")
    parser.add_argument("--data", metavar="DATA",
                        help="calibration data. Engines are verified on it, and it shows what fp16 "
                        "and int8 cost in answers")  # fmt: skip
    add_data_arguments(parser)
    _add_seed(parser, "that of the compilation, by which the samples that certified are "
              "found again in its data (default: 0)")  # fmt: skip
    engines = parser.add_argument_group("engines")
    _add_precision(engines, "of the arithmetic inside; inputs, outputs and exits stay fp32; auto: "
                   "what saves most of those that --data certify, timed here (default: fp32)",
                   also=["auto"])  # fmt: skip
    add_engine_arguments(engines)
    run = parser.add_argument_group("what is done")
    run.add_argument("--rebuild", action="store_true", help="build what still fits too")
    run.add_argument("--prune", action="store_true",
                     help="remove engines that this run does not ask for, also those of other "
                     "GPUs, versions and precisions")  # fmt: skip
    run.add_argument("--beside-serving", action="store_true",
                     help="as a server has it done that uses the same GPU: for the sizes and with "
                     "the settings of the engines that are there, in 1 GiB of the GPU's memory at "
                     "most")  # fmt: skip
    _add_dry_run(run, "only list what would be built, and why; needs no GPU")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile export``."""
    parser = _parser("export", help_texts.EXPORT, argparse.RawDescriptionHelpFormatter)
    _add_bundle(parser, "export")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.onnx",
                        help="the file to write")  # fmt: skip
    # Not required=True: what is missing is told in one line that says why it is needed.
    parser.add_argument("--data", metavar="DATA",
                        help="the calibration data, to verify with (always needed: a bundle does "
                        "not hold them)")  # fmt: skip
    add_data_arguments(parser)
    parser.add_argument("--with-exits", action="store_true",
                        help="add the outputs exit (index of the exit that answered, -1 for the "
                        "model's end) and confidence")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


def plan_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile plan``."""
    parser = _parser("plan", help_texts.PLAN, argparse.RawDescriptionHelpFormatter)
    _add_bundle(parser, "plan for")
    add_plan_arguments(parser)
    _add_json(parser)
    return parser


def _parser(
    name: str, description: str, formatter: type[argparse.HelpFormatter] = argparse.HelpFormatter
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"eecompile {name}".strip(), description=description, formatter_class=formatter
    )
    parser.add_argument("--custom-ops", type=Path, action="append", default=[], metavar="LIB.so",
                        help="library with operators that ONNX Runtime does not have; may be "
                        "repeated")  # fmt: skip
    parser.add_argument("--criterion-module", action="append", default=[], metavar="FILE.py:NAME",
                        help="a criterion of your own: a function of answers [batch, classes], "
                        "float32, that gives confidences [batch] from 0 to 1; may be "
                        "repeated")  # fmt: skip
    return parser


_REPLACED = "write there; BUNDLE is replaced if not given"


def _add_model(parser: argparse.ArgumentParser, what: str = "the model to slice") -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help=what)
    parser.add_argument("--answer", metavar="NAME",
                        help="the output that exits imitate, if several")  # fmt: skip
    parser.add_argument("--task", choices=["auto", *TASK_KINDS], default="auto",
                        help="what the answer is, which says when two agree; auto: as its shape "
                        "and activation say, or an error that asks for it")  # fmt: skip
    parser.add_argument("--class-map", action="store_true",
                        help="answer with the classes of pixels or tokens, in a byte each, "
                        "in place of their scores")  # fmt: skip
    parser.add_argument("--answer-tokens", type=_tokens, default=(), metavar="ID,ID,…",
                        help="of a decoder [batch, tokens, vocabulary]: the tokens that it answers "
                        "with, behind the last one of the prompt, such as those of yes and "
                        "no")  # fmt: skip
    parser.add_argument("--no-simplify", action="store_true", help="do not run onnxslim on the "
                        "model")  # fmt: skip
    parser.add_argument("--simplify-limit", type=_seconds, default=180.0, metavar="SECONDS",
                        help="that onnxslim may take")  # fmt: skip


def _add_grouping(parser: argparse.ArgumentParser, within: float | None) -> None:
    parser.add_argument("--group", metavar="KEY",
                        help="array of the data with an integer or a text for each sample: those "
                        "with equal ones belong together (a person, a recording), are in one split "
                        "alone, and count once in the certificate, as copies do")  # fmt: skip
    parser.add_argument("--copies-within", type=share_from_0, default=within, metavar="SHARE",
                        help="samples are copies of each other up to this share of the usual "
                        "distance between samples, where a gap follows; 0: only equal ones are, "
                        "and consecutive samples that resemble each other are no film")  # fmt: skip


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there too")


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
    promise.add_argument("--max-class-disagreement", type=_share, metavar="SHARE",
                         help="and of the answers of each class by itself, where its samples "
                         "are enough to certify it; default: no class is bounded")  # fmt: skip
    promise.add_argument("--confidence", dest="confidence_level", type=_share, metavar="SHARE",
                         default=confidence_level,
                         help="that this holds on unseen data")  # fmt: skip


def _add_rehearsing(
    group: argparse._ArgumentGroup, batch: int | None, violations: float | None
) -> None:
    group.add_argument("--rehearsal-batch", type=_positive, default=batch, metavar="N",
                       help="rows of a batch that is rehearsed")  # fmt: skip
    group.add_argument("--max-violations", type=share_from_0, default=violations, metavar="SHARE",
                       help="largest share of such batches that an exit may make later than the "
                       "unmodified model would")  # fmt: skip


def _add_precision(group: argparse._ArgumentGroup, help_: str, *, also: Sequence[str] = ()) -> None:
    choices = (*also, *PRECISIONS)
    group.add_argument("--precision", choices=choices, default=argparse.SUPPRESS, help=help_)


def seed(text: str) -> int:
    """Read a seed of random numbers; argparse names this function where it refuses one."""
    value = int(text)
    if not 0 <= value < SEEDS:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 to {SEEDS - 1}")
    return value


def _tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ids of tokens; give for instance 2152,9693"
        ) from error


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _gib(text: str) -> float:
    value = float(text)
    if not 0 < value < _MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text} is no number of GiB; give for instance 4")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0, and at most 1")
    return value


def _distance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no distance; give 0 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds; give for instance 60")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= MOST_SHARE:
        raise argparse.ArgumentTypeError(
            f"{text} is not a share: a number above 0, and below 1 by 1e-9 or more"
        )
    return value
