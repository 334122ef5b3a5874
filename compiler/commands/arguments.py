"""Command lines of ``eecompile`` and its commands: options, help texts, and extensions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from rich.console import Console

from offramp.bundle.engines import PRECISIONS
from offramp.bundle.schema.answers import TASK_KINDS
from offramp.bundle.schema.compilation import COPIES_WITHIN
from offramp.commands.parser import LayeredParser
from offramp.compiler.commands import values
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.common.options import BUILD, COMPILE, EXPORT, PROFILE
from offramp.compiler.data.data_flags import add_data
from offramp.compiler.engines.build_options import (
    DEFAULT_BATCHES,
    OPTIMIZATION_LEVELS,
    EngineBuildOptions,
    parse_batches,
    parse_buckets,
    parse_parts,
    parse_units,
)
from offramp.engine.common.extensions import extensions_for

REPLACED = "folder to write to (default: BUNDLE is replaced)"
SHORT = ("--data", "--output", "--overwrite", "--max-disagreement", "--confidence", "--task",
         "--answer", "--group", "--exits", "--backend", "--seed")  # fmt: skip
"""Options that most users need, shown in the short help."""
SUMMARIES: Final = {
    "inspect": "list the cut points of a model, or the content of a bundle",
    "verify": "compare a bundle with its model on any data",
    "rehearse": "adapt a bundle to a load that has changed",
    "profile": "measure a bundle again, on this machine",
    "build": "build a bundle's TensorRT engines, on the machine with the GPU",
    "export": "write a bundle as one ONNX file, for any ONNX Runtime",
    "wrap": "make a bundle of a model as it is, without exits and data",
}
"""One-line descriptions of the core's subcommands of ``eecompile``; extensions add others."""
_GIB = 2**30
_ENGINE_ARGUMENTS = ("device", "precision", "batch_profiles", "buckets", "parts", "units",
                     "workspace", "optimization_level", "accept_disagreement")  # fmt: skip
_WRAP = """\
Make a bundle of an ONNX model as it is, without exits: no data are needed, and
it takes seconds. eeserve does this itself for an ONNX file."""
MISSING = "serving an ONNX file needs the packages of the extra `onnx`: pip install 'offramp[onnx]'"
"""Error message of ``eecompile wrap`` if a package is missing."""


class Command(NamedTuple):
    """A subcommand of ``eecompile``: its parser, and the function that runs it."""

    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace, Console], int]
    summary: str
    """One-line description, for the list of commands in the help of ``eecompile``."""
    task: bool = False
    """True if ``eecompile MODEL --task NAME`` runs it as well, NAME being the command's name."""


class CompilerExtension(Protocol):
    """The object ``EXTENSION`` of an extension's module ``for_compiler``."""

    commands: Mapping[str, Command]
    """The extension's commands by name."""


def commands_of_extensions() -> dict[str, Command]:
    """Return the subcommands that the extensions add."""
    return {
        name: command
        for extension in extensions_for("compiler")
        for name, command in extension.commands.items()
    }


def command_of(
    given: Sequence[str], commands: Mapping[str, Command]
) -> tuple[Command | None, Sequence[str]]:
    """Return the command that the first word or ``--task`` names, if any, and the other words."""
    if given and given[0] in commands:
        return commands[given[0]], given[1:]
    for place, word in enumerate(given):
        flag, _, joined = word.partition("=")
        name = joined or next(iter(given[place + 1 :]), "")
        if flag == "--task" and name in commands and commands[name].task:
            return commands[name], [*given[:place], *given[place + (1 if joined else 2) :]]
    return None, given


def make_parser(name: str, description: str, **layers: Any) -> LayeredParser:
    """Return the parser of a command with the options that all commands have.

    ``layers`` are arguments of :class:`LayeredParser`.
    """
    parser = LayeredParser(prog=f"eecompile {name}".strip(), description=description, **layers)
    parser.add_argument("--custom-ops", type=Path, action="append", default=[], metavar="LIB.so",
                        help="library of operators that ONNX Runtime lacks; may be "
                        "repeated")  # fmt: skip
    parser.add_argument("--criterion-module", action="append", default=[], metavar="FILE.py:NAME",
                        help="criterion of your own: a function from answers [batch, classes], "
                        "float32, to confidences [batch] from 0 to 1; may be repeated")  # fmt: skip
    return parser


def add_model(parser: argparse.ArgumentParser, what: str = "model, an ONNX file") -> None:
    """Add the argument for the model, and the options for reading its file."""
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help=what)
    parser.add_argument("--task", choices=["auto", *TASK_KINDS], default="auto", metavar="TASK",
                        help="kind of the answer (default: by its shape).\nIt decides when two "
                        f"answers agree: {', '.join(TASK_KINDS)}; auto infers it from shape and "
                        "activation, or asks for it")  # fmt: skip
    parser.add_argument("--answer", metavar="NAME",
                        help="output that exits imitate (default: the only one)")  # fmt: skip
    reading = parser.add_argument_group("reading the model")
    reading.add_argument("--class-map", action="store_true",
                         help="answer with the class of each pixel or token, one byte each, "
                         "instead of the scores")  # fmt: skip
    reading.add_argument("--answer-tokens", type=values.tokens, default=(), metavar="ID,ID,…",
                         help="ids of the possible answers, such as the tokens yes and no: a "
                         "decoder [batch, tokens, vocabulary] chooses one of them after the "
                         "last token of the prompt")  # fmt: skip
    reading.add_argument("--no-simplify", action="store_true",
                         help="do not run onnxslim on the model")  # fmt: skip
    reading.add_argument("--simplify-limit", type=values.seconds, default=180.0, metavar="SECONDS",
                         help="longest time for onnxslim")  # fmt: skip
    reading.add_argument("--max-cut-tensors", type=values.positive, default=4, metavar="K",
                         help="largest number of tensors at a cut point, for models with parallel "
                         "branches, where no single tensor carries all data")  # fmt: skip


def add_grouping(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer, within: float | None
) -> None:
    """Add ``--group`` and ``--copies-within``, which define dependent samples."""
    parser.add_argument("--group", metavar="KEY",
                        help="array of the data that identifies dependent samples.\n"
                        "Samples with equal values (integers or texts), such as those of one "
                        "person or recording, belong to the same data split and count once "
                        "in the certificate, as equal samples do")  # fmt: skip
    default = "" if within is not None else " (default: as the bundle was made)"
    group.add_argument("--copies-within", type=values.share_from_0, default=within, metavar="SHARE",
                       help="samples at most this far apart, as a share of the usual distance "
                       "between samples, count as copies of one sample, if all other pairs are "
                       "clearly farther apart; 0: only equal samples are copies, and "
                       "similar samples in a row are not taken for frames of one "
                       f"film{default}")  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: a file to which the result is also written."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result to this JSON file"
    )


def add_bundle(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the positional argument for the bundle that a command reads."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help=f"bundle to {purpose}")


def add_target(parser: argparse.ArgumentParser, where: str, replaced: str) -> None:
    """Add ``--output``, the folder to write, and ``--overwrite``."""
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaced}")


def add_dry_run(parser: argparse._ActionsContainer, what: str) -> None:
    """Add ``--dry-run``, with which a command writes nothing."""
    parser.add_argument("--dry-run", action="store_true", help=what)


def add_seed(parser: argparse._ActionsContainer, what: str) -> None:
    """Add ``--seed``, the seed of random numbers."""
    parser.add_argument("--seed", type=values.seed, default=0, metavar="N", help=what)


def add_promise(
    parser: argparse.ArgumentParser,
    group: argparse._ActionsContainer,
    disagreement: float | None,
    confidence_level: float | None,
) -> None:
    """Add the options of the promise; where an option has no default, the bundle's values apply."""
    own = "" if disagreement is not None else " (default: as the bundle was made)"
    parser.add_argument("--max-disagreement", type=values.share, default=disagreement,
                        metavar="SHARE",
                        help="largest share of answers that differ from the model's "
                        f"own{own}")  # fmt: skip
    parser.add_argument("--confidence", dest="confidence_level", type=values.share, metavar="SHARE",
                        default=confidence_level,
                        help="confidence level of --max-disagreement on unseen "
                        f"data{own}")  # fmt: skip
    group.add_argument("--max-class-disagreement", type=values.share, metavar="SHARE",
                       help="bound like --max-disagreement for each class of the model "
                       "separately, if its samples suffice to certify it (default: "
                       "none)")  # fmt: skip


def add_rehearsing(
    group: argparse._ActionsContainer,
    batch: int | None,
    violations: float | None,
    min_gain: float | None,
) -> None:
    """Add the settings of PAME's rehearsal; without defaults, the bundle's values apply."""
    own = "" if batch is not None else " (default: as the bundle was made)"
    of_search = "" if batch is not None else "; with --from-scratch, or if no exit is in use"
    group.add_argument("--rehearsal-batch", type=values.positive, default=batch, metavar="N",
                       help=f"samples in each rehearsed batch{own}")  # fmt: skip
    group.add_argument("--max-violations", type=values.share_from_0, default=violations,
                       metavar="SHARE",
                       help="largest share of rehearsed batches that an exit may make slower than "
                       f"with the unmodified model{own}")  # fmt: skip
    group.add_argument("--min-gain", type=values.share_from_0, default=min_gain, metavar="SHARE",
                       help="smallest share of the model's time by which each exit must shorten "
                       f"the mean latency of rehearsed batches; PAME uses 0{of_search}{own}"
                       )  # fmt: skip


def compile_parser() -> LayeredParser:
    """Return the parser of ``eecompile MODEL.onnx``."""
    added = {name: command.summary for name, command in commands_of_extensions().items()}
    every = {**SUMMARIES, **added}
    parser = make_parser(
        "",
        """\
Add exits to an ONNX model, train them on samples, and certify how often answers
may differ from the model's. Write a bundle, which eeserve serves.""",
        short=SHORT,
        illegal=COMPILE,
        examples={
            "eecompile model.onnx": "what it is, what compiling needs",
            "eecompile model.onnx --data samples.npz": "writes model.ee",
            "eecompile model.onnx --data random": "a dry run that certifies nothing",
        },
        commands=every,
    )
    add_compiling(parser)
    return parser


def add_compiling(parser: argparse.ArgumentParser, *, needs_data: bool = False) -> None:
    """Add all options of compiling a model."""
    add_model(parser)
    add_target(parser, "bundle to write (default: MODEL.ee)", "an existing bundle")
    parser.add_argument("--backend", choices=["auto", "onnxruntime", "tensorrt"], default="auto",
                        metavar="NAME",
                        help="auto, onnxruntime or tensorrt (default: auto).\ntensorrt also builds "
                        "the bundle's engines, as eecompile build does, with its defaults; auto "
                        "does so if a GPU and TensorRT are available")  # fmt: skip
    add_seed(parser, "seed of splits and training")
    promise = parser.add_argument_group("promise")
    add_promise(parser, promise, 0.01, 0.95)
    add_grouping(parser, promise, COPIES_WITHIN)
    promise.add_argument("--agree-share", type=values.share_up_to_1, metavar="X",
                         help="share of its tokens, pixels or key points that must match for an "
                         "answer to agree (default: 0.98 of tokens, 0.95 of pixels, all key "
                         "points)")  # fmt: skip
    promise.add_argument("--agree-within", type=values.distance, metavar="D",
                         help="largest difference of regression values, or distance of key "
                         "points, at which answers agree (default: 0.1 standard deviations "
                         "of the model's answers; 0.05 of the map's longer side)")  # fmt: skip
    _add_exits(parser)
    _add_choice(parser.add_argument_group("choice of the exits in use"))
    _add_measuring(parser.add_argument_group("measuring"))
    add_data(parser, "samples like those that will be served; without, the model is described.\n"
             "npz, images, texts, tables or a function, see docs/data.md; labels (optional) are "
             "for the report. random: generated inputs, a dry run that certifies nothing",
             required=needs_data)  # fmt: skip
    parser.add_argument("--progress-file", type=Path, help=argparse.SUPPRESS)


def _add_exits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exits", metavar="A,B,…",
                        help="places of exits, such as 25%%,10%%-60%% (default: chosen).\nNumbers "
                        "or names of cut points as listed by inspect, patterns of names (*/Add*), "
                        "shares of the work before a place (25%%: the nearest place; "
                        "10%%-60%%: all between)")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--heads", choices=["auto", "pooled", "bridges", "both"], default="auto",
                       help="pooled: heads that pool; bridges: some of the model's own blocks, "
                       "then its own head (PAME); both: at each place, whichever saves more; auto: "
                       "bridges if answers have positions, else pooled")  # fmt: skip
    exits.add_argument("--criterion", default="probability", metavar="NAME",
                       help="measure of an exit's confidence. probability: the largest "
                       "probability; entropy: confident if low; margin: difference of the two "
                       "largest probabilities; learned: a regression over these three; "
                       "patience: the number of exits in a row that agree (PABEE); or your "
                       "own")  # fmt: skip
    exits.add_argument("--candidates", type=values.positive, default=12, metavar="N",
                       help="largest number of exits to build")  # fmt: skip
    exits.add_argument("--mask", metavar="NAME",
                       help="input that marks the tokens that count (default: found by its "
                       "name)")  # fmt: skip
    exits.add_argument("--epochs", type=values.positive, default=8, metavar="N",
                       help="training epochs")  # fmt: skip
    exits.add_argument("--augment", choices=["auto", "off"], default="auto",
                       help="auto: heads also train on samples made from the data and labelled by "
                       "the model: mixed images and vectors, spliced texts")  # fmt: skip
    exits.add_argument("--precision", choices=["fp32", "int8", "auto"], default="fp32",
                       help="auto and int8, for CPUs: exits follow an int8 copy of the model, if "
                       "that saves more here; its own answer is the last exit, and the unmodified "
                       "model answers the remaining samples, under the same promise")  # fmt: skip
    exits.add_argument("--train", choices=["frozen", "joint"], default="frozen",
                       help="frozen: exits on the unmodified model; joint: in addition, a copy of "
                       "the model is trained with its exits (PAME), and used if it saves more: its "
                       "own answer is the last exit, and the unmodified model answers the "
                       "remaining samples, under the same promise")  # fmt: skip
    exits.add_argument("--teach", choices=["model", "labels"], default="model",
                       help="teacher of --train joint: the model's own answers, or the data's "
                       "labels")  # fmt: skip
    exits.add_argument("--joint-rate", type=values.share, default=1e-4, metavar="X",
                       help="learning rate of --train joint")  # fmt: skip


def _add_choice(group: argparse._ActionsContainer) -> None:
    group.add_argument("--selection", choices=["savings", "pame"], default="savings",
                       help="savings: the exits that save most time together; pame: one by one, by "
                       "rehearsing batches, so that batches do not become late. Thresholds are "
                       "certified in the same way")  # fmt: skip
    group.add_argument("--max-overhead", type=values.share, metavar="SHARE",
                       help="limit on the time that exits add for samples that leave at no exit, "
                       "at the reference batch size (default: no limit, that time only "
                       "reduces the savings)")  # fmt: skip
    add_rehearsing(group, 32, 0.02, 0.01)


def _add_measuring(group: argparse._ActionsContainer) -> None:
    group.add_argument("--reference-batch-size", type=values.positive, default=8, metavar="N",
                       help="batch size for which savings are predicted")  # fmt: skip
    group.add_argument("--threads", type=values.positive, default=1, metavar="N",
                       help="threads of each graph while profiling")  # fmt: skip
    group.add_argument("--tolerance", type=values.share, metavar="X",
                       help="largest relative difference between the cut model and the whole one "
                       "(default: 1e-5; 1e-2 for fp16 models, 5e-2 for bfloat16 and int8 "
                       "models)")  # fmt: skip
    group.add_argument("--scratch", type=Path, metavar="DIR",
                       help="folder for recorded features, which are removed at the end (default: "
                       "the system's folder for temporary files)")  # fmt: skip
    group.add_argument("--scratch-limit", type=values.gib, default=4.0, metavar="GIB",
                       help="largest space for recorded features; the rest is recorded in later "
                       "passes over the data")  # fmt: skip


def inspect_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile inspect``."""
    parser = make_parser(
        "inspect",
        """\
List where a model can be cut, and why it cannot be cut elsewhere; for a bundle,
list its content.""",
    )
    add_model(parser, "model to slice, or a bundle")
    add_json(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile verify``."""
    parser = make_parser(
        "verify",
        """\
Compare a bundle with its unmodified model: its files, the answers of its stages
in batches of many sizes, and its promise, on data of your choice. Exit status 1
if the model's end answers differently, or if more samples disagree than the
promise makes likely.""",
        short=("--data", "--threads", "--json"),
    )
    add_bundle(parser, "verify")
    add_data(parser, "samples, preferably others than the bundle was made from; labels "
             "(optional) are for its accuracy")  # fmt: skip
    parser.add_argument("--threads", type=values.positive, default=1, metavar="N",
                        help="threads of ONNX Runtime")  # fmt: skip
    add_json(parser)
    return parser


def rehearse_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile rehearse``."""
    short = ("--data", "--output", "--overwrite", "--dry-run", "--from-scratch",
             "--max-disagreement", "--confidence", "--group")  # fmt: skip
    parser = make_parser(
        "rehearse",
        """\
Adapt a bundle to a load that has changed: exits that would make batches late
move towards the model's end, thresholds are raised as far as the promise needs
on the new data, and certified on a part of it. Graphs and profile stay.""",
        short=short,
    )
    add_bundle(parser, "adapt")
    add_data(parser, "samples of the new load; labels (optional) are for the report")
    add_grouping(parser, parser, None)
    add_target(parser, REPLACED, "a bundle at --output")
    add_dry_run(parser, "only print what would change")
    parser.add_argument("--from-scratch", action="store_true",
                        help="search the exits from scratch by rehearsal, instead of moving those "
                        "in use; thresholds may fall too")  # fmt: skip
    add_promise(parser, parser, None, None)
    add_rehearsing(parser, None, None, None)
    add_seed(parser, "seed of split and batches")
    return parser


def profile_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile profile``."""
    parser = make_parser(
        "profile",
        """\
Measure a bundle's profile again on this machine, print what its policy is
predicted to save here, and write it. Graphs, policy and promise stay. A profile
of a GPU, for the plans of a cluster, is written to a separate file.""",
        short=("--threads", "--output", "--backend", "--device", "--json"),
        illegal=PROFILE,
        examples={
            "eecompile profile model.ee": "",
            "eecompile profile model.ee --backend tensorrt --json gpu.json": "",
        },
    )
    add_bundle(parser, "measure")
    add_target(parser, REPLACED, "a bundle at --output")
    add_dry_run(parser, "only print what was measured")
    parser.add_argument("--threads", type=values.positive, metavar="N",
                        help="threads of each graph (default: as the bundle was "
                        "profiled)")  # fmt: skip
    parser.add_argument("--backend", choices=("onnxruntime", "tensorrt", "cuda"),
                        default="onnxruntime", metavar="NAME",
                        help="engine to measure: onnxruntime (the CPU), or on a GPU tensorrt (with "
                        "engines of eecompile build, in fp32) or cuda")  # fmt: skip
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N", help="GPU to measure")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="write the profile to this file only, for use in a cluster "
                        "file")  # fmt: skip
    return parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile build``."""
    parser = make_parser(
        "build",
        """\
Build the TensorRT engines of a bundle, on the machine that will serve it: of
the unmodified model, of the stages of its policy, and of every segment. They
are kept in BUNDLE/engines, by GPU, version of TensorRT and precision; engines
that still fit are not built again. Each is compared with ONNX Runtime before it
is kept.""",
        short=("--device", "--precision", "--data", "--batch-profiles", "--dry-run"),
        illegal=BUILD,
        examples={
            "eecompile build model.ee": "fp32, on the first GPU",
            "eecompile build model.ee --precision fp16 --device cuda:1": "",
            "eecompile build model.ee --batch-profiles 1,2-8,9-64 --buckets sequence=32,64": "",
        },
    )
    add_bundle(parser, "build for")
    add_data(parser, "calibration data of the bundle.\nEngines are verified on it, and it shows "
             "how fp16 and int8 change answers", required=False)  # fmt: skip
    add_seed(parser, "seed of the compilation, which identifies the certification samples "
             "in its data")  # fmt: skip
    add_engine_arguments(parser.add_argument_group("engines"))
    run = parser.add_argument_group("what is done")
    run.add_argument("--rebuild", action="store_true", help="also build engines that still fit")
    run.add_argument("--prune", action="store_true",
                     help="remove engines that this run does not need, including those of other "
                     "GPUs, versions and precisions")  # fmt: skip
    run.add_argument("--while-serving", action="store_true",
                     help="build as a server on the same GPU does: for the sizes and with "
                     "the settings of the existing engines, in at most 1 GiB of the GPU's "
                     "memory")  # fmt: skip
    add_dry_run(run, "only list what would be built, and why; needs no GPU")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile export``."""
    parser = make_parser(
        "export",
        """\
Write a bundle as one ONNX file, which runs in any ONNX Runtime, without
Offramp: inputs and output are the source model's, and easy samples leave early
inside the file. It is compared with the bundle on every sample of --data, and
written only if it returns the same answers at the same exits. Other servers load
it from a model repository; they do not audit answers, watch for drift or renew
certificates, as eeserve does.""",
        short=("--data", "--output", "--overwrite", "--with-exits", "--triton", "--kserve"),
        illegal=EXPORT,
        examples={
            "eecompile export model.ee --data samples.npz --output fast.onnx": "",
            "eecompile export model.ee --data samples.npz --triton models --with-exits": "",
        },
    )
    add_bundle(parser, "export")
    # Not required=True: a repository may be the only output.
    parser.add_argument("--output", type=Path, metavar="FILE.onnx", help="file to write")
    # Not required=True: the error for missing data explains in one line why they are needed.
    add_data(parser, "calibration data to verify with (always needed: a bundle does not contain "
             "them)", required=False)  # fmt: skip
    parser.add_argument("--with-exits", action="store_true",
                        help="add the outputs exit (index of the exit that answered, -1 for the "
                        "model's end) and confidence")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace an existing file or exported model")  # fmt: skip
    servers = parser.add_argument_group("model repositories of other servers")
    servers.add_argument("--triton", type=Path, metavar="DIR",
                         help="write DIR/NAME for Triton's ONNX Runtime backend")  # fmt: skip
    servers.add_argument("--ovms", type=Path, metavar="DIR",
                         help="write DIR/NAME and DIR/config.json for OpenVINO Model Server; may "
                         "be the folder of --triton")  # fmt: skip
    servers.add_argument("--kserve", metavar="URI",
                         help="also write DIR/NAME.kserve.yaml, with which KServe runs Triton on a "
                         "copy of DIR at URI; needs --triton")  # fmt: skip
    servers.add_argument("--name", metavar="NAME",
                         help="name of the model in the repository (default: the "
                         "bundle's name)")  # fmt: skip
    return parser


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options of engines; options that are left out are absent from the namespace."""
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--device", metavar="DEVICE",
        help="GPU to build on and for (default: cuda:0)")  # fmt: skip
    add("--precision", choices=["auto", *PRECISIONS],
        help="arithmetic inside the engines (default: fp32).\n"
        "Inputs, outputs and exits stay fp32. auto: the fastest precision, as timed here, of "
        "those that are certified on --data")  # fmt: skip
    add("--batch-profiles", metavar="A,B-C,…",
        help=f"batch sizes of each engine (default: {DEFAULT_BATCHES}).\nEach range is tuned "
        "for its upper end")  # fmt: skip
    add("--buckets", metavar="NAME=A,B,…", action="append",
        help="upper ends of ranges of another symbolic size, such as sequence=32,64,128; may be "
        "repeated (default: up to the size of the calibration data)")  # fmt: skip
    add("--parts", metavar="A,B",
        help="parts to build engines of: source, stages, segments (default: all)")  # fmt: skip
    add("--units", metavar="NAME,NAME",
        help="single engines to build, by their names in the table that build prints, such as "
        "00-01-exit1: needed when other exits become active")  # fmt: skip
    add("--workspace", type=values.gib, metavar="GIB",
        help="largest GPU memory for scratch (default: all free memory)")  # fmt: skip
    add("--optimization-level", type=int, metavar="N",
        help="0 to 5: how long TensorRT searches for faster engines (default: 3)")  # fmt: skip
    add("--accept-disagreement", action="store_true",
        help="build although fp16 or int8 alone uses up the bundle's promise, and keep its "
        "policy unchanged")  # fmt: skip


def chooses_precision(options: argparse.Namespace) -> bool:
    """Return whether to try engines of several precisions."""
    return getattr(options, "precision", None) == "auto"


def engine_options(options: argparse.Namespace) -> EngineBuildOptions:
    """Return the engine options with defaults filled in; EngineOptionsError if any is malformed."""
    given = {name: value for name, value in vars(options).items() if name in _ENGINE_ARGUMENTS}
    if chooses_precision(options):
        del given["precision"]  # each build that is tried sets its own
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


def wrap_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile wrap``."""
    parser = LayeredParser(prog="eecompile wrap", description=_WRAP)
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="model to serve")
    parser.add_argument("--output", type=Path, metavar="DIR",
                        help="bundle to write (default: MODEL.ee)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
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
