"""Printing of what ``eecompile verify`` found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from offramp.bundle.records import describe_harm, harmed
from offramp.certify import MODEL_END
from offramp.compiler.steps.bundle_check import BundleCheck
from offramp.engine.stages.plan import exit_label


def print_check(check: BundleCheck, path: Path, console: Console) -> None:
    """Print what ``eecompile verify`` found."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    like = "samples"
    if check.distinct_samples < check.samples:
        like = (
            f"samples, {check.distinct_samples:,} of them distinct, which alone count as evidence"
        )
    if check.on_calibration_data:
        like = "samples that it was made of, which prove little"
    say(f"[bold]{escape(str(path))}[/bold]: {check.samples:,} {like}")
    for place, share in check.shares.items():
        where = "the model's end" if place == MODEL_END else exit_label(place)
        say(f"  {where} answered {share:.1%}")
    if MODEL_END in check.shares:
        say(
            "The model's end is the unmodified model's (largest difference "
            f"{check.end_difference:.1e} of a value's scale)."
        )
    share = check.disagreements / check.samples
    say(
        f"{check.disagreements:,} answers ({share:.2%}) do not agree with the unmodified "
        f"model's; on data like these at most {check.at_most:.2%}."
    )
    for line in _lost_by_class(check):
        say(line)
    if check.accuracy is not None:
        say(f"Accuracy {check.accuracy:.2%}, of the unmodified model {check.source_accuracy:.2%}.")
    style, said = _VERDICTS[check.verdict]
    say(f"[{style}]{said}[/{style}]")


def _lost_by_class(check: BundleCheck) -> Iterator[str]:
    """Say which classes of the model, and which labels, lose most, and warn of harm."""
    for losses, whose in ((check.by_class, "that the model gives class"),
                          (check.by_label, "with label")):  # fmt: skip
        shown = [loss for loss in losses if loss.lost][:_MOST_CLASSES]
        for loss in shown:
            yield (
                f"  of {loss.samples:,} samples {whose} {loss.number}, {loss.lost:,} "
                f"({loss.share:.2%}) do not agree"
            )
    if check.max_disagreement is not None:
        for loss in harmed(check.by_class, check.max_disagreement):
            yield f"[bold red]HARM[/bold red]: {describe_harm(loss, check.max_disagreement)}."


_MOST_CLASSES = 5
"""Classes that are listed, those that lose the largest share first."""
_BROKEN = (
    "THE PROMISE DOES NOT HOLD on data like these: so many would be unlikely. Compile the model "
    "with samples of them, or serve with --mode audit, which notices by itself."
)
_VERDICTS = {
    "kept": ("green", "That contradicts nothing that was promised."),
    "contradicted": ("bold red", _BROKEN),
    "nothing promised": ("dim", "Nothing was promised: no exit is in use."),
}
