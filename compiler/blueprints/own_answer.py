"""The last exit of a cascade: the copy's own answer, judged as other exits are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Head, TensorSpec
from offramp.calibration.data.dataset import DataSplit
from offramp.calibration.data.running import run_over
from offramp.calibration.measure.estimates import BackboneTimes
from offramp.compiler.blueprints.blueprint import Blueprint, CompileRun
from offramp.compiler.cuts.slicing import Sliced
from offramp.compiler.exits.endings import CONFIDENCE, exit_prefix
from offramp.compiler.exits.exits import BuiltExit, alone, judge, time_heads
from offramp.compiler.exits.heads import build_own
from offramp.compiler.graphs.tail import Tail
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.principal_values import principal_values
from offramp.engine.common.environment import available_cores
from offramp.engine.graphs.assembly import assemble

OWN = Head(kind="own")


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
