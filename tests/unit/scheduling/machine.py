"""The random life of a scheduler, against a plain account of every sample."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.scheduling.helpers import SIZE, STAGES, none_exit, pairs, scheduler, sizes, table

from offramp.engine.scheduling import (
    DropCause,
    ModelScheduler,
    ParallelLimit,
    Run,
    SchedulerFullError,
    Submission,
    Wait,
)
from offramp.engine.scheduling.queue import PATIENCE_S

CAPACITY = 32

Sample = tuple[int, int]
"""Request, row."""


class Setup(NamedTuple):
    """Under what a machine runs."""

    policy: str
    max_delay_s: float = 0.0
    tau_b: int | None = None
    max_violations: float | None = None


class Asked(NamedTuple):
    """A request."""

    key: tuple[float, float, int]
    signature: int
    deadline_s: float


class SchedulerMachine(RuleBasedStateMachine):
    """Subclasses say under which setup."""

    setup = Setup("run-through")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.streams = 1
        self.s: ModelScheduler = scheduler()
        self.asked: dict[int, Asked] = {}
        self.place: dict[Sample, str] = {}
        """Of every sample that is not resolved: queued, running, parked or retry."""
        self.stage: dict[Sample, int] = {}
        """The last that it ran."""
        self.failures: Counter[Sample] = Counter()
        self.running: dict[int, Run] = {}
        self.before: dict[int, Run] = {}
        """What a stream has to go on with: the survivors of its last run."""
        self.suspended: set[int] = set()
        self.withdrawn: set[int] = set()
        self.retries: list[tuple[int, list[Sample]]] = []
        """The stream that it failed on, and the samples of one request."""
        self.kept: dict[int, dict[int, Sample]] = {}
        """Parked batches that were not discarded: their samples by position."""

    @initialize(streams=st.integers(1, 3))
    def begin(self, streams: int) -> None:
        self.streams = streams
        limit = ParallelLimit(
            SIZE, fixed=self.setup.tau_b, max_violations=self.setup.max_violations
        )
        self.s = scheduler(
            self.setup.policy,
            latencies=table(first_s=0.25, more_s=0.125),
            capacity=CAPACITY,
            max_delay_s=self.setup.max_delay_s,
            streams=streams,
            parallel=limit,
        )

    # What happens

    @rule(
        count=st.integers(1, 2 * SIZE),
        slack=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(-1, 1),
        signature=st.integers(0, 2),
    )
    def submit(self, count: int, slack: int | None, priority: int, signature: int) -> None:
        request = len(self.asked)
        deadline_s = float("inf") if slack is None else self.now + slack / 4
        before = self.s.queued
        order_s = self.now + PATIENCE_S if slack is None else deadline_s
        self.asked[request] = Asked((-priority, order_s, request), signature, deadline_s)
        try:
            self.s.submit(Submission(request, count, deadline_s, priority, signature), self.now)
        except SchedulerFullError:
            assert before + count > CAPACITY
        else:
            self.place |= {(request, row): "queued" for row in range(count)}
        self.collect_waiting()

    @rule(quarters=st.integers(1, 8))
    def pass_time(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        idle = sorted(set(range(self.streams)) - self.suspended - set(self.running))
        if idle:
            self.next(data.draw(st.sampled_from(idle)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def finish(self, data: st.DataObject, share: float) -> None:
        stream = data.draw(st.sampled_from(sorted(self.running)))
        n = len(self.running[stream].requests)
        sure = np.array(data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n)))
        self.done(stream, sure < share)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cancel_rest=st.booleans())
    def fail(self, data: st.DataObject, cancel_rest: bool) -> None:
        stream = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        self.s.failed(stream, self.now)
        mine: dict[int, list[Sample]] = {}
        for sample in pairs(run):
            mine.setdefault(sample[0], []).append(sample)
        dropped = self.s.take_dropped()
        for item in dropped:
            samples = mine.pop(item.request)
            assert item.count == len(samples)
            if item.cause is DropCause.FAILED:
                needed_s = self.needed_s(run.deepest, len(samples))
                late = self.asked[item.request].deadline_s <= self.now + needed_s
                tried = all(self.failures[sample] for sample in samples)
                assert late or tried or item.request in self.withdrawn
            self.leave(samples)
        for samples in mine.values():
            for sample in samples:
                assert not self.failures[sample], "tried a third time"
                self.failures[sample] += 1
                self.place[sample] = "retry"
                del self.stage[sample]
            self.retries.append((stream, samples))
        for item in dropped:
            if item.cause is DropCause.FAILED and cancel_rest:
                self.withdraw(item.request, DropCause.FAILED)

    @precondition(lambda self: self.place)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ = sorted({request for request, _ in self.place})
        self.withdraw(data.draw(st.sampled_from(open_)), DropCause.CANCELLED)

    @rule(data=st.data())
    def suspend_or_resume(self, data: st.DataObject) -> None:
        free = sorted(set(range(self.streams)) - set(self.running) - set(self.before))
        if free:
            stream = data.draw(st.sampled_from(free))
            (self.s.resume if stream in self.suspended else self.s.suspend)(stream)
            self.suspended ^= {stream}

    @rule(chance=st.integers(0, 9))
    def flush(self, chance: int) -> None:
        if chance == 0:
            self.s.flush()

    # What must hold

    @invariant()
    def nothing_is_lost(self) -> None:
        places = Counter(self.place.values())
        assert self.s.queued == places["queued"]
        assert self.s.in_flight == places["running"] + places["parked"] + places["retry"]
        waiting = places["queued"] + places["parked"] + places["retry"] > 0
        assert self.s.waiting == waiting

    @invariant()
    def parked_batches_are_kept_as_long_as_needed(self) -> None:
        self.discard()
        for number, samples in self.kept.items():
            assert samples, f"parked batch {number} is kept for nobody"

    def next(self, stream: int) -> bool:
        """Ask for a stream; whether it got something to run."""
        decision = self.s.next(stream, self.now)
        self.collect_waiting()
        if isinstance(decision, Run):
            self.check_run(stream, decision)
            self.running[stream] = decision
            return True
        assert stream not in self.before, "a batch was forgotten"
        if isinstance(decision, Wait):
            assert decision.until_s > self.now
        if self.setup.tau_b is self.setup.max_violations is None:
            places = Counter(self.place.values())
            assert not places["parked"], "a stream idles although something is parked"
            assert not places["queued"] or self.setup.max_delay_s, "a stream idles for nothing"
        return False

    def done(self, stream: int, exited: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        if run.stage == STAGES - 1:
            exited = np.ones_like(exited)
        samples = pairs(run)
        transition = self.s.done(stream, exited, self.now)
        parts = [transition.released, transition.dropped, transition.survivors]
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(samples)))
        leaving = np.flatnonzero(exited) if run.stage < run.deepest else np.arange(len(samples))
        assert transition.released.tolist() == leaving.tolist()
        assert run.stage < run.deepest or not len(transition.survivors)
        lost = Counter(samples[row][0] for row in transition.dropped)
        told = Counter({item.request: item.count for item in self.s.take_dropped()})
        assert lost == told
        self.leave([samples[row] for row in (*transition.released, *transition.dropped)])
        survivors = [samples[row] for row in transition.survivors]
        if transition.parked is not None:
            self.kept[transition.parked] = dict(enumerate(survivors))
            for sample in survivors:
                self.place[sample] = "parked"
        elif survivors:
            rows = transition.survivors
            self.before[stream] = run._replace(requests=run.requests[rows], rows=run.rows[rows])

    def check_run(self, stream: int, run: Run) -> None:
        samples = pairs(run)
        assert 1 <= len(samples) <= SIZE
        assert len(set(samples)) == len(samples)
        assert run.stage <= run.deepest <= STAGES - 1
        assert len({self.asked[request].signature for request, _ in samples}) == 1
        for sample in samples:
            assert run.stage == self.stage.get(sample, -1) + 1, "a stage was skipped or repeated"
            self.stage[sample] = run.stage
        if stream in self.before:
            before = self.before[stream]
            assert (run.batch, run.deepest, run.pieces) == (before.batch, before.deepest, ())
            assert samples == pairs(before)
        elif run.pieces:
            self.check_fused(run, samples)
        elif self.place[samples[0]] == "retry":
            self.check_retry(stream, samples)
        else:
            self.check_new(samples)
        for sample in samples:
            self.place[sample] = "running"

    def check_new(self, samples: list[Sample]) -> None:
        assert all(self.place[sample] == "queued" for sample in samples)
        signature = self.asked[samples[0][0]].signature
        left = [
            self.asked[request].key
            for (request, row), place in self.place.items()
            if place == "queued"
            and self.asked[request].signature == signature
            and (request, row) not in samples
        ]
        taken = [self.asked[request].key for request, _ in samples]
        assert taken == sorted(taken)
        assert not left or taken[-1] <= min(left), "a more urgent sample was left behind"

    def check_fused(self, run: Run, samples: list[Sample]) -> None:
        assert run.stage > 0
        fused = []
        for number, positions in run.pieces:
            assert positions.tolist() == sorted(set(positions.tolist()))
            fused += [self.kept[number].pop(position) for position in positions.tolist()]
        assert fused == samples
        assert all(self.place[sample] == "parked" for sample in samples)

    def check_retry(self, stream: int, samples: list[Sample]) -> None:
        failed_on = next(s for s, again in self.retries if again == samples)
        others = set(range(self.streams)) - self.suspended - {stream}
        assert failed_on != stream or not others, "tried again where it failed"
        self.retries.remove((failed_on, samples))

    # The account

    def leave(self, samples: list[Sample]) -> None:
        for sample in samples:
            del self.place[sample]
            self.stage.pop(sample, None)

    def withdraw(self, request: int, cause: DropCause) -> None:
        self.withdrawn.add(request)
        self.s.cancel(request, cause)
        dropped = self.s.take_dropped()
        assert {(item.request, item.cause) for item in dropped} <= {(request, cause)}
        waiting = [s for s, place in self.place.items() if s[0] == request and place != "running"]
        assert sum(item.count for item in dropped) == len(waiting)
        self.forget_waiting(waiting)

    def collect_waiting(self) -> None:
        """Account for what left while it waited: it expired, or there was no hope."""
        totals: Counter[tuple[int, DropCause]] = Counter()
        for item in self.s.take_dropped():
            totals[item.request, item.cause] += item.count
        for (request, cause), count in totals.items():
            assert cause in (DropCause.EXPIRED, DropCause.HOPELESS)
            places = ("queued", "parked") if cause is DropCause.EXPIRED else ("queued",)
            if cause is DropCause.EXPIRED:
                assert self.asked[request].deadline_s <= self.now
            gone = [s for s, place in self.place.items() if s[0] == request and place in places]
            for _, samples in self.retries:
                if len(gone) < count and samples[0][0] == request:
                    gone += samples
            assert len(gone) == count, "not all of a request that expired has left"
            self.forget_waiting(gone)

    def forget_waiting(self, samples: list[Sample]) -> None:
        gone = set(samples)
        self.retries = [item for item in self.retries if not gone & set(item[1])]
        for number, by_position in self.kept.items():
            self.kept[number] = {p: s for p, s in by_position.items() if s not in gone}
        self.leave(samples)

    def discard(self) -> None:
        for number in self.s.take_discarded():
            assert not self.kept.pop(number), "discarded, though somebody waits"

    def needed_s(self, deepest: int, count: int) -> float:
        return self.s._latencies.span_s(0, deepest, count)

    def teardown(self) -> None:
        for stream in self.suspended:
            self.s.resume(stream)
        self.suspended = set()
        self.s.flush()
        for stream in sorted(self.running):
            self.done(stream, none_exit(self.running[stream]))
        busy = True
        while busy:
            busy = False
            for stream in range(self.streams):
                while self.next(stream):
                    busy = True
                    self.done(stream, none_exit(self.running[stream]))
        self.discard()
        assert not self.place, "a sample was never resolved"
        assert not self.kept
        left = sizes(self.s)
        for name in ("requests", "batches", "retries", "cancelled", "dropped", "parked"):
            assert left[name] == 0, left
        assert left["parked lanes"] == left["discarded"] == 0


def machine(setup: Setup) -> type[SchedulerMachine]:
    """A machine under a setup."""
    return type("Machine", (SchedulerMachine,), {"setup": setup})
