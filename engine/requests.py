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
class Answers:
    """To the samples of a request, as they come."""

    count: int
    values: NDArray[Any] | None = None
    """[count, classes] as soon as the first sample has its answer."""
    confidences: NDArray[np.float32] = field(init=False)
    filled: NDArray[np.bool_] = field(init=False)
    """[count]: whose answer is there."""

    def __post_init__(self) -> None:
        """Nothing is answered yet."""
        self.confidences = np.zeros(self.count, np.float32)
        self.filled = np.zeros(self.count, np.bool_)

    def fill(
        self, rows: NDArray[np.int64], values: NDArray[Any], confidence: NDArray[np.float32]
    ) -> None:
        """Note the answers of some samples."""
        if self.values is None:
            self.values = np.empty((self.count, *values.shape[1:]), values.dtype)
        self.values[rows] = values
        self.confidences[rows] = confidence
        self.filled[rows] = True


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """Inputs, the answers gathered so far, and who waits for them.

    Owned by the executor (under its lock) from submission until it is finished, then by the
    event loop; ``followup`` and ``final`` stay the executor's until the former is resolved.
    """

    number: int
    inputs: Mapping[str, NDArray[Any]]
    count: int
    batch_key: Hashable
    submitted_s: float
    deadline_s: float
    priority: int
    future: asyncio.Future[PendingRequest]
    followup: asyncio.Future[PendingRequest] | None = None
    """Of a caller who also wants the final answers of samples that run on after an early one:
    resolved when all of those have ended, one way or another."""
    remaining: int = field(init=False)
    """Samples that neither have an answer nor were dropped."""
    following: int = 0
    """Answered samples that run on."""
    first: Answers = field(init=False)
    """What each sample was answered at first."""
    final: Answers | None = None
    """What the model's end said of samples that ran on; ``None`` if none did."""
    exits: NDArray[np.int32] = field(init=False)
    forced: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample had to leave where it did, below the exit's threshold."""
    policy_version: int = 0
    """Of the policy that the answers were given under; the latest, should they differ."""
    error: EngineError | None = None
    """Why there will be no answer."""
    withdrawn: bool = False
    """Whether its caller left."""

    def __post_init__(self) -> None:
        """Nothing is answered yet."""
        self.remaining = self.count
        self.first = Answers(count=self.count)
        self.exits = np.full(self.count, FINAL, np.int32)
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
        """Note the first answers of some samples."""
        self.first.fill(rows, answer, confidence)
        self.exits[rows] = exit_index
        self.forced[rows] = forced
        self.remaining -= len(rows)

    def follow(self, count: int) -> None:
        """Say that so many of the answered samples run on."""
        self.following += count
        if self.final is None:
            self.final = Answers(count=self.count)
