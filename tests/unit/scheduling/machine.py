"""The random life of a scheduler."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.unit.scheduling.account import Asked, Retry, Sample
from tests.unit.scheduling.checks import CheckedScheduler, Setup
from tests.unit.scheduling.helpers import (
    SIZE,
    STAGES,
    pairs,
    points_of,
    scheduler,
    sizes,
    table,
)

from offramp.engine.scheduling import (
    DeviceKind,
    DropCause,
    ParallelLimit,
    Placement,
    SchedulerFullError,
    StreamPlacement,
    Submission,
)
from offramp.engine.scheduling.policies import PolicyName, make_policy, place
from offramp.engine.scheduling.queue import PATIENCE_S
from offramp.engine.scheduling.scheduler import MOST_LOSSES
from offramp.engine.scheduling.stragglers import StragglerMonitor

CAPACITY = 32

LIFE = {
    "submit": 0.3,
    "serve": 0.43,
    "fail": 0.04,
    "interrupt": 0.04,
    "cancel": 0.03,
    "hot swap": 0.05,
    "pass time": 0.07,
    "suspend": 0.04,
}
"""Relative frequencies of events, when many happen together."""


class SchedulerMachine(CheckedScheduler):
    """All possible events of a scheduler, in any order."""

    @initialize(streams=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
    def begin(self, streams: int, seed: int) -> None:
        self.streams = streams
        self.random = np.random.default_rng(seed)
        self.kinds = [str(kind) for kind in self.random.choice(["fast", "slow"], streams)]
        latencies = table(first_s=0.25, more_s=0.125)
        if self.setup.placed:
            self.placements.append(self.draw_placement(STAGES))
        limit = ParallelLimit(
            SIZE, fixed=self.setup.tau_b, max_violations=self.setup.max_violations
        )
        self.s = scheduler(
            self.setup.policy,
            latencies=latencies,
            capacity=CAPACITY,
            max_delay_s=self.setup.max_delay_s,
            streams=streams,
            parallel=limit,
            placement=self.placements[0] if self.placements else None,
        )
        self.latencies = [self.s.latencies]
        if (placed := self.s._current.placed) is not None:  # lives are short
            placed.stragglers = StragglerMonitor(self.kinds, window=3)

    # What happens

    @rule(
        count=st.integers(1, 2 * SIZE),
        slack=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(-1, 1),
        batch_key=st.integers(0, 2),
    )
    def submit(self, count: int, slack: int | None, priority: int, batch_key: int) -> None:
        request = len(self.account.asked)
        deadline_s = float("inf") if slack is None else self.now + slack / 4
        before = self.s.queued
        order_s = self.now + PATIENCE_S if slack is None else deadline_s
        self.account.asked[request] = Asked((-priority, order_s, request), batch_key, deadline_s)
        try:
            self.s.submit(Submission(request, count, deadline_s, priority, batch_key), self.now)
        except SchedulerFullError:
            assert before + count > CAPACITY
        else:
            self.account.place |= {(request, row): "queued" for row in range(count)}
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
        self.done_by(data.draw(st.sampled_from(sorted(self.running))), share)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cancel_rest=st.booleans())
    def fail(self, data: st.DataObject, cancel_rest: bool) -> None:
        self.fail_on(data.draw(st.sampled_from(sorted(self.running))), cancel_rest=cancel_rest)

    def fail_on(self, stream: int, *, cancel_rest: bool, interrupted: bool = False) -> None:
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        alone = len({request for request, _ in pairs(run)}) == 1
        in_vain = not self.s._in_flight.failures.allows_try(waiting=True)
        if interrupted:  # once too often
            assert self.s.interrupted(stream, self.now).buffered is None
        else:
            self.s.failed(stream, self.now)
        lost = [sample for sample in pairs(run) if sample in self.account.answered]
        mine: dict[int, list[Sample]] = {}
        for sample in pairs(run):
            if sample not in self.account.answered:
                mine.setdefault(sample[0], []).append(sample)
        dropped = self.s.take_dropped()
        for item in dropped:
            samples = mine.pop(item.request)
            assert item.count == len(samples)
            if item.cause is DropCause.FAILED:
                needed_s = self.latencies[run.plan].span_s(0, run.deepest, len(samples))
                late = self.account.asked[item.request].deadline_s <= self.now + needed_s
                tried = all(self.account.failures[sample] for sample in samples) or in_vain
                assert late or (alone and tried) or item.request in self.account.withdrawn
            lost += samples
        self.lose(lost)
        left, middle = list(mine.values()), (len(mine) + 1) // 2
        losses = max(self.losses[stream] - 2, 0)
        for half in (left[:middle], left[middle:]):
            if half:
                own = alone and bool(self.account.waiting(half[0][0][0], "queued"))
                until_s = self.now + (0.0 if own else PATIENCE_S) if alone else None
                self.account.try_again(
                    Retry(stream, list(itertools.chain.from_iterable(half)), until_s, losses)
                )
        for item in dropped:
            if item.cause is DropCause.FAILED and cancel_rest:
                self.withdraw(item.request, DropCause.FAILED)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        self.interrupt_on(data.draw(st.sampled_from(sorted(self.running))))

    def interrupt_on(self, stream: int) -> None:
        """The worker of a stream is lost: what of its batch is still wanted is kept."""
        losses = self.losses[stream] = self.losses[stream] + 1
        if losses == MOST_LOSSES:
            self.fail_on(stream, cancel_rest=False, interrupted=True)
            return
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        number = self.s.interrupted(stream, self.now).buffered
        samples = pairs(run)
        lost = [sample for sample in samples if self.account.gives_up(sample, self.now)]
        told = Counter({item.request: item.count for item in self.s.take_dropped()})
        assert told == Counter(request for request, _ in lost)
        self.lose(lost)
        kept = {row: sample for row, sample in enumerate(samples) if sample not in lost}
        assert (number is None) == (not kept)
        if number is not None:
            assert number not in self.numbers, "a number was given again"
            self.numbers.add(number)
            self.account.interrupt(number, kept)
            self.lost_before[number] = losses
            if stream in self.failed_on:
                self.failed_before[number] = self.failed_on[stream]

    @precondition(lambda self: self.account.place)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ = sorted({request for request, _ in self.account.place})
        self.withdraw(data.draw(st.sampled_from(open_)), DropCause.CANCELLED)

    @rule(data=st.data())
    def suspend_or_resume(self, data: st.DataObject) -> None:
        free = sorted(set(range(self.streams)) - set(self.running) - set(self.before))
        if free:
            self.toggle(data.draw(st.sampled_from(free)))

    def toggle(self, stream: int) -> None:
        (self.s.resume if stream in self.suspended else self.s.suspend)(stream)
        self.suspended ^= {stream}

    @rule(chance=st.integers(0, 9))
    def flush(self, chance: int) -> None:
        if chance == 0:
            self.s.flush()

    @precondition(lambda self: self.setup.hot_swaps)
    @rule(stages=st.integers(1, STAGES + 1))
    def hot_swap(self, stages: int) -> None:
        chosen = PolicyName.parse(self.setup.policy)
        fewest = chosen.exit + 2  # it must have the exit
        latencies = table(max(stages, fewest), first_s=0.25, more_s=0.125)
        placed = None
        policy = make_policy(chosen, points_of(latencies), SIZE, self.streams)
        if self.setup.placed:
            self.placements.append(self.draw_placement(latencies.stages))
            placed = place(chosen, points_of(latencies), self.placements[-1], SIZE)
            policy, latencies = placed.first()
        self.s.hot_swap(len(self.latencies), policy, latencies, placed)
        self.latencies.append(latencies)

    def draw_placement(self, stages: int) -> Placement:
        """Splits of neighbouring stages, each for a stream at least; some hold more, some spare."""
        splits = int(self.random.integers(1, min(stages, self.streams) + 1))
        ends = [0, *sorted(self.random.permutation(stages - 1)[: splits - 1] + 1), stages]
        mine = [frozenset(range(a, b)) for a, b in itertools.pairwise(ends)]
        mine += [
            frozenset[int]() if self.random.random() < 0.2 else mine[self.random.integers(splits)]
            for _ in range(self.streams - splits)
        ]
        streams = [
            StreamPlacement(
                kind=kind,
                prefers=prefers,
                holds=prefers | {s for s in range(stages) if self.random.random() < 0.5},
            )
            for kind, prefers in zip(self.kinds, mine, strict=True)
        ]
        kinds = DeviceKind(name="fast"), DeviceKind(name="slow", speed=2.0)
        return Placement(stages=stages, streams=tuple(streams), kinds=kinds)

    @rule(turns=st.integers(1, 25))
    def live(self, turns: int) -> None:
        """Run many actions: with single rules, few samples get beyond stage 0 before they end."""
        for action in self.random.choice(len(LIFE), size=turns, p=list(LIFE.values())):
            self.act(list(LIFE)[action])
            self.nothing_is_lost()
            self.nothing_is_kept_longer_than_needed()

    def act(self, action: str) -> None:
        pick = self.random.integers
        stream = int(pick(self.streams))
        if action == "submit":
            slack = None if pick(2) else int(pick(1, 21))
            self.submit(int(pick(1, 2 * SIZE)), slack, int(pick(-1, 2)), int(pick(2)))
        elif action == "serve" and stream in self.running:
            self.done_by(stream, float(self.random.choice([0.0, 0.3, 0.7])))
        elif action == "serve" and stream not in self.suspended:
            self.next(stream)
        elif action == "fail" and stream in self.running:
            self.fail_on(stream, cancel_rest=bool(pick(2)))
        elif action == "interrupt" and stream in self.running:
            self.interrupt_on(stream)
        elif action == "cancel" and self.account.place:
            open_ = sorted({request for request, _ in self.account.place})
            self.withdraw(open_[int(pick(len(open_)))], DropCause.CANCELLED)
        elif action == "hot swap" and self.setup.hot_swaps:
            self.hot_swap(int(pick(1, STAGES + 2)))
        elif action == "suspend" and stream not in self.running | self.before:
            self.toggle(stream)
        elif action == "pass time":
            self.pass_time(1)

    def teardown(self) -> None:
        for stream in self.suspended:
            self.s.resume(stream)
        self.suspended = set()
        self.s.flush()
        for stream in sorted(self.running):
            self.done_by(stream, 0.3)
        busy = True
        while busy:
            busy = False
            for stream in range(self.streams):
                while self.next(stream):
                    busy = True
                    self.done_by(stream, 0.3)
        self.discard()
        assert not self.account.place, "a sample was never resolved"
        assert not self.account.kept
        assert (self.s.busy, self.s.in_flight, self.s.auditing) == (False, 0, 0)
        left = sizes(self.s)
        assert left["plans"] == 1
        names = ("requests", "batches", "retries", "interrupted", "cancelled", "dropped", "lost")
        for name in (*names, "buffered"):
            assert left[name] == 0, left
        assert left["buffered buckets"] == left["discarded"] == 0


def machine(setup: Setup) -> type[SchedulerMachine]:
    """A machine under a setup."""
    return type("Machine", (SchedulerMachine,), {"setup": setup})
