"""What ``eecompile inspect`` shows: where exits can be attached, and where not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from offramp.compiler.cuts import CutAnalysis, CutPoint, Rejection
    from offramp.compiler.model import SourceModel


def print_inspection(
    model: SourceModel, analysis: CutAnalysis, *, console: Console | None = None
) -> None:
    """Print the inspection of a model.

    Args:
        model: The model.
        analysis: Its cut points.
        console: Where to print; standard output by default.
    """
    (console or Console()).print(render_inspection(model, analysis))


def render_inspection(model: SourceModel, analysis: CutAnalysis) -> RenderableType:
    """Lay out the model's facts, its cut points and the rejected places for a terminal."""
    parts: list[RenderableType] = [_facts(model, analysis)]
    if analysis.cuts:
        parts.append(_cut_table(analysis.cuts))
    if analysis.rejected:
        parts.append(_rejected_table(analysis.rejected))
    return Group(*parts)


def _facts(model: SourceModel, analysis: CutAnalysis) -> Table:
    facts = Table.grid(padding=(0, 2))
    rows = {
        "model": f"{model.name} (opset {model.opset}, {analysis.total_flops / 1e9:.3g} GFLOPs)",
        "inputs": "\n".join(spec.describe() for spec in model.inputs),
        "main": ", ".join(analysis.main_inputs),
        "answer": f"{model.answer.output}: {model.answer.classes} classes, {model.answer.form}",
        "cut points": str(len(analysis.cuts)),
    }
    for title, text in rows.items():
        facts.add_row(f"[bold]{title}[/]", escape(text))
    return facts


def _cut_table(cuts: Sequence[CutPoint]) -> Table:
    table = Table(title="Cut points", title_justify="left", box=box.SIMPLE)
    table.add_column("#", justify="right")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column("FLOPs before", justify="right")
    along = any(cut.side_inputs for cut in cuts)
    if along:
        table.add_column("taken along")
    for cut in cuts:
        table.add_row(
            str(cut.index),
            escape(cut.tensor),
            escape(f"[{', '.join(map(str, cut.shape))}]"),
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
