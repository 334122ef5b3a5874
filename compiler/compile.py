"""ONNX in, bundle out: the steps of ``eecompile``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Measured, Profile, write_bundle
from offramp.bundle.bundle import check_target
from offramp.calibration.dataset import Dataset, Parts, read_dataset, split
from offramp.calibration.errors import DataError
from offramp.calibration.limits import (
    Asked,
    Limit,
    limit_of_certificate,
    limit_of_choice,
    limit_of_heads,
    limit_of_rehearsal,
)
from offramp.calibration.measuring import MEASURED_BATCH_SIZES, measure_policy, stages_of_samples
from offramp.calibration.profiling import BATCH_SIZES
from offramp.calibration.records import ExitRecords, record_answers
from offramp.calibration.rehearsal import (
    Rehearsal,
    RehearsalSettings,
    Rehearsed,
    forecast_policy,
    rehearse_records,
)
from offramp.calibration.selection import certified_policy, choose_active
from offramp.certify import samples_needed
from offramp.certify.agreement import tuning_path
from offramp.compiler.exits import FoundExits, find_exits, time_exits
from offramp.compiler.model import read_model
from offramp.compiler.options import CompileOptions
from offramp.compiler.packing import Draft, make_manifest, pack
from offramp.compiler.profile import ProfileTimer
from offramp.compiler.progress import Progress, SilentProgress
from offramp.compiler.segments import verify
from offramp.compiler.slicing import Sliced, slice_model
from offramp.engine.assembly import assemble
from offramp.engine.control.costs import CostModel
from offramp.engine.control.published.two_stage import StageTimes
from offramp.engine.options import available_cores
from offramp.engine.plan import Mode, ModelStructure, Plan, plan_stages

_log = logging.getLogger(__name__)

VERIFIED_SAMPLES = 64
"""Calibration samples that chained segments and source must agree on."""

_SILENT = SilentProgress()


def compile_model(options: CompileOptions, progress: Progress = _SILENT) -> Bundle:
    """Compile a model into a bundle.

    Raises:
        CompileError: The model cannot be sliced; the message says why and what to do.
        DataError: The calibration data does not fit the model, or is too little.
        BundleExistsError: There is something at ``options.output`` already.
    """
    check_target(options.output, overwrite=options.overwrite)
    with progress.step("Read and simplify the model", 1):
        model = read_model(options.model, answer=options.answer, simplify=options.simplify)
    dataset = read_dataset(options.data, model.inputs)
    parts = split(
        dataset,
        certify_at_least=samples_needed(options.max_disagreement, options.confidence),
        seed=options.seed,
    )
    sliced = slice_model(model, options)
    with progress.step("Slice and verify", 1):
        _verify(sliced, parts, options)

    timer = _timer(sliced, parts, options, progress)
    times = timer.backbone()
    found = find_exits(sliced, parts, options, times, samples=timer.samples, progress=progress)
    built = Draft.of(sliced, found.exits)
    exits_ms = time_exits(
        sliced, found.exits, timer.samples, threads=options.threads, batch_sizes=times.batch_sizes
    )
    profile = timer.finish(times, exits_ms, built, built.read)
    choice = PolicyChoice(built=built, profile=profile, options=options)

    def record(title: str, part: Dataset) -> ExitRecords:
        return record_exits(built, built.read, part, title, progress)

    tune = record("Tune the exits", parts.tune)
    path = choice.fix_path(tune)
    certify = record("Certify the policy", parts.certify)
    policy = choice.certify(path, certify)
    rehearsed = choice.forecast(path, policy, certify, data_sha256=parts.train.sha256)
    measured = _measure(
        policy,
        certify,
        sliced=sliced,
        built=built,
        dataset=parts.certify,
        threads=options.threads,
        progress=progress,
    )
    limit = None
    if not policy.active:
        limit = choice.limit(found, path, tune=tune, certify=certify)
        _log.warning(
            "NO EXIT IS ACTIVE, the bundle will serve the unmodified model: %s.", limit.message
        )
    for note in profile.disturbed:
        _log.warning("The machine was disturbed while it was measured: %s.", note)
    warn_of_violations(rehearsed)

    manifest = make_manifest(sliced, built, certify, parts, options)
    content = pack(
        manifest,
        policy,
        sliced,
        built,
        profile=profile,
        tune=tune,
        certify=certify,
        rehearsed=rehearsed,
        limit=limit,
        measured=measured,
    )
    return write_bundle(options.output, manifest, policy, content, overwrite=options.overwrite)


def record_exits(
    structure: ModelStructure,
    read: Callable[[str], bytes],
    dataset: Dataset,
    title: str,
    progress: Progress,
) -> ExitRecords:
    """Answer a data set at every exit, with the graphs that will be served."""
    outputs = [(e.output, e.confidence) for e in structure.exits]
    files = [*(s.file for s in structure.segments), *(e.file for e in structure.exits)]
    wanted = [*itertools.chain(*outputs), structure.answer.output]
    graph = assemble([read(file) for file in files], wanted)
    with progress.step(title, len(dataset)) as advance:
        return record_answers(
            graph, outputs, structure.answer, dataset, threads=available_cores(), progress=advance
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPath:
    """The exit policies that the certify split will be asked about; fixed without it."""

    active: tuple[int, ...]
    """Exits in use."""
    thresholds: NDArray[np.float64]
    """[levels, active], from conservative to aggressive."""
    rehearsal: Rehearsal | None = None
    """By which the exits were chosen, if they were chosen so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """Chooses an exit policy from recorded answers and profiled times, and certifies it."""

    built: Draft
    profile: Profile
    options: CompileOptions

    def cost(self, batch_size: int) -> CostModel:
        """Costs of all exits at a batch size that was profiled."""
        column = self.profile.column(batch_size)
        after = [e.after_segment for e in self.built.exits]
        exits_ms = [row[column] for row in self.profile.exits_ms]
        return CostModel.at(self.profile, batch_size, after, exits_ms)

    @property
    def times(self) -> StageTimes:
        """What stages take, for rehearsals."""
        after = tuple(e.after_segment for e in self.built.exits)
        return StageTimes(profile=self.profile, after_segment=after)

    def fix_path(self, tune: ExitRecords) -> FixedPath:
        """Choose the exits in use and the path of their thresholds, by the tuning split alone."""
        options, rehearsal = self.options, None
        if options.selection == "pame" and self.built.exits:
            settings = RehearsalSettings(
                batch_size=options.rehearsal_batch,
                max_disagreement=options.max_disagreement,
                max_violations=options.max_violations,
            )
            rehearsal = rehearse_records(
                tune, self.times, settings, confidence_level=options.confidence, seed=options.seed
            )
            active = tuple(a.exit for a in rehearsal.active)
        else:
            active = choose_active(
                tune.confidence,
                tune.agrees,
                self.cost(options.reference_batch_size),
                max_disagreement=options.max_disagreement,
                confidence_level=options.confidence,
                max_overhead=options.max_overhead,
            )
        return FixedPath(active=active, thresholds=path_of_exits(tune, active), rehearsal=rehearsal)

    def certify(self, path: FixedPath, certify: ExitRecords) -> ExitPolicy:
        """Find how far along the path the promise holds."""
        return certified_policy(
            path.active,
            path.thresholds,
            certify.confidence,
            certify.agrees,
            self.cost(self.options.reference_batch_size),
            max_disagreement=self.options.max_disagreement,
            confidence_level=self.options.confidence,
        )

    def forecast(
        self, path: FixedPath, policy: ExitPolicy, certify: ExitRecords, *, data_sha256: str
    ) -> Rehearsed | None:
        """Predict what the certified policy brings, if its exits were chosen by a rehearsal."""
        if path.rehearsal is None:
            return None
        shipped = forecast_policy(
            policy, certify, self.times, path.rehearsal.settings, seed=self.options.seed
        )
        return Rehearsed(rehearsal=path.rehearsal, shipped=shipped, data_sha256=data_sha256)

    def limit(
        self, found: FoundExits, path: FixedPath, *, tune: ExitRecords, certify: ExitRecords
    ) -> Limit:
        """Find what kept all exits out of use, where no policy was certified."""
        options = self.options
        asked = Asked(
            max_disagreement=options.max_disagreement,
            confidence=options.confidence,
            max_overhead=options.max_overhead,
            batch_size=options.reference_batch_size,
        )
        if not found.exits:
            column = self.profile.column(asked.batch_size)
            return limit_of_heads(found.best, self.profile.source_ms[column], asked)
        if not path.active and options.selection == "pame":
            return limit_of_rehearsal(options.max_violations)
        if not path.active:
            costs = {size: self.cost(size) for size in self.profile.batch_sizes}
            return limit_of_choice(tune, costs, asked)
        return limit_of_certificate(path.active, path.thresholds, certify, asked)


def path_of_exits(tune: ExitRecords, active: Sequence[int]) -> NDArray[np.float64]:
    """Thresholds [levels, active] of some exits, from conservative to aggressive."""
    rows = list(active)
    return tuning_path(tune.confidence[rows], tune.agrees[rows]) if rows else np.empty((0, 0))


def warn_of_violations(rehearsed: Rehearsed | None) -> None:
    """Say if the certified thresholds, higher than those rehearsed, make too many batches late."""
    if rehearsed is None:
        return
    late, tolerated = rehearsed.shipped.violations, rehearsed.rehearsal.settings.max_violations
    if late > tolerated:
        _log.warning(
            "%.1f %% of the batches are predicted to be later than without exits, more than the "
            "%g %% of --max-violations: thresholds that could be certified let more samples go on "
            "than those rehearsed. More calibration data helps; so does a larger "
            "--max-disagreement.",
            100 * late,
            100 * tolerated,
        )


def _verify(sliced: Sliced, parts: Parts, options: CompileOptions) -> None:
    """Compare chained segments and source model on the first samples."""
    try:
        verify(
            sliced.model,
            sliced.segments,
            parts.train.take(slice(VERIFIED_SAMPLES)),
            tolerance=options.tolerance,
            batch_sizes=(1, 7, VERIFIED_SAMPLES),
        )
    except RuntimeError as error:
        raise DataError(f"{options.data}: the model fails on the first samples: {error}") from error


def _timer(
    sliced: Sliced, parts: Parts, options: CompileOptions, progress: Progress
) -> ProfileTimer:
    """Time on the training part, which is repeated if it is too short for a batch."""
    train = parts.train
    sizes = {*BATCH_SIZES, options.reference_batch_size}
    if options.selection == "pame":
        sizes.add(options.rehearsal_batch)
    return ProfileTimer(
        source=sliced.model.proto.SerializeToString(),
        segments=sliced.graphs,
        samples=lambda size: train.take(np.arange(size) % len(train)),
        threads=options.threads,
        batch_sizes=sorted(sizes),
        progress=progress,
    )


def _measure(
    policy: ExitPolicy,
    certify: ExitRecords,
    *,
    sliced: Sliced,
    built: Draft,
    dataset: Dataset,
    threads: int,
    progress: Progress,
) -> Measured | None:
    """Measure what the policy brings on the certify split; ``None`` if no exit is in use."""
    if not policy.active:
        return None
    stages = plan_stages(built, built.read, policy.active)
    with progress.step("Measure the policy", len(MEASURED_BATCH_SIZES)) as advance:
        return measure_policy(
            sliced.model.proto.SerializeToString(),
            Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE),
            dataset,
            stages_of_samples(policy, certify),
            answer=sliced.model.answer,
            threads=threads,
            progress=advance,
        )
