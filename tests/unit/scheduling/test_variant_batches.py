"""A batch has one variant from its start to its end; only batches of equal variants fuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from tests.unit.scheduling.account import Sample
from tests.unit.scheduling.checks import Setup
from tests.unit.scheduling.helpers import (
    SIZE,
    STAGES,
    Watched,
    none_exit,
    pairs,
    points_of,
    row_set,
    started,
    table,
)
from tests.unit.scheduling.machine import CAPACITY, SchedulerMachine
from tests.unit.scheduling.test_every_policy import LIVES

from offramp.engine.scheduling import Latencies, ModelScheduler, Run, SampleQueue, Submission
from offramp.engine.scheduling.buffered import BufferedQueue
from offramp.engine.scheduling.policies.batching import RunThrough
from offramp.engine.scheduling.policies.merging import Rebatch, Refill
from offramp.engine.scheduling.policy_protocol import Choice, Merge, Policy, Start, Waiting
from offramp.engine.scheduling.stage_table import StageTable

VARIANTS = 3


def varied(stages: int) -> Latencies:
    """Variant v has v stages less than the full model, but one at least, and is faster."""
    rows = table(stages, first_s=0.25, more_s=0.125).profiled_s
    smaller = [
        StageTable([[seconds / 2**v for seconds in row] for row in rows[: max(stages - v, 1)]])
        for v in range(1, VARIANTS)
    ]
    return Latencies(rows, smaller=smaller)


class AnyVariant:
    """A policy as another one, which starts one variant after the other."""

    name = "any-variant"

    def __init__(self, policy: Policy, first: int = 0) -> None:
        self._policy = policy
        self._variants = itertools.cycle([(first + v) % VARIANTS for v in range(VARIANTS)])

    def choose(self, waiting: Waiting, now_s: float) -> Choice:
        choice = self._policy.choose(waiting, now_s)
        if isinstance(choice, Start):
            return choice._replace(variant=next(self._variants))
        return choice

    def runs_on(self, stage: int, before: int, survivors: int) -> bool:
        return self._policy.runs_on(stage, before, survivors)


class VariantMachine(SchedulerMachine):
    """The random life of a scheduler, with batches of several variants."""

    kind: type[Refill | RunThrough] = Refill

    @initialize(streams=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
    def begin(self, streams: int, seed: int) -> None:
        self.streams = streams
        self.random = np.random.default_rng(seed)
        self.variant: dict[Sample, int] = {}
        self.latencies = [varied(STAGES)]
        queue = SampleQueue(CAPACITY, full=SIZE, max_delay_s=self.setup.max_delay_s)
        self.s = Watched(
            ModelScheduler(
                self.policy(self.latencies[0]), self.latencies[0], queue, streams=streams
            )
        )

    def policy(self, latencies: Latencies) -> AnyVariant:
        first = int(self.random.integers(VARIANTS))
        return AnyVariant(self.kind(points_of(latencies), SIZE, self.streams), first)

    @rule(stages=st.integers(1, STAGES + 1))
    def hot_swap(self, stages: int) -> None:
        latencies = varied(stages)
        self.s.hot_swap(len(self.latencies), self.policy(latencies), latencies)
        self.latencies.append(latencies)

    def check_run(self, stream: int, run: Run) -> None:
        super().check_run(stream, run)
        samples = pairs(run)
        if not (run.pieces or any(sample in self.variant for sample in samples)):
            self.variant |= dict.fromkeys(samples, run.variant)
        mixed = {self.variant[sample] for sample in samples}
        assert mixed == {run.variant}, "a batch mixes variants, or has changed its own"
        assert run.deepest == self.latencies[run.plan].last(run.variant)


@pytest.mark.parametrize("max_delay_s", [0.0, 1.0])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("kind", [Refill, Rebatch, RunThrough])
def test_a_batch_never_mixes_variants(
    kind: type[Refill | RunThrough], feedback: bool, max_delay_s: float
) -> None:
    setup = Setup(kind.name, max_delay_s, feedback=feedback, hot_swaps=True)
    machine = type("Machine", (VariantMachine,), {"setup": setup, "kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=LIVES, stateful_step_count=40)
    )


def test_survivors_of_different_variants_are_not_fused() -> None:
    """Three batches of two lose no sample at stage 0; of variants 0, 1 and 0 the first and the
    third fill a batch.
    """
    latencies = Latencies(
        [[0.0, *[0.25] * SIZE]] * 2, smaller=[StageTable([[0.0, *[0.25] * SIZE]] * 2)]
    )
    policy = AnyVariant(Refill(points_of(latencies), SIZE))
    policy._variants = itertools.cycle([0, 1])
    s = ModelScheduler(policy, latencies, SampleQueue(64, full=SIZE))
    for request in range(3):
        s.submit(Submission(request, 2), 0.0)
        run = started(s.next(0, 0.0))
        assert (run.stage, run.variant) == (0, request % 2)
        assert s.update(0, none_exit(run), 0.0).buffered is not None
    merged = started(s.next(0, 0.0))
    assert (merged.stage, merged.variant, sorted(pairs(merged))) == (
        *(1, 0),
        [(0, 0), (0, 1), (2, 0), (2, 1)],
    )
    s.update(0, none_exit(merged), 0.0)
    alone = started(s.next(0, 0.0))
    assert (alone.stage, alone.variant, pairs(alone)) == (1, 1, [(1, 0), (1, 1)])


@pytest.mark.parametrize(("variant", "merges"), [(0, True), (1, False)])
def test_what_waits_is_urgent_by_the_time_that_its_variant_needs(
    variant: int, merges: bool
) -> None:
    """Until 1 s; the full model needs 1.2 s with the slack, variant 1 an eighth of that."""
    rows = [[0.0, *[1.0] * SIZE]] * 2
    latencies = Latencies(rows, smaller=[StageTable([[s / 8 for s in row] for row in rows])])
    buffered = (BufferedQueue(), BufferedQueue())
    buffered[1].buffer(row_set([0], deadlines_s=1.0), None, 1, 0.0, variant)
    queue = SampleQueue(8, full=SIZE)
    queue.push(Submission(2, 1), 0.0)
    choice = Refill(points_of(latencies), SIZE).choose(Waiting(queue, buffered), 0.0)
    assert isinstance(choice, Merge) == merges
