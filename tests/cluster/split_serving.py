"""An engine that serves a split model under load, while a test changes how it is split."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.cluster.held import ROWS, HeldBackend, cluster_for, plan_of, weights_of

from offramp.bundle import Bundle
from offramp.cluster.planning.cluster_plan import ClusterPlan
from offramp.cluster.serving.cluster_serving import ServedCluster
from offramp.cluster.serving.plan_loop import PlanLoop
from offramp.cluster.serving.split_change import SplitChange, SplitServing
from offramp.cluster.serving.worker_devices import OpenedWorkers
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import OutOfServiceError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult
from offramp.engine.stages.plan import StageSpec

LIMIT_S = 60.0
"""Bound of everything awaited: a test hangs no longer, and asserts no time."""
KINDS = ("slow", "fast", "slow", "fast")
FRONT = plan_of((0, 1, {"fast": 2}), (2, 4, {"slow": 2}))
BACK = plan_of((0, 2, {"slow": 2}), (3, 4, {"fast": 2}), batch_size=2)
Small = tuple[Bundle, list[np.ndarray[Any, Any]]]
"""A bundle, and requests."""


class Load:
    """Requests that come one upon the other, eight at a time, until the test has seen enough."""

    def __init__(self, engine: Engine, requests: Sequence[np.ndarray[Any, Any]]) -> None:
        self._engine, self._requests = engine, requests
        self.chosen: Sequence[int] = range(len(requests))
        """The requests that are sent, in turn."""
        self.answers: list[tuple[int, EngineResult]] = []
        self.refused = 0
        self._ended = False
        self._turns = itertools.count()
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(8)]

    async def _ask(self) -> None:
        while not self._ended:
            number = self.chosen[next(self._turns) % len(self.chosen)]
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
        (model,) = (version.model for version in engine._versions.current.values())
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
        """Return the split of each worker."""
        return [role.segments for role in self.served.splits.roles]

    @property
    def plan(self) -> list[tuple[int, int, int | None]]:
        """The stages in force."""
        return [s.unit for s in self.served.executor.deployment("small").plan.stages]


def serve(
    small: Small,
    body: Callable[[Serving], Coroutine[Any, Any, None]],
    *,
    share: float = 0.8,
    cluster: ServedCluster | None = None,
    plan: ClusterPlan | None = FRONT,
    may_refuse: bool = False,
    refuses: Callable[[HeldBackend, StageSpec], bool] | None = None,
) -> HeldBackend:
    """Serve by ``plan`` under load while ``body`` runs; all answers are those of one process.

    ``refuses`` says which stages cannot be loaded from the start.
    """
    bundle, requests = small
    options = EngineOptions(
        threads=1,
        devices=OpenedWorkers(len(KINDS), cluster or cluster_for(bundle, share=share)),
        keep_state=False,
        defaults=ModelOptions(max_batch_size=ROWS),
    )
    backend = HeldBackend(KINDS, weights_of(bundle))
    if refuses is not None:
        backend.refuses = partial(refuses, backend)

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

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanLoop, "start", lambda _: None)  # the test looks by hand
        found = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    expected = in_process(small)
    for number, result in found:
        one = expected[number]
        np.testing.assert_array_equal(result.exits, one.exits)
        (name,) = one.outputs
        np.testing.assert_allclose(result.outputs[name], one.outputs[name], rtol=1e-5, atol=1e-6)
    backend.close()
    return backend


def in_process(small: Small) -> list[EngineResult]:
    """Return the answers of a single process to the requests."""
    return asyncio.run(_in_process(*small))


async def _in_process(
    bundle: Bundle, requests: Sequence[np.ndarray[Any, Any]]
) -> list[EngineResult]:
    options = EngineOptions(threads=1, defaults=ModelOptions(max_batch_size=ROWS), keep_state=False)
    backend = OnnxRuntimeBackend(threads=1)
    async with await Engine.open({"small": bundle.path}, options, backend=backend) as engine:
        return list(await asyncio.gather(*[engine.infer("small", {"x": x}) for x in requests]))
