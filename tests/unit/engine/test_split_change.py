"""A split model changes its plan while it serves, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.held import ROWS, HeldBackend, cluster_for, plan_of, weights_of
from tests.small import compile_small
from tests.unit.engine.serving import until

from offramp.bundle import ActiveExit, Bundle
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.core import Engine
from offramp.engine.errors import OutOfServiceError
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.engine.plan import StageSpec
from offramp.engine.planning.cluster_plan import ClusterPlan
from offramp.engine.planning.transition import TransitionError
from offramp.engine.results import EngineResult
from offramp.engine.split_change import DRAIN_LIMIT_S, SplitChange, SplitServing
from offramp.engine.swapping import put_in_force

LIMIT_S = 60.0
KINDS = ("slow", "fast", "slow", "fast")
FRONT = plan_of((0, 1, {"fast": 2}), (2, 4, {"slow": 2}))
BACK = plan_of((0, 2, {"slow": 2}), (3, 4, {"fast": 2}), batch_size=2)
THREE = plan_of((0, 0, {"fast": 1}), (1, 3, {"slow": 2}), (4, 4, {"fast": 1}))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, list[np.ndarray[Any, Any]]]:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("small"))
    with np.load(inputs) as archive:
        return bundle, np.array_split(archive["x"][:90], 30)


class Load:
    """Requests that come one upon the other, eight at a time, until the test has seen enough."""

    def __init__(self, engine: Engine, requests: Sequence[np.ndarray[Any, Any]]) -> None:
        self._engine, self._requests = engine, requests
        self.answers: list[tuple[int, EngineResult]] = []
        self.refused = 0
        self._ended = False
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(8)]

    async def _ask(self, number: int) -> None:
        while not self._ended:
            number = (number + 1) % len(self._requests)
            try:
                result = await self._engine.infer("small", {"x": self._requests[number]})
            except OutOfServiceError:
                self.refused += 1
                continue
            self.answers.append((number, result))

    async def more(self, count: int = 20) -> None:
        """Wait for so many more answers."""
        enough = len(self.answers) + count
        while len(self.answers) < enough:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def end(self) -> None:
        self._ended = True
        await asyncio.gather(*self._tasks)


class Serving:
    """An engine whose splits the test changes."""

    def __init__(self, engine: Engine, backend: HeldBackend, load: Load) -> None:
        self.engine, self.backend, self.load = engine, backend, load
        self.now_s = 0.0
        (model,) = engine._models.values()
        assert model.split_by is not None
        self.served = SplitServing(
            name="small",
            executor=engine._executor,
            deployments=model.split_by,
            workers=backend,
            scheduling=model.options.scheduling,
        )

    def change_to(self, plan: ClusterPlan, gone: Sequence[int] = ()) -> SplitChange:
        model = self.served.splits.model
        return SplitChange(self.served, plan, model, gone=gone, clock=lambda: self.now_s)

    async def change(self, plan: ClusterPlan, gone: Sequence[int] = ()) -> SplitChange:
        """Change to a plan while requests are answered."""
        change = self.change_to(plan, gone)
        while not await asyncio.to_thread(change.advance):  # noqa: ASYNC110
            await asyncio.sleep(0)
        return change

    def segments(self) -> list[tuple[int, int] | None]:
        """Give the split that each worker runs."""
        return [role.segments for role in self.served.splits.roles]

    @property
    def plan(self) -> list[tuple[int, int, int | None]]:
        """The stages in force."""
        return [s.unit for s in self.served.executor.deployment("small").plan.stages]


def serve(
    small: tuple[Bundle, list[np.ndarray[Any, Any]]],
    body: Callable[[Serving], Coroutine[Any, Any, None]],
    *,
    share: float = 0.8,
    plan: ClusterPlan | None = FRONT,
    may_refuse: bool = False,
) -> HeldBackend:
    """Serve by ``plan`` under load while ``body`` runs; all answers are those of one process."""
    bundle, requests = small
    cluster = cluster_for(bundle, share=share)
    options = EngineOptions(
        streams=len(KINDS),
        threads=1,
        plan_on=cluster,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=ROWS),
    )
    backend = HeldBackend(KINDS, weights_of(bundle))

    async def run() -> list[tuple[int, EngineResult]]:
        async with await Engine.open({"small": bundle.path}, options, backend=backend) as engine:
            load = Load(engine, requests)
            serving = Serving(engine, backend, load)
            if plan is not None:
                await serving.change(plan)
                backend.most_bytes = [0] * len(KINDS)
            try:
                await load.more()
                await body(serving)
                await load.more()
            finally:
                await load.end()
            assert load.refused == 0 or may_refuse
            assert engine.statistics()["small"].failed == {} or may_refuse
            assert engine.statistics()["small"].retried == 0
            return load.answers

    found = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    expected = asyncio.run(_in_process(bundle, requests))
    for number, result in found:
        one = expected[number]
        np.testing.assert_array_equal(result.exits, one.exits)
        (name,) = one.outputs
        np.testing.assert_allclose(result.outputs[name], one.outputs[name], rtol=1e-5, atol=1e-6)
    backend.close()
    return backend


async def _in_process(
    bundle: Bundle, requests: Sequence[np.ndarray[Any, Any]]
) -> list[EngineResult]:
    options = EngineOptions(threads=1, defaults=ModelOptions(max_batch_size=ROWS), keep_state=False)
    backend = OnnxRuntimeBackend(threads=1)
    async with await Engine.open({"small": bundle.path}, options, backend=backend) as engine:
        return list(await asyncio.gather(*[engine.infer("small", {"x": x}) for x in requests]))


Small = tuple[Bundle, list[np.ndarray[Any, Any]]]


@pytest.mark.parametrize("share", [0.8, 1.3, 3.0])
def test_plans_follow_each_other_under_load(small: Small, share: float) -> None:
    """With little memory, with room for the model, and with room for all twice."""
    total = weights_of(small[0])(0, 4)

    async def body(serving: Serving) -> None:
        assert serving.segments() == [(2, 4), (0, 1), (2, 4), (0, 1)]
        assert serving.plan == [(0, 0, 0), (1, 1, None), (2, 4, None)]
        for plan, stages in (
            (BACK, [(0, 0, 0), (1, 2, None), (3, 4, None)]),
            (THREE, [(0, 0, 0), (1, 3, None), (4, 4, None)]),
            (FRONT, [(0, 0, 0), (1, 1, None), (2, 4, None)]),
        ):
            change = await serving.change(plan)
            assert (change.failure, change.switched) == (None, True)
            assert serving.plan == stages
            assert serving.served.splits.plan == plan
            number = serving.served.executor.deployment("small").number
            await until(lambda n=number: serving.served.executor.plans("small") == {n})  # type: ignore[misc]
            for worker in range(4):
                held = serving.served.splits.held_by(worker)
                fit = {unit for unit in stages if held >= {*range(unit[0], unit[1] + 1)}}
                assert serving.backend.stages(worker) == fit
                role = serving.segments()[worker]
                assert role is not None
                assert held >= {*range(role[0], role[1] + 1)}
            await serving.load.more()

    backend = serve(small, body, share=share)
    assert backend.trespasses == []
    if share < 3:
        assert max(backend.most_bytes) <= share * total


def test_where_workers_lack_the_room_one_of_each_split_serves_to_the_switch(small: Small) -> None:
    """Segments 0 and 1, then 2 to 4, change places: no worker has room for both."""
    turned = plan_of((0, 1, {"slow": 2}), (2, 4, {"fast": 2}))

    async def body(serving: Serving) -> None:
        change = serving.change_to(turned)
        assert change.steps.kept == 0.5
        assert change.steps.late == 2
        while not await asyncio.to_thread(change.advance):
            await serving.load.more(1)
        assert change.failure is None
        assert serving.segments() == [(0, 1), (2, 4), (0, 1), (2, 4)]

    backend = serve(small, body)
    assert backend.trespasses == []
    assert max(backend.most_bytes) <= 0.8 * weights_of(small[0])(0, 4)


def test_a_stage_that_cannot_be_loaded_leaves_the_plan_as_it_was(small: Small) -> None:
    async def body(serving: Serving) -> None:
        held = [serving.backend.stages(worker) for worker in range(4)]
        before = serving.served.splits
        serving.backend.refuses = lambda spec: spec.unit == (1, 2, None)
        change = await serving.change(BACK)
        assert change.failure == "stage (1, 2, None) cannot be loaded"
        assert not change.switched
        assert serving.served.splits is before
        await serving.load.more()
        assert [serving.backend.stages(worker) for worker in range(4)] == held
        serving.backend.refuses = lambda _: False
        assert (await serving.change(BACK)).failure is None, "another time it may go"

    assert serve(small, body).trespasses == []


def test_workers_that_do_not_drain_are_no_reason_to_lose_rows(small: Small) -> None:
    async def body(serving: Serving) -> None:
        before, drained = serving.served.splits, False
        change = serving.change_to(BACK)
        object.__setattr__(
            change, "_served", _NeverDrained(**_fields(serving.served), drains=lambda: drained)
        )
        assert not await asyncio.to_thread(change.advance)
        serving.now_s = DRAIN_LIMIT_S
        assert await asyncio.to_thread(change.advance)
        assert change.failure == "rows of the plan in force did not drain within 60 s"
        assert serving.served.splits is before

    assert serve(small, body).trespasses == []


class _NeverDrained(SplitServing):
    """A model whose rows drain when the test says so."""

    def __init__(self, *, drains: Callable[[], bool], **served: Any) -> None:
        super().__init__(**served)
        object.__setattr__(self, "drains", drains)

    def drained(self, number: int) -> bool:
        found: bool = self.drains()  # type: ignore[attr-defined]
        return found


def _fields(served: SplitServing) -> dict[str, Any]:
    return {
        name: getattr(served, name)
        for name in ("name", "executor", "deployments", "workers", "scheduling")
    }


def test_a_worker_that_is_lost_meanwhile_stops_only_what_none_else_can_run(small: Small) -> None:
    async def body(serving: Serving) -> None:
        before, backend = serving.served.splits, serving.backend

        def lose(spec: StageSpec) -> None:
            if spec.unit == (4, 4, None):
                backend.up = [True, False, True, False]

        backend.on_prepare = lose
        change = await serving.change(THREE)  # where each of the two is alone with its split
        assert change.failure == "no worker of segments 0 to 0 is there any more"
        assert serving.served.splits is before
        backend.up = [True] * 4
        await serving.load.more()

        def lose_one(spec: StageSpec) -> None:
            backend.up[1] = spec.unit != (3, 4, None)

        backend.on_prepare = lose_one
        change = await serving.change(BACK)
        assert (change.failure, backend.up[1]) == (None, False)
        await serving.load.more()

    serve(small, body)


def test_a_plan_without_a_worker_leaves_it_spare(small: Small) -> None:
    less = plan_of((0, 1, {"slow": 1}), (2, 4, {"fast": 2}))

    async def body(serving: Serving) -> None:
        serving.backend.up[0] = False
        with pytest.raises(TransitionError, match="needs 2 workers of type 'slow', and there are"):
            serving.change_to(BACK, gone=[0])
        with pytest.raises(TransitionError, match="not each can keep a worker"):
            serving.change_to(less, gone=[0])
        less_still = plan_of((0, 1, {"fast": 2}), (2, 4, {"slow": 1}))
        change = await serving.change(less_still, gone=[0])
        assert change.failure is None
        assert serving.segments() == [None, (0, 1), (2, 4), (0, 1)]
        await serving.load.more()
        serving.backend.up[0] = True  # it helps where it can, until it is planned for
        await serving.load.more()

    serve(small, body)


def test_a_split_without_workers_is_taken_over_though_others_have_to_stop(small: Small) -> None:
    """What waited for the lost workers is told so; requests that come then are answered."""
    less = plan_of((0, 1, {"fast": 1}), (2, 4, {"fast": 1}))

    async def body(serving: Serving) -> None:
        serving.backend.up = [False, True, False, True]
        change = serving.change_to(less, gone=[0, 2])
        while not change.switched:
            assert not await asyncio.to_thread(change.advance)
        assert serving.segments() == [None, (0, 1), None, (2, 4)]
        again = [serving.engine.infer("small", {"x": x}) for x in small[1]]
        assert len(await asyncio.gather(*again)) == 30
        serving.backend.up = [True] * 4
        while not await asyncio.to_thread(change.advance):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert change.failure is None

    serve(small, body, may_refuse=True)


def test_exits_and_thresholds_change_meanwhile(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in force in the end has the new splits, and the last policy."""

    async def body(serving: Serving) -> None:
        served = serving.served
        first = served.executor.deployment("small").policy
        versions = iter(range(100, 200))

        def swap(exits: Sequence[int]) -> None:
            active = tuple(ActiveExit(exit=e, threshold=0.9999999) for e in exits)
            policy = replace(first, version=next(versions), active=(*first.active, *active))
            put_in_force(served.executor, "small", served.deployments, policy, served.scheduling)

        def meanwhile(spec: StageSpec) -> None:
            serving.backend.on_prepare = lambda _: None
            if spec.last_segment == 2:
                served.deployments.prepare((0, 3))
                swap([3])  # the change has prepared for exit 0 alone

        swap([])
        serving.backend.on_prepare = meanwhile
        change = await serving.change(BACK)
        assert change.failure is None
        current = served.executor.deployment("small")
        assert current.policy.version == 101
        assert current.plan.exits == (0, 3)
        assert serving.plan == [(0, 0, 0), (1, 2, None), (3, 3, 3), (4, 4, None)]
        swap([])
        assert served.executor.deployment("small").placement is not None
        assert serving.plan == [(0, 0, 0), (1, 2, None), (3, 4, None)]

    with caplog.at_level(logging.ERROR):
        serve(small, body)
    assert caplog.records == []
