"""The queues of a fake device: what is enqueued, and in which order it runs.

An operation runs when somebody waits for it or for something behind it, and at any time before:
of all streams that can go on, a random one does its next operation. What may be relied on is not
the order in which things happened to run, but what streams and events promise: every operation
has a clock, see :mod:`offramp.testing.cuda_memory`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.testing.cuda_memory import Access, Block, ByteRange, Clock, FakeMemory, MisuseError

PENDING = 0x5A
"""Bytes of pinned memory that enqueued work will write, until it does."""

Run: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something that can be enqueued: once or, in a graph, again and again."""

    label: str
    enqueued: Callable[[], Run]
    """Called when it is enqueued; gives what to call when it runs."""
    ranges: tuple[ByteRange, ...] = ()
    """What it will use, as far as that is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """Enqueued work."""

    label: str
    stream: int
    number: int
    """In its stream, from 1 on."""
    clock: Clock
    """What has happened before it runs."""
    run: Run
    ranges: tuple[ByteRange, ...] = ()
    after: Operation | None = None
    """Of another stream; it runs only after it."""
    done: bool = False

    @property
    def can_run(self) -> bool:
        """Whether what it waits for is done."""
        return self.after is None or self.after.done


class Queues:
    """The queues of all streams, and the memory that they work on; not locked.

    The order in which streams run comes of the seed.
    """

    def __init__(self, memory: FakeMemory, seed: int) -> None:
        self.host: dict[int, int] = {}
        """The host's clock: what it has waited for."""
        self.running: Operation | None = None
        self._memory = memory
        self._queues: dict[int, deque[Operation]] = {}
        self._clocks: dict[int, dict[int, int]] = {}
        """By stream: what has happened before whatever is enqueued next."""
        self._random = random.Random(seed)  # noqa: S311 - an order of execution, no secret

    @property
    def are_empty(self) -> bool:
        """Whether everything ran."""
        return not any(self._queues.values())

    def open(self) -> int:
        """A new stream's number."""
        stream = len(self._clocks) + 1
        self._queues[stream] = deque()
        self._clocks[stream] = {}
        return stream

    def close(self, stream: int) -> None:
        """Forget an empty queue."""
        del self._queues[stream]

    def push(self, stream: int, work: Work) -> Operation:
        """Put work behind all that the stream has."""
        self._make_pending(work.ranges)
        return self._append(stream, work.label, work.enqueued(), ranges=work.ranges)

    def mark(self, stream: int) -> Operation:
        """Put nothing there: a point that can be waited for."""
        return self._append(stream, "record", lambda: None)

    def hold(self, stream: int, after: Operation) -> None:
        """Let all that is pushed from now on run after something of another stream."""
        merge(self._clocks[stream], after.clock)
        self._append(stream, "wait_on", lambda: None, after=after)

    def step(self) -> None:
        """Run the next operation of one of the streams that can go on."""
        ready = [queue for queue in self._queues.values() if queue and queue[0].can_run]
        operation = self._random.choice(ready).popleft()
        operation.done = True
        self.running = operation
        try:
            operation.run()
        finally:
            self.running = None

    def use(self, used: ByteRange) -> NDArray[np.uint8]:
        """Memory for the operation that runs; MisuseError if none runs, or it must not use that."""
        operation = self.running
        if operation is None:
            raise MisuseError("memory was used outside of enqueued work")
        if not used.size_bytes:
            return np.empty(0, np.uint8)
        access = Access(
            used=used, stream=operation.stream, number=operation.number, label=operation.label
        )
        return self._memory.use(access, operation.clock)

    def drop(self) -> None:
        """Forget all that did not run."""
        for queue in self._queues.values():
            queue.clear()

    def is_over(self, stream: int, number: int | None = None) -> bool:
        """Whether the host waited for an operation, or for all of a stream."""
        last = self._clocks[stream].get(stream, 0) if number is None else number
        return self.host.get(stream, 0) >= last

    def check_unused(self, block: Block) -> None:
        """Check that nothing needs a block any more, and that the host knows it."""
        whole = ByteRange(block.address, block.content.size, writes=True)
        if operation := self._awaits(whole):
            raise MisuseError(f"{block} was freed before {operation.label} used it")
        for access in block.accesses:
            if not self.is_over(access.stream, access.number):
                raise MisuseError(f"{block} was freed before the host waited for {access.label}")

    def _append(
        self,
        stream: int,
        label: str,
        run: Run,
        *,
        ranges: tuple[ByteRange, ...] = (),
        after: Operation | None = None,
    ) -> Operation:
        clock = self._clocks[stream]
        merge(clock, self.host)
        number = clock[stream] = clock.get(stream, 0) + 1
        operation = Operation(
            label=label,
            stream=stream,
            number=number,
            clock=dict(clock),
            run=run,
            ranges=ranges,
            after=after,
        )
        self._queues[stream].append(operation)
        return operation

    def _make_pending(self, ranges: tuple[ByteRange, ...]) -> None:
        """Fill pinned memory that will be written with a pattern: who reads it early, sees that."""
        for used in ranges:
            if used.writes and used.size_bytes and not self._awaits(used):
                block = self._memory.block_of(used, "host")
                if block.kind == "pinned":
                    start = used.address - block.address
                    block.content[start : start + used.size_bytes] = PENDING

    def _awaits(self, used: ByteRange) -> Operation | None:
        """Enqueued work that has still to use a range."""
        for queue in self._queues.values():
            for operation in queue:
                if any(used.conflicts(other) for other in operation.ranges):
                    return operation
        return None


def merge(clock: dict[int, int], other: Clock) -> None:
    """Let a clock know what another knows."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
