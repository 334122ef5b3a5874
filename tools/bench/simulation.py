"""Serving on virtual time: the server's own scheduler and policies, and a clock that jumps.

What is simulated is the device: stages take as long as a profile says, streams do not slow each
other down, and nothing is lost on the way to and from the client. What is not simulated is the
decision: scheduler and policy are the very objects that serve. Whether and where a sample leaves
comes from recorded confidences. Same arguments, same result.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.records import CERTIFY
from offramp.certify import leaves
from offramp.engine.deployment import points_of, variants_may_serve, with_variants
from offramp.engine.options import ModelOptions
from offramp.engine.plan import Mode, make_plan
from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    ModelScheduler,
    OperatingPoints,
    Run,
    SchedulerFullError,
    Submission,
    Wait,
)
from offramp.tools.bench.outcomes import Outcomes, Status

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Behaviour:
    """The exits of recorded samples on their own, and the answer that each stage would give."""

    exits: tuple[int, ...]
    """[stages]: the exit of each; ``MODEL_END`` at the last."""
    leaves_at: NDArray[np.int64]
    """[records]: first stage where the sample is sure enough."""
    agrees: NDArray[np.bool_]
    """[stages, records]: whether the stage's answer is the source model's."""
    right: NDArray[np.bool_] | None = None
    """[stages, records]: whether it is the label; ``None`` without labels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedVariant:
    """A variant of a model, below the full one: how its samples leave, and what it takes."""

    behaviour: Behaviour
    """``agrees`` is with the full model."""
    seconds: Sequence[Sequence[float]]
    """[stages][max_batch_size + 1]: what its stages take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedOutcomes(Outcomes):
    """The outcomes of simulated requests, and which variant answered."""

    variant: NDArray[np.int16]
    """[n]: 0 is the full model; means something where OK."""
    right: NDArray[np.int8]
    """[n]: 1 answered like the label, 0 unlike, -1 unknown."""

    @property
    def accuracy(self) -> float | None:
        """Share of the answered that are answered like their labels, if those are known."""
        known = self.right[self.answered & (self.right >= 0)]
        return float(known.mean()) if known.size else None

    @property
    def variant_shares(self) -> dict[int, float]:
        """Share of the answered, by variant; of those that answered any."""
        found, counts = np.unique(self.variant[self.answered], return_counts=True)
        shares = (counts / max(counts.sum(), 1)).tolist()
        return dict(zip(found.tolist(), shares, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedModel:
    """A model on virtual time."""

    behaviour: Behaviour
    points: OperatingPoints
    """For the policy."""
    seconds: tuple[tuple[float, ...], ...]
    """[stages][max_batch_size + 1]: what stages take."""
    smaller: tuple[SimulatedVariant, ...] = ()
    """Its variants 1, 2 …, where the policy and the mode serve them."""


def model_of(
    bundle: Bundle,
    mode: Mode,
    options: ModelOptions,
    *,
    stage_overhead_s: float = 0.0,
    slowdown: float = 1.0,
) -> SimulatedModel:
    """Simulate a bundle by its profile, and its records of the certify split (unseen data).

    Its variants are simulated where the mode and the policy of ``options`` serve them.
    ``stage_overhead_s`` is what each stage takes beyond its graph; the scheduler knows it.
    ``slowdown`` is how much longer stages take than that; the scheduler finds out.
    """
    full, *smaller = (
        _variant_of(shown, mode, options, stage_overhead_s)
        for shown in (bundle.variants() if variants_may_serve(mode, options) else (bundle,))
    )
    points = with_variants(full[1], [points for _, points in smaller])
    return SimulatedModel(
        behaviour=full[0],
        points=points,
        seconds=_slowed(full[1], slowdown),
        smaller=tuple(
            SimulatedVariant(behaviour=behaviour, seconds=_slowed(points, slowdown))
            for behaviour, points in smaller
        ),
    )


def _variant_of(
    shown: Bundle, mode: Mode, options: ModelOptions, overhead_s: float
) -> tuple[Behaviour, OperatingPoints]:
    """Simulate what a bundle shows as one of its variants, by its own profile and records."""
    plan = make_plan(shown, mode=mode)
    records = shown.records()
    chosen = records["split"] == CERTIFY
    final = records["final_prediction"][chosen]
    leaves_at = np.full(len(final), len(plan.stages) - 1)
    said = np.tile(final, (len(plan.stages), 1))
    for stage in reversed(plan.stages):
        if not stage.final:
            confidence = records["confidence"][stage.answered_by][chosen]
            sure = leaves(confidence, np.float32(stage.threshold))
            leaves_at[sure] = stage.index
            said[stage.index] = records["prediction"][stage.answered_by][chosen]
    behaviour = Behaviour(
        exits=tuple(stage.answered_by for stage in plan.stages),
        leaves_at=leaves_at,
        agrees=said == final,
        right=said == records["label"][chosen] if "label" in records else None,
    )
    return behaviour, points_of(shown.profile(), records, plan, options, overhead_s=overhead_s)


def _slowed(points: OperatingPoints, slowdown: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(slowdown * s for s in row) for row in points.latencies.profiled_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedLoad:
    """Requests of one sample each."""

    arrivals_s: NDArray[np.float64]
    """[n], rising."""
    records: NDArray[np.int64]
    """[n]: which recorded sample each one sends."""
    slo_s: float = _NEVER
    """Deadline of every request, from its arrival."""
    duration_s: float


def draw_load(
    arrivals_s: NDArray[np.float64], duration_s: float, records: int, *, slo_s: float, seed: int
) -> SimulatedLoad:
    """Send records at random, each as likely as any other."""
    drawn = np.random.default_rng(seed).integers(0, records, len(arrivals_s))
    return SimulatedLoad(arrivals_s=arrivals_s, records=drawn, slo_s=slo_s, duration_s=duration_s)


def simulate(  # noqa: PLR0912, PLR0915 - one loop, and few calls in it: it is what a request costs
    model: Behaviour,
    scheduler: ModelScheduler,
    stage_s: Sequence[Sequence[float]],
    load: SimulatedLoad,
    *,
    streams: int,
    runs_on: NDArray[np.bool_] | None = None,
    smaller: Sequence[SimulatedVariant] = (),
    losing_s: Sequence[float] = (),
) -> SimulatedOutcomes:
    """Run a load to its end on virtual time.

    ``stage_s``, [stages][max_batch_size + 1], is what stages take by batch size; what the scheduler
    predicts may differ. The scheduler is fresh, and made for as many streams. ``runs_on``,
    [requests], says which run on after an early answer; ``None`` is none. ``smaller`` are the
    variants 1, 2 … that the scheduler's operating points may name. At each of the rising times
    ``losing_s`` a stream is lost for good, the last one first; what it runs is tried elsewhere.
    """
    behaviours = [model, *(variant.behaviour for variant in smaller)]
    leaves_at = [behaviour.leaves_at[load.records] for behaviour in behaviours]
    seconds = [stage_s, *(variant.seconds for variant in smaller)]
    log = _Log()
    arrivals: list[float] = [*load.arrivals_s.tolist(), _NEVER]
    following, arrival_s, slo_s = 0, arrivals[0], load.slo_s
    ends: list[tuple[float, int]] = []
    """When each busy stream ends its stage; a heap."""
    running: dict[int, Run] = {}
    idle = list(range(streams))
    """The last is asked first: it has just been busy, and may have a batch that goes on."""
    losses = [*losing_s, _NEVER]
    wake_s, loss_s, lost = _NEVER, losses[0], 0
    while True:
        end_s = ends[0][0] if ends else _NEVER
        goes_on = False
        if loss_s < _NEVER and loss_s <= min(arrival_s, end_s, wake_s):
            now_s, stream, lost = loss_s, streams - 1 - lost, lost + 1
            loss_s = losses[lost]
            if stream in idle:
                idle.remove(stream)
            else:
                del running[stream]
                ends = sorted(end for end in ends if end[1] != stream)  # a heap too
                scheduler.failed(stream, now_s)
            scheduler.suspend(stream)
        elif arrival_s <= end_s and arrival_s <= wake_s:
            if arrival_s == _NEVER:
                break
            now_s = arrival_s
            try:
                scheduler.admit(1, slo_s, 0, now_s)
                scheduler.submit(Submission(following, 1, now_s + slo_s), now_s)
            except SchedulerFullError:
                log.rejected.append(following)
            following += 1
            arrival_s = arrivals[following]
        elif end_s <= wake_s:
            now_s, stream = heapq.heappop(ends)
            run = running.pop(stream)
            exited = leaves_at[run.variant][run.requests] == run.stage
            audited = None if runs_on is None else runs_on[run.requests]
            released, _, survivors, buffered, _ = scheduler.done(stream, exited, now_s, audited)
            if len(released):
                log.answered(run, released, now_s)
            goes_on = buffered is None and len(survivors) > 0
            idle.append(stream)
        else:
            now_s = wake_s
        if not idle:
            continue
        wake_s = _NEVER
        while idle and (goes_on or scheduler.waiting):
            goes_on = False
            decision = scheduler.next(idle[-1], now_s)
            if isinstance(decision, Run):
                stream = idle.pop()
                running[stream] = decision
                takes_s = seconds[decision.variant][decision.stage][len(decision.requests)]
                heapq.heappush(ends, (now_s + takes_s, stream))
                if decision.stage == 0:
                    log.started(decision)
                continue
            if isinstance(decision, Wait):
                wake_s = decision.until_s
            break
    return log.outcomes(behaviours, load, scheduler.take_dropped())


class _Log:
    """The events of a simulation as they happen, made into arrays at the end."""

    def __init__(self) -> None:
        self.rejected: list[int] = []
        self._requests: list[NDArray[np.int64]] = []
        self._when: list[tuple[float, int, int]] = []
        """Time, stage and variant."""
        self._first: list[NDArray[np.int64]] = []
        self._sizes: list[int] = []

    def answered(self, run: Run, released: NDArray[np.intp], now_s: float) -> None:
        requests = run.requests
        self._requests.append(requests if len(released) == len(requests) else requests[released])
        self._when.append((now_s, run.stage, run.variant))

    def started(self, run: Run) -> None:
        self._first.append(run.requests)
        self._sizes.append(len(run.requests))

    def outcomes(
        self, behaviours: Sequence[Behaviour], load: SimulatedLoad, dropped: Sequence[Dropped]
    ) -> SimulatedOutcomes:
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
        for item in dropped:
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
    """[n] each: the exit of a stage of a variant, if it is outside the promise, agrees, is right.

    Outside is what leaves below its threshold, and whatever is not the full model's answer.
    """
    count = len(records)
    exit_, forced = np.zeros(count, np.int16), np.zeros(count, np.bool_)
    agrees, right = np.zeros(count, np.int8), np.full(count, -1, np.int8)
    for number, behaviour in enumerate(behaviours):
        mine = variant == number
        at, sample = stage[mine], records[mine]
        exit_[mine] = np.array(behaviour.exits, np.int16)[at]
        forced[mine] = (behaviour.leaves_at[sample] > at) | (number > 0)
        agrees[mine] = behaviour.agrees[at, sample]
        if behaviour.right is not None:
            right[mine] = behaviour.right[at, sample]
    return exit_, forced, agrees, right
