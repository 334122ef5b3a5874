"""Exits, subnets, and subnets with exits, compared at equal accuracy.

    python -m benchmarks.subnets SUPERNET.ee --data TEST.npz [--batch-sizes 1,8,16] [--points 10]
        [--rounds 6] [--samples 4000] [--json FILE]

Four ways of making the model faster (:mod:`~offramp.calibration.choose.trade_offs`): the full
model's exits; subnets to their own ends; every subnet with its own exits; and subnets that pass
uncertain samples to the full model, which no policy serves yet. Thresholds are on the paths of the
tuning split. For each batch size and each way, points on the fronts of accuracy and of agreement
over predicted time are chosen on the certify split. Their accuracy and agreement is then *counted*
on the test data, from one answer of every exit of every variant; their time is *measured* on its
first samples, in comparison with the source model as a plain session, batch by batch in interleaved
rounds: CPU time of the one thread.

Curves are compared at equal accuracy on the test data, and at equal agreement: for each way the
measured point of least time that is at least as good. The goal: both ways together take at most 0.9
of the time of the better one alone at equal accuracy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from benchmarks.common import make_parser
from benchmarks.frontier.measurement import FrontierPoint, SharedStages, point_of
from rich.console import Console

from offramp.bundle import Bundle, ExitPolicy
from offramp.calibration.choose.exit_records import ExitRecords, record_answers
from offramp.calibration.choose.trade_offs import (
    TRADE_OFF_KINDS,
    Judged,
    QualityMeasure,
    TradeOff,
    TradeOffKind,
    accuracy_quality,
    agreement_quality,
    cheapest_at,
    front_of,
    kept_variants,
    trade_offs,
)
from offramp.calibration.data.dataset import Dataset, read_dataset
from offramp.calibration.measure.paired import BatchRunner, ComparedSystem, PlainModel, StagedModel
from offramp.certify import MODEL_END
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.backends import Backend, Slot, make_backend
from offramp.engine.common.environment import available_cores
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import make_plan
from offramp.tools.bench.common.compare import measure_size
from offramp.tools.bench.common.output import describe_environment, figure_table, write_json

DROPS: Final = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04)
"""Losses of accuracy or agreement, relative to the full model, at which groups are compared."""
LOWEST_DROP: Final = 0.06
"""Largest loss on the certify split; points that lose more are not measured."""
GOAL: Final = 0.9
WIDTH: Final = 160
"""Console width, in characters, at which no table is cut."""
GROUPS: Final[Mapping[str, tuple[TradeOffKind, ...]]] = {
    "exits": ("exits",),
    "subnets": ("subnets",),
    "both": ("exits", "subnets", "both"),
    "handing on too": TRADE_OFF_KINDS,
}
"""Compared groups, and the ways that each may take its points from."""
QUALITY_MEASURES: Final[Mapping[str, QualityMeasure]] = {
    "accuracy": accuracy_quality,
    "agreement": agreement_quality,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPoint:
    """A trade-off that was chosen without the test data for a batch size."""

    ways: tuple[TradeOffKind, ...]
    """Ways for which this point was chosen."""
    chosen: TradeOff
    """Trade-off as predicted, and counted on the certify split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """A trade-off, with its results on the test data."""

    ways: tuple[TradeOffKind, ...]
    chosen: TradeOff
    counted: TradeOff
    """Trade-off as predicted, and counted on all of the test data."""
    measured: FrontierPoint
    """Measurements, compared with the full model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualQuality:
    """The smallest measured time of each group at equally good answers."""

    batch_size: int
    worth: str
    """Criterion: accuracy or agreement."""
    drop: float
    """Loss of this criterion relative to the full model, on the test data."""
    times: dict[str, float]
    """Busy time relative to the full model's, by group."""

    def gain(self, group: str) -> float:
        """Return a group's time relative to the better of exits and subnets alone.

        Combining pays if it is below 1.
        """
        return self.times[group] / min(self.times["exits"], self.times["subnets"])


def main() -> None:
    """Choose, count, measure, print, and write if asked."""
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument("--batch-sizes", default="1,8,16")
    parser.add_argument(
        "--points", type=int, default=10, help="largest number of points of each front"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--samples", type=int, default=4000, help="largest number of samples to time"
    )
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    if not bundle.manifest.variants:
        raise SystemExit(f"{bundle.path} has no variants; make it with eecompile supernet")
    dataset = read_dataset(options.data, bundle.manifest.inputs, answer=bundle.manifest.answer)
    records = record(bundle, dataset)
    console, found, rows = Console(width=WIDTH), [], []
    for size in map(int, options.batch_sizes.split(",")):
        judged = kept_variants(bundle, _profiled(bundle, size))
        chosen = choose(judged, options.points)
        points = measure(
            bundle, judged, records, chosen, dataset=dataset, size=size, options=options
        )
        equal = at_equal_worth(points, size)
        print_points(console, bundle, points, size)
        print_equal(console, equal, size)
        found += points
        rows += equal
    write_json(options.json, to_json(bundle, found, rows, options))


def _profiled(bundle: Bundle, size: int) -> int:
    """Return the profiled batch size that is nearest to ``size``: time is predicted for it."""
    return min(bundle.profile().batch_sizes, key=lambda known: abs(known - size))


def record(bundle: Bundle, dataset: Dataset) -> list[ExitRecords]:
    """Answer the test data at every exit of every variant, once."""
    return [
        record_answers(
            answering_graphs(shown.manifest, shown.read),
            [(exit_.output, exit_.confidence) for exit_ in shown.manifest.exits],
            shown.manifest.answer,
            dataset,
            threads=available_cores(),
        )
        for shown in bundle.variants()
    ]


def choose(judged: Judged, most: int) -> list[ChosenPoint]:
    """Choose points of every way on the certify split; the full model comes first."""
    (variant, records), *_ = judged
    full = variant.judge((), MODEL_END, records)
    ways: dict[tuple[object, ...], list[TradeOffKind]] = {_key(full): [*TRADE_OFF_KINDS]}
    chosen = {_key(full): full}
    for way in TRADE_OFF_KINDS:
        points = trade_offs(judged, way)
        for worth in QUALITY_MEASURES.values():
            for point in _spread(front_of(points, worth), worth, worth(full), most):
                chosen.setdefault(_key(point), point)
                mine = ways.setdefault(_key(point), [])
                if way not in mine:
                    mine.append(way)
    return [ChosenPoint(ways=tuple(ways[key]), chosen=point) for key, point in chosen.items()]


def _spread(
    front: Sequence[TradeOff], worth: QualityMeasure, of_full: float, most: int
) -> Iterator[TradeOff]:
    """Yield points of a front, evenly spread over their worth, down to a largest loss."""
    best = worth(front[-1])
    lowest = min(max(worth(front[0]), of_full - LOWEST_DROP), best)
    for level in np.linspace(lowest, best, most):
        point = cheapest_at(front, float(level), worth)
        assert point is not None, "the last of the front reaches every level"
        yield point


def _key(point: TradeOff) -> tuple[object, ...]:
    return point.variant, point.deepest, point.active


def measure(
    bundle: Bundle,
    judged: Judged,
    records: Sequence[ExitRecords],
    chosen: Sequence[ChosenPoint],
    *,
    dataset: Dataset,
    size: int,
    options: argparse.Namespace,
) -> list[MeasuredPoint]:
    """Measure the time of points in interleaved rounds, the full model as a plain session."""
    backend = make_backend("onnxruntime", threads=1, max_rows=size)
    slot = backend.open_slot()
    try:
        agreement = agreement_of(bundle.manifest.answer)
        systems = [
            ComparedSystem(str(place), runner, agreement, time.thread_time)
            for place, runner in enumerate(runners_of(bundle, chosen, backend, slot))
        ]
        used = measure_size(
            systems,
            dataset,
            size,
            before=range(1, size + 1),  # whatever a stage is left with on the way
            rounds=options.rounds,
            samples=options.samples,
            progress=lambda _: None,
        )
    finally:
        slot.close()
        backend.close()
    labels = None if dataset.labels is None else dataset.labels[:used]
    found = []
    for point, system in zip(chosen, systems, strict=True):
        variant, _ = judged[point.chosen.variant]
        before = [a for a in point.chosen.active if a.exit != point.chosen.deepest]
        found.append(
            MeasuredPoint(
                ways=point.ways,
                chosen=point.chosen,
                counted=variant.judge(before, point.chosen.deepest, records[variant.variant]),
                measured=point_of(system, systems[0], None, size, labels),
            )
        )
    return found


def runners_of(
    bundle: Bundle, points: Sequence[ChosenPoint], backend: Backend, slot: Slot
) -> list[BatchRunner]:
    """Return a runner for each point; the first is the full model, as a user would run it."""
    manifest = bundle.manifest
    stages = [SharedStages(backend) for _ in bundle.variants()]
    runners: list[BatchRunner] = [
        PlainModel(bundle.read(manifest.source.file), manifest.answer.output, 1)
    ]
    for point in points[1:]:
        number = point.chosen.variant
        policy = ExitPolicy(version=1, active=point.chosen.active)
        plan = make_plan(bundle.variant(number), policy)
        pipeline = Pipeline(backend, plan, prepare=stages[number].prepare)
        runners.append(StagedModel(pipeline, slot))
    return runners


def at_equal_worth(points: Sequence[MeasuredPoint], size: int) -> list[EqualQuality]:
    """Compare the groups at the losses ``DROPS``, by agreement and, with labels, by accuracy.

    The first point, the full model, belongs to every group.
    """
    full, rows = points[0].counted, []
    for name, worth in QUALITY_MEASURES.items():
        if name == "accuracy" and full.accuracy is None:
            continue
        for drop in DROPS:
            good = [p for p in points if worth(p.counted) >= worth(full) - drop - 1e-12]
            times = {
                group: min(p.measured.busy.value for p in good if set(p.ways) & set(ways))
                for group, ways in GROUPS.items()
            }
            rows.append(EqualQuality(batch_size=size, worth=name, drop=drop, times=times))
    return rows


def to_json(
    bundle: Bundle,
    points: Sequence[MeasuredPoint],
    rows: Sequence[EqualQuality],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return JSON values: predicted, counted and measured figures, each under its own name."""
    return {
        "measured": True,
        "bundle": bundle.manifest.name,
        "subnets": {v.index: v.name for v in bundle.manifest.variants},
        "points": [asdict(point) for point in points],
        "equal": [
            {
                **asdict(row),
                "both_over_better": row.gain("both"),
                "handing_on_over_better": row.gain("handing on too"),
            }
            for row in rows
        ],
        "goal": GOAL,
        "environment": describe_environment(
            threads=1, rounds=options.rounds, samples=options.samples, clock="thread_time"
        ),
    }


def print_points(
    console: Console, bundle: Bundle, points: Sequence[MeasuredPoint], size: int
) -> None:
    """Print all points that were measured at a batch size, the slowest first."""
    names = {0: "full model"} | {v.index: v.name for v in bundle.manifest.variants}
    columns = ("ways", "variant", "ends at", "right", "agree", "early", "predicted ×", "busy ×")
    table = figure_table(
        f"MEASURED, {bundle.manifest.name}, batch {size}",
        "right, agree, early: counted on the test data. predicted ×: by the profile. busy ×, mean "
        "×: CPU time of a batch, and latency of a sample, over the source model's, measured.",
        (*columns, "mean ×"),
        names=columns[:3],
    )
    for point in sorted(points, key=lambda p: -p.measured.busy.value):
        counted, busy, mean = point.counted, point.measured.busy, point.measured.mean
        table.add_row(
            "all" if point.ways == TRADE_OFF_KINDS else "+".join(point.ways),
            names[counted.variant],
            "model" if counted.deepest == MODEL_END else f"E{counted.deepest}",
            "–" if counted.accuracy is None else f"{counted.accuracy:.2%}",
            f"{counted.agreement:.2%}",
            f"{counted.early:.0%}",
            f"{counted.cost:.3f}",
            f"{busy.value:.3f} ± {busy.half_width:.3f}",
            f"{mean.value:.3f}",
        )
    console.print(table)


def print_equal(console: Console, rows: Sequence[EqualQuality], size: int) -> None:
    """Print the times of each group at equally good answers."""
    for worth in dict.fromkeys(row.worth for row in rows):
        table = figure_table(
            f"Least measured busy time × at equal {worth} on the test data, batch {size}",
            f"Goal: both at most {GOAL} of the better one alone, at equal accuracy. Handing on: "
            "subnets that are not sure let the full model answer, which no policy serves yet.",
            ("points lost", *GROUPS, "both ÷ better", "handing on ÷ better"),
            names=(),
        )
        for row in (row for row in rows if row.worth == worth):
            times = [f"{row.times[group]:.3f}" for group in GROUPS]
            gains = [f"{row.gain(group):.2f}" for group in ("both", "handing on too")]
            table.add_row(f"{100 * row.drop:.2f}", *times, *gains)
        console.print(table)


if __name__ == "__main__":
    main()
