"""Handles that the fake driver returns; their calls go back to the driver, which checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.driver import Stream
from offramp.testing.cuda_memory import Block, MisuseError
from offramp.testing.cuda_queues import Operation, Work


@dataclass(eq=False)
class _FakeHandle:
    """A resource of the driver, which its holder must release."""

    on_close: Callable[[Any], None] = field(repr=False)
    closed: bool = field(default=False, kw_only=True)

    def close(self) -> None:
        """Release the resource; harmless if released before."""
        if not self.closed:
            self.on_close(self)
            self.closed = True

    def live(self) -> Self:
        """Return the handle itself; MisuseError if it was closed."""
        if self.closed:
            raise MisuseError(f"{self} was used after it was closed")
        return self


@dataclass(eq=False)
class FakeStream(_FakeHandle):
    """A queue of work."""

    handle: int


@dataclass(eq=False)
class FakeEvent(_FakeHandle):
    """A point in a stream."""

    recorded: Operation | None = field(default=None, repr=False)


@dataclass(eq=False)
class FakeGraph(_FakeHandle):
    """Work recorded while a stream was captured."""

    works: tuple[Work, ...] = field(repr=False)
    on_launch: Callable[[FakeGraph, Stream], None] = field(repr=False)
    last: Operation | None = field(default=None, repr=False)

    def launch(self, stream: Stream) -> None:
        """Enqueue the work."""
        self.on_launch(self, stream)


@dataclass(eq=False)
class FakePinned(_FakeHandle):
    """A handle of fake pinned memory."""

    block: Block = field(repr=False)
    array: NDArray[np.uint8] = field(repr=False)
    """[size_bytes]: the memory's content."""

    @property
    def address(self) -> int:
        """Address of the memory for kernels."""
        return self.block.address

    def free(self) -> None:
        """Release the memory."""
        self.close()
