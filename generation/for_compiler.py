"""What generated text adds to ``eecompile``: ``eecompile MODEL --task generation``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console

from offramp.commands.combinations import Illegal
from offramp.compiler.commands import values
from offramp.compiler.commands.arguments import (
    Command,
    add_seed,
    add_target,
    make_parser,
)
from offramp.compiler.commands.compiling import output_of, read_options
from offramp.compiler.common.progress import TerminalProgress
from offramp.compiler.data.data_flags import add_data
from offramp.generation.compiling.text_options import (
    CRITERIA,
    HEADS,
    SKIPPED,
    TRAININGS,
    TextCompileOptions,
)

_DESCRIPTION: Final = """\
Add exits to a model that generates text, token by token (CALM): most tokens are
easy, and leave after a few layers of the decoder. Thresholds are certified, on
answers that the model gives itself, so prompts need no labels. MODEL is the
ONNX file of a decoder with past keys and values, or the folder of an
encoder-decoder (encoder_model.onnx, decoder_model.onnx and
decoder_with_past_model.onnx), named as transformers or optimum do."""
_SHORT: Final = ("--data", "--output", "--overwrite", "--promise", "--max-disagreement",
                 "--confidence", "--dissimilarity", "--train", "--tokenizer", "--seed")  # fmt: skip
_COMBINATIONS: Final = (
    Illegal(option="--dissimilarity", beside="--promise tokens",
            why="tokens are equal or not; leave it out, or promise texts"),
    Illegal(option="--exact", beside="--promise tokens",
            why="tokens are equal or not; leave it out, or promise texts"),
    Illegal(option="--minutes", without="--train joint",
            why="it limits that training; leave it out"),
    Illegal(option="--head-size", without="--head subset|low-rank",
            why="the model's own head has its size; leave it out"),
    Illegal(option="--train none", beside="--head subset|low-rank",
            why="a smaller head has to learn; leave out one of them"),
    Illegal(option="--train none", beside="--criterion learned-classifier",
            why="the classifier has to learn; leave out one of them"),
)  # fmt: skip


def generation_parser() -> argparse.ArgumentParser:
    """Make the parser of ``eecompile MODEL --task generation``."""
    parser = make_parser(
        "generation",
        _DESCRIPTION,
        short=_SHORT,
        illegal=_COMBINATIONS,
        examples={"eecompile model/ --task generation --data prompts.npz": "writes model.ee"},
    )
    parser.add_argument("model", type=Path, metavar="MODEL",
                        help="ONNX file of a decoder, or folder of an encoder-decoder")  # fmt: skip
    add_target(parser, "bundle to write (default: MODEL.ee)", "a generating bundle that is there")
    promise = parser.add_argument_group("promise")
    promise.add_argument("--promise", choices=["texts", "tokens"], default="texts",
                         help="what is bounded: how unlike whole answers are to the model's, on "
                         "average; or the share of tokens that differ at the same "
                         "prefix")  # fmt: skip
    promise.add_argument("--max-disagreement", type=values.share, default=0.01, metavar="SHARE",
                         help="the bound")  # fmt: skip
    promise.add_argument("--confidence", dest="confidence_level", type=values.share, default=0.95,
                         metavar="SHARE", help="certainty of that on unseen prompts")  # fmt: skip
    promise.add_argument("--dissimilarity", default="differs", metavar="NAME",
                         help="of two answers, 0 to 1: differs, 1 where anything does; "
                         "edit-distance, by the tokens of the longer one; or FILE.py:NAME, a "
                         "function of two lists of tokens")  # fmt: skip
    promise.add_argument("--exact", metavar="REGEX",
                         help="parts of the text that must be the same, such as '[0-9]+': where "
                         "they are not, the answer counts as wholly different")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--train", choices=TRAININGS, default="adapters",
                       help="adapters: a small layer an exit learns the model's own tokens; joint: "
                       "a copy of the decoder learns them with all its exits; none: exits read the "
                       "model's states, for a model that learnt with its exits")  # fmt: skip
    exits.add_argument("--minutes", type=values.seconds, default=5.0, metavar="N",
                       help="most processor time of --train joint")  # fmt: skip
    exits.add_argument("--exits", type=values.layers, default=(), metavar="A,B,…",
                       help="layers behind which exits are tried (default: seven, evenly "
                       "spread); those that net most are used")  # fmt: skip
    exits.add_argument("--criterion", choices=sorted(CRITERIA), default="softmax-margin",
                       help="how sure an exit is (CALM): softmax-margin, between its two largest "
                       "probabilities; max-probability; state-similarity, of the states around its "
                       "last layer; learned-classifier, of the state")  # fmt: skip
    exits.add_argument("--head", choices=HEADS, default="full",
                       help="head of exits: the model's own; or, for large vocabularies, one that "
                       "learns: subset, of the most frequent tokens; low-rank")  # fmt: skip
    exits.add_argument("--head-size", type=values.positive, default=1024, metavar="N",
                       help="tokens of the subset, or the rank")  # fmt: skip
    exits.add_argument("--skipped", choices=SKIPPED, default="auto",
                       help="how layers that a token skips get its keys and values: propagation, "
                       "of the exit's state, at once; catch-up, in full when a later token comes "
                       "so deep; auto: what is faster here")  # fmt: skip
    exits.add_argument("--decay", type=values.distance, metavar="X",
                       help="speed at which thresholds fall along an answer, as CALM's; 4 is "
                       "usual (default: they do not)")  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument("--most-tokens", type=values.positive, metavar="N",
                       help="tokens of an answer (default: as generation_config.json or "
                       "config.json says, or 128)")  # fmt: skip
    model.add_argument("--start-token", type=values.seed, metavar="ID",
                       help="first token of an encoder-decoder's answer (default: as these files "
                       "say)")  # fmt: skip
    model.add_argument("--stop-tokens", type=values.tokens, default=(), metavar="ID,ID,…",
                       help="tokens that end an answer (default: as these files say)")  # fmt: skip
    model.add_argument("--batch", type=values.positive, default=16, metavar="N",
                       help="sequences that run together while measuring")  # fmt: skip
    add_seed(parser, "seed of the split and of training")
    add_data(parser, "prompts like those that will be served: npz with input_ids and "
             "attention_mask, or texts with --tokenizer; see docs/data.md")  # fmt: skip
    return parser


def _compile(options: argparse.Namespace, console: Console) -> int:
    from offramp.generation.compiling.compile_text import compile_text  # noqa: PLC0415
    from offramp.generation.compiling.printing import print_compiled  # noqa: PLC0415

    asked = read_options(
        TextCompileOptions,
        options,
        output=options.output or output_of(options.model),
        criterion=CRITERIA[options.criterion],
    )
    with TerminalProgress(console) as progress:
        done = compile_text(asked, progress)
    print_compiled(done, Console())
    return 0


class _Extension:
    """See :class:`.CompilerExtension`."""

    commands: Final[Mapping[str, Command]] = {
        "generation": Command(
            generation_parser,
            _compile,
            "compile a model that generates text; also eecompile MODEL --task generation",
            task=True,
        )
    }


EXTENSION: Final = _Extension()
