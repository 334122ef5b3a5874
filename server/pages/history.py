"""The last 15 minutes of every served model, for the curves of the status page.

Every 5 s a :class:`HistoryRecorder` takes a snapshot of the engine's statistics on the event loop;
a :class:`History` keeps the differences. A model takes at most about 200 KiB: 180 points and 100
events. Nothing is written to disk, and an unloaded model is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aiohttp import web

from offramp.engine.requests.statistics import CountersSnapshot, Histogram, ModelStatistics
from offramp.engine.serving.totals import totals_of
from offramp.server.common.served import ServedEngine
from offramp.server.pages.events import (
    ModelChange,
    changes_between,
    readiness_change,
    was_loaded_again,
)

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0
"""Seconds between two snapshots."""
POINTS: Final = 180
"""Number of intervals kept: 15 minutes."""
EVENTS: Final = 100
"""Number of events kept for each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPoint:
    """A model's figures between two snapshots; times are on the monotonic clock."""

    start_s: float
    end_s: float
    requests_per_s: float
    """Number of accepted requests per second."""
    samples_per_s: float
    """Number of accepted samples per second."""
    failed_per_s: float
    """Number of samples per second without an answer, including samples that were refused."""
    latency_p50_s: float | None
    """Median time from submission to response; ``None`` if no request was answered."""
    latency_p99_s: float | None
    answers: Mapping[str, int]
    """Number of answered samples by place (an exit or the model's end), where there are any."""
    disagreement: float | None
    """Measured share of answers that differ from the unmodified model's, at the interval's end."""
    upper_bound: float | None
    """Upper confidence bound on the disagreement; ``None`` before there is one."""
    constraint: float | None
    """Largest share of such answers that the promise allows; ``None`` without a controller."""

    def share(self, place: str) -> float | None:
        """Return the share of answers from a place; ``None`` if there were no answers."""
        total = sum(self.answers.values())
        return self.answers.get(place, 0) / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPoint:
    """Requests of all models that were refused or failed between two snapshots."""

    start_s: float
    end_s: float
    refused_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvent:
    """A change of a model between two snapshots."""

    time_s: float
    """Time of the snapshot that showed the change, on the monotonic clock."""
    change: ModelChange


class ModelHistory:
    """Points of the curves of one model, and its events."""

    def __init__(self, statistics: ModelStatistics, *, ready: bool, now_s: float) -> None:
        self.points: deque[IntervalPoint] = deque(maxlen=POINTS)
        """Points, one for each interval, oldest first."""
        self.events: deque[ModelEvent] = deque(maxlen=EVENTS)
        """Changes of the model, oldest first."""
        self._statistics = statistics
        self._totals = totals_of(statistics)
        self._ready = ready
        self._taken_s = now_s

    def record(self, statistics: ModelStatistics, *, ready: bool, now_s: float) -> None:
        """Add the interval since the last snapshot, and its changes."""
        totals = totals_of(statistics)
        before = self._totals
        if was_loaded_again(self._statistics, statistics):
            before = _without_counts(totals)  # the new counters began at 0
        point = _point(before, totals, start_s=self._taken_s, end_s=now_s)
        self.points.append(_with_control(point, statistics))
        changes = [
            *changes_between(self._statistics, statistics),
            *readiness_change(before=self._ready, now=ready),
        ]
        self.events.extend(ModelEvent(time_s=now_s, change=change) for change in changes)
        self._statistics, self._totals = statistics, totals
        self._ready, self._taken_s = ready, now_s

    def places(self) -> list[str]:
        """Return the places that gave answers in the kept intervals, in depth order."""
        known = [stage.label for stage in self._totals.stages]
        answered = dict.fromkeys(place for point in self.points for place in point.answers)
        gone = [place for place in answered if place not in known]
        return gone + [place for place in known if place in answered]


class History:
    """The history of all models of a server; used on one thread."""

    def __init__(self) -> None:
        self.models: dict[str, ModelHistory] = {}
        """Histories of the models that are served now, by name."""
        self.refused: deque[RefusedPoint] = deque(maxlen=POINTS)
        """Points of refused requests, oldest first."""
        self.taken_s = 0.0
        """Time of the latest snapshot on the monotonic clock."""
        self._unix_offset_s = 0.0
        self._refused: int | None = None

    def record(
        self,
        statistics: Mapping[str, ModelStatistics],
        *,
        ready: Mapping[str, bool],
        refused: int,
        now_s: float,
        unix_s: float,
    ) -> None:
        """Record a snapshot; ``refused`` is the number of requests refused since the start.

        ``now_s`` is the time on the monotonic clock, ``unix_s`` the same instant in Unix seconds.
        """
        for name in self.models.keys() - statistics.keys():
            del self.models[name]
        for name, model in statistics.items():
            if name in self.models:
                self.models[name].record(model, ready=ready[name], now_s=now_s)
            else:
                self.models[name] = ModelHistory(model, ready=ready[name], now_s=now_s)
        if self._refused is not None:
            rate = (refused - self._refused) / (now_s - self.taken_s)
            point = RefusedPoint(start_s=self.taken_s, end_s=now_s, refused_per_s=rate)
            self.refused.append(point)
        self._refused, self.taken_s, self._unix_offset_s = refused, now_s, unix_s - now_s

    def unix_s(self, time_s: float) -> float:
        """Return a time of the monotonic clock as Unix seconds, to the millisecond."""
        return round(time_s + self._unix_offset_s, 3)

    def to_json(self) -> dict[str, Any]:
        """Return points and events for ``/history.json``, with times in Unix seconds."""
        return {
            "unix_s": self.unix_s(self.taken_s),
            "interval_s": INTERVAL_S,
            "refused": [
                {"unix_s": self.unix_s(point.end_s), "refused_per_s": round(point.refused_per_s, 3)}
                for point in self.refused
            ],
            "models": {
                name: {
                    "points": [
                        {"unix_s": self.unix_s(point.end_s), **_point_to_json(point)}
                        for point in model.points
                    ],
                    "events": [
                        {"unix_s": self.unix_s(event.time_s), **_event_to_json(event)}
                        for event in model.events
                    ],
                }
                for name, model in self.models.items()
            },
        }


class HistoryRecorder:
    """Records the history of an engine every 5 s while a web application runs."""

    def __init__(self, engine: ServedEngine, refused: Mapping[tuple[str, str], int]) -> None:
        """Keep ``refused``, the counts by status code and reason, to read it at each snapshot."""
        self.history: Final = History()
        self._engine = engine
        self._refused = refused

    async def recorded(self, _application: web.Application) -> AsyncIterator[None]:
        """Record while the application runs; for its ``cleanup_ctx``."""
        recording = asyncio.create_task(self._record_on(), name="history")
        yield
        recording.cancel()
        await asyncio.wait((recording,))

    def record(self) -> None:
        """Take a snapshot of the engine's statistics now."""
        statistics = self._engine.statistics()
        self.history.record(
            statistics,
            ready={name: self._engine.ready(name) for name in statistics},
            refused=sum(self._refused.values()),
            now_s=time.monotonic(),
            unix_s=time.time(),
        )

    async def _record_on(self) -> None:
        try:
            while True:
                self.record()
                await asyncio.sleep(INTERVAL_S)
        except Exception:
            logger.exception("the history of the status page stops after an error")


def _point(
    before: CountersSnapshot, now: CountersSnapshot, *, start_s: float, end_s: float
) -> IntervalPoint:
    """Compute a point from the differences between counters."""
    took_s = end_s - start_s
    latency = _difference(before.latency_s, now.latency_s)
    answered = {stage.label: stage.answered for stage in before.stages}
    answers = {s.label: _grown(answered.get(s.label, 0), s.answered) for s in now.stages}
    return IntervalPoint(
        start_s=start_s,
        end_s=end_s,
        requests_per_s=_grown(before.requests, now.requests) / took_s,
        samples_per_s=_grown(before.samples, now.samples) / took_s,
        failed_per_s=_grown(sum(before.failed.values()), sum(now.failed.values())) / took_s,
        latency_p50_s=latency.quantile(0.5) if latency.count else None,
        latency_p99_s=latency.quantile(0.99) if latency.count else None,
        answers={place: count for place, count in answers.items() if count},
        disagreement=None,
        upper_bound=None,
        constraint=None,
    )


def _with_control(point: IntervalPoint, statistics: ModelStatistics) -> IntervalPoint:
    control = statistics.control
    if control is None:
        return point
    known = control.disagreement_upper_bound < 1
    return replace(
        point,
        disagreement=control.disagreement,
        upper_bound=control.disagreement_upper_bound if known else None,
        constraint=control.max_disagreement,
    )


def _grown(before: int, now: int) -> int:
    """Return the growth of a counter; 0 if it fell.

    A counter falls if a model was loaded again and then replaced within one interval. The history
    reports such an interval as a replacement only.
    """
    return max(0, now - before)


def _difference(before: Histogram, now: Histogram) -> Histogram:
    counts = tuple(map(_grown, before.counts, now.counts))
    return Histogram(bounds=now.bounds, counts=counts, total=now.total - before.total)


def _without_counts(like: CountersSnapshot) -> CountersSnapshot:
    """Return the counters of a model that has just been loaded."""
    latency = replace(like.latency_s, counts=(0,) * len(like.latency_s.counts), total=0.0)
    return replace(like, stages=(), requests=0, samples=0, failed={}, latency_s=latency)


def _point_to_json(point: IntervalPoint) -> dict[str, Any]:
    total = sum(point.answers.values())
    return {
        "interval_s": round(point.end_s - point.start_s, 3),
        "requests_per_s": round(point.requests_per_s, 3),
        "samples_per_s": round(point.samples_per_s, 3),
        "failed_per_s": round(point.failed_per_s, 3),
        "latency_p50_s": point.latency_p50_s,
        "latency_p99_s": point.latency_p99_s,
        "shares": {place: count / total for place, count in point.answers.items()},
        "disagreement": point.disagreement,
        "disagreement_upper_bound": point.upper_bound,
        "max_disagreement": point.constraint,
    }


def _event_to_json(event: ModelEvent) -> dict[str, Any]:
    return {
        "kind": event.change.kind.value,
        "text": event.change.text,
        "warning": event.change.warning,
    }
