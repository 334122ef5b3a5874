"""The frontier as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.frontier.measurement import CombiningGain, Frontier, FrontierSystem
from benchmarks.frontier.policies import BOTH, DESCRIPTIONS, INT8, SOURCE
from rich.console import Console
from rich.table import Table

from offramp.bundle import Ratio
from offramp.tools.bench.common.output import figure_table

WIDTH = 100
"""Console width, in characters, at which the table is not cut."""
_COLUMNS = ("system", "ms", "×source", "mean", "disagree", "right", "predicted ×", "certify errors")


def print_frontier(
    console: Console, frontier: Frontier, *, title: str, baseline: str, confidence_level: float
) -> None:
    """Print a table for each batch size, the gains of combining, and systems without
    certificate.
    """
    sizes = [point.batch_size for point in frontier.systems[0].measured]
    for size in sizes:
        console.print(_table(frontier, size, title))
    console.print(_caption(frontier, baseline, confidence_level), highlight=False)
    for name, words in DESCRIPTIONS.items():
        console.print(f"  {name}: {words}", highlight=False)
    console.print("\nBoth over the better of the two alone, busy time, measured:", highlight=False)
    for bound in frontier.bounds:
        gains = [g for g in frontier.gains if g.max_disagreement == bound]
        told = "; ".join(map(describe_gain, gains)) or "no policy of both is certified"
        console.print(f"  bound {_percent(bound)}: {told}", highlight=False)
    for system in frontier.systems:
        if system.reason is not None:
            console.print(f"[bold]{label_of(system)}: not certified.[/] {_escaped(system.reason)}.")
    for note in frontier.disturbed:
        console.print(f"The machine was disturbed: {_escaped(note)}.")


def describe_gain(gain: CombiningGain) -> str:
    """``×0.83 ± 0.02 at batch 1 (the better alone: exits)``."""
    ratio = _with_width(gain.measured_ratio)
    return f"×{ratio} at batch {gain.batch_size} (the better alone: {gain.better})"


def label_of(system: FrontierSystem) -> str:
    """``exits at 0.5%``; the name alone where there is no bound."""
    if system.max_disagreement is None:
        return system.system
    return f"{system.system} at {_percent(system.max_disagreement)}"


def to_json(frontier: Frontier) -> dict[str, Any]:
    """Return JSON values: promises, predictions and measurements, each under its own name."""
    return {
        "systems": [
            {**asdict(system), "description": DESCRIPTIONS[system.system]}
            for system in frontier.systems
        ],
        "gains": [asdict(gain) for gain in frontier.gains],
        "disturbed": list(frontier.disturbed),
    }


def _table(frontier: Frontier, size: int, title: str) -> Table:
    table = figure_table(f"{title}, batch {size}", "", ("bound", *_COLUMNS), names=("system",))
    told = None
    for system in frontier.systems:
        bound = system.max_disagreement
        if bound != told:
            table.add_section()
        first = "" if bound is None or bound == told else _percent(bound)
        told = bound
        style = "bold" if system.system == BOTH else None
        table.add_row(first, system.system, *_cells(system, size), style=style)
    return table


def _cells(system: FrontierSystem, size: int) -> Sequence[str]:
    point = system.at(size)
    if point is None:
        return (*[""] * 6, "not certified")
    is_source = system.system == SOURCE
    predicted = system.predicted_ratio.get(size)
    return (
        f"{point.busy_ms_per_sample:.3g}",
        "1" if is_source else _with_width(point.busy),
        "1" if is_source else f"{point.mean.value:.2f}",
        f"{point.disagreement:.2%}",
        "–" if point.accuracy is None else f"{point.accuracy:.2%}",
        "–" if predicted is None else f"{predicted:.2f}",
        _errors(system),
    )


def _errors(system: FrontierSystem) -> str:
    if system.policy is None or system.policy.promise is None:
        return "uncertified" if system.system == INT8 else "–"
    promise = system.policy.promise
    return f"{promise.certify_errors} of {promise.certify_samples}"


def _caption(frontier: Frontier, baseline: str, confidence_level: float) -> str:
    return (
        f"Measured here and now, in the same rounds: ms (busy time per sample), ×source (busy time "
        f"over that of the {baseline}; {frontier.describe_width()}), mean (mean latency over the "
        "source's), disagree (answers unlike the source's, on this data), right "
        "(answers like the labels). Predicted, not measured: predicted × (busy time over the "
        "source's by the bundle's profile, on its certify split). Certified: at most the bound "
        f"disagrees on unseen data like the calibration data, with confidence "
        f"{confidence_level:g} for each policy by itself."
    )


def _with_width(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ± {ratio.half_width:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.6g}%"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
