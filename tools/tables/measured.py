"""The table of all results: when they were measured, on which processor, with which version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from offramp.tools.tables.rows import Result, Rows, Table


def table(names: Sequence[str]) -> Table:
    """Return the table of the results with these names, the newest first."""

    def rows(*results: Result) -> Rows:
        yield "measured", "offramp", "processor", "results"
        runs: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        for name, result in zip(names, results, strict=True):
            runs[run(result)].append(name)
        for recorded, found in sorted(runs.items(), reverse=True):
            shown = (fact or "–" for fact in recorded)
            yield *shown, ", ".join(f"`{name}`" for name in found)

    return Table(rows, tuple(names))


def run(result: Result) -> tuple[str, str, str]:
    """Return the day, the version of Offramp, and the processor of a result.

    Of several runs in one file it is the oldest. They are empty if a result records them in its
    own way, as those of GPUs do.
    """
    recorded = result.get("environment") or [{}]
    runs = [recorded] if isinstance(recorded, Mapping) else recorded
    oldest = min(runs, key=lambda environment: str(environment.get("measured_utc", "")))
    return (
        str(oldest.get("measured_utc", ""))[:10],
        oldest.get("packages", {}).get("offramp", ""),
        oldest.get("cpu", ""),
    )
