"""Scheduling policies, several models and their statistics, through the engine."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from tests.facts import facts
from tests.fakes import ScriptedController, fake_model, policy_of, script
from tests.unit.engine.serving import LIMIT_S, Gate, with_engine

from offramp.engine.common.errors import DeadlineExceededError
from offramp.engine.core import Engine
from offramp.engine.requests.timeline import RequestTimeline
from offramp.engine.scheduling import ParallelLimit
from offramp.engine.scheduling.policies import POLICIES, PolicyName
from offramp.testing.backend import SCRIPT, FakeBackend

SLACKFIT = PolicyName("slackfit")
NAMES = [*(name for name in POLICIES if name != "fixed"), "fixed:1", "fixed:final"]
UNSURE, SURE = [0.5, 0.5], [0.95, 0.5]


async def ask_at_random(engine: Engine, seed: int, model: str = "fake", stages: int = 3) -> None:
    """Send a few random rows, and check that each answer is that of its exit."""
    first = np.random.default_rng(seed).random((1 + seed % 11, stages, 1), np.float32)
    rows = np.concatenate([first, 1 - first], axis=-1)
    result = await engine.infer(model, {SCRIPT: rows})
    stage = np.where(result.exits < 0, stages - 1, result.exits)
    np.testing.assert_array_equal(result.outputs["answer"], rows[np.arange(len(rows)), stage])


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_many_requests_at_once_are_all_answered_rightly(name: str, streams: int) -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        await asyncio.gather(*(ask_at_random(engine, seed) for seed in range(300)))
        statistics = engine.statistics()["fake"]
        samples = sum(1 + seed % 11 for seed in range(300))
        assert statistics.answered == statistics.samples == samples
        assert (statistics.queued, statistics.in_flight, statistics.failed) == (0, 0, {})
        assert statistics.latency_s.count == 300
        assert statistics.scheduling == name == engine.model("fake").scheduling
        if name in ("run-through", "refill", "rebatch", "delay", "clockwork", "fixed:final"):
            assert sum(stage.forced for stage in statistics.stages) == 0

    policy = PolicyName.parse(name)
    backend = with_engine(body, thresholds=(0.7, 0.8), streams=streams, scheduling=policy)
    assert max(rows for _, rows in backend.runs) <= 8


def test_refill_fills_batches_that_run_through_leaves_half_empty() -> None:
    """Two batches of 4 lose half of their rows: one stream, then one batch of 4."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = [SURE, UNSURE] * 4
        tasks = [asyncio.create_task(engine.infer("fake", {SCRIPT: script(row)})) for row in rows]
        results = await asyncio.gather(*tasks)
        assert [r.exits[0] for r in results] == [0, -1] * 4
        assert backend.runs == [(0, 4), (0, 4), (1, 4)]

    refill = PolicyName("refill")
    with_engine(body, scheduling=refill, max_batch_size=4, max_delay_s=3600.0)


def test_a_tight_objective_forces_the_unsure_out_and_says_so() -> None:
    """A stage takes 10 s, the objective is 15 s: nothing runs beyond the first."""

    async def body(engine: Engine, backend: FakeBackend) -> None:
        result = await engine.infer("fake", {SCRIPT: script(UNSURE, SURE)})
        assert result.exits.tolist() == [0, 0]
        assert result.forced.tolist() == [True, False]
        assert backend.runs == [(0, 2)]
        stages = engine.statistics()["fake"].stages
        assert [(s.answered, s.forced) for s in stages] == [(2, 1), (0, 0)]

    with_engine(body, scheduling=SLACKFIT, stage_s=10.0, slo_ms=15_000.0)


def test_a_generous_objective_forces_nobody() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        result = await engine.infer("fake", {SCRIPT: script(UNSURE, SURE)})
        assert result.exits.tolist() == [-1, 0]
        assert result.forced.tolist() == [False, False]

    with_engine(body, scheduling=SLACKFIT, stage_s=10.0, slo_ms=3_600_000.0)


def test_where_exits_may_not_be_forced_none_is() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(DeadlineExceededError, match="given up early"):
            await engine.infer("fake", {SCRIPT: script(UNSURE)})
        in_time = time.monotonic() + 25.0  # 20 s are needed
        result = await engine.infer("fake", {SCRIPT: script(UNSURE)}, deadline_s=in_time)
        assert (result.exits.tolist(), result.forced.tolist()) == ([-1], [False])

    with_engine(body, scheduling=SLACKFIT, stage_s=10.0, slo_ms=15_000.0, forced_exits=False)


def test_what_cannot_be_in_time_is_given_up_and_does_not_run() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(DeadlineExceededError, match=facts("fake: given up early", "5000.0 ms")):
            await engine.infer("fake", {SCRIPT: script(SURE, SURE)})
        assert backend.runs == []
        assert engine.statistics()["fake"].failed == {"hopeless": 2}

    with_engine(body, scheduling=SLACKFIT, stage_s=10.0, slo_ms=5_000.0)


def test_the_objective_is_the_deadline_of_those_who_bring_none() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        with pytest.raises(DeadlineExceededError):
            await engine.infer("fake", {SCRIPT: script(SURE)})
        later = time.monotonic() + 3600.0
        result = await engine.infer("fake", {SCRIPT: script(SURE)}, deadline_s=later)
        assert result.exits.tolist() == [0]

    with_engine(body, scheduling=PolicyName("cheapest"), stage_s=10.0, slo_ms=5_000.0)


def test_fixed_forces_everybody_out_at_its_exit() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = script([0.5, 0.6, 0.5], [0.95, 0.5, 0.5], [0.5, 0.99, 0.5])
        result = await engine.infer("fake", {SCRIPT: rows})
        assert result.exits.tolist() == [1, 0, 1]
        assert result.forced.tolist() == [True, False, False]
        np.testing.assert_array_equal(result.outputs["answer"], rows[[0, 1, 2], [1, 0, 1]])

    with_engine(body, thresholds=(0.9, 0.9), scheduling=PolicyName.parse("fixed:1"))


def test_two_models_share_the_streams() -> None:
    backend = FakeBackend()

    async def run() -> None:
        models = {
            "a": fake_model(backend, streams=2, weight=3.0),
            "b": fake_model(
                backend, (0.6, 0.7), streams=2, scheduling=PolicyName("refill"), max_batch_size=4
            ),
        }
        async with Engine(models, backend, streams=2) as engine:
            asked = [ask_at_random(engine, seed, "a", stages=2) for seed in range(100)]
            asked += [ask_at_random(engine, seed, "b", stages=3) for seed in range(100)]
            await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
            statistics = engine.statistics()
            samples = sum(1 + seed % 11 for seed in range(100))
            assert {name: s.answered for name, s in statistics.items()} == {
                "a": samples,
                "b": samples,
            }
            assert {n: s.scheduling for n, s in statistics.items()} == {
                "a": "run-through",
                "b": "refill",
            }
            assert engine.ready("a")
            assert engine.ready()
            assert not engine.ready("c")

    asyncio.run(run())
    backend.close()


def test_statistics_say_under_what_they_were_counted() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: script(SURE)})
        statistics = engine.statistics()["fake"]
        assert (statistics.scheduling, statistics.mode) == ("refill", "leave")
        assert (statistics.streams, statistics.streams_in_service) == (2, 2)
        assert (statistics.restarts, statistics.retried) == (0, 0)
        assert statistics.parallel_below == 3

    limit, refill = ParallelLimit(8, fixed=3), PolicyName("refill")
    with_engine(body, scheduling=refill, streams=2, parallel=limit)


def test_where_batches_are_not_limited_the_statistics_say_so() -> None:
    async def body(engine: Engine, backend: FakeBackend) -> None:
        assert engine.statistics()["fake"].parallel_below is None

    with_engine(body, parallel=ParallelLimit(8))


def test_the_times_of_a_request_are_noted_where_they_are_asked_for() -> None:
    """Two rows of the traced request, and one of another in its batch."""
    gate, traced = Gate(), RequestTimeline()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        first = asyncio.create_task(engine.infer("fake", {SCRIPT: script(SURE)}))
        await gate.wait_entered()  # whatever comes now shares the next batch
        rows = {SCRIPT: script(SURE, UNSURE)}
        second = asyncio.create_task(engine.infer("fake", rows, timeline=traced))
        third = asyncio.create_task(engine.infer("fake", {SCRIPT: script(UNSURE)}))
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, second, third)
        facts = [(s.label, s.batch, s.samples, s.answered) for s in traced.stages]
        assert facts == [("exit 0", 3, 2, 1), ("final", 2, 1, 1)]
        assert not traced.audited
        times = [time_s for s in traced.stages for time_s in (s.began_s, s.ended_s)]
        assert times == sorted(times)
        await engine.infer("fake", {SCRIPT: script(SURE)})
        assert not engine._executor._models["fake"].table.traced

    with_engine(body, on_run=gate)


def test_an_audit_is_noted_in_the_times_of_its_request() -> None:
    traced = RequestTimeline()

    async def body(engine: Engine, backend: FakeBackend) -> None:
        await engine.infer("fake", {SCRIPT: script(SURE)}, timeline=traced)
        assert [(s.label, s.answered) for s in traced.stages] == [("exit 0", 1)]
        assert traced.audited

    with_engine(body, controller=ScriptedController(policy_of(1, e0=0.9)))
