"""A plan of stages as streams are asked with it that differ in what they prefer, hold and take."""

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
from offramp.engine.scheduling.stragglers import Standing, StragglerMonitor


class KindPolicy(NamedTuple):
    """What streams of one kind of device are asked with.

    Each kind has its own, so that slack is looked at with the times of whoever asks, and what is
    observed of a slow kind teaches nothing about a fast one.
    """

    policy: Policy
    latencies: Latencies
    """What the policy predicts by: :meth:`Placement.expected_s`."""


class TimedRun(NamedTuple):
    """A run that ended, as latencies are told of it."""

    stage: int
    batch_size: int
    elapsed_s: float
    variant: int


class PlacedPlan:
    """A placement with what serves it: policies by kind, and what waits as a stream may see it.

    A policy is asked with a :class:`Waiting` of some stages only, the others' queues being empty:
    so it need not know of placements.
    """

    def __init__(
        self,
        placement: Placement,
        kinds: Mapping[str, KindPolicy],
        going_on_to: Sequence[frozenset[int]],
    ) -> None:
        """Serve a placement by the policies of its kinds, whose tables are equally large.

        ``going_on_to`` is :meth:`Placement.going_on_to`.
        """
        sizes = {kind: k.latencies.max_batch_size for kind, k in kinds.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"tables reach up to batches of {sizes}; give all the same sizes")
        self.placement = placement
        self.latencies = {kind: k.latencies for kind, k in kinds.items()}
        """By kind."""
        self._going_on_to = going_on_to
        self._kinds = [kinds[stream.kind] for stream in placement.streams]
        self._starting = {stream.kind for stream in placement.streams if 0 in stream.prefers}
        self.stragglers = StragglerMonitor([stream.kind for stream in placement.streams])
        """The watch over its streams; plans that follow each other share one."""
        self._waiting = Waiting(SampleQueue(0, full=1), ())
        self._views: dict[frozenset[int], Waiting] = {}
        self._empty = BufferedQueue()
        self._no_queue = SampleQueue(0, full=1)

    def follow(self, before: PlacedPlan | None, streams: int) -> None:
        """Take over what is known of the streams; ValueError if they are others."""
        kinds = [stream.kind for stream in self.placement.streams]
        if len(kinds) != streams:
            raise ValueError(f"{len(kinds)} streams are placed, expected {streams}; place each")
        if before is not None:
            old = [stream.kind for stream in before.placement.streams]
            if kinds != old:
                raise ValueError(f"streams are of kinds {kinds}, expected {old} as before")
            self.stragglers = before.stragglers

    def of(self, stream: int) -> KindPolicy:
        """Give what a stream is asked with."""
        return self._kinds[stream]

    def open_to_all(self) -> None:
        """Let every stream take any stage, which is loaded then: its holders may never be back."""
        every = frozenset(range(self.placement.stages))
        streams = tuple(replace(stream, holds=every) for stream in self.placement.streams)
        self.placement = replace(self.placement, streams=streams)

    def holders(self) -> list[list[int]]:
        """[stages]: the streams that have the weights of each."""
        streams = range(len(self.placement.streams))
        stages = range(self.placement.stages)
        return [[n for n in streams if self.holds(n, stage)] for stage in stages]

    def first(self) -> KindPolicy:
        """Give what the first stream is asked with that starts new batches."""
        return next(k for n, k in enumerate(self._kinds) if self.prefers(n, 0))

    def prefers(self, stream: int, stage: int) -> bool:
        """Whether a stage is of a stream's own split."""
        return stage in self.placement.streams[stream].prefers

    def holds(self, stream: int, stage: int) -> bool:
        """Whether a stream has the weights of a stage."""
        return stage in self.placement.streams[stream].holds

    def goes_on_to(self, stream: int, stage: int) -> bool:
        """Whether a batch may go on to a stage where it is: see :meth:`Placement.going_on_to`."""
        return stage in self._going_on_to[stream]

    def show(self, waiting: Waiting) -> None:
        """Say what waits under this plan from now on."""
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
        """Take note of how many rows went on from a stage: the same on devices of any kind."""
        for latencies in self.latencies.values():
            latencies.observe_shrinking(stage, before, survivors, variant, unanswered)

    def observe(self, stream: int, run: TimedRun, now_s: float, *, merged: bool) -> None:
        """Take note of how long a run of a stream took.

        Not of what was stolen: it may have been moved first, and to predict it is for others.
        """
        mine, latencies = self.placement.streams[stream], self._kinds[stream].latencies
        if mine.prefers and run.stage not in mine.prefers:
            return
        if merged:
            latencies.observe_merged(*run)
        if not merged or mine.kind not in self._starting:  # it has no others to learn from
            latencies.observe(*run)
        predicted_s = latencies.variants[run.variant].seconds[run.stage][run.batch_size]
        if predicted_s:
            self.stragglers.observe(stream, run.elapsed_s / predicted_s, now_s)

    def may_shed(self, stream: int, others: Collection[int]) -> bool:
        """Whether what is too late for a stream is so for all: no kind that starts it is faster.

        ``others`` are all other streams in service.
        """
        mine_s = self._whole_s(stream)
        starting = (n for n in others if self.prefers(n, 0) and not self.stragglers.standing(n))
        return self.prefers(stream, 0) and all(self._whole_s(n) >= mine_s for n in starting)

    def wake_s(self, stream: int, now_s: float) -> float:
        """When a stream that was given nothing has to ask again, at the latest.

        For what waits and is left to others may expire, and a probe may become due; one that is
        due already waits for work, not for a time.
        """
        buffered_s = (queue.deadline_s for queue in self._waiting.buffered if queue.size)
        queued_s = self._waiting.queue.next_expiry_s()
        probe_s = self.stragglers.probe_s(stream)
        return min(queued_s, probe_s if probe_s > now_s else math.inf, *buffered_s)

    def views(
        self, stream: int, others: Collection[int], busy: Collection[int], now_s: float
    ) -> Iterator[Waiting]:
        """Give what a stream looks at first, and what it may steal then.

        A batch of its own that may grow lets a full one go first that may be stolen: or splits with
        too many devices would spend them on half-empty batches, while others fall behind.

        ``others`` are all other streams in service. What one prefers that is not ``busy`` is not
        stolen. A straggler may take what no idle stream of usual standing prefers; once excluded,
        what no other stream in service can run, and its own stages when a probe is due.
        """
        mine, monitor = self.placement.streams[stream], self.stragglers
        standing = monitor.standing(stream)
        if standing is Standing.USUAL and mine.prefers:
            yield self._view(mine.prefers)
        if standing is Standing.EXCLUDED:
            able = [n for n in others if monitor.standing(n) is not Standing.EXCLUDED]
            stages = mine.holds.difference(*(self.placement.streams[n].holds for n in able))
            if monitor.probe_s(stream) <= now_s:
                stages |= mine.prefers or mine.holds
        else:
            idle = [n for n in others if n not in busy and monitor.standing(n) is Standing.USUAL]
            stages = mine.holds - self.placement.preferred(idle)
            if standing is Standing.USUAL:
                stages -= mine.prefers
        if stages:
            yield self._view(stages)

    def _whole_s(self, stream: int) -> float:
        """Seconds of one row to the model's end, as streams of a kind expect it now."""
        latencies = self._kinds[stream].latencies
        return latencies.span_s(0, latencies.stages - 1, 1)

    def _view(self, stages: frozenset[int]) -> Waiting:
        """Give what waits for some stages; the queues of the others are empty."""
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
