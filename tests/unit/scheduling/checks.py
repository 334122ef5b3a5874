"""A scheduler of which everything is checked that it says: against a plain account of samples."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeAlias

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant
from numpy.typing import NDArray
from tests.unit.scheduling.account import Account, Retry, Sample
from tests.unit.scheduling.helpers import SIZE, pairs, scheduler

from offramp.engine.scheduling import (
    DropCause,
    Latencies,
    Placement,
    Run,
    StepOutcome,
    Wait,
)
from offramp.engine.scheduling.stragglers import ReplicaStatus

Flags: TypeAlias = NDArray[np.bool_]


class Setup(NamedTuple):
    """Under what a machine runs."""

    policy: str
    max_delay_s: float = 0.0
    tau_b: int | None = None
    max_violations: float | None = None
    feedback: bool = False
    """True if samples may run on after their answer."""
    hot_swaps: bool = False
    """True if plans are swapped."""
    placed: bool = False
    """True if streams differ in their preferred stages, held stages and times."""


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
        """Latencies of every plan so far."""
        self.running: dict[int, Run] = {}
        self.before: dict[int, Run] = {}
        """Runs whose survivors a stream has to continue with."""
        self.suspended: set[int] = set()
        self.numbers: set[int] = set()
        """Numbers of all batches that were ever buffered or interrupted."""
        self.losses: dict[int, int] = {}
        """Interruptions of the batch that a stream runs."""
        self.lost_before: dict[int, int] = {}
        """Streams that lost batches waiting to be resumed, by number, in order."""
        self.failed_on: dict[int, int] = {}
        """Stream on which the running second try of a stream failed before."""
        self.failed_before: dict[int, int] = {}
        """The same of second tries that wait to be resumed, by number."""
        self.placements: list[Placement] = []
        """Placements of every plan; empty if streams are equal."""

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
            assert not self.left_to_it(stream), "a stream idles although something is buffered"
            assert not self.resumable(stream), "a stream idles though something is to be resumed"
            if not self.placements:
                assert not places["buffered"], "a stream idles although something is buffered"
                assert not places["queued"] or self.setup.max_delay_s, "a stream idles for nothing"
            assert not self.to_retry(stream), "a stream idles although it could try again"
            if not (places["queued"] or places["buffered"]):
                assert not self.to_retry(stream, suspects=True), "nothing else waits"
        return False

    def done(self, stream: int, exited: Flags, runs_on: Flags | None = None) -> None:
        run = self.running.pop(stream)
        self.before.pop(stream, None)
        if run.stage == self.latencies[run.plan].stages - 1:
            exited = np.ones_like(exited)
        samples = pairs(run)
        outcome = self.s.update(stream, exited, self.now, runs_on)
        self.check_outcome(run, outcome, exited, runs_on)
        dropped = [samples[row] for row in outcome.given_up]
        told = Counter({item.request: item.count for item in self.s.take_dropped()})
        assert told == Counter(request for request, _ in dropped)
        self.lose(dropped)
        going_on = set(outcome.survivors.tolist())
        released = outcome.released.tolist()
        through = [row for row in released if row not in going_on] + outcome.ended.tolist()
        self.account.answered |= {samples[row] for row in released if row in going_on}
        self.account.leave([samples[row] for row in through])
        self.go_on(stream, run, outcome)

    def done_by(self, stream: int, share: float) -> None:
        """The run of a stream is done, and about this share of its rows is sure enough."""
        sure, runs_on = self.random.random((2, len(self.running[stream].requests)))
        self.done(stream, sure < share, runs_on < 0.5 if self.setup.feedback else None)

    def check_outcome(
        self, run: Run, outcome: StepOutcome, exited: Flags, runs_on: Flags | None
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
        found = [outcome.released, outcome.given_up, outcome.survivors, outcome.ended]
        assert [f.tolist() for f in found] == [np.flatnonzero(e).tolist() for e in expected]

    def go_on(self, stream: int, run: Run, outcome: StepOutcome) -> None:
        rows = outcome.survivors
        survivors = [pairs(run)[row] for row in rows]
        yields_first = bool(survivors) and self.yields_first(survivors)
        assert outcome.buffered is not None or not yields_first, "feedback went before an answer"
        if outcome.buffered is not None:
            assert outcome.buffered not in self.numbers, "a number was given again"
            self.numbers.add(outcome.buffered)
            alone = stream in self.failed_on or yields_first
            place = "interrupted" if alone else "buffered"
            self.account.keep(outcome.buffered, dict(enumerate(survivors)), place)
            if alone:  # it goes on by itself, on a stream that holds its next stage
                self.lost_before[outcome.buffered] = self.losses[stream]
            if stream in self.failed_on:
                self.failed_before[outcome.buffered] = self.failed_on[stream]
            if self.placements:
                assert place == "buffered" or not self.may_stay(stream, run.plan, run.stage + 1)
        elif survivors:
            assert self.may_stay(stream, run.plan, run.stage + 1), "another stream's split began"
            self.before[stream] = run._replace(samples=run.samples.take(rows))

    def yields_first(self, survivors: list[Sample]) -> bool:
        """Return True if a fully answered batch lets waiting samples go first."""
        places = Counter(self.account.place.values())
        few = places["interrupted"] + len(survivors) <= SIZE
        return bool(few and self.yields(survivors) and places["queued"] and not self.placements)

    def yields(self, samples: list[Sample]) -> bool:
        """Return True if no caller waits for a batch, nor for the end of its plan."""
        plan = self.account.origin[samples[0]].plan
        return plan == self.s.plan and self.account.answered.issuperset(samples)

    def check_run(self, stream: int, run: Run) -> None:
        samples = pairs(run)
        account = self.account
        assert self.holds(stream, run.plan, run.stage), "a stream has not what it should run"
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
        self.failed_on.pop(stream, None)
        if self.account.place[samples[0]] == "interrupted":
            self.check_resumed(stream, run, samples)
            return
        assert not self.resumable(stream, yielding=False), "they go first"
        if not run.pieces and self.account.place[samples[0]] == "retry":
            self.check_retry(stream, samples)
            return
        assert run.plan < min(self.to_retry(stream), default=run.plan + 1), "retries go first"
        if run.pieces:
            self.check_merged(run, samples)
        else:
            self.check_new(stream, run, samples)
            self.account.start(run)

    def check_new(self, stream: int, run: Run, samples: list[Sample]) -> None:
        account = self.account
        assert run.plan == self.s.plan
        buffered = [sample for sample, place in account.place.items() if place == "buffered"]
        old = [sample for sample in buffered if account.origin[sample].plan != run.plan]
        assert not any(self.prefers(stream, *self.wanted(sample)) for sample in old) or (
            self.placements and self.status(stream)
        ), "old plans first"
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
        yields = self.yields(samples)
        first, *_ = self.resumable(stream, yielding=yields)
        assert number == first, "the first that was interrupted goes first"
        if yields:
            assert not self.resumable(stream, yielding=False), "feedback went before an answer"
            assert not self.to_retry(stream), "feedback went before an answer"
        kept = self.account.kept[number]
        assert [kept.pop(position) for position in positions.tolist()] == samples
        assert not kept, "a part of an interrupted batch was left"
        assert run.batch not in self.numbers
        self.losses[stream] = self.lost_before.pop(number)
        if number in self.failed_before:
            self.failed_on[stream] = self.failed_before.pop(number)

    def check_retry(self, stream: int, samples: list[Sample]) -> None:
        retry = next(retry for retry in self.account.retries if retry.samples == samples)
        self.account.retries.remove(retry)
        self.failed_on[stream], self.losses[stream] = retry.failed_on, retry.losses
        plan = self.account.origin[samples[0]].plan
        elsewhere = retry.failed_on != stream or not self.able(stream, plan, 0)
        assert elsewhere, "tried again where it failed"
        if self.waits(retry):
            places = set(self.account.place.values())
            assert not places & {"queued", "buffered"}, "a suspect ran before others"
            assert not self.to_retry(stream), "a suspect ran before others"

    def waits(self, retry: Retry) -> bool:
        return retry.suspect_until_s is not None and retry.suspect_until_s > self.now

    def to_retry(self, stream: int, *, suspects: bool = False) -> list[int]:
        """Return the plans of batches that a stream may retry: failed elsewhere, or only it can."""
        plans = [
            (retry.failed_on, self.account.origin[retry.samples[0]].plan)
            for retry in self.account.retries
            if suspects or not self.waits(retry)
        ]
        return [
            plan
            for failed_on, plan in plans
            if self.holds(stream, plan, 0)
            and (failed_on != stream or not self.able(stream, plan, 0))
        ]

    def resumable(self, stream: int, *, yielding: bool | None = None) -> list[int]:
        """The numbers of what a stream may resume, in turn: what yields, what does not, or any."""
        found = []
        for number in self.lost_before:
            samples = list(self.account.kept.get(number, {}).values())
            if not samples or yielding == (not self.yields(samples)):
                continue
            plan, stage = self.wanted(samples[0])
            failed_here = self.placements and self.failed_before.get(number) == stream
            if self.holds(stream, plan, stage) and not (
                failed_here and self.able(stream, plan, stage)
            ):
                found.append(number)
        return found

    # Where streams differ

    def wanted(self, sample: Sample) -> tuple[int, int]:
        """The plan of a sample that was started, and the stage that it runs next."""
        return self.account.origin[sample].plan, self.account.stage[sample] + 1

    def prefers(self, stream: int, plan: int, stage: int) -> bool:
        return not self.placements or stage in self.placements[plan].streams[stream].prefers

    def may_stay(self, stream: int, plan: int, stage: int) -> bool:
        """Return True if a batch may go on to a stage on its stream: no split begins there, or none
        for faster streams.
        """
        if not self.placements:
            return True
        streams = self.placements[plan].streams
        theirs = [other for other in streams if stage in other.prefers]
        begins = not any(stage - 1 in other.prefers for other in theirs)
        slow = streams[stream].kind == "slow" and all(other.kind == "fast" for other in theirs)
        return self.holds(stream, plan, stage) and not (begins and slow)

    def holds(self, stream: int, plan: int, stage: int) -> bool:
        return not self.placements or stage in self.placements[plan].streams[stream].holds

    def able(self, stream: int, plan: int, stage: int) -> list[int]:
        """Other streams in service that can run a stage."""
        return [other for other in self.others(stream) if self.holds(other, plan, stage)]

    def status(self, stream: int) -> ReplicaStatus:
        placed = self.s._current.placed
        assert placed is not None
        return placed.stragglers.status(stream)

    def left_to_it(self, stream: int) -> list[Sample]:
        """Return samples that wait at a split held by an idle stream, and that only it should take.

        Idle streams that prefer it and are no stragglers should take them. An excluded straggler
        leaves them to all others that hold it.
        """
        if not self.placements:
            return []
        busy = set(self.running) | set(self.before)
        found = []
        for sample, place in self.account.place.items():
            if place != "buffered" or not self.holds(stream, *self.wanted(sample)):
                continue
            able = self.able(stream, *self.wanted(sample))
            if self.status(stream) is ReplicaStatus.EXCLUDED:
                theirs = [other for other in able if self.status(other) < ReplicaStatus.EXCLUDED]
            else:
                mine = self.prefers(stream, *self.wanted(sample)) and not self.status(stream)
                theirs = [
                    other
                    for other in able
                    if not (mine or other in busy or self.status(other))
                    and self.prefers(other, *self.wanted(sample))
                ]
            if not theirs:
                found.append(sample)
        return found

    def others(self, stream: int) -> set[int]:
        """Return the other streams in service."""
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
            self.failed_before.pop(number, None)
