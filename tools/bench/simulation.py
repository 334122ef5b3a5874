"""Simulation of serving on virtual time, with the server's own scheduler and policies.

The device is simulated: stages take the durations of a profile, streams do not slow each other
down, and transfers to and from the client take no time. Decisions are not simulated: scheduler and
policy are the objects used for serving. Exits come from recorded confidences. The result is
deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.certify import MODEL_END
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    ModelScheduler,
    Placement,
    Run,
    SchedulerFullError,
    StepOutcome,
    Submission,
    Wait,
)
from offramp.tools.bench.common.outcomes import Outcomes, Status
from offramp.tools.bench.simulated_devices import SecondsTable, SimulatedDevices
from offramp.tools.bench.simulated_model import Behaviour, SimulatedVariant

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedOutcomes(Outcomes):
    """The outcomes of simulated requests, and which variant answered."""

    variant: NDArray[np.int16]
    """[n]: variant that answered, 0 for the full model; valid if the status is OK."""
    right: NDArray[np.int8]
    """[n]: 1 if the answer is the label, 0 if it differs, -1 if unknown."""

    @property
    def accuracy(self) -> float | None:
        """Share of answers that are equal to the labels; ``None`` if labels are unknown."""
        known = self.right[self.answered & (self.right >= 0)]
        return float(known.mean()) if known.size else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedLoad:
    """A load of requests with one sample each."""

    arrivals_s: NDArray[np.float64]
    """[n]: arrival times, rising."""
    records: NDArray[np.int64]
    """[n]: recorded sample that each request sends."""
    slo_s: float = _NEVER
    """Deadline of every request, from its arrival."""
    duration_s: float


def draw_load(
    arrivals_s: NDArray[np.float64], duration_s: float, records: int, *, slo_s: float, seed: int
) -> SimulatedLoad:
    """Return a load whose requests send records at random, each equally likely."""
    drawn = np.random.default_rng(seed).integers(0, records, len(arrivals_s))
    return SimulatedLoad(arrivals_s=arrivals_s, records=drawn, slo_s=slo_s, duration_s=duration_s)


def simulate(
    model: Behaviour,
    scheduler: ModelScheduler,
    stage_s: SecondsTable,
    load: SimulatedLoad,
    *,
    streams: int,
    runs_on: NDArray[np.bool_] | None = None,
    smaller: Sequence[SimulatedVariant] = (),
    losing_s: Sequence[float] = (),
    placement: Placement | None = None,
    slower: Mapping[int, float] | None = None,
) -> SimulatedOutcomes:
    """Run a load to its end on virtual time.

    ``stage_s``, [stages][max_batch_size + 1], has durations of stages by batch size; the
    scheduler's predictions may differ. The scheduler must be new, and made for the same number of
    streams. ``runs_on``, bool [requests], marks requests that run on after an early answer;
    ``None`` marks none. ``smaller`` are the variants 1, 2 … that the scheduler's operating points
    may name. At each of the increasing times ``losing_s`` a stream is lost permanently, the last
    one first; its running batch is retried on another one.

    ``placement`` has the true durations of stages on each stream, and of transfers between streams:
    the scheduler's own placement, or another one for the same streams, which it does not expect.
    ``slower`` are stragglers: the slowdown of a stream, by its number, relative to others of its
    kind.
    """
    behaviours = [model, *(variant.behaviour for variant in smaller)]
    tables = [stage_s, *(variant.seconds for variant in smaller)]
    simulation = _Simulation(
        scheduler,
        SimulatedDevices(tables, streams, placement, slower),
        load,
        leaves_at=[behaviour.leaves_at[load.records] for behaviour in behaviours],
        runs_on=runs_on,
        losing_s=losing_s,
        streams=streams,
    )
    if placement is None or placement.is_shared:
        simulation.run(simulation.ask_the_last)
    else:
        simulation.run(simulation.ask_all)
    return simulation.log.outcomes(behaviours, load)


class _Simulation:
    """State of one simulation: the next events, and the run of each stream."""

    def __init__(
        self,
        scheduler: ModelScheduler,
        devices: SimulatedDevices,
        load: SimulatedLoad,
        *,
        leaves_at: Sequence[NDArray[np.int64]],
        runs_on: NDArray[np.bool_] | None,
        losing_s: Sequence[float],
        streams: int,
    ) -> None:
        self.log = _Log()
        self._scheduler, self._devices, self._slo_s = scheduler, devices, load.slo_s
        self._leaves_at, self._runs_on = leaves_at, runs_on
        self._arrivals: list[float] = [*load.arrivals_s.tolist(), _NEVER]
        self._following = 0
        """Index of the request that arrives next."""
        self._losses = [_NEVER, *reversed(losing_s)]
        """Times at which streams are lost; the next one is last in the list."""
        self._next_lost = streams - 1
        self._ends: list[tuple[float, int]] = []
        """End time of each busy stream's stage, with the stream; a heap."""
        self._running: dict[int, Run] = {}
        self._idle = list(range(streams))
        """Idle streams; the last one is asked first, because it may have a batch that continues."""
        self._wake_s = _NEVER
        """Time at which an idle stream must be asked again."""
        self._goes_on = False
        """True if the last idle stream has a batch that continues."""

    def run(self, ask: Callable[[float], None]) -> None:
        """Process events in order, and ask idle streams after each; losses first."""
        ends, arrivals, losses = self._ends, self._arrivals, self._losses
        while True:
            loss_s, arrival_s = losses[-1], arrivals[self._following]
            end_s = ends[0][0] if ends else _NEVER
            now_s = min(loss_s, arrival_s, end_s, self._wake_s)
            if now_s == _NEVER:
                break
            if loss_s == now_s:
                self._lose(now_s)
            elif arrival_s == now_s:
                self._arrive(now_s)
            elif end_s == now_s:
                self._end(now_s)
            self._wake_s = _NEVER
            if self._idle:
                ask(now_s)

    def ask_the_last(self, now_s: float) -> None:
        """Ask idle streams for work, the last one first.

        The streams are equal: if one of them gets no work, no other gets any.
        """
        idle, scheduler = self._idle, self._scheduler
        while idle and (self._goes_on or scheduler.waiting):
            self._goes_on = False
            decision = scheduler.next(idle[-1], now_s)
            if not isinstance(decision, Run):
                self._follow(*decision.outcomes)
                self._wake_s = _wake_s(decision, now_s)
                break
            self._start(idle.pop(), decision, now_s)

    def ask_all(self, now_s: float) -> None:
        """Ask every idle stream; repeat while any gets work, because others may then steal more."""
        idle, scheduler = self._idle, self._scheduler
        if self._goes_on:
            self._goes_on = False
            decision = scheduler.next(idle[-1], now_s)
            assert isinstance(decision, Run), "a stream with a batch goes on with it"
            self._start(idle.pop(), decision, now_s)
        found = True
        while found and scheduler.waiting:
            found, self._wake_s = False, _NEVER
            for stream in idle[::-1]:
                decision = scheduler.next(stream, now_s)
                if isinstance(decision, Run):
                    found = True
                    idle.remove(stream)
                    self._start(stream, decision, now_s)
                else:
                    self._follow(*decision.outcomes)
                    self._wake_s = min(self._wake_s, _wake_s(decision, now_s))

    def _lose(self, now_s: float) -> None:
        """Take a stream out of the simulation permanently."""
        self._losses.pop()
        stream, self._next_lost = self._next_lost, self._next_lost - 1
        if stream in self._idle:
            self._idle.remove(stream)
        else:
            del self._running[stream]
            self._ends[:] = sorted(end for end in self._ends if end[1] != stream)  # a heap too
            self._follow(self._scheduler.failed(stream, now_s))
        self._scheduler.suspend(stream)

    def _arrive(self, now_s: float) -> None:
        """Submit the request that arrives."""
        request, self._following = self._following, self._following + 1
        try:
            self._scheduler.admit(1, self._slo_s, 0, now_s)
            submission = Submission(request, 1, now_s + self._slo_s)
            self._follow(self._scheduler.submit(submission, now_s))
        except SchedulerFullError as error:
            self._follow(error.outcome)
            self.log.rejected.append(request)

    def _start(self, stream: int, run: Run, now_s: float) -> None:
        """Start a run of the scheduler on a stream."""
        self._running[stream] = run
        heapq.heappush(self._ends, (now_s + self._devices.takes_s(stream, run), stream))
        self._follow(*run.outcomes)
        if run.stage == 0:
            self.log.started(run)

    def _end(self, now_s: float) -> None:
        """End the run of the stream that is first."""
        _, stream = heapq.heappop(self._ends)
        run = self._running.pop(stream)
        requests = run.samples.requests
        exited = self._leaves_at[run.variant][requests] == run.stage
        audited = None if self._runs_on is None else self._runs_on[requests]
        outcome = self._scheduler.update(stream, exited, now_s, audited)
        if len(outcome.released):
            self.log.answered(run, outcome.released, now_s)
        self._idle.append(stream)
        if outcome.buffered is None:
            self._goes_on = len(outcome.survivors) > 0
        else:
            self._devices.keep(outcome.buffered, stream)
        self._follow(outcome)

    def _follow(self, *outcomes: StepOutcome) -> None:
        """Record outcomes, and drop the locations of rows that are no longer waiting."""
        for outcome in outcomes:
            self.log.dropped += outcome.dropped
            self._devices.forget(outcome.discarded)


def _wake_s(decision: Wait | Idle, now_s: float) -> float:
    """Return the time at which a stream that got no work must be asked again."""
    if not isinstance(decision, Wait):
        return _NEVER
    assert decision.until_s > now_s, f"waiting at {now_s} until {decision.until_s} is for ever"
    return decision.until_s


class _Log:
    """Records the events of a simulation, and returns them as arrays at the end."""

    def __init__(self) -> None:
        self.rejected: list[int] = []
        self.dropped: list[Dropped] = []
        self._requests: list[NDArray[np.int64]] = []
        self._when: list[tuple[float, int, int]] = []
        """Time, stage and variant of each request's answer."""
        self._first: list[NDArray[np.int64]] = []
        self._sizes: list[int] = []

    def answered(self, run: Run, released: NDArray[np.intp], now_s: float) -> None:
        requests = run.requests
        self._requests.append(requests if len(released) == len(requests) else requests[released])
        self._when.append((now_s, run.stage, run.variant))

    def started(self, run: Run) -> None:
        self._first.append(run.requests)
        self._sizes.append(len(run.requests))

    def outcomes(self, behaviours: Sequence[Behaviour], load: SimulatedLoad) -> SimulatedOutcomes:
        count = len(load.arrivals_s)
        latency_s = np.full(count, np.nan)
        stage, variant = np.zeros(count, np.int64), np.zeros(count, np.int16)
        status = np.full(count, Status.UNANSWERED, np.uint8)
        batch_size = np.zeros(count, np.int16)
        if self._requests:
            requests = np.concatenate(self._requests)
            when = np.repeat(np.array(self._when), [len(r) for r in self._requests], axis=0)
            latency_s[requests] = when[:, 0] - load.arrivals_s[requests]
            stage[requests], variant[requests] = when[:, 1], when[:, 2]
            status[requests] = Status.OK
        if self._first:
            sizes = np.repeat(self._sizes, [len(r) for r in self._first])
            batch_size[np.concatenate(self._first)] = sizes
        status[self.rejected] = Status.REJECTED
        for item in self.dropped:
            late = item.cause in {DropCause.EXPIRED, DropCause.INFEASIBLE}
            status[item.request] = Status.EXPIRED if late else Status.FAILED
        exit_, forced, agrees, right = _answers(behaviours, load.records, stage, variant)
        return SimulatedOutcomes(
            intended_s=load.arrivals_s,
            latency_s=latency_s,
            status=status,
            exit=exit_,
            forced=forced & (status == Status.OK),
            agrees=agrees,
            batch_size=batch_size,
            duration_s=load.duration_s,
            variant=variant,
            right=right,
        )


def _answers(
    behaviours: Sequence[Behaviour],
    records: NDArray[np.int64],
    stage: NDArray[np.int64],
    variant: NDArray[np.int16],
) -> tuple[NDArray[np.int16], NDArray[np.bool_], NDArray[np.int8], NDArray[np.int8]]:
    """Return four arrays [n]: exit, true if outside the promise, agreement, and correctness.

    An answer is outside the promise if it left below the threshold, or is not from the full model.
    """
    count = len(records)
    exit_, forced = np.zeros(count, np.int16), np.zeros(count, np.bool_)
    agrees, right = np.zeros(count, np.int8), np.full(count, -1, np.int8)
    for number, behaviour in enumerate(behaviours):
        mine = variant == number
        at, sample = stage[mine], records[mine]
        exits = [MODEL_END if exit_ is None else exit_ for exit_ in behaviour.exits]
        exit_[mine] = np.array(exits, np.int16)[at]
        forced[mine] = (behaviour.leaves_at[sample] > at) | (number > 0)
        agrees[mine] = behaviour.agrees[at, sample]
        if behaviour.right is not None:
            right[mine] = behaviour.right[at, sample]
    return exit_, forced, agrees, right
