"""What ``eecompile build`` prints when it is done: a line for each engine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.bundle import Bundle
from offramp.bundle.engines import ENGINES
from offramp.compiler.engines.build import UNKNOWN
from offramp.compiler.engines.building import Building, Planned, PlannedEngine, UnitResult
from offramp.compiler.engines.options import SizeRange, describe_ranges
from offramp.compiler.engines.units import Unit, segment_units, source_unit, stage_units

_MIB = 2**20
_STYLES = {"built": "green", "fresh": "dim", "failed": "bold red"}


def print_building(building: Building, console: Console) -> None:
    """Print a line a unit, and what there is now."""
    if building.results is None:
        table, line = _plan_table(building), _plan_line(building)
    else:
        table = _result_table(building, building.results)
        line = _result_line(building, building.results)
    console.print(table)
    console.print(line, highlight=False, soft_wrap=True)


def _result_table(building: Building, results: Sequence[UnitResult]) -> Table:
    table = _table("profiles", "size", "build", "difference")
    for result in results:
        entry = result.entry if result.status != "failed" else None
        table.add_row(
            result.unit.name,
            part_of(result.unit, building.bundle),
            str(len(entry.profiles)) if entry else "–",
            f"{entry.size_bytes / _MIB:.1f} MiB" if entry else "–",
            f"{entry.build_s:.1f} s" if entry else "–",
            "–" if result.error is None else f"{result.error:.1e}",
            f"[{_STYLES[result.status]}]{result.status}[/]",
        )
    return table


def _result_line(building: Building, results: Sequence[UnitResult]) -> str:
    counts = [
        f"{sum(r.status == status for r in results)} {status}"
        for status in ("built", "fresh", "failed")
        if status != "failed" or building.failed
    ]
    entries = [r.entry for r in results if r.entry and r.status != "failed"]
    size = sum(entry.size_bytes for entry in entries) / _MIB
    path = f"{building.bundle.path}/{ENGINES}/{building.target.folder}"
    line = f"{escape(building.target.describe())}: {', '.join(counts)}"
    if not entries:
        return line
    ranges = {SizeRange(p.first_batch, p.last_batch) for e in entries for p in e.profiles}
    batches = describe_ranges(sorted(ranges))
    return (
        f"{line}, {size:.1f} MiB for batches {batches} in [bold]{escape(path)}[/bold]\n"
        "Measured: the time of building, and the largest difference from ONNX Runtime on the CPU, "
        "relative to the scale of each value."
    )


def _plan_table(building: Building) -> Table:
    table = _table("profiles")
    table.add_column("why")
    for plan in building.planned:
        profiles = str(len(plan.profiles)) if isinstance(plan, PlannedEngine) else "–"
        part = part_of(plan.unit, building.bundle)
        table.add_row(plan.unit.name, part, profiles, *_intention(plan))
    return table


def _table(*numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("engine", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    return table


def _intention(plan: Planned) -> tuple[str, str]:
    if isinstance(plan, UnitResult):
        return "[bold red]refused[/]", escape(plan.problem)
    return ("build", escape(plan.stale)) if plan.stale else ("[dim]keep[/]", "")


def _plan_line(building: Building) -> str:
    stale = [p for p in building.planned if not isinstance(p, PlannedEngine) or p.stale]
    target = building.target
    unknown = f"a GPU that is not known, {target.precision}"
    there = unknown if target.gpu == UNKNOWN else target.describe()
    return (
        f"{len(stale)} of {len(building.planned)} engines would be built for {escape(there)}; "
        "nothing was written"
    )


def part_of(unit: Unit, bundle: Bundle) -> str:
    """Say which part of the bundle a unit is, or parts."""
    parts = {
        "source model": [source_unit(bundle.manifest)],
        "stage": stage_units(bundle),
        "segment": segment_units(bundle.manifest),
    }
    return ", ".join(part for part, units in parts.items() if unit in units)
