"""The command line of ``eecompile MODEL.onnx``."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.bundle.schema.compilation import COPIES_WITHIN
from offramp.commands.parser import LayeredParser
from offramp.compiler.commands import help_texts, values
from offramp.compiler.commands.extension import commands_of_extensions
from offramp.compiler.commands.shared_arguments import (
    add_grouping,
    add_model,
    add_promise,
    add_rehearsing,
    add_seed,
    add_target,
    make_parser,
)
from offramp.compiler.common.options import COMPILE
from offramp.compiler.data.arguments import add_data

SHORT = ("--data", "--output", "--overwrite", "--max-disagreement", "--confidence", "--task",
         "--answer", "--group", "--exits", "--backend", "--seed")  # fmt: skip
"""Options that nine of ten people need."""


def compile_parser() -> LayeredParser:
    """Make the parser of ``eecompile MODEL.onnx``."""
    added = {name: command.summary for name, command in commands_of_extensions().items()}
    every = {**help_texts.COMMANDS, **added}
    parser = make_parser(
        "",
        help_texts.COMPILE,
        short=SHORT,
        illegal=COMPILE,
        examples=help_texts.COMPILE_EXAMPLES,
        commands=every,
    )
    add_compiling(parser)
    return parser


def add_compiling(parser: argparse.ArgumentParser, *, needs_data: bool = False) -> None:
    """Add all options of compiling a model."""
    add_model(parser)
    add_target(parser, "bundle to write (default: MODEL.ee)", "a bundle that is there")
    parser.add_argument("--backend", choices=["auto", "onnxruntime", "tensorrt"], default="auto",
                        metavar="NAME",
                        help="auto, onnxruntime or tensorrt (default: auto).\ntensorrt builds the "
                        "bundle's engines too, as eecompile build does, with its defaults; auto "
                        "does so where a GPU and TensorRT are there")  # fmt: skip
    add_seed(parser, "seed of splits and training")
    promise = parser.add_argument_group("promise")
    add_promise(parser, promise, 0.01, 0.95)
    add_grouping(parser, promise, COPIES_WITHIN)
    promise.add_argument("--agree-share", type=values.share_up_to_1, metavar="X",
                         help="share of its tokens, pixels or key points that an answer needs to "
                         "agree (default: 0.98 of tokens, 0.95 of pixels, all key "
                         "points)")  # fmt: skip
    promise.add_argument("--agree-within", type=values.distance, metavar="D",
                         help="how far values of a regression may differ, or key points be apart "
                         "(default: 0.1 standard deviations of the model's answers; 0.05 of the "
                         "map's longer side)")  # fmt: skip
    _add_exits(parser)
    _add_choice(parser.add_argument_group("choice of the exits in use"))
    _add_measuring(parser.add_argument_group("measuring"))
    add_data(parser, "samples like those that will be served; without, the model is described.\n"
             "npz, images, texts, tables or a function, see docs/data.md; labels (optional) are "
             "for the report. random: made inputs, a dry run that certifies nothing",
             required=needs_data)  # fmt: skip
    parser.add_argument("--progress-file", type=Path, help=argparse.SUPPRESS)


def _add_exits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exits", metavar="A,B,…",
                        help="places of exits, such as 25%%,10%%-60%% (default: chosen).\nNumbers "
                        "or names of cut points as inspect lists them, patterns of names (*/Add*), "
                        "shares of the work before them (25%%: the nearest; 10%%-60%%: all "
                        "between)")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--heads", choices=["auto", "pooled", "bridges", "both"], default="auto",
                       help="pooled: heads that pool; bridges: some of the model's own blocks, "
                       "then its own head (PAME); both: at each place what saves more; auto: "
                       "bridges where answers have places, else pooled")  # fmt: skip
    exits.add_argument("--criterion", default="probability", metavar="NAME",
                       help="measure of how sure an exit is: probability, its largest; entropy, "
                       "reversed; margin, between the two largest; learned, a regression over "
                       "these; patience, how many exits in a row agree (PABEE); or your "
                       "own")  # fmt: skip
    exits.add_argument("--candidates", type=values.positive, default=12, metavar="N",
                       help="most exits that are built")  # fmt: skip
    exits.add_argument("--mask", metavar="NAME",
                       help="input that says which tokens count (default: found by its "
                       "name)")  # fmt: skip
    exits.add_argument("--epochs", type=values.positive, default=8, metavar="N",
                       help="epochs of training")  # fmt: skip
    exits.add_argument("--augment", choices=["auto", "off"], default="auto",
                       help="auto: heads train on samples made from the data too, labelled by the "
                       "model: mixed images and vectors, spliced texts")  # fmt: skip
    exits.add_argument("--precision", choices=["fp32", "int8", "auto"], default="fp32",
                       help="auto and int8, for CPUs: exits follow an int8 copy of the model, if "
                       "that saves more here; its own answer is the last exit, and the unmodified "
                       "model answers the rest, under the same promise")  # fmt: skip
    exits.add_argument("--train", choices=["frozen", "joint"], default="frozen",
                       help="frozen: exits on the model as it is; joint: then a copy of the model "
                       "together with them (PAME), which is used if it saves more: its own answer "
                       "is the last exit, and the unmodified model answers the rest, under the "
                       "same promise")  # fmt: skip
    exits.add_argument("--teach", choices=["model", "labels"], default="model",
                       help="teacher of --train joint: the model's own answers, or the data's "
                       "labels")  # fmt: skip
    exits.add_argument("--joint-rate", type=values.share, default=1e-4, metavar="X",
                       help="learning rate of --train joint")  # fmt: skip


def _add_choice(group: argparse._ActionsContainer) -> None:
    group.add_argument("--selection", choices=["savings", "pame"], default="savings",
                       help="savings: exits that save most time together; pame: one by one, by "
                       "rehearsing batches, so that batches do not become late. Thresholds are "
                       "certified alike")  # fmt: skip
    group.add_argument("--max-overhead", type=values.share, metavar="SHARE",
                       help="limit on the time that exits may add where none is taken, at the "
                       "reference batch size (default: no limit, that time is a price in the "
                       "savings)")  # fmt: skip
    add_rehearsing(group, 32, 0.02)


def _add_measuring(group: argparse._ActionsContainer) -> None:
    group.add_argument("--reference-batch-size", type=values.positive, default=8, metavar="N",
                       help="batch size that savings are predicted at")  # fmt: skip
    group.add_argument("--threads", type=values.positive, default=1, metavar="N",
                       help="threads of each graph while profiling")  # fmt: skip
    group.add_argument("--tolerance", type=values.share, metavar="X",
                       help="largest relative difference between slices and model (default: 1e-5; "
                       "1e-2 of fp16 models, 5e-2 of bfloat16 and int8 ones)")  # fmt: skip
    group.add_argument("--scratch", type=Path, metavar="DIR",
                       help="folder where features are recorded, and removed again (default: the "
                       "system's folder for temporary files)")  # fmt: skip
    group.add_argument("--scratch-limit", type=values.gib, default=4.0, metavar="GIB",
                       help="most space for features there at once; the rest is recorded in later "
                       "passes over the data")  # fmt: skip
