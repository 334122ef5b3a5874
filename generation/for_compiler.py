"""Registration of generated text with ``eecompile``: ``eecompile MODEL --task generation``."""

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
easy, and leave after a few layers of the decoder. Thresholds are certified on
answers of the model itself, so prompts need no labels. MODEL is the
ONNX file of a decoder with past keys and values, or the folder of an
encoder-decoder (encoder_model.onnx, decoder_model.onnx and
decoder_with_past_model.onnx), named as transformers or optimum do."""
_SHORT: Final = ("--data", "--output", "--overwrite", "--promise", "--max-disagreement",
                 "--confidence", "--dissimilarity", "--train", "--tokenizer", "--seed")  # fmt: skip
_COMBINATIONS: Final = (
    Illegal(option="--dissimilarity", other="--promise tokens",
            why="tokens are equal or not; leave it out, or promise texts"),
    Illegal(option="--exact", other="--promise tokens",
            why="tokens are equal or not; leave it out, or promise texts"),
    Illegal(option="--minutes", without="--train joint",
            why="it limits that training; leave it out"),
    Illegal(option="--head-size", without="--head subset|low-rank",
            why="the model's own head has its size; leave it out"),
    Illegal(option="--train none", other="--head subset|low-rank",
            why="a smaller head has to learn; leave out one of them"),
    Illegal(option="--train none", other="--criterion learned-classifier",
            why="the classifier has to learn; leave out one of them"),
)  # fmt: skip


def generation_parser() -> argparse.ArgumentParser:
    """Return the parser of ``eecompile MODEL --task generation``."""
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
                         help="what is bounded: texts, the mean dissimilarity of whole answers to "
                         "the model's; tokens, the share of tokens that differ at the same "
                         "prefix")  # fmt: skip
    promise.add_argument("--max-disagreement", type=values.share, default=0.01, metavar="SHARE",
                         help="largest value of what --promise bounds")  # fmt: skip
    promise.add_argument("--confidence", dest="confidence_level", type=values.share, default=0.95,
                         metavar="SHARE",
                         help="confidence level of that bound on unseen prompts")  # fmt: skip
    promise.add_argument("--dissimilarity", default="differs", metavar="NAME",
                         help="dissimilarity of two answers, 0 to 1. differs: 1 if they differ; "
                         "edit-distance: edits divided by the tokens of the longer answer; "
                         "FILE.py:NAME: your function of two lists of tokens")  # fmt: skip
    promise.add_argument("--exact", metavar="REGEX",
                         help="parts of the text that must be equal, such as '[0-9]+': if they "
                         "are not, the answer counts as wholly different")  # fmt: skip
    exits = parser.add_argument_group("exits")
    exits.add_argument("--train", choices=TRAININGS, default="adapters",
                       help="adapters: a small layer per exit learns the model's tokens; joint: "
                       "a copy of the decoder learns them with all its exits; none: exits read the "
                       "model's states, for a model that was trained with its exits")  # fmt: skip
    exits.add_argument("--minutes", type=values.seconds, default=5.0, metavar="N",
                       help="limit on the processor time of --train joint, in minutes")  # fmt: skip
    exits.add_argument("--exits", type=values.layers, default=(), metavar="A,B,…",
                       help="layers after which exits are tried (default: seven, evenly "
                       "spread); those that save most time are used")  # fmt: skip
    exits.add_argument("--criterion", choices=sorted(CRITERIA), default="softmax-margin",
                       metavar="NAME",
                       help="confidence of an exit (CALM). softmax-margin: difference of its two "
                       "largest probabilities; max-probability: the largest one; "
                       "state-similarity: cosine of the input and the output of the layer "
                       "before the exit; learned-classifier: computed from the state")  # fmt: skip
    exits.add_argument("--head", choices=HEADS, default="full",
                       help="head of exits. full: the model's own; for large vocabularies, a "
                       "smaller one is trained: subset, for the most frequent tokens, or "
                       "low-rank")  # fmt: skip
    exits.add_argument("--head-size", type=values.positive, metavar="N",
                       help="number of tokens of --head subset, or rank of --head low-rank "
                       "(default: 1024, or half of the model's own number if that "
                       "is less)")  # fmt: skip
    exits.add_argument("--skipped", choices=SKIPPED, default="auto",
                       help="keys and values of layers that a token skips: propagation, computed "
                       "from the exit's state as it leaves; catch-up, in full when a later token "
                       "reaches those layers; auto: the faster of both")  # fmt: skip
    exits.add_argument("--decay", type=values.distance, metavar="X",
                       help="speed at which thresholds fall along an answer, as in CALM; 4 is "
                       "usual (default: they are constant)")  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument("--most-tokens", type=values.positive, metavar="N",
                       help="largest number of tokens in an answer (default: as in "
                       "generation_config.json or config.json, or 128)")  # fmt: skip
    model.add_argument("--start-token", type=values.seed, metavar="ID",
                       help="first token of an encoder-decoder's answer (default: as in these "
                       "files)")  # fmt: skip
    model.add_argument("--stop-tokens", type=values.tokens, default=(), metavar="ID,ID,…",
                       help="tokens that end an answer (default: as in these files)")  # fmt: skip
    model.add_argument("--batch", type=values.positive, default=16, metavar="N",
                       help="sequences that run together in measurements")  # fmt: skip
    add_seed(parser, "seed of the split and of training")
    add_data(parser, "prompts like those that will be served: npz with input_ids and "
             "attention_mask, or texts with --tokenizer, which becomes part of the bundle in "
             "either case; see docs/data.md", besides=("tokenizer",))  # fmt: skip
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
    """Adds ``eecompile generation`` (:class:`.CompilerExtension`)."""

    commands: Final[Mapping[str, Command]] = {
        "generation": Command(
            generation_parser,
            _compile,
            "compile a model that generates text (or --task generation)",
            task=True,
        )
    }


EXTENSION: Final = _Extension()
