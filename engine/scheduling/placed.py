"""A stage plan for streams that differ in the stages that they prefer, hold and may take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.latency import Latencies
from offramp.engine.scheduling.placement import Placement
from offramp.engine.scheduling.policy_protocol import Policy, Waiting
from offramp.engine.scheduling.queue import SampleQueue
from offramp.engine.scheduling.stragglers import ReplicaStatus, StragglerMonitor


class KindPolicy(NamedTuple):
    """Policy and latencies for streams of one kind of device.

    Each kind has its own latencies. So slack is computed with the times of the deciding stream, and
    observations of a slow kind do not change the predictions for a fast kind.
    """

    policy: Policy
    latencies: Latencies
    """Predictions that the policy uses: :meth:`Placement.expected_s`."""


class TimedRun(NamedTuple):
    """A run that ended, as arguments for :meth:`.Latencies.observe`."""

    stage: int
    batch_size: int
    elapsed_s: float
    variant: int


class PlacedPlan:
    """A placement with policies by kind, and views of waiting samples for each stream.

    A policy receives a :class:`Waiting` of some stages only; the queues of other stages are empty.
    So policies need not know about placements.
    """

    def __init__(
        self,
        placement: Placement,
        kinds: Mapping[str, KindPolicy],
        continued_stages: Sequence[frozenset[int]],
    ) -> None:
        """Serve a placement with policies by kind; their latency tables must have equal sizes.

        ``continued_stages`` is the result of :meth:`Placement.continued_stages`.
        """
        sizes = {kind: k.latencies.max_batch_size for kind, k in kinds.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"latency tables reach up to batches of {sizes}; use the same batch sizes for all"
            )
        self.placement = placement
        self.latencies = {kind: k.latencies for kind, k in kinds.items()}
        """Predicted times of stages, by kind of device."""
        self._continued_stages = continued_stages
        self._kinds = [kinds[stream.kind] for stream in placement.streams]
        self._starting = {stream.kind for stream in placement.streams if 0 in stream.prefers}
        self.stragglers = StragglerMonitor([stream.kind for stream in placement.streams])
        """Monitor of the streams; consecutive plans share one monitor."""
        self._waiting = Waiting(SampleQueue(0, full=1), ())
        self._views: dict[frozenset[int], Waiting] = {}
        self._empty = BufferedQueue()
        self._no_queue = SampleQueue(0, full=1)

    def follow(self, before: PlacedPlan | None, streams: int) -> None:
        """Take over the state of the streams; ValueError if they differ."""
        kinds = [stream.kind for stream in self.placement.streams]
        if len(kinds) != streams:
            raise ValueError(f"{len(kinds)} streams are placed, expected {streams}; place each")
        if before is not None:
            old = [stream.kind for stream in before.placement.streams]
            if kinds != old:
                raise ValueError(f"streams are of kinds {kinds}, expected {old} as before")
            self.stragglers = before.stragglers

    def of(self, stream: int) -> KindPolicy:
        """Return the policy and latencies of a stream."""
        return self._kinds[stream]

    def open_to_all(self) -> None:
        """Allow every stream to load and take any stage: the usual holders may never return."""
        every = frozenset(range(self.placement.stages))
        streams = tuple(replace(stream, holds=every) for stream in self.placement.streams)
        self.placement = replace(self.placement, streams=streams)

    def holders(self) -> list[list[int]]:
        """Return, for each stage, the streams that have its weights: [stages]."""
        streams = range(len(self.placement.streams))
        stages = range(self.placement.stages)
        return [[n for n in streams if self.holds(n, stage)] for stage in stages]

    def first(self) -> KindPolicy:
        """Return the policy and latencies of the first stream that starts new batches."""
        return next(k for n, k in enumerate(self._kinds) if self.prefers(n, 0))

    def prefers(self, stream: int, stage: int) -> bool:
        """Return whether a stage belongs to a stream's own split."""
        return stage in self.placement.streams[stream].prefers

    def holds(self, stream: int, stage: int) -> bool:
        """Return whether a stream has the weights of a stage."""
        return stage in self.placement.streams[stream].holds

    def continues_on(self, stream: int, stage: int) -> bool:
        """Return whether a batch may go on to a stage (:meth:`Placement.continued_stages`)."""
        return stage in self._continued_stages[stream]

    def show(self, waiting: Waiting) -> None:
        """Set the waiting samples that this plan serves from now on."""
        self._waiting = waiting
        self._views.clear()

    def observe_shrinking(
        self,
        stage: int,
        before: int,
        survivors: int,
        variant: int,
        unanswered: tuple[int, int] | None = None,
    ) -> None:
        """Record how many rows went on from a stage, for devices of all kinds."""
        for latencies in self.latencies.values():
            latencies.observe_shrinking(stage, before, survivors, variant, unanswered)

    def observe(self, stream: int, run: TimedRun, now_s: float, *, merged: bool) -> None:
        """Record the time of a run on a stream.

        Stolen runs are ignored: their time may include moving the rows, and is predicted by another
        kind of device.
        """
        mine, latencies = self.placement.streams[stream], self._kinds[stream].latencies
        if mine.prefers and run.stage not in mine.prefers:
            return
        if merged:
            latencies.observe_merged(*run)
        if not merged or mine.kind not in self._starting:  # it observes merged runs only
            latencies.observe(*run)
        predicted_s = latencies.variants[run.variant].seconds[run.stage][run.batch_size]
        if predicted_s:
            self.stragglers.observe(stream, run.elapsed_s / predicted_s, now_s)

    def may_shed(self, stream: int, others: Collection[int]) -> bool:
        """Return whether samples too late here are too late for all others that start batches.

        ``others`` are all other streams in service.
        """
        mine_s = self._whole_s(stream)
        starting = (n for n in others if self.prefers(n, 0) and not self.stragglers.status(n))
        return self.prefers(stream, 0) and all(self._whole_s(n) >= mine_s for n in starting)

    def wake_s(self, stream: int, now_s: float) -> float:
        """Return the latest time at which a stream without work must ask again.

        By then, samples that wait for other streams may expire, or a probe of the stream may become
        due. A probe that is already due waits for work, not for a time.
        """
        buffered_s = (queue.deadline_s for queue in self._waiting.buffered if queue.size)
        queued_s = self._waiting.queue.next_expiry_s()
        probe_s = self.stragglers.probe_s(stream)
        return min(queued_s, probe_s if probe_s > now_s else math.inf, *buffered_s)

    def views(
        self, stream: int, others: Collection[int], busy: Collection[int], now_s: float
    ) -> Iterator[Waiting]:
        """Yield the waiting samples that a stream considers first, and then those it may steal.

        If the stream's own batch may still grow, a full batch that the stream may steal is
        considered first. Otherwise splits with too many devices would run half-empty batches while
        other splits are late.

        ``others`` are all other streams in service. A stage that an idle stream prefers is not
        stolen. A straggler may take stages that no idle stream of normal status prefers. An
        excluded stream may take stages that no other stream in service can run, and its own stages
        when a probe is due.
        """
        mine, monitor = self.placement.streams[stream], self.stragglers
        status = monitor.status(stream)
        if status is ReplicaStatus.USUAL and mine.prefers:
            yield self._view(mine.prefers)
        if status is ReplicaStatus.EXCLUDED:
            able = [n for n in others if monitor.status(n) is not ReplicaStatus.EXCLUDED]
            stages = mine.holds.difference(*(self.placement.streams[n].holds for n in able))
            if monitor.probe_s(stream) <= now_s:
                stages |= mine.prefers or mine.holds
        else:
            idle = [n for n in others if n not in busy and monitor.status(n) is ReplicaStatus.USUAL]
            stages = mine.holds - self.placement.preferred(idle)
            if status is ReplicaStatus.USUAL:
                stages -= mine.prefers
        if stages:
            yield self._view(stages)

    def _whole_s(self, stream: int) -> float:
        """Return the seconds that one row is expected to take to the model's end on a stream."""
        latencies = self._kinds[stream].latencies
        return latencies.span_s(0, latencies.stages - 1, 1)

    def _view(self, stages: frozenset[int]) -> Waiting:
        """Return the waiting samples of some stages; the queues of other stages are empty."""
        view = self._views.get(stages)
        if view is None:
            waiting = self._waiting
            buffered = [
                queue if stage in stages else self._empty
                for stage, queue in enumerate(waiting.buffered)
            ]
            queue = waiting.queue if 0 in stages else self._no_queue
            view = self._views[stages] = Waiting(queue, tuple(buffered), waiting.suspended)
        return view
