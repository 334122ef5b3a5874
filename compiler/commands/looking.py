"""Descriptions of models and bundles: ``eecompile inspect``, and ``eecompile MODEL`` alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.bundle import Answer, Bundle
from offramp.bundle.engines import list_targets
from offramp.bundle.schema.serde import to_plain
from offramp.calibration.data.scratch import ScratchSpace
from offramp.certify import samples_needed
from offramp.certify.binomial import least_to_split
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint, Rejection
from offramp.compiler.graphs.source_model import SourceModel

if TYPE_CHECKING:
    from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint


STATUS: Final = 2
"""Exit status if the data is missing; any other missing required option has the same."""
SERVE_WELL: Final = 10_000
"""Number of calibration samples beyond which exits improve little."""
_INPUTS: Final = 6
"""Largest number of inputs that are listed."""
_KINDS: Final = """\
npz or folder of npy · folder of images · CSV or JSONL of texts
parquet · Hugging Face data set · module:function"""


def describe_model(model: SourceModel, analysis: CutAnalysis) -> dict[str, Any]:
    """Describe a model, its cut points, and the tensors where no exit can be attached.

    If the FLOPs of an operator are not known, operators are timed, and shares of FLOPs are shares
    of that time.
    """
    return {
        "model": model.name,
        "opset": model.opset,
        "gflops": None if analysis.total_s is not None else analysis.total_flops / 1e9,
        "measured_s": analysis.total_s,
        "unknown_work": list(analysis.unknown_work),
        "inputs": [to_plain(spec) for spec in model.declared],
        "unread_inputs": [each.spec.name for each in model.unread],
        "main_inputs": list(analysis.main_inputs),
        "rereads": analysis.rereads,
        "answer": to_plain(model.answer),
        "cut_points": [asdict(cut) for cut in analysis.cuts],
        "rejected": [asdict(place) for place in analysis.rejected],
    }


def describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """Describe a bundle: its manifest without the list of files, policy, profile, and engines."""
    manifest = to_plain(bundle.manifest)
    del manifest["files"]
    measured = bundle.measured()
    return {
        "bundle": bundle.path.name,
        "manifest": manifest,
        "policy": to_plain(bundle.policy),
        "profile": to_plain(bundle.profile()),
        "measured": None if measured is None else to_plain(measured),
        "engines": [to_plain(target) for target in list_targets(bundle.path)],
    }


def print_inspection(model: SourceModel, analysis: CutAnalysis, console: Console) -> None:
    """Print a model's facts, its cut points, and the tensors where no exit can be attached."""
    facts = Table.grid(padding=(0, 2))
    rows = {
        "model": f"{model.name} (opset {model.opset}, {_work(analysis)})",
        "inputs": "\n".join(_input_lines(model)),
        "main": ", ".join(analysis.main_inputs),
        "answer": _described(model.answer),
        "cut points": str(len(analysis.cuts)),
    }
    for title, text in rows.items():
        facts.add_row(f"[bold]{title}[/]", escape(text))
    console.print(facts)
    if analysis.cuts:
        console.print(_cut_table(analysis.cuts, "time" if analysis.total_s else "FLOPs"))
    if analysis.rejected:
        console.print(_rejected_table(analysis.rejected))


def _input_lines(model: SourceModel) -> Iterator[str]:
    """Yield a line for each input of the model's file."""
    unread = {each.spec.name for each in model.unread}
    for spec in model.declared:
        yield spec.describe() + (", which nothing reads" if spec.name in unread else "")


def _described(answer: Answer) -> str:
    """Return text such as ``logits: 2 classes, logits``, with a decoder's answer tokens."""
    tokens = f", of the tokens {', '.join(map(str, answer.tokens))}" if answer.tokens else ""
    return f"{answer.output}: {answer.describe()}{tokens}"


def _work(analysis: CutAnalysis) -> str:
    """Return the model's work as text: its FLOPs, or its measured time."""
    kinds = ", ".join(analysis.unknown_work)
    if analysis.total_s is not None:
        return f"{1e3 * analysis.total_s:.3g} ms measured, as the FLOPs of {kinds} are not known"
    without = f" without {kinds}" if kinds else ""
    return f"{analysis.total_flops / 1e9:.3g} GFLOPs{without}"


def _cut_table(cuts: Sequence[CutPoint], unit: str) -> Table:
    table = Table(title="Cut points", title_justify="left", box=box.SIMPLE)
    table.add_column("#", justify="right")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column(f"{unit} before", justify="right")
    along = any(cut.side_inputs for cut in cuts)
    if along:
        table.add_column("taken along")
    for cut in cuts:
        tensors = cut.head_input().tensors
        shapes = (f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors)
        table.add_row(
            str(cut.index),
            escape("\n".join(cut.tensors)),
            escape("\n".join(shapes)),
            cut.operator,
            f"{cut.flops_share_before:.1%}",
            *([escape(", ".join(cut.side_inputs))] if along else []),
        )
    return table


def _rejected_table(rejected: Sequence[Rejection]) -> Table:
    table = Table(title="No exit here", title_justify="left", box=box.SIMPLE)
    table.add_column("from tensor", overflow="fold")
    table.add_column("operator")
    table.add_column("places", justify="right")
    table.add_column("reason")
    for place in rejected:
        table.add_row(escape(place.tensor), place.operator, str(place.places), escape(place.reason))
    return table


def inspect(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print a model with its cut points, or a bundle, and return the same as plain data."""
    if options.model.is_dir():
        from offramp.compiler.commands.printing import print_bundle  # noqa: PLC0415

        bundle = Bundle.open(options.model)
        print_bundle(bundle, Console())
        return describe_bundle(bundle)
    model, analysis = _read(options, console)
    print_inspection(model, analysis, Console())
    return describe_model(model, analysis)


def _read(options: argparse.Namespace, console: Console) -> tuple[SourceModel, CutAnalysis]:
    """Read a model, and find its cut points."""
    from offramp.compiler.cuts.cuts import find_cuts  # noqa: PLC0415
    from offramp.compiler.frontend.model import read_model  # noqa: PLC0415
    from offramp.compiler.graphs.weights import weight_file  # noqa: PLC0415

    with (
        console.status("reading and simplifying the model"),
        weight_file(ScratchSpace()) as weights,
    ):
        model = read_model(
            options.model,
            answer=options.answer,
            task=TaskOptions(kind=options.task, class_map=options.class_map),
            answer_tokens=options.answer_tokens,
            simplify=not options.no_simplify,
            simplify_limit=options.simplify_limit,
            max_cut_tensors=options.max_cut_tensors,
            weights=weights,
        )
        return model, find_cuts(model, max_tensors=options.max_cut_tensors)


def show_first_look(options: argparse.Namespace, console: Console) -> int:
    """Print the description of a model without data; return the exit status."""
    from offramp.compiler.cuts.exit_placement import choose_candidates  # noqa: PLC0415

    model, analysis = _read(options, console)
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
        f"[bold]{least:,} samples[/] at least; {max(SERVE_WELL, 2 * least):,} are better. Labels "
        "are not needed.\nThey should be like the samples that will be served.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _print_ways(model: str, console: Console) -> None:
    ways = {
        f"eecompile {model} --data DATA": f"you have samples:\n{_KINDS}",
        f"eeserve {model} --learn": (
            "you have none: serve the unmodified model, record its\n"
            "inputs, compile in the background, and switch over"
        ),
        f"eecompile {model} --data random": (
            "a dry run on random inputs, to see exits and times;\nit certifies nothing"
        ),
    }
    console.print("\nThree ways on:", highlight=False)
    for command, purpose in ways.items():
        console.print(f"  [bold]{escape(command)}[/]", highlight=False, soft_wrap=True)
        for line in purpose.splitlines():
            console.print(f"      {escape(line)}", highlight=False, soft_wrap=True)
    console.print("\neecompile --help shows the options.", highlight=False)
