"""Options that several commands of ``eecompile`` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from offramp.bundle.schema.answers import TASK_KINDS
from offramp.commands.parser import LayeredParser
from offramp.compiler.commands import values

REPLACED = "folder to write to (default: BUNDLE is replaced)"


def make_parser(name: str, description: str, **layers: Any) -> LayeredParser:
    """Make the parser of a command with the options that all of them have.

    ``layers`` are those of :class:`LayeredParser`.
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
    """Add the model, and how to read it."""
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help=what)
    parser.add_argument("--task", choices=["auto", *TASK_KINDS], default="auto", metavar="TASK",
                        help="kind of the answer (default: by its shape).\nIt decides when two "
                        f"answers agree: {', '.join(TASK_KINDS)}; auto infers it from shape and "
                        "activation, or asks for it")  # fmt: skip
    parser.add_argument("--answer", metavar="NAME",
                        help="output that exits imitate (default: the only one)")  # fmt: skip
    reading = parser.add_argument_group("reading the model")
    reading.add_argument("--class-map", action="store_true",
                         help="answer with the classes of pixels or tokens, a byte each, instead "
                         "of their scores")  # fmt: skip
    reading.add_argument("--answer-tokens", type=values.tokens, default=(), metavar="ID,ID,…",
                         help="tokens that a decoder [batch, tokens, vocabulary] answers with "
                         "after the last token of its prompt, such as those of yes and "
                         "no")  # fmt: skip
    reading.add_argument("--no-simplify", action="store_true",
                         help="do not run onnxslim on the model")  # fmt: skip
    reading.add_argument("--simplify-limit", type=values.seconds, default=180.0, metavar="SECONDS",
                         help="most time for onnxslim")  # fmt: skip
    reading.add_argument("--max-cut-tensors", type=values.positive, default=4, metavar="K",
                         help="most tensors of a cut point, where no single tensor carries all "
                         "data, as in parallel branches")  # fmt: skip


def add_grouping(
    parser: argparse.ArgumentParser, group: argparse._ActionsContainer, within: float | None
) -> None:
    """Add which samples are not independent of each other."""
    parser.add_argument("--group", metavar="KEY",
                        help="array of the data that tells dependent samples.\nSamples with equal "
                        "values (integers or texts), such as those of one person or recording, "
                        "are in one split and count once in the certificate, as copies "
                        "do")  # fmt: skip
    default = "" if within is not None else " (default: as the bundle was made)"
    group.add_argument("--copies-within", type=values.share_from_0, default=within, metavar="SHARE",
                       help="largest distance of copies, as a share of the usual distance between "
                       "samples, where a gap follows; 0: only equal samples are copies, and "
                       f"consecutive similar samples are not one film{default}")  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add a file for machines."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write it to as well")


def add_bundle(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the bundle that a command reads."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help=f"bundle to {purpose}")


def add_target(parser: argparse.ArgumentParser, where: str, replaced: str) -> None:
    """Add where to write."""
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaced}")


def add_dry_run(parser: argparse._ActionsContainer, what: str) -> None:
    """Add a run that writes nothing."""
    parser.add_argument("--dry-run", action="store_true", help=what)


def add_seed(parser: argparse._ActionsContainer, what: str) -> None:
    """Add the seed of random numbers."""
    parser.add_argument("--seed", type=values.seed, default=0, metavar="N", help=what)


def add_promise(
    parser: argparse.ArgumentParser,
    group: argparse._ActionsContainer,
    disagreement: float | None,
    confidence_level: float | None,
) -> None:
    """Add the promise; without defaults it is the bundle's own."""
    own = "" if disagreement is not None else " (default: as the bundle was made)"
    parser.add_argument("--max-disagreement", type=values.share, default=disagreement,
                        metavar="SHARE",
                        help=f"largest share of answers unlike the model's{own}")  # fmt: skip
    parser.add_argument("--confidence", dest="confidence_level", type=values.share, metavar="SHARE",
                        default=confidence_level,
                        help=f"certainty of that on unseen data{own}")  # fmt: skip
    group.add_argument("--max-class-disagreement", type=values.share, metavar="SHARE",
                       help="the same bound for each class of the model's by itself, where its "
                       "samples suffice to certify it (default: no class is bounded)")  # fmt: skip


def add_rehearsing(
    group: argparse._ActionsContainer, batch: int | None, violations: float | None
) -> None:
    """Add the settings of PAME's rehearsal; without defaults they are the bundle's own."""
    own = "" if batch is not None else " (default: as the bundle was made)"
    group.add_argument("--rehearsal-batch", type=values.positive, default=batch, metavar="N",
                       help=f"rows of a batch that is rehearsed{own}")  # fmt: skip
    group.add_argument("--max-violations", type=values.share_from_0, default=violations,
                       metavar="SHARE",
                       help="largest share of such batches that an exit may make later than the "
                       f"unmodified model would{own}")  # fmt: skip
