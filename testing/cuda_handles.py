"""What the fake driver gives out. Every call comes back to the driver, which checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.driver import Stream
from offramp.testing.cuda_memory import Block
from offramp.testing.cuda_queues import Operation, Work


@dataclass(eq=False)
class FakeStream:
    """A queue."""

    handle: int
    """Its number."""
    on_close: Callable[[FakeStream], None] = field(repr=False)
    closed: bool = False

    def close(self) -> None:
        """Release it."""
        if not self.closed:
            self.on_close(self)
            self.closed = True


@dataclass(eq=False)
class FakeEvent:
    """A point in a stream."""

    on_close: Callable[[FakeEvent], None] = field(repr=False)
    recorded: Operation | None = field(default=None, repr=False)
    """What it stands for."""
    closed: bool = False

    def close(self) -> None:
        """Release it."""
        if not self.closed:
            self.on_close(self)
            self.closed = True


@dataclass(eq=False)
class FakeGraph:
    """Noted work."""

    works: tuple[Work, ...] = field(repr=False)
    on_launch: Callable[[FakeGraph, Stream], None] = field(repr=False)
    on_close: Callable[[FakeGraph], None] = field(repr=False)
    last: Operation | None = field(default=None, repr=False)
    """Of its last launch."""
    closed: bool = False

    def launch(self, stream: Stream) -> None:
        """Enqueue it."""
        self.on_launch(self, stream)

    def close(self) -> None:
        """Release it."""
        if not self.closed:
            self.on_close(self)
            self.closed = True


@dataclass(eq=False)
class FakePinned:
    """Pinned memory."""

    block: Block = field(repr=False)
    array: NDArray[np.uint8] = field(repr=False)
    """[size_bytes]: its content."""
    on_free: Callable[[FakePinned], None] = field(repr=False)
    freed: bool = False

    @property
    def address(self) -> int:
        """Where kernels see it."""
        return self.block.address

    def free(self) -> None:
        """Release it."""
        if not self.freed:
            self.on_free(self)
            self.freed = True
