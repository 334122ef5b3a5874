"""A plan as batches run under it, and the batches: what both know for as long as they are there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from offramp.engine.scheduling.decisions import Piece, RowSet, Run
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.placed import PlacedPlan, TimedRun
from offramp.engine.scheduling.policy_protocol import Policy, Start, Waiting


@dataclass(slots=True, eq=False)
class ServedPlan:
    """A plan of the model's stages, with what chooses and predicts for batches started under it."""

    number: int
    """The plan's number: :attr:`Run.plan`."""
    policy: Policy
    latencies: Latencies
    """The predictions for its stages; told what is observed."""
    waiting: Waiting
    """The samples that its policy may choose from: once it is old, those at its splits only."""
    placed: PlacedPlan | None = None
    """Where streams differ: what each of them is asked with, instead of policy and latencies."""

    def form(self, start: Start, requests: int) -> ScheduledBatch:
        """Form the new batch that its policy chose, of up to so many requests."""
        limit = min(start.limit, self.latencies.max_batch_size)
        samples = self.waiting.queue.take(start.bucket, limit, requests)
        variant, deepest = start.variant, start.deepest
        if deepest is None:
            deepest = self.latencies.last(variant)
        return ScheduledBatch(self, 0, samples, start.bucket.batch_key, deepest, variant)

    def runs_on(self, stream: int, batch: ScheduledBatch, before: int, survivors: int) -> bool:
        """Whether the survivors of a batch go on at once to the stage that it has come to.

        Of a placed plan they never do where others should go on with them. Elsewhere they do until
        their empty places have cost as much as to merge them would: as whoever rents skis, and
        does not know for how long, buys once the rent comes to their price.
        """
        stage, retry = batch.stage - 1, batch.by_itself
        if self.placed is None:
            return retry or self.policy.runs_on(stage, before, survivors)
        if not self.placed.goes_on_to(stream, batch.stage):
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
        """Take note of how long the stage of a batch took."""
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
        """Take note of how many rows went on from a stage: see :meth:`.StageTable.observe`."""
        which = self.latencies if self.placed is None else self.placed
        which.observe_shrinking(stage, before, survivors, variant, unanswered)


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """A batch on a stream, or to be tried again; its samples leave bit by bit."""

    plan: ServedPlan
    """The plan that its samples were started under, and end under."""
    stage: int
    samples: RowSet
    batch_key: Hashable
    deepest: int
    """The stage where all that are still here must leave."""
    variant: int
    """What its samples run, from their start to their end, a second try included."""
    pieces: tuple[Piece, ...] = ()
    """The buffered batches that it was just merged of."""
    by_itself: bool = False
    """Whether it is tried again, and meets no other batch at splits."""
    failed_on: int | None = None
    """The stream that its samples failed on before, if they did."""
    suspect_until_s: float | None = None
    """Of a request that failed alone: until when its second try waits for all others."""
    losses: int = 0
    """How often the worker that ran it was lost."""
    number: int = 0
    """Given when a stream takes it."""
    wasted_s: float = 0.0
    """What its empty places have cost since it was formed."""
    executing: bool = False
    started_s: float = 0.0
    earliest_s: float = field(init=False)
    """First deadline among its samples, or earlier."""

    def __post_init__(self) -> None:
        self.earliest_s = min(self.samples.deadlines_s.tolist())

    @property
    def only_feedback(self) -> bool:
        """Whether all its samples have their answer, and run on for feedback alone."""
        return bool(self.samples.answered.all())

    def as_run(self) -> Run:
        """Tell the stream that took it what to run."""
        number, plan = self.number, self.plan.number
        return Run(number, self.stage, self.samples, self.deepest, self.pieces, plan, self.variant)
