"""A controller's loop on recorded answers: chunks of samples instead of a clock.

The exit of a sample, and its agreement with the source model, are recorded from the real model. The
cost of an answer is predicted from the profile. A chunk is served under the policy that is active
when it starts; its records reach the controller some chunks later, as in the pipeline; jobs run
immediately, but their results arrive after a delay of their run time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.adapt.sequence import Population, SampleSequence, answering_places

from offramp.bundle import NEVER, ExitPolicy
from offramp.certify import (
    MODEL_END,
    UNKNOWN,
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    reaches,
)
from offramp.engine.control.controller import ControlEvent, Controller, ControlStatus, Job
from offramp.engine.control.costs import CostModel
from offramp.engine.stages.plan import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedController:
    """A controller, and the mode that decides what happens to answered samples."""

    label: str
    description: str
    controller: Controller
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The pace of a replay: chunks, delays, and the assumed rate."""

    chunk: int = 32
    """Samples that start together, under one policy."""
    delay_chunks: int = 2
    """Number of chunks that start before the records of one reach the controller."""
    tuning_delay: int | None = None
    """Number of samples that start while a job runs; ``None`` computes it from run time and
    ``rate``."""
    rate: float = 2000.0
    """Assumed number of samples per second."""
    seed: int = 0
    """Seed of the audits' random draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """A job that a controller ran during a replay, such as a tuning."""

    purpose: str
    taken_at: int
    """Number of samples that had started before the job."""
    arrived_at: int
    took_ms: float
    """Measured run time of the job in ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the active policy."""

    at: int
    """Index of the first sample under the new policy."""
    policy: ExitPolicy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayTrace:
    """The course of a replay: where and how each of N samples was answered."""

    answered_at: IntArray
    """int64[N]: the exit that answered; :data:`MODEL_END` if none did."""
    agrees: BoolArray
    """bool[N]: whether the answer is the source model's; measured."""
    audited: BoolArray
    """bool[N]: true if an exit answered the sample, and the sample ran to the end nevertheless."""
    latency_ms: FloatArray
    """float64[N]: time until the answer; predicted."""
    compute_ms: FloatArray
    """float64[N]: time until the sample left; predicted."""
    policy: IntArray
    """int64[N]: index in ``changes`` of the policy that served the sample."""
    changes: tuple[Change, ...]
    """Changes of the policy; the first entry is the policy at the start."""
    chunk: int
    """Number of samples per chunk."""
    statuses: tuple[ControlStatus, ...]
    """Status of the controller at the start of each chunk."""
    tunings: tuple[ReplayedJob, ...]
    events: tuple[tuple[int, ControlEvent], ...]
    """Events of the controller, each with the number of samples that had started before it."""
    source_ms: float
    """Time of the source model for a sample; predicted."""


@dataclass(slots=True)
class _Out:
    """A job whose result has not arrived yet."""

    job: Job
    result: Any
    arrives_at: int


@dataclass(slots=True)
class _Log:
    changes: list[Change] = field(default_factory=list)
    statuses: list[ControlStatus] = field(default_factory=list)
    tunings: list[ReplayedJob] = field(default_factory=list)
    events: list[tuple[int, ControlEvent]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Served:
    """The answers to the samples of a chunk, and the part that the controller may read."""

    answered_at: IntArray
    complete: BoolArray
    latency_ms: FloatArray
    compute_ms: FloatArray
    seen: Observations


def replay(
    sequence: SampleSequence,
    contender: ComparedController,
    costs: CostModel,
    settings: ReplaySettings,
) -> ReplayTrace:
    """Serve a sequence under a controller, which must be new and cannot be used again.

    ``costs`` has the costs of all exits of the bundle, at the batch size of a chunk.
    """
    controller = contender.controller
    coins = np.random.default_rng(settings.seed).random(len(sequence))
    log, out, chunks = _Log(), None, list[_Served]()
    for number, start in enumerate(range(0, len(sequence), settings.chunk)):
        rows = slice(start, min(start + settings.chunk, len(sequence)))
        if out is not None and rows.start >= out.arrives_at:
            controller.finish(out.job, out.result)
            out = None
        policy = controller.policy
        if not log.changes or policy.version != log.changes[-1].policy.version:
            log.changes.append(Change(at=rows.start, policy=policy))
        log.statuses.append(controller.status())
        mode, probability = contender.mode, controller.audit_probability
        if mode is not Mode.AUDIT:
            probability = float(mode.observed)
        runs_on = coins[rows] < probability
        samples = sequence.drawn.take(rows)
        served = _serve(samples, policy, costs, mode=mode, runs_on=runs_on, probability=probability)
        chunks.append(served)
        if mode.observed and number >= settings.delay_chunks:
            controller.observe(chunks[number - settings.delay_chunks].seen)
            if out is None and (job := controller.take_job()) is not None:
                out = _run(job, rows.stop, settings, log)
        log.events += [(rows.stop, event) for event in controller.take_events()]
    return _trace(sequence, log, chunks, costs, settings)


def _serve(
    samples: Population,
    policy: ExitPolicy,
    costs: CostModel,
    *,
    mode: Mode,
    runs_on: BoolArray,
    probability: float,
) -> _Served:
    """Send samples through the model, as stages and exits would.

    ``runs_on``, bool by sample, is true for samples that run to the end even if an exit answers
    them. It was drawn before, with the given ``probability``.
    """
    count, exits = len(samples), samples.exits
    active = [a.exit for a in policy.active if mode.observed or a.threshold < NEVER]
    answered_at = answering_places(samples.confidence, policy)
    complete = (answered_at == MODEL_END) | runs_on
    in_use = np.zeros((exits, 1), np.bool_)
    in_use[active] = True
    reached = reaches(answered_at, range(exits))
    known = in_use & (reached | complete)
    until = np.full(exits + 1, np.nan)
    until[[*active, exits]] = costs.latency_ms(active)
    seen = Observations(
        confidence=np.where(known, samples.confidence, np.float32(np.nan)),
        prediction=np.where(known, samples.prediction, np.int32(UNKNOWN)),
        answered_at=answered_at,
        final=np.where(complete, samples.final, np.int32(UNKNOWN)),
        audit_probability=np.full(count, probability),
        policy_version=np.full(count, policy.version),
        forced=np.zeros(count, np.bool_),
    )
    return _Served(
        answered_at=answered_at,
        complete=complete,
        latency_ms=until[answered_at],
        compute_ms=np.where(complete, until[exits], until[answered_at]),
        seen=seen,
    )


def _run(job: Job, started: int, settings: ReplaySettings, log: _Log) -> _Out:
    """Run a job now, and return it with the arrival time of its result."""
    begin_s = time.perf_counter()
    result = job.run()
    took_s = time.perf_counter() - begin_s
    delay, late = settings.tuning_delay, math.ceil(took_s * settings.rate)
    arrives_at = started + (late if delay is None else delay)
    log.tunings.append(
        ReplayedJob(
            purpose=job.purpose, taken_at=started, arrived_at=arrives_at, took_ms=took_s * 1e3
        )
    )
    return _Out(job, result, arrives_at)


def _trace(
    sequence: SampleSequence,
    log: _Log,
    chunks: list[_Served],
    costs: CostModel,
    settings: ReplaySettings,
) -> ReplayTrace:
    answered_at = np.concatenate([c.answered_at for c in chunks])
    complete = np.concatenate([c.complete for c in chunks])
    every = np.arange(len(sequence))
    starts = np.array([change.at for change in log.changes])
    return ReplayTrace(
        answered_at=answered_at,
        agrees=sequence.drawn.agrees[answered_at, every],
        audited=complete & (answered_at != MODEL_END),
        latency_ms=np.concatenate([c.latency_ms for c in chunks]),
        compute_ms=np.concatenate([c.compute_ms for c in chunks]),
        policy=np.searchsorted(starts, every, side="right") - 1,
        changes=tuple(log.changes),
        chunk=settings.chunk,
        statuses=tuple(log.statuses),
        tunings=tuple(log.tunings),
        events=tuple(log.events),
        source_ms=costs.source_ms,
    )
