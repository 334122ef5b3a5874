"""A stage plan that serves batches, and the batches themselves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from offramp.engine.scheduling.decisions import Piece, RowSet, Run
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.placed import PlacedPlan, TimedRun
from offramp.engine.scheduling.policy_protocol import Policy, Start, Waiting


@dataclass(slots=True, eq=False)
class ServedPlan:
    """A plan of the model's stages, with the policy and predictions for its batches."""

    number: int
    """The plan's number: :attr:`Run.plan`."""
    policy: Policy
    latencies: Latencies
    """Predictions for its stages, corrected by observations."""
    waiting: Waiting
    """Samples from which the policy may choose; for an old plan, only samples at its splits."""
    placed: PlacedPlan | None = None
    """Policies and latencies by stream, if streams differ; used instead of ``policy`` and
    ``latencies``."""

    def form(self, start: Start, requests: int) -> ScheduledBatch:
        """Form the new batch that its policy chose, of up to ``requests`` requests."""
        limit = min(start.limit, self.latencies.max_batch_size)
        samples = self.waiting.queue.take(start.bucket, limit, requests)
        variant, deepest = start.variant, start.deepest
        if deepest is None:
            deepest = self.latencies.last(variant)
        return ScheduledBatch(self, 0, samples, start.bucket.batch_key, deepest, variant)

    def runs_on(self, stream: int, batch: ScheduledBatch, before: int, survivors: int) -> bool:
        """Return whether the survivors of a batch continue immediately to their next stage.

        In a placed plan they do not continue if other streams should run that stage. Otherwise they
        continue until the empty places of the batch have cost as much as a merge would cost (the
        ski-rental rule for an unknown duration).
        """
        stage, retry = batch.stage - 1, batch.by_itself
        if self.placed is None:
            return retry or self.policy.runs_on(stage, before, survivors)
        if not self.placed.continues_on(stream, batch.stage):
            return False
        policy, latencies = self.placed.of(stream)
        if retry or policy.runs_on(stage, before, survivors):
            return True
        wasted_s = batch.wasted_s + latencies.wasted_s(batch.stage, survivors, batch.variant)
        if wasted_s > latencies.merging_s * survivors / latencies.max_batch_size:
            return False
        batch.wasted_s = wasted_s
        return True

    def observe(self, stream: int, batch: ScheduledBatch, size: int, now_s: float) -> None:
        """Record the time of a batch's stage."""
        run = TimedRun(batch.stage, size, now_s - batch.started_s, batch.variant)
        if self.placed is not None:
            self.placed.observe(stream, run, now_s, merged=bool(batch.pieces))
        elif batch.pieces:
            self.latencies.observe_merged(*run)
        else:
            self.latencies.observe(*run)

    def observe_shrinking(
        self,
        stage: int,
        before: int,
        survivors: int,
        variant: int,
        unanswered: tuple[int, int] | None = None,
    ) -> None:
        """Record how many rows went on from a stage: see :meth:`.StageTable.observe`."""
        which = self.latencies if self.placed is None else self.placed
        which.observe_shrinking(stage, before, survivors, variant, unanswered)


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """A batch that runs on a stream, or waits for a retry; its samples leave gradually."""

    plan: ServedPlan
    """Stage plan of the batch's samples, from their start to their end."""
    stage: int
    samples: RowSet
    batch_key: Hashable
    deepest: int
    """Stage where all remaining samples must leave."""
    variant: int
    """Variant that its samples run, from start to end, including retries."""
    pieces: tuple[Piece, ...] = ()
    """Parts of buffered batches from which this batch was just merged."""
    by_itself: bool = False
    """True for a retry, which is never merged with other batches at splits."""
    failed_on: int | None = None
    """Stream on which the samples failed before, if any."""
    suspect_until_s: float | None = None
    """For a request that failed alone: time until which its retry waits for all other samples."""
    losses: int = 0
    """Number of workers that were lost while they ran the batch."""
    number: int = 0
    """Number of the batch, which it gets when a stream takes it."""
    wasted_s: float = 0.0
    """Seconds that the empty places of the batch have cost since it was formed."""
    executing: bool = False
    started_s: float = 0.0
    earliest_s: float = field(init=False)
    """Lower bound of the samples' deadlines."""

    def __post_init__(self) -> None:
        self.earliest_s = min(self.samples.deadlines_s.tolist())

    @property
    def only_feedback(self) -> bool:
        """True if all samples of the batch have their answer, and run on for feedback only."""
        return bool(self.samples.answered.all())

    def as_run(self) -> Run:
        """Return the run for the stream that took the batch."""
        number, plan = self.number, self.plan.number
        return Run(number, self.stage, self.samples, self.deepest, self.pieces, plan, self.variant)
