"""Policies that form a batch by size and delay, independently of deadlines."""

from __future__ import annotations

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.early_drop import EarlyDrop
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.points import OperatingPoints
from offramp.engine.scheduling.policy_protocol import (
    Choice,
    LoadShedding,
    NeverBuffers,
    Start,
    Waiting,
)
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.stage_table import Shrinking


class Delay(NeverBuffers):
    """Batching by size and maximum delay, as TensorFlow Serving and Triton do (Apparate 2.1).

    Deadlines only order the queue: a sample is served late unless its deadline has already passed.
    """

    name = "delay"

    def __init__(self, _points: OperatingPoints, max_batch_size: int, _streams: int = 1) -> None:
        self._max_batch_size = max_batch_size

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Start the most urgent bucket that is ready."""
        bucket = waiting.ready(now_s)
        return Start(bucket, self._max_batch_size) if isinstance(bucket, Bucket) else bucket


class RunThrough(NeverBuffers):
    """A batch stays on its stream, stage after stage, and shrinks as samples leave (PAME 4.2).

    Together with :class:`~offramp.engine.scheduling.parallel.ParallelLimit` (τ_b) this is PAME's
    parallel batch scheduling. PAME has no deadlines. With deadlines, the batch size is limited so
    that a row is in time in the mean, given how batches shrink. A sample that cannot even leave at
    the first exit in time is dropped immediately. A sample that would make others late is dropped,
    too (early drop). Otherwise goodput would collapse under overload.
    """

    name = "run-through"

    def __init__(self, points: OperatingPoints, max_batch_size: int, streams: int = 1) -> None:
        self._former = BatchFormer(max_batch_size, points.latencies, streams)

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Start the most urgent bucket that is ready."""
        bucket = waiting.ready(now_s)
        if not isinstance(bucket, Bucket):
            return bucket
        return self._former.form(waiting.queue, bucket, now_s)


class BatchFormer:
    """The rule that forms new batches for policies under which samples leave at any exit."""

    def __init__(self, max_batch_size: int, latencies: Latencies, streams: int) -> None:
        self._max_batch_size = max_batch_size
        self._latencies = latencies
        self._streams = streams
        self._seen: Shrinking | None = None
        self._early_drop = EarlyDrop((), streams)

    def form(self, queue: SampleQueue, bucket: Bucket, now_s: float) -> Start | LoadShedding:
        """Start as many samples as the first sample's slack allows, or drop the first sample."""
        slack_s = bucket.most_urgent().deadline_s - now_s
        if slack_s == float("inf"):
            return Start(bucket, self._max_batch_size)
        size = self._latencies.largest_shrinking_batch(slack_s)
        latency_margin = self._latencies.latency_margin
        if not size or self._rule().gives_up(queue, bucket, now_s, latency_margin):
            self._latencies.invalidate()
            return LoadShedding(bucket)
        return Start(bucket, min(size, self._max_batch_size))

    def _rule(self) -> EarlyDrop:
        shrinking = self._latencies.shrinking
        if shrinking is not self._seen:  # the observed rates have changed
            self._seen = shrinking
            busy_s = shrinking.busy_s[-1]
            sizes = [n for n in range(1, self._max_batch_size + 1) if busy_s[n] > 0.0]
            settings = [(shrinking.answer_s[n], n / busy_s[n]) for n in sizes]
            self._early_drop = EarlyDrop(settings, self._streams)
        return self._early_drop
