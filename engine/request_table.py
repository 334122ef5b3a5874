"""Who waits for what: the open requests of a model, and the account of their samples.

Not locked: whoever holds the executor's lock may call. Every accepted sample is accounted for
exactly once, as answered or as failed by some cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.engine.completion_queue import CompletionQueue
from offramp.engine.errors import BackendError, DeadlineExceededError, EngineError
from offramp.engine.requests import PendingRequest
from offramp.engine.scheduling import DropCause, Dropped
from offramp.engine.statistics import Counters, StageCounters


class Given(NamedTuple):
    """Answers that a stage gave to n rows of one request."""

    exit: int
    """``FINAL`` for the model's end."""
    rows: NDArray[np.int64]
    """[n]: within the request."""
    values: NDArray[Any]
    """[n, classes]."""
    confidence: NDArray[np.float32]
    """[n]."""
    forced: NDArray[np.bool_]
    """[n]: below the exit's threshold, to be in time."""
    policy_version: int = 0
    following: int = 0
    """How many of the rows run on."""


class RequestTable:
    """Open requests by number; what is finished goes into the completions."""

    def __init__(
        self,
        name: str,
        counters: Counters,
        completions: CompletionQueue,
        clock: Callable[[], float],
    ) -> None:
        """Start empty; ``name`` is the model's, for messages."""
        self.counters = counters
        self._completions = completions
        self._name = name
        self._clock = clock
        self._open: dict[int, PendingRequest] = {}
        self._followed: dict[int, PendingRequest] = {}
        """Answered ones whose callers wait for what runs on."""

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    @property
    def awaited(self) -> int:
        """Requests that somebody waits for: open, or with a second answer to come."""
        return len(self._open) + len(self._followed)

    def accept(self, request: PendingRequest) -> None:
        """Open a request."""
        self._open[request.number] = request
        self.counters.requests += 1
        self.counters.samples += request.count

    def get(self, number: int) -> PendingRequest | None:
        """The open request of that number."""
        return self._open.get(number)

    def answer(self, number: int, counters: StageCounters, given: Given) -> None:
        """Note answers to a request, if it is still open; ``counters`` are the stage's."""
        request = self._open.get(number)
        if request is None:
            return
        count = len(given.rows)
        if request.withdrawn or request.error is not None:
            self.drop([Dropped(number, count, _lost_by(request))])
            return
        request.fill(
            given.rows,
            given.values,
            given.confidence,
            exit_index=given.exit,
            forced=given.forced,
        )
        request.policy_version = max(request.policy_version, given.policy_version)
        if given.following and request.followup is not None:
            request.follow(given.following)
        counters.answered += count
        counters.forced += int(np.count_nonzero(given.forced))
        if request.remaining == 0:
            del self._open[number]
            self._finish(request)
            if request.final is not None:
                self._followed[number] = request
                self._conclude(request)

    def confirm(
        self,
        number: int,
        rows: NDArray[np.int64],
        values: NDArray[Any],
        confidence: NDArray[np.float32],
    ) -> None:
        """Note what the model's end said of answered rows of a request, if somebody asks."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.final.fill(rows, values, confidence)
            request.following -= len(rows)
            self._conclude(request)

    def lose(self, number: int, count: int) -> None:
        """Say that so many answered samples of a request will not get to the model's end."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.following -= count
            self._conclude(request)

    def forget(self, number: int) -> None:
        """Say that nobody waits for the final answers of a request any more."""
        self._followed.pop(number, None)

    def drop(self, dropped: Iterable[Dropped], failure: EngineError | None = None) -> None:
        """Account for samples that leave without an answer.

        Args:
            dropped: What leaves, and why.
            failure: What went wrong with those that failed.
        """
        for item in dropped:
            request = self._open.get(item.request)
            if request is None:
                continue
            self.counters.failed[item.cause.value] += item.count
            request.remaining -= item.count
            if request.remaining == 0:
                del self._open[item.request]
            if item.cause is DropCause.FAILED:
                self.fail(request, failure or BackendError(f"{self._name}: execution failed"))
            elif item.cause is not DropCause.CANCELLED:
                self.fail(request, self._too_late(request, item.cause))

    def fail(self, request: PendingRequest, error: EngineError) -> None:
        """Tell a request's caller why there will be no answer; the first reason counts."""
        if request.error is None:
            request.error = copy_of(error)
            self._finish(request)

    def fail_all(self, error: EngineError, cause: str) -> list[int]:
        """Fail and close every open request; gives their numbers."""
        requests, self._open = self._open, {}
        for request in requests.values():
            self.counters.failed[cause] += request.remaining
            self.fail(request, error)
        followed, self._followed = self._followed, {}
        for request in followed.values():  # they have their answers, and get no second ones
            self._completions.add_followup(request)
        return list(requests)

    def _conclude(self, request: PendingRequest) -> None:
        """Hand over the final answers once all are there."""
        if request.following == 0 and self._followed.pop(request.number, None) is not None:
            self._completions.add_followup(request)

    def _finish(self, request: PendingRequest) -> None:
        if request.withdrawn:
            return
        if request.error is None:
            self.counters.latency_s.observe(self._clock() - request.submitted_s)
        self._completions.add(request)

    def _too_late(self, request: PendingRequest, cause: DropCause) -> EngineError:
        given = f"{(request.deadline_s - request.submitted_s) * 1e3:.1f} ms that there were"
        if cause is DropCause.INFEASIBLE:
            return DeadlineExceededError(
                f"{self._name}: given up early, as no answer can be expected within the {given}"
            )
        return DeadlineExceededError(f"{self._name}: no answer within the {given}")


def _lost_by(request: PendingRequest) -> DropCause:
    """Why an answer is of no use: its request as a whole was given up before."""
    if request.withdrawn:
        return DropCause.CANCELLED
    late = isinstance(request.error, DeadlineExceededError)
    return DropCause.EXPIRED if late else DropCause.FAILED


def copy_of(error: EngineError) -> EngineError:
    """An error of the same kind: each caller raises one of its own, with its own traceback."""
    return type(error)(*error.args)
