"""The queues of a fake device: enqueued work, and the order in which it runs.

An operation runs at the latest when something waits for it or for a later operation. A random
stream, among those that can continue, runs its next operation. Code must rely only on the order
that streams and events guarantee, not on the order in which operations happen to run. Each
operation has a clock for this order: see :mod:`offramp.testing.cuda_memory`.
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
"""Byte that fills pinned memory before enqueued work writes to it."""

Run: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that can be enqueued: once, or repeatedly in a graph."""

    label: str
    enqueued: Callable[[], Run]
    """Called when the work is enqueued; returns the function to call when it runs."""
    ranges: tuple[ByteRange, ...] = ()
    """Memory ranges that the work will use, as far as they are known."""


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """Work that was enqueued in a stream."""

    label: str
    stream: int
    number: int
    """Number of the operation in its stream, from 1 on."""
    clock: Clock
    """Operations that are over before this operation runs."""
    run: Run
    ranges: tuple[ByteRange, ...] = ()
    after: Operation | None = None
    """Operation of another stream that must run first."""
    done: bool = False

    @property
    def can_run(self) -> bool:
        """True if the operation that it waits for is done."""
        return self.after is None or self.after.done


class Queues:
    """The queues of all streams, and the memory that they work on; not locked.

    The order of streams is random, determined by the seed.
    """

    def __init__(self, memory: FakeMemory, seed: int) -> None:
        self.host: dict[int, int] = {}
        """The host's clock: operations that it has waited for."""
        self.running: Operation | None = None
        self._memory = memory
        self._queues: dict[int, deque[Operation]] = {}
        self._clocks: dict[int, dict[int, int]] = {}
        """Clocks by stream: operations that are over before the stream's next operation runs."""
        self._random = random.Random(seed)  # noqa: S311 - order of execution, not a secret

    @property
    def are_empty(self) -> bool:
        """True if all work has run."""
        return not any(self._queues.values())

    def open(self) -> int:
        """Return the number of a new stream."""
        stream = len(self._clocks) + 1
        self._queues[stream] = deque()
        self._clocks[stream] = {}
        return stream

    def close(self, stream: int) -> None:
        """Remove an empty queue."""
        del self._queues[stream]

    def push(self, stream: int, work: Work) -> Operation:
        """Append work to the queue of a stream."""
        self._make_pending(work.ranges)
        return self._append(stream, work.label, work.enqueued(), ranges=work.ranges)

    def mark(self, stream: int) -> Operation:
        """Append an empty operation: a point that can be waited for."""
        return self._append(stream, "record", lambda: None)

    def hold(self, stream: int, after: Operation) -> None:
        """Make all later work of a stream run after an operation of another stream."""
        merge(self._clocks[stream], after.clock)
        self._append(stream, "wait_on", lambda: None, after=after)

    def step(self) -> None:
        """Run the next operation of a random stream that can continue."""
        ready = [queue for queue in self._queues.values() if queue and queue[0].can_run]
        operation = self._random.choice(ready).popleft()
        operation.done = True
        self.running = operation
        try:
            operation.run()
        finally:
            self.running = None

    def use(self, used: ByteRange) -> NDArray[np.uint8]:
        """Return memory for the running operation; MisuseError if it may not be used."""
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
        """Drop all work that has not run."""
        for queue in self._queues.values():
            queue.clear()

    def is_over(self, stream: int, number: int | None = None) -> bool:
        """Return whether the host waited for an operation, or for all of a stream."""
        last = self._clocks[stream].get(stream, 0) if number is None else number
        return self.host.get(stream, 0) >= last

    def check_unused(self, block: Block) -> None:
        """Check that operations that used a block are over, and that the host waited for them."""
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
        """Fill pinned memory that work will write with a pattern, which reveals early reads."""
        for used in ranges:
            if used.writes and used.size_bytes and not self._awaits(used):
                block = self._memory.block_of(used, "host")
                if block.kind == "pinned":
                    start = used.address - block.address
                    block.content[start : start + used.size_bytes] = PENDING

    def _awaits(self, used: ByteRange) -> Operation | None:
        """Return the first enqueued operation that conflicts with a range, or ``None``."""
        for queue in self._queues.values():
            for operation in queue:
                if any(used.conflicts(other) for other in operation.ranges):
                    return operation
        return None


def merge(clock: dict[int, int], other: Clock) -> None:
    """Set each entry of a clock to the maximum of the two clocks."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
