"""Tables of generated text: how often it differs, and tokens a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.tools.tables.rows import Result, Rows, Table, percent, times

_TOGETHER: Final = ", together"
_SYSTEMS: Final[Mapping[str, str]] = {
    "whole": "exits, answers that differ ≤ 1 %",
    "edit": "exits, edit distance ≤ 1 %",
    "tokens": "exits, tokens that differ ≤ 1 %",
    "layers_3": "trained with 3 layers",
    "layers_4": "trained with 4 layers",
}


def text_risks(result: Result) -> Rows:
    """Yield how often generated text differs from the unmodified model's, by system."""
    yield (
        "system", "tokens that differ", "answers that differ", "edit distance", "layers run",
        "right answers",
    )  # fmt: skip
    for name, risk in result["risks"].items():
        if name.endswith(_TOGETHER):
            continue
        keys = ("tokens", "whole_outputs", "edit_distance", "layers_run", "right")
        yield _system(name), *(percent(risk[key], 2) for key in keys)


def text_goodput(result: Result) -> Rows:
    """Yield tokens per second, relative to the unmodified model's, by system and concurrency."""
    figures = result["goodput"]
    counts = sorted({figure["in_flight"] for figure in figures})
    yield "system", *(f"{count} in flight" for count in counts)
    for name in dict.fromkeys(figure["system"] for figure in figures):
        of_system = {f["in_flight"]: f for f in figures if f["system"] == name}
        if name == "unmodified":
            rates = (f"{of_system[count]['tokens_per_s']:,.0f} tokens/s" for count in counts)
            yield _system(name), *rates
        else:
            yield _system(name), *(times(of_system[count]["ratio"]) for count in counts)


def text_refill(result: Result) -> Rows:
    """Yield refilled batches, relative to batches that start together; steps take constant time."""
    yield "load", "slots", "rows a step", "refilled", "together", "refilled over together"
    for row in result["rows"]:
        yield (
            row["load"],
            str(row["slots"]),
            str(row["batch"]),
            *(times(row[key]) for key in ("refilled", "together", "over_together")),
        )


def _system(name: str) -> str:
    system, _, policy = name.partition(", ")
    shown = _SYSTEMS.get(system, system.replace("first 1 layers", "first layer"))
    return f"{shown}; batches together" if policy == "together" else shown


TABLES: Final[Mapping[str, Table]] = {
    "text-goodput": Table(text_goodput, ("generation",)),
    "text-refill": Table(text_refill, ("generation_refill",)),
    "text-risks": Table(text_risks, ("generation",)),
}
