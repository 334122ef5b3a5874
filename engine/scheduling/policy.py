"""What a scheduling policy is: when a batch starts, of what, how deep, and who runs on.

The mechanism (:mod:`offramp.engine.scheduling.scheduler`) owns queues and batches and keeps the
promises; a policy only chooses, and may be asked at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from offramp.engine.scheduling.base import Idle, Wait, wait_until
from offramp.engine.scheduling.buckets import Bucket
from offramp.engine.scheduling.buffered import BufferedBucket, BufferedQueue
from offramp.engine.scheduling.queue import SampleQueue


class Start(NamedTuple):
    """Form a batch of waiting samples and run stage 0."""

    bucket: Bucket
    limit: int
    """Most samples of it."""
    deepest: int | None = None
    """Stage where all must leave; ``None`` is the last."""


class Fuse(NamedTuple):
    """Form a batch of buffered survivors and run the stage that they wait for."""

    stage: int
    bucket: BufferedBucket
    limit: int


class Shed(NamedTuple):
    """Give up the most urgent sample of a bucket: it cannot be answered in time."""

    bucket: Bucket


Choice: TypeAlias = Start | Fuse | Shed | Wait | Idle


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits; a policy looks and does not touch."""

    queue: SampleQueue
    """For stage 0."""
    buffered: Sequence[BufferedQueue]
    """[stages]: survivors that wait for each stage; none ever wait for stage 0 there."""


def ready_bucket(waiting: Waiting, now_s: float) -> Bucket | Wait | Idle:
    """The bucket that the next batch is formed of, or how long to wait for one."""
    bucket = waiting.queue.ready(now_s)
    if isinstance(bucket, Bucket):
        return bucket
    return wait_until(min(bucket, waiting.queue.next_expiry_s()))


class Policy(Protocol):
    """Small, deterministic; the caller serialises the calls."""

    @property
    def name(self) -> str:
        """As it is chosen on the command line."""
        ...

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        """What a stream without a batch shall do. O(log n)."""
        ...

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:
        """Whether the survivors of a batch go on at once on their stream, or wait at the split.

        Args:
            stage: That was just executed; not the last.
            before: Rows that it had.
            survivors: Rows that go on, at least one.
        """
        ...


class RunsThrough:
    """What policies share whose batches never wait at a split (PAME 4.2)."""

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:  # noqa: ARG002
        """Always."""
        return True
