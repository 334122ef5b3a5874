"""The protocol of scheduling policies: when a batch starts, from which samples, and how deep.

The mechanism (:mod:`offramp.engine.scheduling.scheduler`) owns queues and batches and ensures their
guarantees; a policy only reads the waiting samples and chooses, and may be called at any time.
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
    """Largest number of samples in the batch."""
    deepest: int | None = None
    """Stage where all samples must leave; ``None`` is the last."""
    variant: int = 0
    """Variant that all its samples run, to their end; 0 is the full model."""

    @property
    def may_grow(self) -> bool:
        """True if the batch can be fuller if it starts a little later."""
        return self.bucket.size < self.limit


class Merge(NamedTuple):
    """The choice to merge buffered survivors of a bucket into a batch and run their next stage.

    A bucket has samples of one variant only.
    """

    stage: int
    bucket: BufferedBucket
    limit: int
    """Largest number of samples in the batch."""
    urgent: bool = False
    """True if the samples have no time left to wait for a fuller batch."""

    @property
    def may_grow(self) -> bool:
        """True if the batch can be fuller if it starts a little later, and still be in time."""
        return self.bucket.size < self.limit and not self.urgent


class LoadShedding(NamedTuple):
    """The choice to drop the most urgent request of a bucket, which cannot be served in time."""

    bucket: Bucket


Choice: TypeAlias = Start | Merge | LoadShedding | Wait | Idle


@dataclass(frozen=True, slots=True)
class Waiting:
    """All waiting samples; policies read them, and never change them."""

    queue: SampleQueue
    """Samples that wait for stage 0."""
    buffered: Sequence[BufferedQueue]
    """[stages]: survivors that wait for each stage; the first is always empty."""
    suspended: Collection[int] = frozenset()
    """Streams that are out of service now."""

    def without_queue(self) -> Waiting:
        """Return only the samples that wait at splits."""
        return Waiting(SampleQueue(0, full=1), self.buffered, self.suspended)

    def ready(self, now_s: float) -> Bucket | Wait | Idle:
        """Return the bucket for the next batch, or the decision how long to wait for one."""
        bucket = self.queue.ready(now_s)
        if isinstance(bucket, Bucket):
            return bucket
        return wait_until(min(bucket, self.queue.next_expiry_s()))


class Policy(Protocol):
    """The rule that assigns batches to streams; deterministic, and the caller serialises calls.

    A class of :mod:`offramp.engine.scheduling.policies`, constructed from operating points, the
    largest batch size and the number of streams, in this order.
    """

    name: str
    """Name on the command line."""

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """Choose the next action of a stream without a batch. O(log n).

        After :class:`LoadShedding` it is called again immediately.
        """

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:
        """Return whether survivors continue immediately on their stream, or wait at the split.

        ``stage``, not the last, was just executed on ``before`` rows; at least one row survives.
        """


class NeverBuffers:
    """The base of policies whose batches never wait at a split (PAME 4.2)."""

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:  # noqa: ARG002
        """Continue immediately, always."""
        return True
