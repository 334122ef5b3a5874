"""Forecasts of the batch profile (E3 3.1) compared, on series made of recorded arrivals.

    python -m benchmarks.forecasts TRACES [--arima] [--json FILE]

TRACES is a folder with AzureLLMInferenceTrace_conv.csv.gz, AzureLLMInferenceTrace_code.csv.gz
(Azure Public Dataset, CC-BY-4.0; times and context lengths of requests) and
servegen_m-small_rate_per600s.csv (summed from Alibaba's ServeGen, Apache-2.0).

Series: a request of the Azure traces goes on behind exit k if its context is longer than a
quantile of all contexts of its trace (so that 80, 50 and 20 % do); windows of two minutes. Besides,
mixes of easy and hard rows that shift from 80:20 to 20:80, by steps and by waves, with as many rows
in a window as the traces have; which rows are easy is drawn. For each window each method sees those
before it. Pinball loss is that of shares, the mean of quantiles 0.5 and 0.8; lost goodput is
PREDICTED, of the plan for a forecast against that for what came, both under what came, on 16 V100
(batch curves assumed). ARIMA needs the extra `forecast`.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.clusters import HOMOGENEOUS, LAYERS, cluster_of, model_of
from benchmarks.common import make_parser
from numpy.typing import NDArray
from rich.table import Table

from offramp.engine.planning.arima import Arima
from offramp.engine.planning.cluster import Cluster, ModelFacts
from offramp.engine.planning.cluster_plan import ClusterPlan
from offramp.engine.planning.forecasting import (
    Autoregressive,
    Ewma,
    Forecaster,
    LastValue,
    forecast_share,
)
from offramp.engine.planning.goal import PlanningGoal
from offramp.engine.planning.optimiser import make_cluster_plan
from offramp.engine.planning.prediction import predict
from offramp.tools.bench.output import describe_environment, wide_console, write_json

WINDOW_S = 120.0
EXITS = (2, 4, 5)
"""Layers of twelve that the three exits follow; the others have none."""
LEVELS = (0.5, 0.8)
FIRST = 5
"""Windows that are seen before the first forecast that counts."""
MOST_WINDOWS = 120
GOAL = PlanningGoal(slo_s=0.1, batch_sizes=(1, 2, 4, 8))
"""The paper's objective; its batches are of 8 at most at that."""


def main() -> None:
    """Compare, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, metavar="TRACES")
    parser.add_argument("--arima", action="store_true", help="ARIMA too, which takes minutes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    methods: list[Forecaster] = [
        LastValue(), Ewma(0.2), Ewma(0.4), Ewma(0.7), Autoregressive(1), Autoregressive(2)
    ]  # fmt: skip
    if options.arima:
        methods.append(Arima())
    found: dict[str, Any] = {}
    for name, shares in all_series(options.traces, options.seed).items():
        found[name] = {"windows": len(shares)}
        for method in methods:
            found[name][title_of(method)] = compare(method, shares)
        print(name, found[name], flush=True)
    columns = [title_of(method) for method in methods]
    table = Table("series", *columns, title="Pinball loss (of shares); goodput lost, PREDICTED, at "
                  "quantiles 0.5 and 0.8")  # fmt: skip
    means = {column: mean_of(found, column) for column in columns}
    for name, row in {**found, "mean": means}.items():
        table.add_row(name, *(shown(row[column]) for column in columns))
    wide_console(160).print(table)
    if options.json is not None:
        document = {
            "predicted": "goodput lost; pinball loss is that of the forecasts on the series",
            "assumptions": " ".join((__doc__ or "").split("Series:")[1].split()),
            "series": found,
            "mean": means,
            "least_pinball": min(means, key=lambda name: means[name]["pinball"]),
            "least_goodput_lost": min(means, key=lambda name: means[name]["lost_at_0.8"]),
            "environment": describe_environment(seed=options.seed),
        }
        write_json(options.json, document)


def title_of(method: Forecaster) -> str:
    """A method with its parameter."""
    parameters = {k.lstrip("_"): v for k, v in vars(method).items() if k in ("_weight", "_order")}
    return " ".join([method.name, *(f"{v}" for v in parameters.values())])


def shown(row: Mapping[str, float]) -> str:
    return f"{row['pinball']:.4f}; {row['lost_at_0.5']:.1%}, {row['lost_at_0.8']:.1%}"


def mean_of(found: Mapping[str, Any], column: str) -> dict[str, float]:
    rows = [row[column] for row in found.values()]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


# Series.


def all_series(folder: Path, seed: int) -> dict[str, NDArray[np.float64]]:
    """[windows, exits] each: shares that went on."""
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
    """Seconds from the first request, and tokens of context."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    contexts = [float(row["ContextTokens"]) for row in rows]
    return np.array(times) - times[0], np.array(contexts)


def drawn(
    easy: NDArray[np.float64], rows: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Easy rows leave at the exits in equal parts; whether a row is easy is drawn."""
    shares = []
    for share, count in zip(easy.tolist(), rows.tolist(), strict=True):
        if count:
            parts = [share / len(EXITS)] * len(EXITS)
            left = rng.multinomial(count, [*parts, 1 - sum(parts)])[: len(EXITS)]
            shares.append(1 - np.cumsum(left) / count)
    return np.array(shares)


# Losses.


def compare(method: Forecaster, shares: NDArray[np.float64]) -> dict[str, float]:
    """Forecast every window but the first from those before it."""
    losses: list[float] = []
    lost: dict[float, list[float]] = {level: [] for level in LEVELS}
    start = time.process_time()
    forecasts = {
        level: [
            tuple(
                np.minimum.accumulate(
                    [forecast_share(shares[:k, e], method, level) for e in range(len(EXITS))]
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
            losses.append(float(np.maximum(level * error, (level - 1) * error).mean()))
            lost[level].append(goodput_lost(forecast, came))
    count = len(LEVELS) * (len(shares) - FIRST)
    return {
        "pinball": float(np.mean(losses)),
        **{f"lost_at_{level}": float(np.mean(values)) for level, values in lost.items()},
        "cpu_ms_a_window": 1e3 * cpu_s / count,
    }


def cluster() -> Cluster:
    """Sixteen V100, with times of the three exits alone."""
    every = cluster_of(HOMOGENEOUS)
    kinds = [
        replace(kind, times=replace(kind.times, exits_s=kind.times.exits_s[list(EXITS)]))
        for kind in every.types
    ]
    return replace(every, types=tuple(kinds))


CLUSTER = cluster()


def goodput_lost(forecast: tuple[float, ...], came: NDArray[np.float64]) -> float:
    """Share of the goodput of the plan that knew what came."""
    truth = facts(tuple(np.minimum.accumulate(came).tolist()))
    best, made = (rate(plan_for(shares), truth) for shares in (truth.going_on, forecast))
    return 1 - made / best


def facts(shares: tuple[float, ...]) -> ModelFacts:
    dense = model_of([1.0] * (LAYERS - 1))
    return ModelFacts(segments=LAYERS, exit_after=EXITS, going_on=shares, row_bytes=dense.row_bytes)


_PLANS: dict[tuple[float, ...], ClusterPlan] = {}


def plan_for(shares: tuple[float, ...]) -> ClusterPlan:
    """Forecasts that differ by less than a thousandth have one plan."""
    key = tuple(round(share, 3) for share in shares)
    if key not in _PLANS:
        _PLANS[key] = make_cluster_plan(facts(key), CLUSTER, GOAL).plan
    return _PLANS[key]


def rate(plan: ClusterPlan, truth: ModelFacts) -> float:
    return predict(plan, truth, CLUSTER, arrival_rps=plan.rate_rps).rate_rps


if __name__ == "__main__":
    main()
