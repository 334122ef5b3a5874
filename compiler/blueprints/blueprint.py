"""Blueprints: ways to serve a model, each with its parts, their times, and the exits it would use.

A float32 model in pieces makes one, and every copy of it another, be it quantised
(:mod:`.precision`) or trained together with its exits (:mod:`.joint`); they are compared by what
they are predicted to save on the tuning split, and one is certified and packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offramp.bundle import ValueBound
from offramp.bundle.schema.compilation import BatchEffect, JointTraining
from offramp.calibration.choose.limits import BindingLimit
from offramp.calibration.choose.records import ExitRecords
from offramp.calibration.choose.selection import Candidates
from offramp.calibration.data.dataset import DataSplit
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.estimates import BackboneTimes
from offramp.calibration.measure.profiling import BATCH_SIZES
from offramp.calibration.rehearsal import RehearsalSettings
from offramp.compiler.blueprints.cascade import verify_front
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.blueprints.profile import ProfileTimer
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import Progress
from offramp.compiler.cuts.slice_verification import VERIFIED_SAMPLES
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.exits import BuiltExit, time_heads
from offramp.compiler.exits.policy import FixedPath, PolicyChoice, record_exits


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRun:
    """What is asked of the compiler, the data that it has for it, and where it shows progress."""

    options: CompileOptions
    parts: DataSplit
    progress: Progress
    scratch: ScratchSpace = field(default_factory=ScratchSpace)
    batch_effect: BatchEffect | None = None
    """Taken from what is asked for in ``options``, if it is anything."""
    value_bounds: tuple[ValueBound, ...] = ()
    """Values of inputs beyond which the model fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model in pieces with exits, measured, and the policies that could be certified."""

    sliced: Sliced
    draft: Draft
    timer: ProfileTimer
    choice: PolicyChoice
    """Of the exits in use; with the profile."""
    tune: ExitRecords
    """What each exit answers on the tuning split."""
    candidates: Candidates
    """The sets of exits that may be in use, to be asked under other costs."""
    path: FixedPath
    predicted_savings: float
    """Share of the source model's time, on the tuning split, at the reference batch size."""
    reason: str = ""
    """Why it was preferred to others, where there were any."""
    training: JointTraining | None = None
    """How its copy was trained together with the exits, if it was."""
    frozen: Blueprint | None = None
    """Then, what there is without it."""
    limit: BindingLimit | None = None
    """What keeps all exits out of use, where that is known already."""


def draw(
    sliced: Sliced,
    exits: Sequence[BuiltExit],
    run: CompileRun,
    *,
    timer: ProfileTimer,
    times: BackboneTimes,
) -> Blueprint:
    """Time exits on a model in pieces whose own times are known, and choose those in use."""
    options = run.options
    draft = Draft.of(sliced, exits)
    graphs = {exit_.candidate: [exit_.graph] for exit_ in exits}
    times_ms = time_heads(
        sliced,
        graphs,
        timer.samples,
        threads=options.threads,
        batch_sizes=times.batch_sizes,
        progress=run.progress,
    )
    exits_ms = [tuple(head_ms) for (head_ms,) in times_ms]
    choice = PolicyChoice(
        structure=draft,
        profile=timer.finish(times, exits_ms, draft, draft.read),
        max_disagreement=options.max_disagreement,
        confidence_level=options.confidence_level,
        batch_size=options.reference_batch_size,
        max_class_disagreement=options.max_class_disagreement,
        seed=options.seed,
    )
    tune = record_exits(draft, draft.read, run.parts.tune, "Tune the exits", run.progress)
    candidates = choice.candidates(tune)
    path = _fix_path(choice, tune, candidates, options)
    return Blueprint(
        sliced=sliced,
        draft=draft,
        timer=timer,
        choice=choice,
        tune=tune,
        candidates=candidates,
        path=path,
        predicted_savings=candidates.savings(path.active, choice.cost(choice.batch_size)),
    )


def timer_of(sliced: Sliced, run: CompileRun) -> ProfileTimer:
    """Time on the training part, which is repeated if it is too short for a batch."""
    options, train = run.options, run.parts.train
    sizes = {*BATCH_SIZES, options.reference_batch_size}
    if options.selection == "pame":
        sizes.add(options.rehearsal_batch)
    return ProfileTimer(
        source=sliced.model.proto.SerializeToString(),
        segments=sliced.graphs,
        samples=lambda size: train.take(np.arange(size) % len(train)),
        threads=options.threads,
        batch_sizes=sorted(sizes),
        progress=run.progress,
        quantised=None if sliced.front is None else sliced.front.proto.SerializeToString(),
    )


def measure_copy(
    sliced: Sliced, copy: bytes, run: CompileRun
) -> tuple[ProfileTimer, BackboneTimes]:
    """Hold the pieces of a copy against it, and time them, with the model behind them.

    CompileError if they answer otherwise, DataError if the copy fails on a sample.
    """
    verify_front(
        sliced,
        copy,
        run.parts.train.take(slice(VERIFIED_SAMPLES)),
        tolerance=sliced.tolerance(run.options),
        batch_sizes=(1, 7, VERIFIED_SAMPLES),
    )
    timer = timer_of(sliced, run)
    return timer, timer.backbone()


def _fix_path(
    choice: PolicyChoice, tune: ExitRecords, candidates: Candidates, options: CompileOptions
) -> FixedPath:
    if options.selection == "pame" and choice.structure.exits:
        settings = RehearsalSettings(
            batch_size=options.rehearsal_batch,
            max_disagreement=options.max_disagreement,
            max_violations=options.max_violations,
        )
        return choice.by_rehearsal(tune, settings)
    return choice.by_savings(tune, options.max_overhead, candidates=candidates)
