"""``eecompile build --precision auto``: build engines in the precision that saves the most time.

Only certified precisions are compared. fp16 and int8 are built if the calibration data certifies
them again (:mod:`~offramp.compiler.engines.engine_verification`). tf32 is not tried: no CPU
computes in it, so its effect on answers is unknown. Then the engines of all stages and precisions
are timed in alternation on the GPU. The time of each stage is weighted with the share of certify
samples that run it in that precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from offramp.bundle import Bundle
from offramp.bundle.engine_index import model_digest
from offramp.bundle.engines import (
    EngineStore,
    Precision,
    list_targets,
    prune_targets,
    remove_targets,
)
from offramp.bundle.records import CERTIFY
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, Dataset, read_samples
from offramp.certify import evaluate
from offramp.compiler.common.errors import CompileError, EngineBuildError
from offramp.compiler.engines import build
from offramp.compiler.engines.build import SILENT_REPORTS, BuildOptions, Reports, build_bundle
from offramp.compiler.engines.builder_protocol import TimedEngine
from offramp.compiler.engines.building import Building, PlannedEngine
from offramp.compiler.engines.engine_verification import Verifier, part_data
from offramp.compiler.engines.profiles import ModelShapes, Point, Sizes
from offramp.compiler.engines.units import Unit, source_unit
from offramp.engine.common.environment import available_cores
from offramp.engine.stages.plan import Mode, make_plan

CERTIFIABLE: Final[tuple[Precision, ...]] = ("fp32", "fp16", "int8")
"""Precisions that can be certified, from fine to coarse."""
WORTH: Final = 0.02
"""Share of the fp32 model's time that a coarser precision must save in addition to the savings of a
finer one. A smaller difference is within the noise of the times."""
ROUNDS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPrecision:
    """Engines in one precision, and their predicted savings."""

    building: Building
    savings: float
    """Predicted savings, as a share of the fp32 source model's time. They follow from the times
    measured here and the shares of samples that leave at each exit."""

    @property
    def precision(self) -> Precision:
        """Precision of the engines that were timed."""
        return self.building.target.precision

    def describe(self) -> str:
        """Return text such as ``fp16 70.9 %``."""
        return f"{self.precision} {self.savings:.1%}"


def build_best(options: BuildOptions, reports: Reports = SILENT_REPORTS) -> Building:
    """Build engines in all precisions that can be certified, and keep those that save the most.

    The other engines for this GPU and TensorRT version are removed, as serving prefers the coarsest
    precision. Returns the result that is kept, or fp32's if some fp32 engines failed; then nothing
    is removed. Raises the errors of :func:`.build_bundle`.
    """
    bundle = Bundle.open(options.bundle)
    dataset = None if options.data is None else read_samples(options.data, bundle.manifest)
    precisions, why = _possible(bundle, dataset, options)
    if why:
        reports.print_line(f"--precision auto: fp32 only: {why}")
    first, *others = precisions
    buildings = [_build(first, options, reports)]
    if buildings[0].failed:
        return buildings[0]
    for precision in others:
        try:
            building = _build(precision, options, reports)
            _check_certified(building)
        except (CompileError, DataError) as error:
            reports.print_line(f"--precision auto: {precision} is left out: {error}")
        else:
            buildings.append(building)
    timed = _time(bundle, buildings, dataset, options, reports)
    best = choose(timed)
    _keep(best, timed, options, reports)
    return best.building


def choose(timed: Sequence[TimedPrecision]) -> TimedPrecision:
    """Choose a precision. A coarser precision has to save clearly more than a finer one."""
    best = timed[0]
    for each in timed[1:]:
        if each.savings > best.savings + WORTH:
            best = each
    return best


def _possible(
    bundle: Bundle, dataset: Dataset | None, options: BuildOptions
) -> tuple[tuple[Precision, ...], str]:
    """Return the precisions that can be certified, and why the other ones cannot be."""
    if dataset is None or options.data is None:
        return ("fp32",), (
            "the effect of fp16 and int8 on answers is unknown; add --data DATA, which the "
            "bundle was compiled with"
        )
    if bundle.policy.promise is None:
        return ("fp32",), "the bundle promises nothing that could be certified for another"
    if not part_data(bundle, dataset, seed=options.seed, threads=available_cores()).certifies:
        return ("fp32",), (
            f"{data_name(options.data)} is not the data that the bundle was compiled with, or "
            "--seed differs, so no precision can be certified on it"
        )
    return CERTIFIABLE, ""


def _build(precision: Precision, options: BuildOptions, reports: Reports) -> Building:
    engines = replace(options.engines, precision=precision)
    return build_bundle(replace(options, engines=engines, prune=False), reports)


def _check_certified(building: Building) -> None:
    if building.failed:
        first = building.failed[0]
        raise EngineBuildError(f"{len(building.failed)} engines failed; the first: {first.problem}")
    store = EngineStore.open(building.bundle.path, building.target)
    evidence = store.index.evidence
    if evidence is None or evidence.model != model_digest(building.bundle.manifest):
        raise EngineBuildError("nothing was certified in this precision")


def _time(
    bundle: Bundle,
    buildings: Sequence[Building],
    dataset: Dataset | None,
    options: BuildOptions,
    reports: Reports,
) -> list[TimedPrecision]:
    """Time all stages in all precisions, together with the fp32 source model."""
    verifier = Verifier(bundle, ModelShapes(bundle), "fp32", samples=dataset)
    source = source_unit(bundle.manifest)
    point = _point(buildings[0], source)
    served = [_as_served(building) for building in buildings]
    stages = [[Unit(*s.unit) for s in make_plan(b, mode=Mode.AUDIT).stages] for b in served]
    plans = [_timed_engine(buildings[0], source, verifier, point)]
    for building, units in zip(buildings, stages, strict=True):
        plans += [_timed_engine(building, unit, verifier, point) for unit in units]
    with (
        reports.progress.step(f"Time {len(plans)} engines at {point.describe()}", 1),
        closing(build.make_builder(options.engines.device)) as builder,
    ):
        source_s, *seconds = builder.time(plans, rounds=ROUNDS)
    found, start = [], 0
    for building, bundle_, units in zip(buildings, served, stages, strict=True):
        times = seconds[start : start + len(units)]
        start += len(units)
        savings = predicted_savings(bundle_, times, source_s)
        found.append(TimedPrecision(building=building, savings=savings))
    return found


def _as_served(building: Building) -> Bundle:
    store = EngineStore.open(building.bundle.path, building.target)
    evidence = store.index.evidence
    if evidence is None:
        return building.bundle
    return building.bundle.under(evidence, store.read_evidence(evidence))


def _point(building: Building, source: Unit) -> Point:
    """Return the sizes to time: the reference batch, or the nearest batch that engines allow."""
    wanted = building.bundle.manifest.calibration.reference_batch_size
    planned = [p for p in building.planned if isinstance(p, PlannedEngine) and p.unit == source]
    sizes = [profile.sizes for profile in planned[0].profiles]

    def nearest(each: Sizes) -> int:
        return min(max(wanted, each.batch.first), each.batch.last)

    best = min(sizes, key=lambda each: abs(nearest(each) - wanted))
    return best.best._replace(batch=nearest(best))


def _timed_engine(building: Building, unit: Unit, verifier: Verifier, point: Point) -> TimedEngine:
    store = EngineStore.open(building.bundle.path, building.target)
    entry = store.entry(unit.name)
    assert entry is not None, "all units of the policy were built"
    inputs = verifier.inputs(unit, entry.profiles[0].inputs, point)
    profile = entry.profile_for({name: array.shape for name, array in inputs.items()})
    assert profile is not None, "the point is of a profile"
    return TimedEngine(plan=store.read(entry), inputs=inputs, profile=profile)


def predicted_savings(served: Bundle, stages_s: Sequence[float], source_s: float) -> float:
    """Predict the share of the source model's time that a policy saves.

    ``stages_s`` are the times in seconds of the policy's stages for a whole batch. A sample costs
    its part of the time of each stage that it runs. The shares of samples that leave at each exit
    are those of the certify split.
    """
    stages = make_plan(served, mode=Mode.AUDIT).stages[:-1]
    exits = [stage.answered_by for stage in stages]
    if not exits:
        return 1 - sum(stages_s) / source_s
    records = served.records()
    judged = records["split"] == CERTIFY
    return evaluate(
        records["confidence"][:, judged][exits],
        (records["prediction"] == records["final_prediction"])[:, judged][exits],
        1e3 * np.cumsum(stages_s),
        np.array([stage.threshold for stage in stages]),
        vanilla_ms=1e3 * source_s,
    ).savings


def _keep(
    best: TimedPrecision, timed: Sequence[TimedPrecision], options: BuildOptions, reports: Reports
) -> None:
    """Remove the engines in precisions that were not chosen, and report the choice."""
    others = ", ".join(each.describe() for each in timed if each is not best)
    reports.print_line(
        f"--precision auto: {best.precision} is kept: predicted to save {best.savings:.1%} of the "
        f"fp32 model's time{f' ({others})' if others else ''}, by engines timed here and exits as "
        f"certified; a coarser precision has to save {WORTH:.0%} more"
    )
    target = best.building.target
    if options.prune:
        gone = prune_targets(options.bundle, [target])
    else:
        same = [t for t in list_targets(options.bundle) if t.runs_where(target) and t != target]
        gone = remove_targets(options.bundle, same)
    for name in gone.removed:
        reports.print_line(f"removed {name}")
    for name in gone.busy:
        reports.print_line(
            f"{name} is not removed: another build is at work in it; it may be served"
        )
