"""The protocol of scheduling policies: when a batch starts, of what, how deep, and who runs on.

The mechanism (:mod:`offramp.engine.scheduling.scheduler`) owns queues and batches and keeps the
promises; a policy only looks at what waits and chooses, and may be asked at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.buffered import BufferedBucket, BufferedQueue
from offramp.engine.scheduling.decisions import Idle, Wait, wait_until
from offramp.engine.scheduling.queue import SampleQueue


class Start(NamedTuple):
    """The choice to form a batch of waiting samples and run stage 0."""

    bucket: Bucket
    limit: int
    """Most samples of the batch."""
    deepest: int | None = None
    """Stage where all must leave; ``None`` is the last."""
    variant: int = 0
    """Which all its samples run, to their end; 0 is the full model."""

    @property
    def may_grow(self) -> bool:
        """Whether it may be fuller a little later."""
        return self.bucket.size < self.limit


class Merge(NamedTuple):
    """The choice to merge buffered survivors into a batch and run the stage that they wait for.

    A bucket holds one variant's only.
    """

    stage: int
    bucket: BufferedBucket
    limit: int
    """Most samples of the batch."""
    urgent: bool = False
    """Whether it has no time left to wait for a fuller batch."""

    @property
    def may_grow(self) -> bool:
        """Whether it may be fuller a little later, and in time."""
        return self.bucket.size < self.limit and not self.urgent


class LoadShedding(NamedTuple):
    """The choice to drop the most urgent request of a bucket: it is infeasible to serve in time."""

    bucket: Bucket


Choice: TypeAlias = Start | Merge | LoadShedding | Wait | Idle


@dataclass(frozen=True, slots=True)
class Waiting:
    """All samples that wait; a policy looks at them and does not touch them."""

    queue: SampleQueue
    """For stage 0."""
    buffered: Sequence[BufferedQueue]
    """[stages]: survivors that wait for each stage; the first is always empty."""
    suspended: Collection[int] = frozenset()
    """The streams that are out of service now."""

    def without_queue(self) -> Waiting:
        """Give what waits at splits alone."""
        return Waiting(SampleQueue(0, full=1), self.buffered, self.suspended)

    def ready(self, now_s: float) -> Bucket | Wait | Idle:
        """Find the bucket that the next batch is formed of, or how long to wait for one."""
        bucket = self.queue.ready(now_s)
        if isinstance(bucket, Bucket):
            return bucket
        return wait_until(min(bucket, self.queue.next_expiry_s()))


class Policy(Protocol):
    """The rule by which streams are given batches; deterministic, and the caller serialises.

    A class of :mod:`offramp.engine.scheduling.policies` that is made of operating points, the
    largest batch size and the number of streams, in this order.
    """

    name: str
    """By which it is chosen on the command line."""

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Choose what a stream without a batch shall do. O(log n).

        After :class:`LoadShedding` it is asked again at once.
        """

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:
        """Whether the survivors of a batch go on at once on their stream, or wait at the split.

        ``stage``, not the last, was just executed on ``before`` rows; at least one survives.
        """


class NeverBuffers:
    """The base of policies whose batches never wait at a split (PAME 4.2)."""

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:  # noqa: ARG002
        """Go on at once, always."""
        return True
