"""Blueprints: ways to serve a model, each with the parts of the model, their times, and exits.

The float32 model in pieces is one blueprint. Each copy of the model is a further blueprint. A copy
is quantised (:mod:`.precision_choice`), or trained together with its exits (:mod:`.joint`), and its
own answer is the last exit. Blueprints are compared by their predicted savings on the tuning split;
one of them is certified and packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ExitPolicy, Head, Measured
from offramp.bundle.schema.compilation import JointTraining
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import Candidates
from offramp.calibration.data.dataset import DataSplit
from offramp.calibration.data.running import run_over
from offramp.calibration.rehearsal import RehearsalSettings, Rehearsed
from offramp.compiler.blueprints.cascade import verify_front
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.cuts.slicing import VERIFIED_SAMPLES, Cascade, Sliced
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.exits.exits import BuiltExit, judge
from offramp.compiler.exits.heads import build_own
from offramp.compiler.exits.policy_choice import FixedPath, PolicyChoice, record_exits
from offramp.compiler.exits.timed_model import CompileRun, TimedModel
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.principal_values import principal_values
from offramp.engine.common.environment import available_cores
from offramp.engine.graphs.assembly import assemble

OWN = Head(kind="own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model in pieces with its exits, the times of all parts, and the exits that may be used."""

    timed: TimedModel
    draft: Draft
    choice: PolicyChoice
    """Choice of the exits in use; includes the profile."""
    tune: ExitRecords
    """Answers of each exit on the tuning split."""
    candidates: Candidates
    """Sets of exits to choose from. The choice can be repeated with other costs of the parts."""
    path: FixedPath
    predicted_savings: float
    """Predicted saving on the tuning split at the reference batch size, as a share of the source
    model's time."""
    reason: str = ""
    """Reason why this blueprint was preferred to others, if there were any."""
    training: JointTraining | None = None
    """Record of the training, if a copy was trained together with the exits."""
    frozen: Blueprint | None = None
    """Blueprint without the trained copy, if there is one."""
    limit: str | None = None
    """Reason why no exit can be in use, if one is known; else ``None``."""

    @property
    def sliced(self) -> Sliced:
        """The model, cut into the segments of the blueprint."""
        return self.timed.sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A blueprint with its results on the certify split, and with measured times."""

    chosen: Blueprint
    records: ExitRecords
    """Answers of each exit on the certify split."""
    policy: ExitPolicy
    limit: str | None = None
    """Reason why no exit is in use; ``None`` if one is."""
    measured: Measured | None = None
    rehearsed: Rehearsed | None = None


def draw(timed: TimedModel, exits: Sequence[BuiltExit]) -> Blueprint:
    """Time exits on a model whose pieces were timed, and choose the exits in use."""
    run, times = timed.run, timed.times
    options = run.options
    draft = Draft.of(timed.sliced, exits)
    graphs = {exit_.candidate: [exit_.graph] for exit_ in exits}
    exits_ms = [tuple(head_ms) for (head_ms,) in timed.time_heads(graphs, times.batch_sizes)]
    choice = PolicyChoice(
        structure=draft,
        profile=timed.timer.finish(times, exits_ms, draft, draft.read),
        max_disagreement=options.promise.max_disagreement,
        confidence_level=options.promise.confidence_level,
        batch_size=options.choice.reference_batch_size,
        max_class_disagreement=options.promise.max_class_disagreement,
        seed=options.seed,
    )
    tune = record_exits(draft, draft.read, run.parts.tune, "Tune the exits", run.progress)
    candidates = choice.candidates(tune)
    path = _fix_path(choice, tune, candidates, options)
    return Blueprint(
        timed=timed,
        draft=draft,
        choice=choice,
        tune=tune,
        candidates=candidates,
        path=path,
        predicted_savings=candidates.savings(path.active, choice.cost(choice.batch_size)),
    )


def time_copy(sliced: Cascade, copy: bytes, run: CompileRun) -> TimedModel:
    """Check that a copy's pieces answer like the whole copy, and time the pieces and the model.

    CompileError if the answers differ, DataError if the copy fails on a sample.
    """
    verify_front(
        sliced,
        copy,
        run.parts.train.take(slice(VERIFIED_SAMPLES)),
        tolerance=sliced.tolerance(run.options),
        batch_sizes=(1, 7, VERIFIED_SAMPLES),
    )
    return TimedModel.of(sliced, run)


def _fix_path(
    choice: PolicyChoice, tune: ExitRecords, candidates: Candidates, options: CompileOptions
) -> FixedPath:
    if options.choice.selection == "pame" and choice.structure.exits:
        settings = RehearsalSettings(
            batch_size=options.choice.rehearsal_batch,
            max_disagreement=options.promise.max_disagreement,
            max_violations=options.choice.max_violations,
            min_gain=options.choice.min_gain,
        )
        return choice.by_rehearsal(tune, settings)
    return choice.by_savings(tune, options.choice.max_overhead, candidates=candidates)


def own_exit(timed: TimedModel, plain: Blueprint) -> BuiltExit:
    """Make the copy's own answer the last exit of a cascade, and measure how often it agrees.

    ``plain`` is the source model's blueprint, whose answers are the reference. DataError if the
    copy fails on a sample.
    """
    sliced, run = timed.sliced, timed.run
    candidate = len(sliced.cuts) - 1
    graph = _built(sliced)
    principal, agrees, mask = _answered(sliced, graph, plain, run.parts)
    ((cost_ms,),) = timed.time_heads({candidate: [graph]})[0]
    cost = replace(timed.alone(candidate, cost_ms), source_begins=len(sliced.cuts))
    bound = run.options.promise.max_disagreement
    judged = judge(OWN, principal, agrees, cost, max_disagreement=bound, mask=mask)
    tokens, tail = sliced.model.mask, sliced.front.tail
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
    return build_own(
        sliced.cuts[-1],
        sliced.model.answer,
        exit_prefix(len(sliced.cuts) - 1),
        tail=sliced.front.tail,
        share=share,
        mask=sliced.model.mask,
        **sliced.versions,
    )


def _answered(
    sliced: Sliced, graph: bytes, plain: Blueprint, parts: DataSplit
) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[Any] | None]:
    """Run the copy on the tuning split.

    Returns principal values [samples, n], whether each answer agrees with the source model's
    [samples], and the mask of tokens. For classification there is one principal value: the
    confidence that the graph computes.
    """
    answer, tune = sliced.model.answer, parts.tune
    prefix, agreement = exit_prefix(len(sliced.cuts) - 1), agreement_of(answer)
    outputs = [prefix + answer.output, prefix + CONFIDENCE]
    taught = answer if (tail := sliced.front.tail) is None else tail.taught
    if tail is not None:
        outputs.append(taught.output)
    graphs, ends_too = [assemble([*sliced.graphs[:-1], graph], outputs)], answer.task.is_dense
    if ends_too:  # the records of answers with positions do not contain the answers
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
