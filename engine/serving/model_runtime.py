"""The runtime state of a served model: its deployments, open requests and buffered tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Variant
from offramp.certify.decision import MODEL_END
from offramp.engine.common.errors import BackendError, DrainingError, EngineError
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.request_table import CompletionQueue, Request, RequestTable
from offramp.engine.requests.statistics import (
    Counters,
    CountersSnapshot,
    DepartureCounters,
    VariantStatistics,
)
from offramp.engine.requests.timeline import StageTime
from offramp.engine.requests.variant_audits import AuditCounts
from offramp.engine.scheduling import DropCause, Dropped, PlacedPlan, Run, StepOutcome
from offramp.engine.scheduling.decisions import RowSet, all_rows
from offramp.engine.scheduling.policies import PlanPolicy
from offramp.engine.serving.evidence import Parts, observer_of
from offramp.engine.stages.backend_protocol import Rows, TensorBatch
from offramp.engine.stages.pipeline import Pipeline, StageStep
from offramp.engine.stages.plan import StageSpec, exit_label

_log = logging.getLogger(__name__)

Pieces: TypeAlias = tuple[tuple[Future[TensorBatch], Rows], ...]
"""Pieces of a merged batch: buffered tensors of any stream, and the rows of them to use."""


class ModelRuntime:
    """A model on the streams of a device, starting with its first deployment and no requests.

    Guarded by the executor's lock, except :meth:`start`, :meth:`check_inputs` and :meth:`observe`,
    which only access data of the samples of their run.
    """

    def __init__(
        self,
        key: str,
        name: str,
        model: ServedModel,
        completions: CompletionQueue,
        clock: Callable[[], float],
    ) -> None:
        self.key, self.name, self.model = key, name, model
        self._clock = clock
        self.scheduler = scheduler = model.scheduler
        counters = Counters([variant.name for variant in model.variants])
        self.table = RequestTable(name, counters, completions, clock)
        self._observer = observer_of(model)
        self._buffered: dict[int, Future[TensorBatch]] = {}
        """Tensors that wait at splits, by number; each future is done once its stream has copied
        them."""
        self._deployments: dict[int, Deployment] = {}
        """Deployments that have running or waiting batches, by number."""
        self._departures: dict[int, DepartureCounters] = {}
        """Counters of each deployment; deployments of the same exits share them."""
        self._placed: dict[int, PlacedPlan | None] = {model.deployment.number: scheduler.placed}
        """Placed plan of each deployment, if streams differ."""
        self.current = model.deployment
        """Deployment with which batches start from now on."""
        self._activate(model.deployment)

    def hot_swap(self, deployment: Deployment, chosen: PlanPolicy) -> None:
        """Activate a deployment for batches that start from now on."""
        self.scheduler.hot_swap(deployment.number, *chosen)
        self._placed[deployment.number] = chosen.placed
        self._activate(deployment)
        for plan in self._deployments.keys() - self.scheduler.plans:
            del self._deployments[plan], self._departures[plan], self._placed[plan]

    def open_old_plans(self) -> None:
        """Allow any stream to run samples that wait under older plans."""
        for number, placed in self._placed.items():
            if placed is not None and number != self.current.number:
                placed.open_to_all()

    def under(self, run: Run) -> Deployment:
        """Return the deployment with which the batch of a run was started."""
        return self._deployments[run.plan]

    def pipeline_of(self, run: Run) -> Pipeline:
        """Return the pipeline that executes a run."""
        return self.under(run).of_variant(run.variant)

    def snapshot(self) -> CountersSnapshot:
        """Return all counts of the model at one time."""
        observed = self._observer.counts()
        audits = observed.audits or [AuditCounts(0, 0)] * len(self.model.variants)
        return self.table.counters.snapshot(
            queued=self.scheduler.queued,
            in_flight=self.scheduler.in_flight,
            auditing=self.scheduler.auditing,
            lost_feedback=observed.lost,
            out_of_range=observed.out_of_range,
            discounted=observed.discounted,
            variants=[
                self._of_variant(variant, compared)
                for variant, compared in zip(self.model.variants, audits, strict=True)
            ],
        )

    def _of_variant(self, variant: Variant, compared: AuditCounts) -> VariantStatistics:
        answered, forced = self.table.counters.of_variant(variant.index)
        return VariantStatistics(
            name=variant.name,
            answered=answered,
            forced=forced,
            audited=compared.audited,
            disagreed=compared.disagreed,
            agreement=variant.agreement,
        )

    def take_pieces(self, run: Run) -> Pieces:
        """Return the buffered tensors from which a run is merged, before they are discarded."""
        return tuple((self._buffered[p.number], p.positions) for p in run.pieces)

    def requests_of(self, run: Run, now_s: float) -> list[tuple[Request, slice | Rows]]:
        """Return the requests of a batch that starts, each with its rows in the batch.

        DrainingError if a request was closed in the meantime.
        """
        parts: list[tuple[Request, slice | Rows]] = []
        for number, _, rows in _by_request(run, all_rows(len(run.requests))):
            request = self.table.get(number)
            if request is None:
                raise DrainingError(f"{self.name}: stopped before the answer")
            parts.append((request, rows))
            if request.started_s is None:
                request.started_s = now_s
        self._count_padding(run, parts)
        return parts

    def gather(self, parts: Parts) -> dict[str, NDArray[Any]]:
        """Join the inputs of a batch, given the result of :meth:`requests_of`."""
        taken = [
            {name: array[rows] for name, array in request.inputs.items()} for request, rows in parts
        ]
        return self.model.lengths.join(taken, parts[0][0].batch_key)

    def _count_padding(self, run: Run, parts: Parts) -> None:
        rules, counters = self.model.lengths, self.table.counters
        if rules.pads:
            rows = [stop - start for start, stop in _neighbours(run.requests.tolist())]
            inputs = [request.inputs for request, _ in parts]
            added = rules.added(inputs, rows, parts[0][0].batch_key)
            counters.padded += added.samples
            counters.padded_positions += added.positions

    def start(self, run: Run) -> None:
        """Record that the samples of a batch start."""
        deployment = self.under(run)
        forced = run.deepest < len(deployment.plan.stages) - 1
        self._observer.starts(run, policy_version=deployment.policy.version, forced=forced)

    def check_inputs(self, run: Run, parts: Parts, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Pass the inputs of a batch that starts to its observer."""
        self._observer.reads(run, parts, inputs)

    def observe(self, run: Run, step: StageStep) -> tuple[StageStep, NDArray[np.bool_] | None]:
        """Observe a stage's result; return the corrected step, and which answered rows run on."""
        return self._observer.observe_stage(run, step, self._stage_of(run))

    def conclude(
        self, run: Run, step: StageStep, outcome: StepOutcome, run_s: float
    ) -> Future[TensorBatch] | None:
        """Carry out the scheduler's decisions on every row of a run.

        ``run_s`` is the seconds that the stage took. Returns a future for the survivors' tensors if
        another run will use them.
        """
        stage, result = self._stage_of(run), step.result
        exit_index = stage.exit
        if exit_index is not None:  # a stage that ends only at a split has no answer
            counters = self.table.counters.stages[run.variant, exit_index]
            counters.batch_size.observe(len(run.requests))
            counters.run_s.observe(run_s)
            if not run.variant:
                self._count_departures(run, step, exit_index, outcome.released)
        # Survivors go on: on this stream, or from a buffer that other streams may use at once.
        kept = self._keep(outcome)
        self._observer.concluded(run, step, stage, outcome)
        if self.table.traced:
            self._note_times(run, stage, outcome, run_s)
        if len(outcome.released):
            self._answer(run, step, exit_index, outcome)
        # Rows that were answered before, and end here: their final answer is confirmed, or lost.
        for number, part, rows in _by_request(run, outcome.ended):
            answer, confidence = result.answer, result.confidence[part]
            if exit_index != MODEL_END or answer is None:
                self.table.lose(number, len(confidence))
            else:
                self.table.confirm(number, rows, answer[part], confidence)
        self.follow(outcome)
        return kept

    def _note_times(self, run: Run, stage: StageSpec, outcome: StepOutcome, run_s: float) -> None:
        """Add the run to the timelines of its traced requests."""
        ended_s, released = self._clock(), run.requests[outcome.released]
        going_on = run.requests[outcome.survivors]
        label = "split" if stage.exit is None else exit_label(stage.exit)
        for number in tuple(self.table.traced):
            if (request := self.table.get(number)) is None or request.timeline is None:
                self.table.traced.discard(number)
            elif samples := int(np.count_nonzero(run.requests == number)):
                answered = int(np.count_nonzero(released == number))
                times = StageTime(
                    label, ended_s - run_s, ended_s, len(run.requests), samples, answered
                )
                request.timeline.stages.append(times)
                left = int(np.count_nonzero(going_on == number))
                request.timeline.audited |= answered + left > samples

    def _count_departures(self, run: Run, step: StageStep, exit_index: int, released: Rows) -> None:
        """Count rows that have their answer now; only a run's deepest stage forces rows out."""
        if rows := len(released):
            forced = 0
            if run.stage == run.deepest:
                forced = rows - int(np.count_nonzero(step.exited[released]))
            self._departures[run.plan].count(exit_index, rows, forced)

    def fail(self, outcome: StepOutcome, failure: EngineError) -> None:
        """Fail the requests of a failed batch that are not retried, with the reason."""
        self.table.counters.retried = self.scheduler.retried
        self.follow(outcome, failure)

    def abandon(self, run: Run, failure: EngineError) -> None:
        """Fail the requests of a run whose end could not be processed."""
        for number in np.unique(run.requests).tolist():
            request = self.table.get(number)
            if request is not None:
                left = [Dropped(number, request.remaining, DropCause.FAILED)]
                self.table.drop(left, failure)
            self.cancel(number, DropCause.FAILED)

    def interrupt(self, outcome: StepOutcome, failure: EngineError) -> Future[TensorBatch] | None:
        """Reserve a buffer for the tensors of an interrupted batch, if the batch will be resumed.

        Otherwise it has failed too often, with ``failure`` as the reason.
        """
        kept = self._keep(outcome)
        self.table.counters.resumed = self.scheduler.resumed
        self.fail(outcome, failure)
        return kept

    def cancel(self, number: int, cause: DropCause = DropCause.CANCELLED) -> None:
        """Withdraw a request, and process the outcome."""
        self.follow(self.scheduler.cancel(number, cause))

    def fail_all(self, refusal: EngineError, cause: str) -> None:
        """Fail and withdraw all open requests; their samples are counted under ``cause``."""
        for number in self.table.fail_all(refusal, cause):
            self.cancel(number)
        self.table.deliver()

    def follow(self, outcome: StepOutcome, failure: EngineError | None = None) -> None:
        """Count dropped and lost samples, and deliver completed requests.

        ``failure`` is the reason why samples of the outcome failed, if any did.
        """
        outcomes = [outcome]
        for told in outcomes:  # the list grows during the loop
            self.table.drop(told.dropped, failure)
            outcomes.extend(  # the remaining samples of a request without an answer need not run
                self.scheduler.cancel(item.request, item.cause)
                for item in told.dropped
                if item.cause is not DropCause.CANCELLED and self.table.get(item.request)
            )
            for samples in told.lost:
                self._lose(samples)
            for number in told.discarded:
                self._buffered.pop(number, None)
        self.table.deliver()

    def _lose(self, samples: RowSet) -> None:
        """Record that samples will have no more results."""
        self._observer.lost(samples.sample_ids)
        requests, counts = np.unique(samples.requests[samples.answered], return_counts=True)
        for number, count in zip(requests.tolist(), counts.tolist(), strict=True):
            self.table.lose(number, count)

    def _keep(self, outcome: StepOutcome) -> Future[TensorBatch] | None:
        """Reserve a buffer for tensors that another run will use, if there are any."""
        if outcome.buffered is None:
            return None
        kept = self._buffered[outcome.buffered] = Future()
        return kept

    def _activate(self, deployment: Deployment) -> None:
        self._deployments[deployment.number] = deployment
        counters = self.table.counters
        self._departures[deployment.number] = counters.departures_of(deployment.plan.exits)
        self.current = deployment
        thresholds = {
            (variant, stage.answered_by): stage.threshold
            for variant, pipeline in enumerate(deployment.pipelines)
            for stage in pipeline.plan.stages
            if stage.exit is not None
        }
        counters.activate(thresholds)

    def _stage_of(self, run: Run) -> StageSpec:
        return self.pipeline_of(run).plan.stages[run.stage]

    def _answer(
        self, run: Run, step: StageStep, exit_index: int | None, outcome: StepOutcome
    ) -> None:
        """Store the answers of released rows in their requests."""
        answer, confidence, _ = step.result
        assert answer is not None
        assert exit_index is not None
        forced, version = ~step.exited, self.under(run).policy.version
        survives = None  # [rows]: whether a released row runs on for feedback
        if outcome.released_survive(len(forced)):
            survives = np.zeros(len(forced), np.bool_)
            survives[outcome.survivors] = True
        for number, part, rows in _by_request(run, outcome.released):
            try:
                self.table.answer(
                    number,
                    rows,
                    answer[part],
                    confidence[part],
                    exit_index=exit_index,
                    forced=forced[part],
                    policy_version=version,
                    following=0 if survives is None else int(np.count_nonzero(survives[part])),
                    variant=run.variant,
                )
            except Exception as error:  # for example, an exit whose answers have another shape
                _log.exception("%s: stage %d: its answer cannot be stored", self.name, run.stage)
                failure = BackendError(f"{self.name}: stage {run.stage}: {error}")
                self.table.drop([Dropped(number, len(forced[part]), DropCause.FAILED)], failure)


def _by_request(run: Run, positions: Rows) -> Iterator[tuple[int, slice | Rows, slice | Rows]]:
    """Yield the requests of some rows of a run.

    Each is its number, the positions of its rows in the run, and the rows' numbers in the request.
    """
    if not len(positions):
        return
    numbers = run.requests[positions].tolist()
    for start, stop in _neighbours(numbers):
        part = positions[start:stop]
        yield numbers[start], _as_index(part), _as_index(run.rows[part])


def _neighbours(requests: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each sequence of equal request numbers."""
    start = 0
    for stop, number in enumerate(requests):
        if number != requests[start]:
            yield start, stop
            start = stop
    if requests:
        yield start, len(requests)


def _as_index(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return row numbers as a slice if they are consecutive: it indexes arrays without a copy.

    Row numbers are consecutive unless survivors of earlier stages are retried.
    """
    first, last, count = int(rows[0]), int(rows[-1]), len(rows)
    if count == 1 or (last - first + 1 == count and (rows[1:] > rows[:-1]).all()):
        return slice(first, last + 1)
    return rows
