"""A scheduler of which everything is checked that it says: against a plain account of samples."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeAlias

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant
from numpy.typing import NDArray
from tests.unit.scheduling.account import Account, Sample
from tests.unit.scheduling.helpers import SIZE, pairs, scheduler

from offramp.engine.scheduling import (
    DropCause,
    Latencies,
    Run,
    Transition,
    Wait,
)

Flags: TypeAlias = NDArray[np.bool_]


class Setup(NamedTuple):
    """Under what a machine runs."""

    policy: str
    max_delay_s: float = 0.0
    tau_b: int | None = None
    max_violations: float | None = None
    feedback: bool = False
    """Whether samples may run on after their answer."""
    hot_swaps: bool = False
    """Whether plans are swapped."""


class CheckedScheduler(RuleBasedStateMachine):
    """Subclasses say under which setup, and what happens."""

    setup = Setup("run-through")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.streams = 1
        self.random = np.random.default_rng(0)
        self.s = scheduler()
        self.account = Account()
        self.latencies: list[Latencies] = []
        """Of every plan there was."""
        self.running: dict[int, Run] = {}
        self.before: dict[int, Run] = {}
        """What a stream has to go on with: the survivors of its last run."""
        self.suspended: set[int] = set()
        self.numbers: set[int] = set()
        """Of batches that were ever buffered or interrupted."""
        self.losses: dict[int, int] = {}
        """Interruptions of the batch that a stream runs."""
        self.lost_before: dict[int, int] = {}
        """Those of batches that wait to be resumed, by number."""

    @invariant()
    def nothing_is_lost(self) -> None:
        places = Counter(self.account.place.values())
        assert self.s.queued == places["queued"]
        assert self.s.in_flight == len(self.account.under_way(answered=False))
        assert self.s.auditing == len(self.account.under_way(answered=True))
        waiting = sum(places[p] for p in ("queued", "buffered", "retry", "interrupted")) > 0
        assert self.s.waiting == waiting
        assert self.s.busy == bool(self.account.place)
        assert self.s.retried == self.account.failures.total()
        assert self.s.resumed == self.account.interruptions

    @invariant()
    def nothing_is_kept_longer_than_needed(self) -> None:
        assert not self.s.take_dropped()
        assert not self.s.take_lost()
        self.discard()
        for number, samples in self.account.kept.items():
            assert samples, f"buffered batch {number} is kept for nobody"
        current = max(len(self.latencies) - 1, 0)
        assert self.s.plan == current
        assert self.s.plans == {current, *(o.plan for o in self.account.origin.values())}

    def next(self, stream: int) -> bool:
        """Ask for a stream; whether it got something to run."""
        decision = self.s.next(stream, self.now)
        self.collect_waiting()
        if isinstance(decision, Run):
            self.check_run(stream, decision)
            self.running[stream] = decision
            return True
        assert stream not in self.before, "a batch was forgotten"
        assert not self.account.late(self.now)
        if isinstance(decision, Wait):
            assert decision.until_s > self.now
        if self.setup.tau_b is self.setup.max_violations is None:
            places = Counter(self.account.place.values())
            assert not places["buffered"], "a stream idles although something is buffered"
            assert not places["interrupted"], "a stream idles though something is to be resumed"
            assert not places["queued"] or self.setup.max_delay_s, "a stream idles for nothing"
            assert not self.to_retry(stream), "a stream idles although it could try again"
        return False

    def done(self, stream: int, exited: Flags, runs_on: Flags | None = None) -> None:
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        if run.stage == self.latencies[run.plan].stages - 1:
            exited = np.ones_like(exited)
        samples = pairs(run)
        transition = self.s.done(stream, exited, self.now, runs_on)
        self.check_transition(run, transition, exited, runs_on)
        dropped = [samples[row] for row in transition.dropped]
        told = Counter({item.request: item.count for item in self.s.take_dropped()})
        assert told == Counter(request for request, _ in dropped)
        self.lose(dropped)
        going_on = set(transition.survivors.tolist())
        released = transition.released.tolist()
        through = [row for row in released if row not in going_on] + transition.ended.tolist()
        self.account.answered |= {samples[row] for row in released if row in going_on}
        self.account.leave([samples[row] for row in through])
        self.go_on(stream, run, transition)

    def done_by(self, stream: int, share: float) -> None:
        """The run of a stream is done, and about this share of its rows is sure enough."""
        sure, runs_on = self.random.random((2, len(self.running[stream].requests)))
        self.done(stream, sure < share, runs_on < 0.5 if self.setup.feedback else None)

    def check_transition(
        self, run: Run, transition: Transition, exited: Flags, runs_on: Flags | None
    ) -> None:
        samples = pairs(run)
        answered = np.array([sample in self.account.answered for sample in samples])
        in_vain = np.array([self.account.gives_up(sample, self.now) for sample in samples])
        released, dropped, staying, ended = (np.zeros(len(samples), np.bool_) for _ in range(4))
        if run.stage == run.deepest:
            released, ended = ~answered, answered
        else:
            released = exited & ~answered
            dropped = in_vain & ~exited
            staying = ~exited & ~in_vain | answered
            if runs_on is not None:
                staying |= released & runs_on
        expected = [released, dropped, staying, ended]
        found = [transition.released, transition.dropped, transition.survivors, transition.ended]
        assert [f.tolist() for f in found] == [np.flatnonzero(e).tolist() for e in expected]

    def go_on(self, stream: int, run: Run, transition: Transition) -> None:
        rows = transition.survivors
        survivors = [pairs(run)[row] for row in rows]
        if transition.buffered is not None:
            assert transition.buffered not in self.numbers, "a number was given again"
            self.numbers.add(transition.buffered)
            self.account.kept[transition.buffered] = dict(enumerate(survivors))
            for sample in survivors:
                self.account.place[sample] = "buffered"
        elif survivors:
            self.before[stream] = run._replace(samples=run.samples.take(rows))

    def check_run(self, stream: int, run: Run) -> None:
        samples = pairs(run)
        account = self.account
        assert 1 <= len(samples) <= SIZE
        assert len(set(samples)) == len(samples)
        assert run.stage <= run.deepest <= self.latencies[run.plan].stages - 1
        assert len({account.asked[request].batch_key for request, _ in samples}) == 1
        if stream in self.before:
            before = self.before[stream]
            assert (run.batch, run.deepest, run.pieces) == (before.batch, before.deepest, ())
            assert samples == pairs(before)
        else:
            self.check_start(stream, run, samples)
        account.check_origin(run)
        for sample in samples:
            assert run.stage == account.stage.get(sample, -1) + 1, "a stage was skipped or repeated"
            account.stage[sample] = run.stage
            account.place[sample] = "running"

    def check_start(self, stream: int, run: Run, samples: list[Sample]) -> None:
        beside = [len(other.requests) for other in (self.running | self.before).values()]
        assert self.setup.tau_b is None or max(beside, default=0) < self.setup.tau_b
        self.losses[stream] = 0
        if self.account.place[samples[0]] == "interrupted":
            self.check_resumed(stream, run, samples)
            return
        assert "interrupted" not in self.account.place.values(), "they go first"
        if not run.pieces and self.account.place[samples[0]] == "retry":
            self.check_retry(stream, samples)
            return
        assert run.plan < min(self.to_retry(stream), default=run.plan + 1), "retries go first"
        if run.pieces:
            self.check_merged(run, samples)
        else:
            self.check_new(run, samples)
            self.account.start(run)

    def check_new(self, run: Run, samples: list[Sample]) -> None:
        account = self.account
        assert run.plan == self.s.plan
        buffered = [sample for sample, place in account.place.items() if place == "buffered"]
        assert {account.origin[sample].plan for sample in buffered} <= {run.plan}, "old plans first"
        assert all(account.place[sample] == "queued" for sample in samples)
        batch_key = account.asked[samples[0][0]].batch_key
        left = [
            account.asked[request].key
            for (request, row), place in account.place.items()
            if place == "queued"
            and account.asked[request].batch_key == batch_key
            and (request, row) not in samples
        ]
        taken = [account.asked[request].key for request, _ in samples]
        assert taken == sorted(taken)
        assert not left or taken[-1] <= min(left), "a more urgent sample was left behind"

    def check_merged(self, run: Run, samples: list[Sample]) -> None:
        assert run.stage > 0
        merged = []
        for number, positions in run.pieces:
            assert positions.tolist() == sorted(set(positions.tolist()))
            kept = self.account.kept[number]
            merged += [kept.pop(position) for position in positions.tolist()]
        assert merged == samples
        assert all(self.account.place[sample] == "buffered" for sample in samples)

    def check_resumed(self, stream: int, run: Run, samples: list[Sample]) -> None:
        ((number, positions),) = run.pieces
        kept = self.account.kept[number]
        assert [kept.pop(position) for position in positions.tolist()] == samples
        assert not kept, "a part of an interrupted batch was left"
        assert number == min(self.lost_before), "the first that was interrupted goes first"
        assert run.batch not in self.numbers
        self.losses[stream] = self.lost_before.pop(number)

    def check_retry(self, stream: int, samples: list[Sample]) -> None:
        retries = self.account.retries
        failed_on = next(s for s, again in retries if again == samples)
        assert failed_on != stream or not self.others(stream), "tried again where it failed"
        retries.remove((failed_on, samples))

    def to_retry(self, stream: int) -> list[int]:
        """The plans of what a stream may try again: it failed elsewhere, or nobody else can."""
        alone = not self.others(stream)
        retries = [a for failed_on, a in self.account.retries if failed_on != stream or alone]
        return [self.account.origin[again[0]].plan for again in retries]

    def others(self, stream: int) -> set[int]:
        """Streams in service besides."""
        return set(range(self.streams)) - self.suspended - {stream}

    # The account

    def lose(self, samples: list[Sample]) -> None:
        """These were started and have left, and exactly these were told."""
        assert sorted(self.account.named(self.s.take_lost())) == sorted(samples)
        self.account.leave(samples)

    def withdraw(self, request: int, cause: DropCause) -> None:
        self.account.withdrawn.add(request)
        self.s.cancel(request, cause)
        dropped = self.s.take_dropped()
        assert {(item.request, item.cause) for item in dropped} <= {(request, cause)}
        queued = self.account.waiting(request, "queued")
        started = self.account.waiting(request, "buffered", "retry", "interrupted")
        assert sum(item.count for item in dropped) == len(queued) + len(started)
        self.lose(started)
        self.account.leave(queued)

    def collect_waiting(self) -> None:
        """Account for what left while it waited: it expired, or there was no hope."""
        account = self.account
        lost = account.named(self.s.take_lost())
        late = account.late(self.now)
        assert set(lost) <= set(late)
        totals: Counter[tuple[int, DropCause]] = Counter()
        for item in self.s.take_dropped():
            totals[item.request, item.cause] += item.count
        totals.subtract((request, DropCause.EXPIRED) for request, _ in lost)
        account.leave(lost)
        for (request, cause), count in totals.items():
            assert cause in (DropCause.EXPIRED, DropCause.INFEASIBLE)
            if count:
                queued = account.waiting(request, "queued")
                assert count == len(queued), "not all of a request that waited has left"
                assert cause is DropCause.INFEASIBLE or set(queued) <= set(late)
                account.leave(queued)
        if len(self.s.plans) == 1:
            assert not account.late(self.now)

    def discard(self) -> None:
        for number in self.s.take_discarded():
            assert not self.account.kept.pop(number), "discarded, though somebody waits"
            self.lost_before.pop(number, None)
