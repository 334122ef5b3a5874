"""A split model changes its plan while it serves, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.cluster.held import plan_of, weights_of
from tests.cluster.split_serving import BACK, FRONT, Serving, Small, serve
from tests.facts import facts, tells
from tests.fakes import ScriptedController
from tests.small import compile_small
from tests.unit.engine.serving import until

from offramp.bundle import ActiveExit
from offramp.cluster.planning.transition import Action, TransitionError
from offramp.cluster.serving.split_change import DRAIN_LIMIT_S, SplitServing
from offramp.engine.models.served_model import ModelControl
from offramp.engine.requests.recorder import Recorder
from offramp.engine.serving.control_loop import ControlLoop
from offramp.engine.serving.swapping import activate
from offramp.engine.stages.plan import StageSpec

THREE = plan_of((0, 0, {"fast": 1}), (1, 3, {"slow": 2}), (4, 4, {"fast": 1}))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    bundle, inputs = compile_small(tmp_path_factory.mktemp("small"))
    with np.load(inputs) as archive:
        return bundle, np.array_split(archive["x"][:90], 30)


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
                held = serving.served.splits.held[worker]
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
        actions = [step.action for step in change.steps.steps]
        switch = actions.index(Action.SWITCH)
        assert actions[:switch].count(Action.STOP) == 2
        assert actions[switch:].count(Action.LOAD) == 2
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
        tells(change.failure, "drain", "60 s")
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
        tells(change.failure, "no worker", "segments 0 to 0")
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
        with pytest.raises(TransitionError, match=facts("2 workers of type 'slow'")):
            serving.change_to(BACK, gone=[0])
        with pytest.raises(TransitionError, match="not every split can keep a worker"):
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
    """Samples that waited for the lost workers get an error; later requests are answered."""
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
    """The final state has the new splits, and the last policy."""

    async def body(serving: Serving) -> None:
        served = serving.served
        first = served.executor.deployment("small").policy
        versions = iter(range(100, 200))

        def swap(exits: Sequence[int]) -> None:
            active = tuple(ActiveExit(exit=e, threshold=0.9999999) for e in exits)
            policy = replace(first, version=next(versions), active=(*first.active, *active))
            activate(served.executor, "small", served.deployments, policy, served.scheduling)

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


def test_control_changes_exits_while_splits_change(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    """Two loops put deployments in force, and neither undoes what the other did."""

    async def body(serving: Serving) -> None:
        served = serving.served
        first = served.executor.deployment("small").policy
        more = (*first.active, ActiveExit(exit=3, threshold=0.9999999))
        controller = ScriptedController(first)
        control = ModelControl(
            controller=controller,
            recorder=Recorder(4),
            deployments=served.deployments,
            fingerprint={},
        )
        (model,) = (v.model for v in serving.engine._versions.current.values())
        loop = ControlLoop(served.executor, {"small": replace(model, control=control)})
        ended = threading.Event()

        def change_exits() -> int:
            while not ended.is_set():
                loop.poll()
                current = served.executor.deployment("small").policy
                if current == controller.policy:
                    active = more if len(current.active) == 1 else first.active
                    controller.policy = replace(current, version=current.version + 1, active=active)
            return controller.policy.version - first.version

        changing = asyncio.create_task(asyncio.to_thread(change_exits))
        for plan in (BACK, THREE, FRONT):
            assert (await serving.change(plan)).failure is None
            deployment, splits = served.executor.deployment("small"), served.splits
            assert splits.plan == plan
            ends = {stage.last_segment for stage in deployment.plan.stages}
            assert ends >= splits.borders
        ended.set()
        assert await changing > 3
        while served.executor.deployment("small").policy != controller.policy:
            await asyncio.to_thread(loop.poll)
        loop.stop()

    with caplog.at_level(logging.ERROR):
        serve(small, body)
    assert caplog.records == []
