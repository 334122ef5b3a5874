"""Batches on the device: in a slot's buffers, or buffered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.engine.cuda.arena import Region
from offramp.engine.cuda.buffering import BufferedMemory
from offramp.engine.cuda.layout import Layout


@dataclass(slots=True, kw_only=True, eq=False)
class CudaBatch:
    """Rows in the buffers of a slot; not frozen, since one is made every stage."""

    owner: object
    """The slot."""
    rows: int
    layout: Layout
    """Of the input area where it lies, or would be brought to."""
    area: int
    """Which of the two."""
    addresses: tuple[int, ...]
    """Of ``layout.tensors``, where they lie now."""
    home: tuple[int, ...]
    """The same, where they lie in the input area or would be brought to."""
    stamps: tuple[tuple[Region, int], ...]
    """Buffers that it lies in, and their versions when it was written."""
    placed: bool = True
    """Whether it lies in the input area; otherwise it still lies where its stage gave it."""
    survivors: NDArray[np.int32] | None = None
    """Rows that the stage's end has already brought to the input area, rising."""
    brought: int = -1
    """The version of the input area then."""

    def __len__(self) -> int:
        """Rows."""
        return self.rows

    @property
    def valid(self) -> bool:
        """Whether it was not overwritten."""
        return all(region.version == version for region, version in self.stamps)


@dataclass(slots=True, kw_only=True, eq=False)
class BufferedBatch:
    """Rows in memory of their own; written for good."""

    pool: object
    """Whose memory it is."""
    rows: int
    layout: Layout
    memory: BufferedMemory
    area: int
    """The input area where it would have gone on, so that a graph captured there fits it."""
    capacity: int
    """Of the layout that it had there."""

    def __len__(self) -> int:
        """Rows."""
        return self.rows
