"""Facts of a model as ``eecompile inspect`` prints them: inputs, answer, and its cut points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.bundle import Answer
from offramp.compiler.cuts.cut_points import CutAnalysis, CutPoint, Rejection
from offramp.compiler.graphs.source_model import SourceModel


def print_inspection(model: SourceModel, analysis: CutAnalysis, console: Console) -> None:
    """Print a model's facts, its cut points, and the places where no exit can be attached."""
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
    """``logits: 2 classes, logits``, and of a decoder the tokens that the classes are."""
    tokens = f", of the tokens {', '.join(map(str, answer.tokens))}" if answer.tokens else ""
    return f"{answer.output}: {answer.describe()}{tokens}"


def _work(analysis: CutAnalysis) -> str:
    """Return the model's work, and how it is known."""
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
        tensors = cut.as_heads_see_it().tensors
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
