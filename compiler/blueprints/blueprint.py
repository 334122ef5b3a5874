"""Blueprints: ways to serve a model, each with its parts, their times, and the exits it would use.

A float32 model in pieces makes one, and every copy of it another, be it quantised
(:mod:`.precision`) or trained together with its exits (:mod:`.joint`), whose own answer is the last
of its exits. Blueprints are compared by what they are predicted to save on the tuning split, and
one is certified and packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Head, TensorSpec, ValueBound
from offramp.bundle.schema.compilation import BatchEffect, JointTraining
from offramp.calibration.choose.limits import BindingLimit
from offramp.calibration.choose.records import ExitRecords
from offramp.calibration.choose.selection import Candidates
from offramp.calibration.data.dataset import DataSplit
from offramp.calibration.data.running import run_over
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
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.exits.exits import BuiltExit, alone, judge, time_heads
from offramp.compiler.exits.heads import build_own
from offramp.compiler.exits.policy import FixedPath, PolicyChoice, record_exits
from offramp.compiler.graphs.tail import Tail
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.principal_values import principal_values
from offramp.engine.common.environment import available_cores
from offramp.engine.graphs.assembly import assemble

OWN = Head(kind="own")


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


def own_exit(sliced: Sliced, times: BackboneTimes, plain: Blueprint, run: CompileRun) -> BuiltExit:
    """Make the copy's own answer an exit, and judge it with no other beside it.

    ``plain`` is the source model's blueprint: its answers are what is agreed with. DataError if the
    copy fails on a sample.
    """
    options, candidate = run.options, len(sliced.cuts) - 1
    graph = _built(sliced)
    principal, agrees, mask = _answered(sliced, graph, plain, run.parts)
    ((cost_ms,),) = time_heads(
        sliced,
        {candidate: [graph]},
        plain.timer.samples,
        threads=options.threads,
        batch_sizes=[options.reference_batch_size],
        progress=run.progress,
    )[0]
    cost = replace(alone(times, candidate, cost_ms, options), source_begins=len(sliced.cuts))
    bound = options.max_disagreement
    judged = judge(OWN, principal, agrees, cost, max_disagreement=bound, mask=mask)
    tokens, tail = _mask_of(sliced), _tail_of(sliced)
    read = dict.fromkeys([sliced.cuts[candidate].name, *([tail.taught.output] if tail else [])])
    return BuiltExit(
        candidate=candidate,
        cut=sliced.cuts[candidate],
        graph=_built(sliced, judged.share),
        reads=(*read, *([tokens.name] if tokens else [])),
        weights={},
        heads=(judged.score,),
        best=judged.score,
        share=judged.share,
    )


def _built(sliced: Sliced, share: float = 1.0) -> bytes:
    answer, prefix = sliced.model.answer, exit_prefix(len(sliced.cuts) - 1)
    mask = _mask_of(sliced)
    return build_own(
        sliced.cuts[-1],
        answer,
        prefix,
        tail=_tail_of(sliced),
        share=share,
        mask=mask,
        **sliced.versions,
    )


def _tail_of(sliced: Sliced) -> Tail | None:
    """Return the copy's tail, which names its own scores."""
    assert sliced.front is not None
    return sliced.front.tail


def _mask_of(sliced: Sliced) -> TensorSpec | None:
    """Find the input that says which tokens of the answer count."""
    model = sliced.model
    return next((spec for spec in model.inputs if spec.name == model.answer.task.mask), None)


def _answered(
    sliced: Sliced, graph: bytes, plain: Blueprint, parts: DataSplit
) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[Any] | None]:
    """Let the copy answer the tuning split.

    Gives principal values [samples, n], whether answers are the source model's [samples], and the
    mask of their tokens. Of one class of several the one principal value is the graph's confidence,
    by whatever criterion.
    """
    answer, tune = sliced.model.answer, parts.tune
    prefix, agreement = exit_prefix(len(sliced.cuts) - 1), agreement_of(answer)
    outputs = [prefix + answer.output, prefix + CONFIDENCE]
    taught = answer if (tail := _tail_of(sliced)) is None else tail.taught
    if tail is not None:
        outputs.append(taught.output)
    graphs, ends_too = [assemble([*sliced.graphs[:-1], graph], outputs)], answer.task.is_dense
    if ends_too:  # what is recorded of answers with places does not say what they were
        graphs.append(sliced.graphs[-1])
        outputs = [*outputs, answer.output]
    whole = None if answer.task.mask is None else tune.column(answer.task.mask, slice(None))
    principal, codes = [], []
    for rows, (said, sure, *rest) in run_over(graphs, outputs, tune, threads=available_cores()):
        scores, *ends = rest if tail is not None else [said, *rest]
        mask = None if whole is None else whole[rows]
        values = np.fmax(sure, 0)[:, None]
        if answer.task.kind != "classification":
            values = principal_values(scores, taught.form, taught.task)
        principal.append(values)
        truth = agreement.reduce(ends[0]) if ends else agreement.reduce(said)
        codes.append(agreement.codes_against(agreement.reduce(said), truth, mask))
    agrees = np.concatenate(codes) == plain.tune.final_prediction
    return np.concatenate(principal), agrees, whole
