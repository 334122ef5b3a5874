"""``make generate``: a small model writes text, and shows at which layer each token left.

    python -m examples.generate [--models FOLDER] [SENTENCE ...]

The model rewrites dates, times, amounts and telephone numbers in sentences, and copies the rest. It
is trained here, in about 14 minutes, unless it is in ``demo/normaliser`` or in ``--models``. It is
compiled with exits and served by ``eeserve``; each token is shown in the colour of the exit where
it left; if the output is not a terminal, with the number of that layer below it. Needs the package
tokenizers: ``pip install 'offramp[text]'``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.commands import ROOT, console, run, serving, title
from rich.text import Text

from offramp.client import Client
from offramp.generation.bundle.generating_bundle import GeneratingBundle

MODELS, BUNDLE = Path("demo/normaliser"), Path("demo/text.ee")
SENTENCES = (
    "pls call Dorvan on (020) 7946-0018 by half past 3 in the afternoon",
    "They still owe us 18,900,000 USD, thanks.",
    "fyi, from 15/2/19 to 12 Mar 2025 we are closed please.",
    "Lunch with Tupilko at nineteen minutes to seven in the evening near the museum!",
    "hi Tote, the price went from 17.9 million euros to 19800 dollars on 24.11.10, ok?",
    "nothing has changed at the airport (ref UR1655)",
)
COLOURS = ("green", "cyan", "blue", "magenta", "yellow", "bright_green", "bright_cyan")
"""Colours of the exits, in order; the model's end is red."""
END_COLOUR = "red"
LAYERS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Characters for layer numbers; deeper layers are shown as +."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token, and where it left."""

    text: str
    number: int
    """Token id in the vocabulary."""
    layer: int
    """Number of decoder layers that ran for it."""


def main() -> int:
    """Make, compile, serve, ask; return the exit status."""
    parser = argparse.ArgumentParser(description="Show exits at every token of generated text.")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="to be rewritten")
    parser.add_argument("--models", type=Path, help=f"folder with joint/ (default: {MODELS})")
    options = parser.parse_args()
    model = (options.models or MODELS) / "joint"

    title("1  Train a small model together with its exits")
    if (ROOT / model).is_dir():
        console.print(f"{model} is there already")
    elif options.models is not None:
        parser.error(f"{model} is not there; leave --models out to train one")
    else:
        run("offramp.tools.zoo.text_normaliser", "python -m offramp.tools.zoo.text_normaliser",
            "--output", MODELS, "--only", "joint")  # fmt: skip

    title("2  Compile: choose exits, certify thresholds")
    if (ROOT / BUNDLE).is_dir():
        console.print(f"{BUNDLE} is there already; remove it to compile again")
    else:
        # The exits were trained with the model, and read its states without adapters.
        run("offramp.compiler.commands.cli", "eecompile", model, "--task", "generation", "--data",
            model / "calibration.npz", "--train", "none", "--output", BUNDLE)  # fmt: skip
    ends = [stage.end for stage in GeneratingBundle.open(ROOT / BUNDLE).model.stages]
    if len(ends) == 1:
        console.print(
            f"{BUNDLE} has no exit: it serves the model as it is, and there is nothing to show. "
            f"The reason was said when it was compiled. Remove {BUNDLE} to compile again.",
            style="bold red",
        )
        return 1

    title("3  Serve, and ask")
    sentences = options.sentences or list(SENTENCES)
    answers = ask(sentences, ends)
    console.print(legend(answers, ends))
    for sentence, answer in zip(sentences, answers, strict=True):
        console.print(f"\n{sentence}", style="dim", markup=False)
        console.print(shown(answer, ends, colours=console.is_terminal))

    title("4  Compare with the model's own answers")
    console.print(summary(answers, ask(sentences, ends, "--mode", "off"), ends))
    return 0


def ask(sentences: Sequence[str], ends: Sequence[int], *flags: str) -> list[list[ShownToken]]:
    """Serve the bundle, and return the answers to some sentences."""
    with serving(BUNDLE, *flags) as (address, _), Client(address) as client:
        return [
            [
                ShownToken(token.text, token.token, ends[token.exit])  # -1 is the model's end
                for token in client.generate(BUNDLE.stem, sentence)
            ]
            for sentence in sentences
        ]


def colour_of(layer: int, ends: Sequence[int]) -> str:
    """Return the colour of the exit after a layer, or of the model's end."""
    return END_COLOUR if layer == ends[-1] else COLOURS[list(ends).index(layer) % len(COLOURS)]


def legend(answers: Sequence[Sequence[ShownToken]], ends: Sequence[int]) -> Text:
    """Return a legend: the colour of each exit, and the share of tokens that left there."""
    left = Counter(token.layer for answer in answers for token in answer)
    parts = [
        Text.assemble(
            (f"{'the end, layer' if end == ends[-1] else 'exit after layer'} {end}",
             colour_of(end, ends)),
            f": {left[end] / max(left.total(), 1):.0%} of tokens",
        )
        for end in ends
    ]  # fmt: skip
    return Text("   ").join(parts)


def shown(answer: Sequence[ShownToken], ends: Sequence[int], *, colours: bool) -> Text:
    """Return an answer in colours, or with the layer of each token below its characters."""
    if colours:
        return Text.assemble(*((token.text, colour_of(token.layer, ends)) for token in answer))
    layers = (LAYERS[token.layer : token.layer + 1] or "+" for token in answer)
    below = "".join(layer * len(token.text) for layer, token in zip(layers, answer, strict=True))
    return Text("".join(token.text for token in answer) + "\n" + below)


def summary(
    answers: Sequence[Sequence[ShownToken]],
    full: Sequence[Sequence[ShownToken]],
    ends: Sequence[int],
) -> str:
    """Return one line: saved layers, and the share of answers equal to the model's."""
    layers = [token.layer for answer in answers for token in answer]
    pairs = zip(answers, full, strict=True)
    equal = sum([t.number for t in a] == [t.number for t in b] for a, b in pairs)
    return (
        f"{len(layers)} tokens; {sum(layers) / (len(layers) * ends[-1]):.0%} of decoder layers "
        f"run; {equal} of {len(answers)} answers equal to the full model's"
    )


if __name__ == "__main__":
    sys.exit(main())
