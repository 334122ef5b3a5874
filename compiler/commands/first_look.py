"""``eecompile MODEL.onnx`` without data: what the model is, what compiling takes, and ways on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.certify import samples_needed
from offramp.certify.splits import least_to_split
from offramp.compiler.common.asked_task import AskedTask

if TYPE_CHECKING:  # they import onnx
    from offramp.compiler.cuts.cut_points import CutAnalysis, CutPoint
    from offramp.compiler.graphs.source_model import SourceModel

STATUS: Final = 2
"""Exit status: data are missing, as with any other required option."""
SERVE_WELL: Final = 10_000
"""Samples beyond which exits improve little."""
_INPUTS: Final = 6
"""Most inputs that are listed."""
_KINDS: Final = """\
npz or folder of npy · folder of images · CSV or JSONL of texts
parquet · Hugging Face data set · module:function"""


def show_first_look(options: argparse.Namespace, console: Console) -> int:
    """Print the screen; return the exit status."""
    from offramp.compiler.cuts.cuts import find_cuts  # noqa: PLC0415
    from offramp.compiler.cuts.placement import choose_candidates  # noqa: PLC0415
    from offramp.compiler.frontend.model import read_model  # noqa: PLC0415

    with console.status("reading and simplifying the model"):
        model = read_model(
            options.model,
            answer=options.answer,
            task=AskedTask(kind=options.task, class_map=options.class_map),
            answer_tokens=options.answer_tokens,
            simplify=not options.no_simplify,
            simplify_limit=options.simplify_limit,
            max_cut_tensors=options.max_cut_tensors,
        )
        analysis = find_cuts(model, max_tensors=options.max_cut_tensors)
    rules = options.exits.split(",") if options.exits else None
    chosen = choose_candidates(analysis, limit=options.candidates, exits=rules)
    out = Console()
    _print_model(model, analysis, chosen, out)
    _print_samples(options.max_disagreement, options.confidence_level, out)
    _print_ways(str(options.model), out)
    return STATUS


def _print_model(
    model: SourceModel, analysis: CutAnalysis, chosen: tuple[CutPoint, ...], console: Console
) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    rows = {
        "model": model.name,
        "task": f"{model.answer.task.kind} (--task names another)",
        "inputs": "\n".join(_inputs(model)),
        "answer": f"{model.answer.output}: {model.answer.describe()}",
        "exits": _places(analysis, chosen),
    }
    for title, text in rows.items():
        facts.add_row(f"[bold]{title}[/]", escape(text))
    console.print(facts)


def _inputs(model: SourceModel) -> Iterator[str]:
    specs = model.inputs
    yield from (spec.describe() for spec in specs[:_INPUTS])
    if len(specs) > _INPUTS:
        yield f"and {len(specs) - _INPUTS} more"


def _places(analysis: CutAnalysis, chosen: tuple[CutPoint, ...]) -> str:
    shares = ", ".join(f"{100 * cut.flops_share_before:.0f}" for cut in chosen)
    cuts = len(analysis.cuts)
    places = "1 place" if cuts == 1 else f"{cuts} places"
    return f"{places}; tried: {len(chosen)}, after {shares} % of the work"


def _print_samples(max_disagreement: float, confidence_level: float, console: Console) -> None:
    least = least_to_split(samples_needed(max_disagreement, confidence_level))
    console.print(
        f"\nA promise that at most {100 * max_disagreement:g} % of its answers change, with "
        f"{100 * confidence_level:g} % confidence, takes\n"
        f"[bold]{least:,} samples[/] at least; {max(SERVE_WELL, 2 * least):,} serve well. Labels "
        "are not needed.\nThey should be like those that will be served.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _print_ways(model: str, console: Console) -> None:
    ways = {
        f"eecompile {model} --data DATA": f"you have samples:\n{_KINDS}",
        f"eeserve {model} --learn": (
            "you have none: serve the model as it is, record what it\n"
            "is asked, compile in the background, and switch over"
        ),
        f"eecompile {model} --data random": (
            "a dry run on made inputs, to see exits and times;\nit certifies nothing"
        ),
    }
    console.print("\nThree ways on:", highlight=False)
    for command, purpose in ways.items():
        console.print(f"  [bold]{escape(command)}[/]", highlight=False, soft_wrap=True)
        for line in purpose.splitlines():
            console.print(f"      {escape(line)}", highlight=False, soft_wrap=True)
    console.print("\neecompile --help shows the options.", highlight=False)
