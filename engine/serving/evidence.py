"""Observation of a model's batches, separate from answering them.

Some samples are evidence about a model's answers: controllers learn from these samples, and audits
compare variants on them. Both need the answer of an exit and the model's own answer.
:class:`.ModelRuntime` reports to a :class:`BatchObserver` for every batch: its start, the result of
each stage, and the decisions on its rows. An observer may make samples run on, but never answers a
sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.certify.decision import MODEL_END
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.comparison import TakesCodes, answer_log
from offramp.engine.requests.input_guard import InputGuard
from offramp.engine.requests.recorder import Recorder
from offramp.engine.requests.request_table import Request
from offramp.engine.requests.variant_audits import AUDITED_SHARE, AuditCounts, VariantAudits
from offramp.engine.scheduling import Run, StepOutcome
from offramp.engine.stages.backend_protocol import Rows
from offramp.engine.stages.pipeline import StageStep
from offramp.engine.stages.plan import StageSpec

Parts: TypeAlias = Sequence[tuple[Request, slice | Rows]]
"""Parts of a starting batch: requests, and the rows of each request that are in the batch."""
SampleIds = NDArray[np.int64]


class EvidenceCounts(NamedTuple):
    """Counts of samples that are no evidence, by reason, and audits of each variant."""

    lost: int = 0
    out_of_range: int = 0
    discounted: int = 0
    audits: Sequence[AuditCounts] = ()
    """Audits of the variants below the full model; empty if nothing is compared."""


class BatchObserver(Protocol):
    """Observes the batches of one model.

    :meth:`concluded` and :meth:`lost` are called under the executor's lock. The other methods are
    called without the lock, and may only access data of the samples of their run.
    """

    def starts(self, run: Run, *, policy_version: int, forced: bool) -> None:
        """Record samples that start; ``forced`` if they have to leave before the model's end."""

    def reads(self, run: Run, parts: Parts, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Receive the inputs [n, …] of samples that start, and their requests."""

    def observe_stage(
        self, run: Run, step: StageStep, stage: StageSpec
    ) -> tuple[StageStep, NDArray[np.bool_] | None]:
        """Receive the result of a stage; return it, corrected, and which rows run on.

        In the returned step, samples that must stay do not exit. The mask [n] marks the rows that
        run on once they are answered; ``None`` if no row does.
        """

    def concluded(self, run: Run, step: StageStep, stage: StageSpec, outcome: StepOutcome) -> None:
        """Receive the decisions on the rows of a run."""

    def lost(self, sample_ids: SampleIds) -> None:
        """Receive samples that left unexpectedly."""

    def counts(self) -> EvidenceCounts:
        """Return the counts of samples that are no evidence, and of audits."""


class NoObserver:
    """The observer of a model without control, which ignores all calls."""

    def starts(self, run: Run, *, policy_version: int, forced: bool) -> None:
        """Do nothing: samples are not recorded."""

    def reads(self, run: Run, parts: Parts, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Do nothing."""

    def observe_stage(
        self,
        run: Run,  # noqa: ARG002 - all batches are alike
        step: StageStep,
        stage: StageSpec,  # noqa: ARG002
    ) -> tuple[StageStep, NDArray[np.bool_] | None]:
        """Return the step unchanged, without samples that must run on."""
        return step, None

    def concluded(self, run: Run, step: StageStep, stage: StageSpec, outcome: StepOutcome) -> None:
        """Do nothing."""

    def lost(self, sample_ids: SampleIds) -> None:
        """Do nothing."""

    def counts(self) -> EvidenceCounts:
        """Return counts of 0: nothing is observed."""
        return EvidenceCounts()


def observer_of(model: ServedModel) -> BatchObserver:
    """Make the observer of a model's batches, depending on its control."""
    if model.control is None:
        return NoObserver()
    exits = [len(variant.exits) for variant in model.variants]
    return AnswerEvidence(model.answer, model.control.recorder, exits, model.guard)


class AnswerEvidence:
    """Records answers of the exits and of the model for a controller, and audits variants.

    ``variant_exits`` are the numbers of exits of the variants below the full model; ``guard``
    decides which inputs are in range.
    """

    def __init__(
        self,
        answer: Answer,
        recorder: Recorder,
        variant_exits: Sequence[int],
        guard: InputGuard | None,
    ) -> None:
        self._recorder, self._guard = recorder, guard
        self._audits = tuple(VariantAudits(exits) for exits in variant_exits)
        told: tuple[TakesCodes, ...] = (recorder, *self._audits)
        self._logs = tuple(answer_log(answer, takes) for takes in told)
        """Answer logs by variant, the full model first."""

    def starts(self, run: Run, *, policy_version: int, forced: bool) -> None:
        """Decide at random which samples are audited."""
        self._recorder.start(run.sample_ids, policy_version, forced=forced)
        if run.variant:
            self._recorder.record_variant_samples(run.sample_ids, AUDITED_SHARE)
            self._audits[run.variant - 1].start(run.sample_ids)

    def reads(self, run: Run, parts: Parts, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Exclude samples from the evidence that are out of range or equal to recent samples."""
        self._logs[run.variant].begin(run.sample_ids, inputs)
        is_evidence = np.full(len(run.sample_ids), not run.variant)
        if self._guard is not None:
            in_range = self._guard.in_range(inputs)
            if not in_range.all():
                self._recorder.leave_out(run.sample_ids[~in_range])
                is_evidence &= in_range
        if is_evidence.any():
            origins = chain.from_iterable(request.origins(rows) for request, rows in parts)
            self._recorder.admit(run.sample_ids[is_evidence], [*compress(origins, is_evidence)])

    def observe_stage(
        self, run: Run, step: StageStep, stage: StageSpec
    ) -> tuple[StageStep, NDArray[np.bool_] | None]:
        """Record a stage's answers, and keep samples with out-of-range inputs from leaving."""
        result = step.result
        if step.leaving and result.carry is not None:
            in_range = self._recorder.in_range(run.sample_ids)
            if not in_range.all():
                exited = step.exited & in_range
                step = StageStep(result, exited, int(np.count_nonzero(exited)))
        if result.answer is not None:
            log = self._logs[run.variant]
            log.record_answers(run.sample_ids, stage.answered_by, result.answer, result.confidence)
        return step, self._recorder.runs_on(run.sample_ids)

    def concluded(self, run: Run, step: StageStep, stage: StageSpec, outcome: StepOutcome) -> None:
        """Record which rows were answered early, and which are complete."""
        rows, exit_index = outcome.released, stage.exit
        if len(rows) and exit_index is not None and exit_index != MODEL_END:
            if run.variant:
                self._audits[run.variant - 1].answered(run.sample_ids[rows], exit_index)
            else:
                self._recorder.answered(run.sample_ids[rows], exit_index, ~step.exited[rows])
        leaves = np.ones(len(run.requests), np.bool_)
        leaves[outcome.survivors] = False
        leaves[outcome.given_up] = False  # these are reported as lost
        ended = run.sample_ids[leaves]
        self._recorder.finish(ended)
        if run.variant:
            self._audits[run.variant - 1].finish(ended)
        self._logs[run.variant].forget(ended)

    def lost(self, sample_ids: SampleIds) -> None:
        """Record that samples are no evidence."""
        self._recorder.lose(sample_ids)
        for log in self._logs:
            log.forget(sample_ids)

    def counts(self) -> EvidenceCounts:
        """Return counts of samples that are no evidence, and of audits."""
        return EvidenceCounts(
            lost=self._recorder.lost,
            out_of_range=self._recorder.left_out,
            discounted=self._recorder.discounted,
            audits=[audits.counts for audits in self._audits],
        )
