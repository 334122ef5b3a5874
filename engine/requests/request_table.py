"""The open requests of a model, their answers so far, and the queue of completed requests.

A request is opened when the scheduler accepts it, collects the answers to its samples stage by
stage, and is completed when every sample was answered or dropped; then the completion queue passes
it to the event loop. The caller holds the executor's lock, except for the delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.engine.common.errors import BackendError, DeadlineExceededError, EngineError
from offramp.engine.control.evidence_window import Origin, fingerprints
from offramp.engine.requests.lengths import BatchKey
from offramp.engine.requests.statistics import Counters
from offramp.engine.requests.timeline import RequestTimeline
from offramp.engine.scheduling import DropCause, Dropped
from offramp.engine.scheduling.decisions import Rows

_log = logging.getLogger(__name__)

_MEMORY = 1 / 32
"""Weight of one delivery of answers in the running means of the delay."""
_MOST, _LEAST_BOUND_S = 2.0, 1e-3


@dataclass(slots=True, eq=False, kw_only=True)
class RequestAnswers:
    """The answers to the samples of a request, filled in stage by stage."""

    count: int
    values: NDArray[Any] | None = None
    """[count, classes]: answers, once the first sample has one."""
    confidences: NDArray[np.float32] = field(init=False)
    filled: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample has its answer."""

    def __post_init__(self) -> None:
        self.confidences = np.zeros(self.count, np.float32)
        self.filled = np.zeros(self.count, np.bool_)

    def fill(
        self, rows: slice | Rows, values: NDArray[Any], confidence: NDArray[np.float32]
    ) -> None:
        """Store the answers to some samples."""
        if self.values is None:
            self.values = np.empty((self.count, *values.shape[1:]), values.dtype)
        self.values[rows] = values
        self.confidences[rows] = confidence
        self.filled[rows] = True


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the engine: inputs, answers so far, and futures for its caller.

    The executor owns the request (under its lock) from submission until it is completed; then the
    event loop owns it. ``followup`` and ``final`` belong to the executor until ``followup`` is
    resolved.
    """

    number: int
    inputs: Mapping[str, NDArray[Any]]
    count: int
    batch_key: BatchKey
    """Shapes of a sample: requests of equal keys may share a batch."""
    submitted_s: float
    deadline_s: float
    priority: int
    source: str = ""
    """Sender, for the limit on its share of the evidence."""
    timeline: RequestTimeline | None = None
    """Record of the stages that ran; ``None`` for most requests."""
    future: asyncio.Future[Request]
    """Resolved with the request itself when it is completed."""
    followup: asyncio.Future[Request] | None = None
    """For a caller who also needs the final answers of samples that run on after an early one:
    resolved when all of these have ended, with or without an answer."""
    remaining: int = field(init=False)
    """Number of samples that neither have an answer nor were dropped."""
    following: int = 0
    """Number of answered samples that run on."""
    first: RequestAnswers = field(init=False)
    """First answer to each sample, from an exit or the model's end."""
    final: RequestAnswers | None = None
    """Answers of the model's end to samples that ran on; ``None`` if none did."""
    exits: NDArray[np.int32] = field(init=False)
    """[count]: exit that answered the sample; ``MODEL_END`` is the model's own answer."""
    forced: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample was forced to leave, below the exit's threshold."""
    variants: NDArray[np.int16] = field(init=False)
    """[count]: variant that answered the sample; 0 is the full model."""
    policy_version: int = 0
    """Version of the policy of the answers; the latest, if they differ."""
    started_s: float | None = None
    """Time at which its first batch was started."""
    error: EngineError | None = None
    """Reason why there will be no answer."""
    withdrawn: bool = False
    """True if the caller no longer waits."""
    unseen: int = 0
    """Number of samples of a length that calibration never had."""

    def __post_init__(self) -> None:
        self.remaining = self.count
        self.first = RequestAnswers(count=self.count)
        self.exits = np.full(self.count, MODEL_END, np.int32)
        self.forced = np.zeros(self.count, np.bool_)
        self.variants = np.zeros(self.count, np.int16)

    def origins(self, rows: slice | Rows) -> list[Origin]:
        """Return the fingerprint and source of each of the given rows (at least one)."""
        arrays = [self.inputs[name][rows] for name in sorted(self.inputs)]
        return [(print_, self.source) for print_ in fingerprints(arrays, len(arrays[0]))]


class CompletionQueue:
    """Passes completed requests from the streams' threads to the event loop.

    The loop is woken once for any number of requests. Streams' threads fill the queue and wake the
    loop while they hold the executor's lock. The loop takes requests without this lock; if it
    waited for the lock, a stream's thread would have to let the loop run first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start empty; ``clock`` is the executor's clock, in seconds."""
        self._clock = clock
        self._woken_s = 0.0
        self._delay_s = 0.0
        self._spread_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completed: deque[tuple[asyncio.Future[Request], Request]] = deque()
        self._waking = False

    @property
    def delay_s(self) -> float:
        """Delay until an answer reaches the event loop: the running mean plus two deviations.

        An answer must be completed earlier than its deadline by this time.
        """
        return self._delay_s + 2.0 * self._spread_s

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop on which completed requests are delivered."""
        self._loop = loop

    def add(self, future: asyncio.Future[Request] | None, request: Request) -> None:
        """Add a request, to resolve ``future`` with it; the caller holds the lock."""
        if future is not None:
            self._completed.append((future, request))

    def wake(self) -> None:
        """Wake the event loop to deliver the requests; the caller holds the lock."""
        if self._completed and not self._waking and self._loop is not None:
            self._waking = True
            self._woken_s = self._clock()
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: no caller waits any more
                _log.debug("the event loop is closed")

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        # A stall of the loop is no reason to refuse later requests: one observation counts for
        # at most a few times the usual delay.
        most_s = _MOST * self.delay_s + _LEAST_BOUND_S
        delay_s = min(self._clock() - self._woken_s, most_s)
        self._spread_s += _MEMORY * (abs(delay_s - self._delay_s) - self._spread_s)
        self._delay_s += _MEMORY * (delay_s - self._delay_s)
        self._waking = False  # before the queue is read: later requests wake the loop again
        while self._completed:
            future, request = self._completed.popleft()
            if not future.done():  # its caller may have left
                future.set_result(request)


class RequestTable:
    """The open requests of a model by number, and the counts of their samples.

    Every accepted sample is counted exactly once, as answered or as failed with a cause.
    """

    def __init__(
        self,
        name: str,
        counters: Counters,
        completions: CompletionQueue,
        clock: Callable[[], float],
    ) -> None:
        self.counters = counters
        self._completions = completions
        self._name = name
        self._clock = clock
        self._open: dict[int, Request] = {}
        self.traced: set[int] = set()
        """Numbers of the requests with a timeline; some of these requests may have ended."""
        self._followed: dict[int, Request] = {}
        """Answered requests whose callers wait for samples that run on."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> int:
        """Number of requests with a waiting caller: open, or with a second answer to come."""
        return len(self._open) + len(self._followed)

    def accept(self, request: Request) -> None:
        """Add an accepted request to the open ones, and count it."""
        self._open[request.number] = request
        if request.timeline is not None:
            self.traced.add(request.number)
        self.counters.requests += 1
        self.counters.samples += request.count
        self.counters.unseen_lengths += request.unseen

    def get(self, number: int) -> Request | None:
        """Return an open request by its number."""
        return self._open.get(number)

    def answer(
        self,
        number: int,
        rows: slice | Rows,
        values: NDArray[Any],
        confidence: NDArray[np.float32],
        *,
        exit_index: int,
        forced: NDArray[np.bool_],
        policy_version: int,
        following: int = 0,
        variant: int = 0,
    ) -> None:
        """Store a stage's answers to n samples of a request, if it is still open.

        ``rows`` [n] are the samples' positions in the request, ``values`` [n, classes] their
        answers. ``exit_index`` is the exit of ``variant`` that answered, or ``MODEL_END``.
        ``forced`` [n] marks samples below the exit's threshold that leave to meet a deadline;
        ``following`` is the number of samples that run on.
        """
        request, count = self._open.get(number), len(confidence)
        if request is None:
            return
        if request.withdrawn or request.error is not None:
            self.drop([Dropped(number, count, _lost_by(request))])
            return
        request.first.fill(rows, values, confidence)
        request.exits[rows] = exit_index
        request.forced[rows] = forced
        request.variants[rows] = variant
        request.remaining -= count
        request.policy_version = max(request.policy_version, policy_version)
        if following and request.followup is not None:
            request.following += following
            request.final = request.final or RequestAnswers(count=request.count)
        counters = self.counters.stages[variant, exit_index]
        counters.answered += count
        counters.forced += int(np.count_nonzero(forced))
        if request.remaining == 0:
            del self._open[number]
            self._complete(request)
            if request.final is not None:
                self._followed[number] = request
                self._follow_up(request)

    def confirm(
        self,
        number: int,
        rows: slice | Rows,
        values: NDArray[Any],
        confidence: NDArray[np.float32],
    ) -> None:
        """Store the model end's answers to answered samples, if the caller needs them."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.final.fill(rows, values, confidence)
            self.lose(number, len(confidence))

    def lose(self, number: int, count: int) -> None:
        """Record that ``count`` answered samples of a request will not reach the model's end."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.following -= count
            self._follow_up(request)

    def withdraw(self, number: int) -> bool:
        """Record that a caller no longer waits; return whether its request is still open."""
        request = self._open.get(number)
        if request is None:
            return False
        self.counters.failed_requests += request.error is None
        request.withdrawn = True
        return True

    def forget(self, number: int) -> None:
        """Record that no caller waits for the final answers of a request any more."""
        self._followed.pop(number, None)

    def drop(self, dropped: Iterable[Dropped], failure: EngineError | None = None) -> None:
        """Count samples that leave without an answer; ``failure`` is the error, if any."""
        for item in dropped:
            request = self._open.get(item.request)
            if request is None:
                continue
            self.counters.failed[item.cause.value] += item.count
            request.remaining -= item.count
            if request.remaining == 0:
                del self._open[item.request]
            if item.cause is DropCause.FAILED:
                self._fail(request, failure or BackendError(f"{self._name}: execution failed"))
            elif item.cause is not DropCause.CANCELLED:
                self._fail(request, self._too_late(request, item.cause))

    def fail_all(self, error: EngineError, cause: str) -> list[int]:
        """Fail and close every open request; return their numbers."""
        requests, self._open = self._open, {}
        for request in requests.values():
            self.counters.failed[cause] += request.remaining
            self._fail(request, error)
        followed, self._followed = self._followed, {}
        for request in followed.values():  # they have their answers, and get no second ones
            self._completions.add(request.followup, request)
        return list(requests)

    def deliver(self) -> None:
        """Wake the event loop to resolve the futures of completed requests."""
        self._completions.wake()

    def _fail(self, request: Request, error: EngineError) -> None:
        """Complete a request with an error; only the first error counts."""
        if request.error is None:
            self.counters.failed_requests += not request.withdrawn  # that has been counted
            request.error = copy_of(error)
            self._complete(request)

    def _complete(self, request: Request) -> None:
        """Pass a request to its caller, if the caller still waits."""
        if request.withdrawn:
            return
        if request.error is None:
            now_s = self._clock()
            started_s = now_s if request.started_s is None else request.started_s
            self.counters.queue_s.observe(started_s - request.submitted_s)
            self.counters.latency_s.observe(now_s - request.submitted_s)
        self._completions.add(request.future, request)

    def _follow_up(self, request: Request) -> None:
        """Pass the final answers to the caller once all are complete."""
        if request.following == 0 and self._followed.pop(request.number, None) is not None:
            self._completions.add(request.followup, request)

    def _too_late(self, request: Request, cause: DropCause) -> EngineError:
        given_ms = (request.deadline_s - request.submitted_s) * 1e3
        if given_ms <= 0:
            late = f"{abs(given_ms):.1f} ms before the request came"
            return DeadlineExceededError(f"{self._name}: the deadline had passed {late}")
        given = f"{given_ms:.1f} ms until its deadline"
        if cause is DropCause.INFEASIBLE:
            return DeadlineExceededError(
                f"{self._name}: given up early, as no answer can be expected within the {given}"
            )
        return DeadlineExceededError(f"{self._name}: no answer within the {given}")


def _lost_by(request: Request) -> DropCause:
    """Return why the whole request of an answer was dropped before the answer came."""
    if request.withdrawn:
        return DropCause.CANCELLED
    late = isinstance(request.error, DeadlineExceededError)
    return DropCause.EXPIRED if late else DropCause.FAILED


def copy_of(error: EngineError) -> EngineError:
    """Return an equal error: each caller raises its own, with its own traceback."""
    return type(error)(*error.args)
