"""The open requests of a model, the answers gathered for them, and the queue of completed ones.

A request is opened when the scheduler accepts it, gathers the answers to its samples stage by
stage, and is completed when every sample was answered or dropped; then the completion queue takes
it to the event loop. The caller holds the executor's lock, but for the delivery.
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
"""Weight of one delivery in the running means."""
_MOST, _LEAST_BOUND_S = 2.0, 1e-3


@dataclass(slots=True, eq=False, kw_only=True)
class RequestAnswers:
    """The answers to the samples of a request, filled in as stages give them."""

    count: int
    values: NDArray[Any] | None = None
    """[count, classes] as soon as the first sample has its answer."""
    confidences: NDArray[np.float32] = field(init=False)
    filled: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample's answer is there."""

    def __post_init__(self) -> None:
        self.confidences = np.zeros(self.count, np.float32)
        self.filled = np.zeros(self.count, np.bool_)

    def fill(
        self, rows: slice | Rows, values: NDArray[Any], confidence: NDArray[np.float32]
    ) -> None:
        """Note the answers to some samples."""
        if self.values is None:
            self.values = np.empty((self.count, *values.shape[1:]), values.dtype)
        self.values[rows] = values
        self.confidences[rows] = confidence
        self.filled[rows] = True


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request on its way through the engine: inputs, answers so far, and who waits for them.

    Owned by the executor (under its lock) from submission until it is completed, then by the
    event loop; ``followup`` and ``final`` stay the executor's until the former is resolved.
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
    """The sender, for bounds on its share of the evidence."""
    timeline: RequestTimeline | None = None
    """Where to note what stages ran; ``None`` for most requests."""
    future: asyncio.Future[Request]
    """Resolved with the request itself when it is completed."""
    followup: asyncio.Future[Request] | None = None
    """Of a caller who also wants the final answers of samples that run on after an early one:
    resolved when all of those have ended, one way or another."""
    remaining: int = field(init=False)
    """Samples that neither have an answer nor were dropped."""
    following: int = 0
    """Answered samples that run on."""
    first: RequestAnswers = field(init=False)
    """What each sample was answered at first."""
    final: RequestAnswers | None = None
    """What the model's end said of samples that ran on; ``None`` if none did."""
    exits: NDArray[np.int32] = field(init=False)
    """[count]: the exit that answered the sample; ``MODEL_END`` is the model's own answer."""
    forced: NDArray[np.bool_] = field(init=False)
    """[count]: whether the sample had to leave where it did, below the exit's threshold."""
    variants: NDArray[np.int16] = field(init=False)
    """[count]: the variant that answered the sample; 0 is the full model."""
    policy_version: int = 0
    """Of the policy that the answers were given under; the latest, should they differ."""
    error: EngineError | None = None
    """Why there will be no answer."""
    withdrawn: bool = False
    """Whether its caller left."""
    unseen: int = 0
    """Samples of a length that calibration never had."""

    def __post_init__(self) -> None:
        self.remaining = self.count
        self.first = RequestAnswers(count=self.count)
        self.exits = np.full(self.count, MODEL_END, np.int32)
        self.forced = np.zeros(self.count, np.bool_)
        self.variants = np.zeros(self.count, np.int16)

    def origins(self, rows: slice | Rows) -> list[Origin]:
        """Return what tells whether each of some rows, at least one, may be evidence."""
        arrays = [self.inputs[name][rows] for name in sorted(self.inputs)]
        return [(print_, self.source) for print_ in fingerprints(arrays, len(arrays[0]))]


class CompletionQueue:
    """Carries completed requests from the streams' threads to the event loop.

    The loop is woken once, however many requests are completed meanwhile. Filled and woken under
    the executor's lock, which the loop does not wait for: a thread of a stream that met it there
    would have to let it run on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start empty; ``clock`` is the executor's."""
        self._clock = clock
        self._woken_s = 0.0
        self._delay_s = 0.0
        self._spread_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completed: deque[tuple[asyncio.Future[Request], Request]] = deque()
        self._waking = False

    @property
    def delay_s(self) -> float:
        """How long an answer takes into the event loop: the running mean, and two deviations.

        What has to be answered by a time has to be completed so much earlier.
        """
        return self._delay_s + 2.0 * self._spread_s

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver in this loop."""
        self._loop = loop

    def add(self, future: asyncio.Future[Request] | None, request: Request) -> None:
        """Put a request in, to resolve ``future`` with it; the lock is held."""
        if future is not None:
            self._completed.append((future, request))

    def wake(self) -> None:
        """Have the event loop deliver what is in; the lock is held."""
        if self._completed and not self._waking and self._loop is not None:
            self._waking = True
            self._woken_s = self._clock()
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody waits any more
                _log.debug("the event loop is closed")

    def _deliver(self) -> None:
        """Resolve futures; runs in the event loop."""
        # A stall of the loop is no reason to refuse what comes after it: one observation counts
        # for at most a few times the usual.
        most_s = _MOST * self.delay_s + _LEAST_BOUND_S
        delay_s = min(self._clock() - self._woken_s, most_s)
        self._spread_s += _MEMORY * (abs(delay_s - self._delay_s) - self._spread_s)
        self._delay_s += _MEMORY * (delay_s - self._delay_s)
        self._waking = False  # before the look at what is in: what comes later wakes it anew
        while self._completed:
            future, request = self._completed.popleft()
            if not future.done():  # its caller may have left
                future.set_result(request)


class RequestTable:
    """The open requests of a model by number, and the account of their samples.

    Every accepted sample is accounted for exactly once, as answered or as failed by some cause.
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
        """Numbers of requests whose times are noted, and of some that have ended."""
        self._followed: dict[int, Request] = {}
        """Answered ones whose callers wait for what runs on."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> int:
        """Requests that somebody waits for: open, or with a second answer to come."""
        return len(self._open) + len(self._followed)

    def accept(self, request: Request) -> None:
        """Open a request."""
        self._open[request.number] = request
        if request.timeline is not None:
            self.traced.add(request.number)
        self.counters.requests += 1
        self.counters.samples += request.count
        self.counters.unseen_lengths += request.unseen

    def get(self, number: int) -> Request | None:
        """Find an open request by its number."""
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
        """Note the answers that a stage gave to n samples of a request, if it is still open.

        ``rows`` [n] are within the request, ``values`` [n, classes]; ``exit_index`` of ``variant``
        answered, or ``MODEL_END``; ``forced`` [n] are below its threshold, to be in time;
        ``following`` of them run on.
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
        """Note what the model's end said of answered samples of a request, if somebody asks."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.final.fill(rows, values, confidence)
            self.lose(number, len(confidence))

    def lose(self, number: int, count: int) -> None:
        """Note that so many answered samples of a request will not get to the model's end."""
        request = self._followed.get(number) or self._open.get(number)
        if request is not None and request.final is not None:
            request.following -= count
            self._follow_up(request)

    def forget(self, number: int) -> None:
        """Note that nobody waits for the final answers of a request any more."""
        self._followed.pop(number, None)

    def drop(self, dropped: Iterable[Dropped], failure: EngineError | None = None) -> None:
        """Account for samples that leave without an answer; ``failure`` says why some failed."""
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
        """Fail and close every open request; gives their numbers."""
        requests, self._open = self._open, {}
        for request in requests.values():
            self.counters.failed[cause] += request.remaining
            self._fail(request, error)
        followed, self._followed = self._followed, {}
        for request in followed.values():  # they have their answers, and get no second ones
            self._completions.add(request.followup, request)
        return list(requests)

    def deliver(self) -> None:
        """Have the event loop resolve the futures of completed requests."""
        self._completions.wake()

    def _fail(self, request: Request, error: EngineError) -> None:
        """Tell a request's caller why there will be no answer; the first reason counts."""
        if request.error is None:
            request.error = copy_of(error)
            self._complete(request)

    def _complete(self, request: Request) -> None:
        """Hand a request back to its caller, unless the caller left."""
        if request.withdrawn:
            return
        if request.error is None:
            self.counters.latency_s.observe(self._clock() - request.submitted_s)
        self._completions.add(request.future, request)

    def _follow_up(self, request: Request) -> None:
        """Hand over the final answers once all are there."""
        if request.following == 0 and self._followed.pop(request.number, None) is not None:
            self._completions.add(request.followup, request)

    def _too_late(self, request: Request, cause: DropCause) -> EngineError:
        given_ms = (request.deadline_s - request.submitted_s) * 1e3
        if given_ms <= 0:
            late = f"{abs(given_ms):.1f} ms before the request came"
            return DeadlineExceededError(f"{self._name}: the deadline had passed {late}")
        given = f"{given_ms:.1f} ms that there were"
        if cause is DropCause.INFEASIBLE:
            return DeadlineExceededError(
                f"{self._name}: given up early, as no answer can be expected within the {given}"
            )
        return DeadlineExceededError(f"{self._name}: no answer within the {given}")


def _lost_by(request: Request) -> DropCause:
    """Why an answer is of no use: its request as a whole was given up before."""
    if request.withdrawn:
        return DropCause.CANCELLED
    late = isinstance(request.error, DeadlineExceededError)
    return DropCause.EXPIRED if late else DropCause.FAILED


def copy_of(error: EngineError) -> EngineError:
    """An error of the same kind: each caller raises one of its own, with its own traceback."""
    return type(error)(*error.args)
