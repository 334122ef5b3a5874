"""Chooses the next model, where several models share the streams of one device.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over the busy seconds of streams: the model
that has used the device for the shortest time, relative to its weight, is served first. A model
that was idle starts again with the same used time as the other models: unused time is not saved up,
so a burst of one model never blocks the others. Batches are not preempted. Earliest deadline first
across models was rejected: the model with the tightest deadlines would take the whole device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offramp.engine.scheduling.decisions import (
    NOTHING,
    Decision,
    Run,
    StepOutcome,
    Submission,
    Wait,
    wait_until,
)
from offramp.engine.scheduling.scheduler import ModelScheduler


@dataclass(slots=True)
class _Share:
    """A model's share of the device."""

    name: str
    scheduler: ModelScheduler
    weight: float
    used_s: float = 0.0
    """Stream seconds that it has used, divided by its weight; comparable among busy models."""
    busy: bool = False
    """True if the model has waiting or running samples."""


class DeviceScheduler:
    """The scheduler of a device, which all its models share; the caller serialises the calls.

    Each model's scheduler has as many streams as the device. ``weights`` are the relative shares
    while all models are busy; 1 by default.
    """

    def __init__(
        self, models: Mapping[str, ModelScheduler], *, weights: Mapping[str, float] | None = None
    ) -> None:
        self._shares: dict[str, _Share] = {}
        self._suspended: set[int] = set()
        """Streams that are out of service for all models."""
        self._flushes = False
        for name, model in models.items():
            self.add(name, model, weight=(weights or {}).get(name, 1.0))
        self._running: dict[int, _Share] = {}
        """:class:`_Share` of the model whose batch runs, by stream."""
        self._started_s: dict[int, float] = {}

    def add(self, name: str, model: ModelScheduler, *, weight: float = 1.0) -> None:
        """Add a model that shares the device from now on; its name must be unused."""
        if not weight > 0.0:
            raise ValueError(f"the weight of {name} is {weight}, expected above 0")
        self._shares[name] = _Share(name, model, weight)
        for stream in self._suspended:
            model.suspend(stream)
        if self._flushes:
            model.flush()

    def remove(self, name: str) -> None:
        """Remove a model without a batch on any stream; its waiting samples are lost."""
        assert not self.runs(name), f"a batch of {name} is on a stream"
        del self._shares[name]

    def runs(self, name: str) -> bool:
        """Return whether a batch of a model is on a stream."""
        return any(share.name == name for share in self._running.values())

    def model(self, name: str) -> ModelScheduler:
        """Return the scheduler of a served model."""
        return self._shares[name].scheduler

    @property
    def waiting(self) -> bool:
        """True if a stream without a batch may find work, now or soon."""
        return any(share.scheduler.waiting for share in self._shares.values())

    def submit(self, model: str, submission: Submission, now_s: float) -> StepOutcome:
        """Queue a request; see :meth:`ModelScheduler.submit`."""
        share = self._shares[model]
        outcome = share.scheduler.submit(submission, now_s)
        if not share.busy:
            share.busy = True
            others = [s.used_s for s in self._shares.values() if s.busy and s is not share]
            # While no model is busy, the virtual time is that of the most served model.
            everybody = max(s.used_s for s in self._shares.values())
            share.used_s = max(share.used_s, min(others, default=everybody))
        return outcome

    def next(self, stream: int, now_s: float) -> Decision:
        """Decide what the idle ``stream`` runs, and for which model."""
        mine = self._running.get(stream)
        if mine is not None:
            decision = mine.scheduler.next(stream, now_s)
            assert isinstance(decision, Run), "a stream with a batch continues it"
            self._started_s[stream] = now_s
            return decision._replace(model=mine.name, outcomes=_named(decision, mine))
        until_s, outcomes = float("inf"), list[StepOutcome]()
        busy = [s for s in self._shares.values() if s.busy and not s.scheduler.suspends(stream)]
        for share in sorted(busy, key=lambda share: share.used_s):  # least served first
            decision = share.scheduler.next(stream, now_s)
            outcomes += _named(decision, share)
            if isinstance(decision, Run):
                self._running[stream] = share
                self._started_s[stream] = now_s
                return decision._replace(model=share.name, outcomes=tuple(outcomes))
            if isinstance(decision, Wait):
                until_s = min(until_s, decision.until_s)
            share.busy = share.scheduler.busy
        return replace(wait_until(until_s), outcomes=tuple(outcomes))

    def update(
        self,
        stream: int,
        exited: NDArray[np.bool_],
        now_s: float,
        runs_on: NDArray[np.bool_] | None = None,
    ) -> StepOutcome:
        """Record that the run of ``stream`` ended; see :meth:`ModelScheduler.update`."""
        self._charge(stream, now_s)
        outcome = self._running[stream].scheduler.update(stream, exited, now_s, runs_on)
        if not len(outcome.survivors) or outcome.buffered is not None:
            del self._running[stream]
        return outcome

    def failed(self, stream: int, now_s: float, *, blamed: bool = True) -> StepOutcome:
        """Record that the batch of ``stream`` failed; see :meth:`ModelScheduler.failed`."""
        if stream not in self._running:
            return NOTHING
        self._charge(stream, now_s)
        return self._running.pop(stream).scheduler.failed(stream, now_s, blamed=blamed)

    def interrupted(self, stream: int, now_s: float) -> StepOutcome:
        """Record that a stream's worker was lost; see :meth:`ModelScheduler.interrupted`."""
        if stream not in self._running:
            return NOTHING
        self._charge(stream, now_s)
        return self._running.pop(stream).scheduler.interrupted(stream, now_s)

    def suspend(self, stream: int, model: str | None = None) -> None:
        """Take a stream out of service for one model or all; no batch of these may run on it."""
        if model is None:
            self._suspended.add(stream)
        for share in self._shares.values():
            if model in (None, share.name):
                share.scheduler.suspend(stream)

    def resume(self, stream: int, model: str | None = None) -> None:
        """Put a stream into service again, for one model or for all."""
        if model is None:
            self._suspended.discard(stream)
        for share in self._shares.values():
            if model in (None, share.name):
                share.scheduler.resume(stream)

    def flush(self, model: str | None = None) -> None:
        """Stop waiting for fuller batches of a model, or of all models, from now on."""
        self._flushes = self._flushes or model is None
        for share in self._shares.values():
            if model in (None, share.name):
                share.scheduler.flush()

    def _charge(self, stream: int, now_s: float) -> None:
        share = self._running[stream]
        share.used_s += (now_s - self._started_s[stream]) / share.weight


def _named(decision: Decision, share: _Share) -> tuple[StepOutcome, ...]:
    """Return the samples that left while a model decided, with the model's name."""
    if not decision.outcomes:
        return ()
    return tuple(outcome._replace(model=share.name) for outcome in decision.outcomes)
