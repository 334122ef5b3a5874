"""What becomes of one model's samples: answers, counts, feedback, under whatever plan.

Whoever holds the executor's lock may call, but for :meth:`HostedModel.started` and
:meth:`HostedModel.seen`, which only touch what belongs to the samples of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.engine.backends.base import Rows, TensorBatch
from offramp.engine.deployment import Deployment
from offramp.engine.errors import BackendError, EngineError
from offramp.engine.pipeline import Step
from offramp.engine.recorder import Recorder
from offramp.engine.request_table import Given, RequestTable
from offramp.engine.requests import FINAL
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Policy,
    Run,
    SuccessiveScheduler,
    Transition,
)
from offramp.engine.statistics import CountersSnapshot, Place, StageCounters

_log = logging.getLogger(__name__)

_LATE = frozenset({DropCause.EXPIRED, DropCause.INFEASIBLE})


@dataclass(frozen=True, slots=True)
class Serving:
    """A deployment, and what is counted under it."""

    deployment: Deployment
    stages: tuple[StageCounters, ...]

    @property
    def last(self) -> int:
        """The model's end."""
        return len(self.stages) - 1


class HostedModel:
    """A model on the streams of a device."""

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        scheduler: SuccessiveScheduler,
        table: RequestTable,
        recorder: Recorder | None = None,
    ) -> None:
        """Start with a deployment; nobody else may use what is given.

        Args:
            name: For messages.
            deployment: In force at first.
            scheduler: Of the model.
            table: Empty.
            recorder: Keeps what is observed; ``None`` in modes that observe nothing.
        """
        self.name = name
        self.scheduler = scheduler
        self.table = table
        self.recorder = recorder
        self.buffered: dict[int, Future[TensorBatch]] = {}
        """Tensors that wait at splits; each is there as soon as its stream has copied it."""
        self._serving: dict[int, Serving] = {}
        self.current = self._adopt(deployment)
        """What starts now starts under this."""

    def under(self, run: Run) -> Serving:
        """What a run was started under."""
        return self._serving[run.plan]

    def succeed(self, deployment: Deployment, policy: Policy) -> None:
        """Put a deployment in force for whatever starts from now on."""
        self.scheduler.succeed(deployment.number, policy, deployment.points.latencies)
        self.current = self._adopt(deployment)
        through = self._serving.keys() - self.scheduler.plans
        for plan in through:
            del self._serving[plan]

    def snapshot(self) -> CountersSnapshot:
        """All counts, of one instant."""
        return self.table.counters.snapshot(
            queued=self.scheduler.queued,
            in_flight=self.scheduler.in_flight,
            auditing=self.scheduler.auditing,
            lost_feedback=self.recorder.lost if self.recorder else 0,
        )

    def started(self, run: Run) -> None:
        """Take note of a batch that starts; by the stream's thread, without the lock."""
        if self.recorder is not None:
            serving = self.under(run)
            version = serving.deployment.policy.version
            self.recorder.start(run.sample_ids, version, forced=run.deepest < serving.last)

    def seen(self, run: Run, step: Step) -> NDArray[np.bool_] | None:
        """Take note of what a stage said; gives which rows run on once they are answered.

        By the stream's thread, without the lock.
        """
        recorder = self.recorder
        if recorder is None:
            return None
        stage = self.under(run).deployment.pipeline.plan.stages[run.stage]
        answer = step.result.answer
        if answer is not None:
            prediction = answer.argmax(axis=1)
            if stage.exit is None:
                recorder.final(run.sample_ids, prediction)
            else:
                recorder.passed(run.sample_ids, stage.exit, step.result.confidence, prediction)
        return recorder.runs_on(run.sample_ids)

    def release(self, run: Run, transition: Transition, step: Step) -> None:
        """Give the answers of a stage to those who wait for them."""
        serving = self.under(run)
        stage = serving.deployment.pipeline.plan.stages[run.stage]
        exit_index = FINAL if stage.exit is None else stage.exit
        if self.recorder is not None:
            self._record(run, transition, step, stage.exit)
        runs_on: NDArray[np.bool_] | None = None
        if self.recorder is not None and len(transition.survivors):
            runs_on = np.zeros(len(run.requests), np.bool_)
            runs_on[transition.survivors] = True
        version = serving.deployment.policy.version
        for rows in _by_request(run, transition.released):
            answer, confidence = step.result.answer, step.result.confidence
            assert answer is not None
            number = int(run.requests[rows[0]])
            given = Given(
                exit_index,
                run.rows[rows],
                answer[rows],
                confidence[rows],
                ~step.exited[rows],
                version,
                0 if runs_on is None else int(np.count_nonzero(runs_on[rows])),
            )
            try:
                self.table.answer(number, serving.stages[run.stage], given)
            except Exception as error:  # an exit whose answers have another shape, say
                _log.exception("%s: stage %d: its answer cannot be kept", self.name, run.stage)
                failure = BackendError(f"{self.name}: stage {run.stage}: {error}")
                self.table.drop([Dropped(number, len(rows), DropCause.FAILED)], failure)
        for rows in _by_request(run, transition.ended):
            number, answer = int(run.requests[rows[0]]), step.result.answer
            if stage.exit is not None or answer is None:
                self.table.lose(number, len(rows))
            else:
                confidence = step.result.confidence[rows]
                self.table.confirm(number, run.rows[rows], answer[rows], confidence)

    def give_up(self, failure: EngineError) -> None:
        """Tell those whose batch failed, and have no second chance, why."""
        dropped = self.scheduler.take_dropped()
        self.table.drop(dropped, failure)
        for item in dropped:
            if item.cause is DropCause.FAILED:  # the rest of its request need not run
                self.scheduler.cancel(item.request, DropCause.FAILED)
        self.table.counters.retried = self.scheduler.retried

    def settle(self) -> None:
        """Account for what the scheduler dropped or lost, and let go of what nobody needs."""
        while dropped := self.scheduler.take_dropped():
            self.table.drop(dropped)
            for item in dropped:  # what is left of a request that is late need not run
                if item.cause in _LATE and self.table.get(item.request) is not None:
                    self.scheduler.cancel(item.request, item.cause)
        for samples in self.scheduler.take_lost():
            if self.recorder is not None:
                self.recorder.lose(samples.sample_ids)
            requests, counts = np.unique(samples.requests[samples.answered], return_counts=True)
            for number, count in zip(requests.tolist(), counts.tolist(), strict=True):
                self.table.lose(number, count)
        self.discard()

    def discard(self) -> None:
        """Let go of the tensors of buffered batches that nobody will ask for."""
        for number in self.scheduler.take_discarded():
            self.buffered.pop(number, None)

    def _adopt(self, deployment: Deployment) -> Serving:
        plan = deployment.pipeline.plan
        places = [
            Place(stage.exit, label, stage.threshold)
            for label, stage in zip(plan.exit_labels(), plan.stages, strict=True)
        ]
        serving = Serving(deployment, self.table.counters.under(places))
        self._serving[deployment.number] = serving
        return serving

    def _record(self, run: Run, transition: Transition, step: Step, exit_index: int | None) -> None:
        """Take note of who was answered, and of whom nothing more will be known."""
        recorder = self.recorder
        assert recorder is not None
        released, sample_ids = transition.released, run.sample_ids
        if exit_index is not None and len(released):
            recorder.answered(sample_ids[released], exit_index, ~step.exited[released])
        leaves = np.ones(len(sample_ids), np.bool_)
        leaves[transition.survivors] = False
        leaves[transition.dropped] = False  # reported as lost
        if leaves.any():
            recorder.finish(sample_ids[leaves])


def _by_request(run: Run, rows: Rows) -> Iterator[Rows]:
    """Give some rows of a run, a request at a time."""
    for start, stop in neighbours(run.requests[rows]):
        yield rows[start:stop]


def neighbours(requests: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Give the bounds of runs of equal values."""
    if not len(requests):
        return
    start = 0
    for stop in (np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist():
        yield start, stop
        start = stop
    yield start, len(requests)
