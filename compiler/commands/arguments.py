"""Command lines of the commands of ``eecompile`` that read a bundle, and of ``inspect``."""

from __future__ import annotations

import argparse
from pathlib import Path

from offramp.compiler.commands import help_texts, values
from offramp.compiler.commands.engine_arguments import add_engine_arguments
from offramp.compiler.commands.shared_arguments import (
    REPLACED,
    add_bundle,
    add_dry_run,
    add_grouping,
    add_json,
    add_model,
    add_promise,
    add_rehearsing,
    add_seed,
    add_target,
    make_parser,
)
from offramp.compiler.common.options import BUILD, EXPORT
from offramp.compiler.data.arguments import add_data


def inspect_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile inspect``."""
    parser = make_parser("inspect", help_texts.INSPECT)
    add_model(parser, "model to slice, or a bundle")
    add_json(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile verify``."""
    parser = make_parser("verify", help_texts.VERIFY, short=("--data", "--threads", "--json"))
    add_bundle(parser, "verify")
    add_data(parser, "samples, best ones that the bundle was not made of; labels (optional) are "
             "for its accuracy")  # fmt: skip
    parser.add_argument("--threads", type=values.positive, default=1, metavar="N",
                        help="threads of ONNX Runtime")  # fmt: skip
    add_json(parser)
    return parser


def rehearse_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile rehearse``."""
    short = ("--data", "--output", "--overwrite", "--dry-run", "--anew", "--max-disagreement",
             "--confidence", "--group")  # fmt: skip
    parser = make_parser("rehearse", help_texts.REHEARSE, short=short)
    add_bundle(parser, "adapt")
    add_data(parser, "samples of the new load; labels (optional) are for the report")
    add_grouping(parser, parser, None)
    add_target(parser, REPLACED, "a bundle that is at --output")
    add_dry_run(parser, "only print what would change")
    parser.add_argument("--anew", action="store_true",
                        help="search the exits from scratch by rehearsal, instead of moving those "
                        "in use; thresholds may fall too")  # fmt: skip
    add_promise(parser, parser, None, None)
    add_rehearsing(parser, None, None)
    add_seed(parser, "seed of split and batches")
    return parser


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile profile``."""
    parser = make_parser("profile", help_texts.PROFILE)
    add_bundle(parser, "measure")
    add_target(parser, REPLACED, "a bundle that is at --output")
    add_dry_run(parser, "only print what was measured")
    parser.add_argument("--threads", type=values.positive, metavar="N",
                        help="threads of each graph (default: as the bundle was "
                        "profiled)")  # fmt: skip
    return parser


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile build``."""
    parser = make_parser(
        "build",
        help_texts.BUILD,
        short=("--device", "--precision", "--data", "--batch-profiles", "--dry-run"),
        illegal=BUILD,
        examples=help_texts.BUILD_EXAMPLES,
    )
    add_bundle(parser, "build for")
    add_data(parser, "calibration data of the bundle.\nEngines are verified on it, and it shows "
             "what fp16 and int8 cost in answers", required=False)  # fmt: skip
    add_seed(parser, "seed of the compilation, by which the samples that certified are found "
             "again in its data")  # fmt: skip
    add_engine_arguments(parser.add_argument_group("engines"))
    run = parser.add_argument_group("what is done")
    run.add_argument("--rebuild", action="store_true", help="build engines that still fit, too")
    run.add_argument("--prune", action="store_true",
                     help="remove engines that this run does not ask for, also those of other "
                     "GPUs, versions and precisions")  # fmt: skip
    run.add_argument("--beside-serving", action="store_true",
                     help="as a server that uses the same GPU has it done: for the sizes and with "
                     "the settings of the engines that are there, in at most 1 GiB of the GPU's "
                     "memory")  # fmt: skip
    add_dry_run(run, "only list what would be built, and why; needs no GPU")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile export``."""
    parser = make_parser(
        "export",
        help_texts.EXPORT,
        short=("--data", "--output", "--overwrite", "--with-exits", "--triton", "--kserve"),
        illegal=EXPORT,
        examples=help_texts.EXPORT_EXAMPLES,
    )
    add_bundle(parser, "export")
    # Not required=True: a repository may be all that is asked for.
    parser.add_argument("--output", type=Path, metavar="FILE.onnx", help="file to write")
    # Not required=True: the error for a missing one says in one line why it is needed.
    add_data(parser, "calibration data to verify with (always needed: a bundle does not hold "
             "them)", required=False)  # fmt: skip
    parser.add_argument("--with-exits", action="store_true",
                        help="add the outputs exit (index of the exit that answered, -1 for the "
                        "model's end) and confidence")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace a file or an exported model that is there")  # fmt: skip
    servers = parser.add_argument_group("model repositories of other servers")
    servers.add_argument("--triton", type=Path, metavar="DIR",
                         help="write DIR/NAME for Triton's ONNX Runtime backend")  # fmt: skip
    servers.add_argument("--ovms", type=Path, metavar="DIR",
                         help="write DIR/NAME and DIR/config.json for OpenVINO Model Server; may "
                         "be the folder of --triton")  # fmt: skip
    servers.add_argument("--kserve", metavar="URI",
                         help="write DIR/NAME.kserve.yaml too, by which KServe runs Triton on a "
                         "copy of DIR at URI; needs --triton")  # fmt: skip
    servers.add_argument("--name", metavar="NAME",
                         help="name of the model there (default: that of the bundle)")  # fmt: skip
    return parser
