"""Forecasts of the batch profile (E3 3.1) compared, on series made of recorded arrivals.

    python -m benchmarks.forecasts TRACES [--bundle BUNDLE --data NPZ] [--arima] [--json FILE]

TRACES is a folder with AzureLLMInferenceTrace_conv.csv.gz, AzureLLMInferenceTrace_code.csv.gz
(Azure Public Dataset, CC-BY-4.0; times and context lengths of requests) and
servegen_m-small_rate_per600s.csv (summed from Alibaba's ServeGen, Apache-2.0).

Series: a request of the Azure traces continues after exit k if its context is longer than a
quantile of all contexts of its trace, so that 80, 50 and 20 % of the requests continue. Windows are
two minutes long. Other series are mixes of easy and hard rows that shift from 80:20 to 20:80, by
steps and by waves, with as many rows per window as the traces have; easy rows are drawn at random.

With a bundle and data that it was not trained on, shifting mixes are also served in simulation, as
in `python -m benchmarks.adapt` (SIMULATED: thresholds as compiled, and as the default controller
changes them). The server's recorder then produces the series. Rows per window are those of the
conversations trace, and each exit is at its depth in the model.

For each window each method sees the windows before it. Pinball loss is that of the forecast shares,
the mean of quantiles 0.5 and 0.8. Lost goodput is PREDICTED: the plan for a forecast is compared
with the plan for the true values, both under the true values, on 16 V100 (batch curves assumed).
ARIMA needs the extra `forecast`.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.clusters import HOMOGENEOUS, LAYERS, cluster_of, model_of
from benchmarks.common import make_parser
from benchmarks.served_profiles import served_profiles
from numpy.typing import NDArray
from rich.table import Table

from offramp.bundle import Bundle
from offramp.cluster.planning.arima import Arima
from offramp.cluster.planning.cluster import Cluster, ModelFacts
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.planning.forecasting import (
    Autoregressive,
    Ewma,
    Forecaster,
    LastValue,
    forecast_share,
)
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.cluster.planning.prediction import predict
from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

WINDOW_S = 120.0
EXITS = (2, 4, 5)
"""Layers, of twelve, after which made series have their three exits."""
LEVELS = (0.5, 0.8)
FIRST = 5
"""Number of windows before the first forecast that is evaluated."""
MOST_WINDOWS = 120
OFTEN = 0.9
"""Smallest share of windows in which an exit of a served bundle must be on to be evaluated."""
GOAL = PlanningGoal(slo_s=0.1, batch_sizes=(1, 2, 4, 8))
"""Goal of the plans: the paper's objective, at which its batches are of 8 rows at most."""


def main() -> None:
    """Compare, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, metavar="TRACES")
    parser.add_argument("--bundle", type=Path, help="bundle that serves shifting mixes")
    parser.add_argument(
        "--data", type=Path, metavar="NPZ", help="data that the bundle was not compiled with"
    )
    parser.add_argument(
        "--arima", action="store_true", help="also compare ARIMA, which takes minutes"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    methods: list[Forecaster] = [
        LastValue(), Ewma(0.2), Ewma(0.4), Ewma(0.7), Autoregressive(1), Autoregressive(2)
    ]  # fmt: skip
    if options.arima:
        methods.append(Arima())
    found: dict[str, Any] = {}
    series = made_series(options.traces, options.seed)
    if options.bundle is not None:
        series |= served_series(options.bundle, options.data, options.traces, options.seed)
    for name, one in series.items():
        found[name] = {"windows": len(one.shares), "exits_after": one.exits}
        for method in methods:
            found[name][title_of(method)] = compare(method, one)
        print(name, found[name], flush=True)
    columns = [title_of(method) for method in methods]
    served = [name for name in found if name.startswith("served")]
    groups = {"mean": list(found), "mean of made": [n for n in found if n not in served]}
    if served:
        groups["mean of served"] = served
    table = Table("series", *columns, title="Pinball loss (of shares); goodput lost, PREDICTED, at "
                  "quantiles 0.5 and 0.8")  # fmt: skip
    means = {
        title: {column: mean_of([found[name] for name in names], column) for column in columns}
        for title, names in groups.items()
    }
    for name, row in {**found, **means}.items():
        table.add_row(name, *(shown(row[column]) for column in columns))
    wide_console(160).print(table)
    if options.json is not None:
        document = {
            "predicted": "goodput lost; pinball loss is that of the forecasts on the series",
            "assumptions": " ".join((__doc__ or "").split("Series:")[1].split()),
            "series": found,
            **{title.replace(" ", "_"): row for title, row in means.items()},
            "least_pinball": {t: min(m, key=lambda c: m[c]["pinball"]) for t, m in means.items()},
            "least_goodput_lost": {
                t: min(m, key=lambda c: m[c]["lost_at_0.8"]) for t, m in means.items()
            },
            "environment": describe_environment(seed=options.seed),
        }
        write_json(options.json, document)


def title_of(method: Forecaster) -> str:
    """Return a method's name with its parameter."""
    parameters = {k.lstrip("_"): v for k, v in vars(method).items() if k in ("_weight", "_order")}
    return " ".join([method.name, *(f"{v}" for v in parameters.values())])


def shown(row: Mapping[str, float]) -> str:
    return f"{row['pinball']:.4f}; {row['lost_at_0.5']:.1%}, {row['lost_at_0.8']:.1%}"


def mean_of(found: Sequence[Mapping[str, Any]], column: str) -> dict[str, float]:
    rows = [row[column] for row in found]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


# Series.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Shares that went on after each exit, window by window."""

    shares: NDArray[np.float64]
    """[windows, exits]; NaN of exits that were off."""
    exits: tuple[int, ...] = EXITS
    """The layer of twelve that each exit follows."""


def made_series(folder: Path, seed: int) -> dict[str, Series]:
    """Return series from the requests of traces, and from random mixes."""
    return {name: Series(shares=shares) for name, shares in drawn_shares(folder, seed).items()}


def served_series(bundle: Path, data: Path, folder: Path, seed: int) -> dict[str, Series]:
    """Return series that the server's recorder made of shifting mixes, SIMULATED."""
    times, _ = read_azure(folder / "AzureLLMInferenceTrace_conv.csv.gz")
    rows = np.bincount((times // WINDOW_S).astype(int))[:-1]
    segments = Bundle.open(bundle).manifest
    depths = [(exit_.after_segment + 1) / len(segments.segments) for exit_ in segments.exits]
    layer_of = {k: round(depth * LAYERS) - 1 for k, depth in enumerate(depths)}
    found = {}
    for name, profile in served_profiles(bundle, data, rows, WINDOW_S, seed).items():
        shares = profile.going_on()
        on = np.isfinite(shares).mean(axis=0) >= OFTEN
        exits: dict[int, int] = {}  # by layer; of two exits at one, the earlier
        for exit_ in np.flatnonzero(on).tolist():
            if 0 <= layer_of[exit_] < LAYERS - 1:
                exits.setdefault(layer_of[exit_], exit_)
        if exits:
            found[name] = Series(shares=shares[:, list(exits.values())], exits=tuple(exits))
    return found


def drawn_shares(folder: Path, seed: int) -> dict[str, NDArray[np.float64]]:
    """Return for each series [windows, exits]: shares of rows that continue after each exit."""
    rng = np.random.default_rng(seed)
    series = {}
    for name in ("conv", "code"):
        times, contexts = read_azure(folder / f"AzureLLMInferenceTrace_{name}.csv.gz")
        window = (times // WINDOW_S).astype(int)
        limits = np.quantile(contexts, (0.2, 0.5, 0.8))
        series[f"{name}: context lengths"] = np.array(
            [
                [(contexts[window == k] > limit).mean() for limit in limits]
                for k in range(window.max())
                if (window == k).sum() > 0
            ]
        )
        rows = np.bincount(window)[:-1]
        thirds = np.repeat([0.8, 0.5, 0.2], -(-len(rows) // 3))[: len(rows)]
        waves = 0.5 + 0.3 * np.sin(np.arange(len(rows)) / len(rows) * 4 * np.pi)
        series[f"{name}: steps 80:20, 50:50, 20:80"] = drawn(thirds, rows, rng)
        series[f"{name}: waves of 80:20 to 20:80"] = drawn(waves, rows, rng)
    with (folder / "servegen_m-small_rate_per600s.csv").open() as file:
        rates = np.array([float(row["rate_rps"]) for row in csv.DictReader(file)])[:MOST_WINDOWS]
    busy = (rates - rates.min()) / np.ptp(rates)
    rows = (rates * WINDOW_S).astype(int)
    series["ServeGen: the busier, the harder"] = drawn(0.8 - 0.6 * busy, rows, rng)
    return series


def read_azure(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each request's seconds from the first request, and its tokens of context."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    contexts = [float(row["ContextTokens"]) for row in rows]
    return np.array(times) - times[0], np.array(contexts)


def drawn(
    easy: NDArray[np.float64], rows: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw the shares of rows that continue after each exit, by window.

    ``easy`` is the share of easy rows in each window; they leave at the exits in equal parts.
    """
    shares = []
    for share, count in zip(easy.tolist(), rows.tolist(), strict=True):
        if count:
            parts = [share / len(EXITS)] * len(EXITS)
            left = rng.multinomial(count, [*parts, 1 - sum(parts)])[: len(EXITS)]
            shares.append(1 - np.cumsum(left) / count)
    return np.array(shares)


# Losses.


def compare(method: Forecaster, series: Series) -> dict[str, float]:
    """Forecast each window from the windows before it; return mean losses and the CPU time."""
    shares = series.shares
    losses: list[float] = []
    lost: dict[float, list[float]] = {level: [] for level in LEVELS}
    start = time.process_time()
    forecasts = {
        level: [
            tuple(
                np.minimum.accumulate(
                    [forecast_share(shares[:k, e], method, level) for e in range(shares.shape[1])]
                ).tolist()
            )
            for k in range(FIRST, len(shares))
        ]
        for level in LEVELS
    }
    cpu_s = time.process_time() - start
    for level, rows in forecasts.items():
        for forecast, came in zip(rows, shares[FIRST:], strict=True):
            error = came - np.array(forecast)
            if np.isfinite(error).any():
                losses.append(float(np.nanmean(np.maximum(level * error, (level - 1) * error))))
            lost[level].append(goodput_lost(forecast, filled(came), series.exits))
    count = len(LEVELS) * (len(shares) - FIRST)
    return {
        "pinball": float(np.mean(losses)),
        **{f"lost_at_{level}": float(np.mean(values)) for level, values in lost.items()},
        "cpu_ms_a_window": 1e3 * cpu_s / count,
    }


def filled(came: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return shares without NaN: all rows that reached an exit that was off went on."""
    shares, before = [], 1.0
    for share in came.tolist():
        before = before if np.isnan(share) else share
        shares.append(before)
    return np.array(shares)


@cache
def cluster(exits: tuple[int, ...]) -> Cluster:
    """Return sixteen V100, whose times include the given exits only."""
    every = cluster_of(HOMOGENEOUS)
    kinds = [
        replace(kind, times=replace(kind.times, exits_s=kind.times.exits_s[list(exits)]))
        for kind in every.types
    ]
    return replace(every, types=tuple(kinds))


def goodput_lost(
    forecast: tuple[float, ...], came: NDArray[np.float64], exits: tuple[int, ...]
) -> float:
    """Return the goodput lost, as a share of that of the plan for the true values."""
    truth = facts(tuple(np.minimum.accumulate(came).tolist()), exits)
    best, made = (
        rate(plan_for(rounded(shares), exits), truth) for shares in (truth.going_on, forecast)
    )
    return 1 - made / best


def facts(shares: tuple[float, ...], exits: tuple[int, ...]) -> ModelFacts:
    dense = model_of([1.0] * (LAYERS - 1))
    return ModelFacts(segments=LAYERS, exit_after=exits, going_on=shares, row_bytes=dense.row_bytes)


def rounded(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Round shares to thousandths, so that nearly equal forecasts share one plan."""
    return tuple(round(share, 3) for share in shares)


@cache
def plan_for(shares: tuple[float, ...], exits: tuple[int, ...]) -> ClusterPlan:
    return make_cluster_plan(facts(shares, exits), cluster(exits), GOAL).plan


def rate(plan: ClusterPlan, truth: ModelFacts) -> float:
    there = cluster(truth.exit_after)
    return predict(plan, truth, there, arrival_rps=plan.rate_rps).rate_rps


if __name__ == "__main__":
    main()
