"""Tables of clusters: forecasts, and E3's evaluation simulated and on emulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.tools.tables.rows import Result, Rows, Table, by

_PAPER_WRONG: Final = "4 to 8 % (fig. 22)"
"""Goodput that E3 loses if its forecast is wrong by 20 %."""
_STRAGGLER: Final = "one device of the last split takes four times as long, 80 % easy"
_MIXED: Final = "6 V100 + 8 P100 + 15 K80"


def forecasts(result: Result) -> Rows:
    """Yield goodput lost at the 0.8 quantile, and pinball loss, by method."""
    yield "goodput lost, PREDICTED, and pinball loss", *(
        "7 synthetic series", "8 served, SIMULATED", "all"
    )  # fmt: skip
    names = {
        "last value": "last window",
        "ARIMA (1, 1, 1)": "ARIMA (1, 1, 1)",
        "EWMA 0.7": "EWMA, weight 0.7",
        "AR 2": "AR (2) by least squares",
    }
    for key, name in names.items():
        means = (result[part][key] for part in ("mean_of_made", "mean_of_served", "mean"))
        yield name, *(f"{100 * m['lost_at_0.8']:.1f} %, {m['pinball']:.4f}" for m in means)


def predicted(result: Result) -> Rows:
    """Yield E3's experiments as predicted in closed form, batches of 8."""
    parts = {name: part["rows"] for name, part in result["experiments"].items()}
    equal = by(parts["homogeneous"], "easy", "batch")
    mixed = by(parts["heterogeneous"], "easy", "batch")
    cost = by(parts["fixed rate"], "easy", "batch")["80%", "8"]
    errors = [by(parts["forecast errors"], "case")[f"{easy} easy"] for easy in ("80%", "50%")]
    more, fewer = ([row[f"error {error}: lost %"] for row in errors] for error in ("-20%", "+20%"))
    lower = [cost[f"{kind}: lower by %"] for kind in ("V100", "any type")]
    wrapper = [100 * (row["with / without"] - 1) for row in parts["wrapper"]]
    easy, hard = equal["80%", 8], equal["20%", 8]
    at_1, at_8 = (mixed["80%", size]["mixed / 16 V100"] for size in (1, 8))
    yield "", "here, PREDICTED", "the paper, measured"
    yield (
        "16 V100, 80 % easy, against the unmodified model",
        f"× {easy['plan / source']:.2f}",
        "× 1.30 (fig. 7)",
    )
    yield "the same against run-through", f"× {easy['plan / run-through']:.2f}", "× 1.44 (fig. 7)"
    yield (
        "20 % easy, against the unmodified model",
        f"× {hard['plan / source']:.2f}",
        "up to 23 % below (fig. 16)",
    )
    yield (
        f"{_MIXED} against 16 V100, 80 % easy",
        f"× {at_8:.2f}; × {at_1:.2f} at a batch of 1",
        "up to × 1.70 (fig. 13)",
    )
    yield (
        "6,000 rows/s at the least cost, 80 % easy",
        f"{min(lower):.0f} to {max(lower):.0f} % lower",
        "35 to 78 % lower (figs. 14, 15)",
    )
    for kind, lost in (("more", more), ("fewer", fewer)):
        yield (
            f"forecast wrong by 20 %, {kind} rows than forecast, 50 to 80 % easy",
            f"{min(lost):.0f} to {max(lost):.0f} % lost",
            _PAPER_WRONG,
        )
    yield (
        "exits inside splits off, an exit costs 2 to 20 % of a layer",
        f"{min(wrapper):+.0f} to {max(wrapper):+.0f} %",
        "up to +16 % (fig. 25)",
    )


def simulated(result: Result) -> Rows:
    """Yield simulated goodput at 100 ms, relative to the unmodified model's."""
    systems = ("run-through", "dedicated", "stealing", "shared")
    yield "SIMULATED", *systems, "the paper, measured"
    parts = result["experiments"]
    published = ("× 1.30, run-through × 0.90 (fig. 7)", "–", "up to 23 % below (fig. 16)")
    for row, paper in zip(parts["mixes"]["rows"], published, strict=True):
        cells = (f"× {row[f'{system} / source']:.2f}" for system in systems)
        yield f"16 V100, {_spaced(row['easy'])} easy", *cells, paper
    for row in parts["heterogeneous"]["rows"]:
        cells = (f"× {row[f'mixed: {s} / source of 16 V100']:.2f}" for s in systems[1:])
        yield f"{_MIXED}, batch {row['batch']}, against the model on 16 V100", "–", *cells, "–"


def simulated_lost(result: Result) -> Rows:
    """Yield simulated goodput lost by wrong forecasts and by a straggler."""
    systems = ("dedicated", "stealing")
    yield "goodput lost, SIMULATED", *systems, "the paper, measured"
    parts = result["experiments"]
    yield from _lost(parts["forecast errors"]["rows"], parts["stragglers"]["rows"], systems)


def emulated(result: Result) -> Rows:
    """Yield goodput on emulated devices, relative to the unmodified model's."""
    systems = (
        "run-through", "dedicated", "dedicated, overlapped", "stealing", "stealing, overlapped",
    )  # fmt: skip
    yield "easy rows", *systems, "the last over run-through", "simulated / measured"
    compared = ("source", "run-through", "dedicated", "stealing")
    for row in result["experiments"]["mixes"]:
        cells = (f"× {row[f'{system} / source']:.2f}" for system in systems)
        over = f"× {row['stealing, overlapped / run-through']:.2f}"
        yield (
            row["easy"],
            *cells,
            over,
            ", ".join(f"{row[f'{system}: simulated / measured']:.2f}" for system in compared),
        )


def emulated_lost(result: Result) -> Rows:
    """Yield goodput lost on emulated devices by wrong forecasts and by a straggler."""
    systems = ("dedicated, overlapped", "stealing, overlapped")
    yield "goodput lost", *systems, "the paper"
    parts = result["experiments"]
    yield from _lost(parts["forecast errors"], parts["stragglers"], systems)


def _lost(errors: list[Result], stragglers: list[Result], systems: tuple[str, str]) -> Rows:
    for row in errors:
        fewer = row["fewer leave than expected by"]
        kind = "fewer" if fewer[0] == "+" else "more"
        case = f"{_spaced(row['easy'])} easy, {_spaced(fewer[1:])} {kind} leave"
        cells = (f"{row[f'{system}: lost %']:.0f} %".replace("-0 ", "0 ") for system in systems)
        yield f"{case} than forecast", *cells, _PAPER_WRONG
    lost = {row["system"]: row["lost %"] for row in stragglers}
    yield _STRAGGLER, *(f"{lost[system]:.0f} %" for system in systems), "–"


def emulated_sizes(result: Result) -> Rows:
    """Yield goodput on emulated devices by batch size, and on devices of several types."""
    systems = ("run-through", "dedicated, overlapped", "stealing, overlapped")
    yield "batches of", *systems
    parts = result["experiments"]
    rows = {f"{row['batch']}, 80 % easy": row for row in parts["sizes"]} | {
        f"{row['batch']}, {_MIXED}, against the model on them": row
        for row in parts["heterogeneous"]
    }
    for name, row in rows.items():
        ratios = (row.get(f"{system} / source") for system in systems)
        yield name, *("–" if ratio is None else f"× {ratio:.2f}" for ratio in ratios)


def emulated_cost(result: Result) -> Rows:
    """Yield the devices, and the cost, of 6,000 rows a second on emulated devices."""
    systems = ("source", "run-through", "stealing, overlapped")
    yield (
        "batches of", "V100: the unmodified model", "run-through", "stealing, overlapped",
        "$/h, mixed: the unmodified model", "run-through", "stealing, overlapped",
    )  # fmt: skip
    parts = result["experiments"]
    for fewest, cheapest in zip(parts["fewest"], parts["cheapest"], strict=True):
        counts = (str(fewest[f"{system}: V100"]) for system in systems)
        costs = (f"{cheapest[f'{system}: $/h']:.2f}" for system in systems)
        yield str(fewest["batch"]), *counts, *costs


def _spaced(share: str) -> str:
    return share.replace("%", " %")


TABLES: Final[Mapping[str, Table]] = {
    "e3-emulated": Table(emulated, ("e3_emulated",)),
    "e3-emulated-cost": Table(emulated_cost, ("e3_emulated_cost",)),
    "e3-emulated-lost": Table(emulated_lost, ("e3_emulated",)),
    "e3-emulated-sizes": Table(emulated_sizes, ("e3_emulated",)),
    "e3-predicted": Table(predicted, ("e3_plans",)),
    "e3-simulated": Table(simulated, ("e3",)),
    "e3-simulated-lost": Table(simulated_lost, ("e3",)),
    "forecasts": Table(forecasts, ("forecasts",)),
}
