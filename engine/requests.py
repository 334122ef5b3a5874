"""A request on its way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.engine.errors import EngineError

FINAL = -1
"""In place of an exit's index: the model's own end answered."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """Inputs, the answers gathered so far, and who waits for them.

    Owned by the executor (under its lock) from submission until it is finished, then by the
    event loop.
    """

    number: int
    inputs: Mapping[str, NDArray[Any]]
    count: int
    signature: Hashable
    submitted_s: float
    deadline_s: float
    priority: int
    future: asyncio.Future[PendingRequest]
    remaining: int = field(init=False)
    """Samples that neither left with an answer nor were dropped."""
    answer: NDArray[Any] | None = None
    """[count, classes] as soon as the first sample has its answer."""
    exits: NDArray[np.int32] = field(init=False)
    confidences: NDArray[np.float32] = field(init=False)
    forced: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample had to leave where it did, below the exit's threshold."""
    error: EngineError | None = None
    """Why there will be no answer."""
    withdrawn: bool = False
    """Whether its caller left."""

    def __post_init__(self) -> None:
        """Nothing is answered yet."""
        self.remaining = self.count
        self.exits = np.full(self.count, FINAL, np.int32)
        self.confidences = np.zeros(self.count, np.float32)
        self.forced = np.zeros(self.count, np.bool_)

    def fill(
        self,
        rows: NDArray[np.int64],
        answer: NDArray[Any],
        confidence: NDArray[np.float32],
        *,
        exit_index: int,
        forced: NDArray[np.bool_],
    ) -> None:
        """Note the answers of some samples."""
        if self.answer is None:
            self.answer = np.empty((self.count, *answer.shape[1:]), answer.dtype)
        self.answer[rows] = answer
        self.confidences[rows] = confidence
        self.exits[rows] = exit_index
        self.forced[rows] = forced
        self.remaining -= len(rows)
