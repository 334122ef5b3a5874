"""Requirements on an engine on a GPU: run on GPUs by tests/gpu, rehearsed on the fake driver."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy
from offramp.certify.decision import MODEL_END, NEVER
from offramp.engine.backends import Backend
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import EngineResult, ResultKind
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.serving.totals import totals_of
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan

MODEL = "m"
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The CPU's results for every sample at every place where it could leave."""

    inputs: Tensors
    answer: dict[int, NDArray[Any]]
    """Answers by exit, :data:`MODEL_END` for the end: [n, classes]."""
    confidence: dict[int, NDArray[np.float32]]
    """The same: [n]."""
    tolerance: float
    """Largest difference of answers and confidences, relative to the largest answer."""

    @classmethod
    def of(cls, bundle: Bundle, inputs: Tensors, tolerance: float) -> Truth:
        """Run all samples through all exits."""
        everything = tuple(replace(a, threshold=NEVER) for a in bundle.policy.active)
        plan = make_plan(bundle, replace(bundle.policy, active=everything), Mode.AUDIT)
        pipeline = Pipeline(OnnxRuntimeBackend(), plan)
        slot = pipeline.backend.open_slot()
        batch, answer, confidence = slot.upload(inputs), {}, {}
        for index, stage in enumerate(plan.stages):
            result = pipeline.step(slot, index, batch).result
            assert result.answer is not None
            answer[stage.answered_by], confidence[stage.answered_by] = (
                result.answer,
                result.confidence,
            )
            if result.carry is not None:
                batch = result.carry
        return cls(inputs=inputs, answer=answer, confidence=confidence, tolerance=tolerance)

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, rows: NDArray[np.intp]) -> Tensors:
        return {name: array[rows] for name, array in self.inputs.items()}

    def check(
        self, result: EngineResult, rows: NDArray[np.intp], policies: list[ExitPolicy]
    ) -> None:
        """Every row answered as the CPU does at that exit, under one of the policies."""
        (found,) = result.outputs.values()
        for place, (row, exit_) in enumerate(zip(rows, result.exits.tolist(), strict=True)):
            wanted = self.answer[exit_][row]
            allowed = self.tolerance * max(1.0, float(np.abs(wanted).max()))
            assert np.abs(found[place] - wanted).max() <= allowed, (row, exit_)
            sure = float(self.confidence[exit_][row])
            assert abs(result.confidences[place] - sure) <= self.tolerance
            assert any(self._leaves(policy, row, exit_) for policy in policies), (row, exit_, sure)

    def _leaves(self, policy: ExitPolicy, row: int, exit_: int) -> bool:
        """Return True if a sample leaves at an exit and not before, up to the tolerance."""
        for active in policy.active:
            sure = float(self.confidence[active.exit][row])
            if active.exit == exit_:
                return sure >= active.threshold - self.tolerance
            if sure > active.threshold + self.tolerance:
                return False
        return exit_ == MODEL_END


def options(mode: Mode = Mode.LEAVE, *, streams: int = 2, most: int = 32) -> EngineOptions:
    return EngineOptions(
        mode=mode,
        streams=streams,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=most, controller="static"),
    )


async def agree(
    backend: Backend, path: Path, truth: Truth, how: EngineOptions, *, requests: int, seed: int = 0
) -> tuple[int, ...]:
    """Send requests of random sizes, many at a time; gives how many rows left at each place."""
    left: dict[int, int] = {}
    async with await Engine.open({MODEL: path}, how, backend=backend) as engine:
        policy = engine.model(MODEL).policy
        numbers = iter(range(requests))

        async def client() -> None:
            for number in numbers:
                rng = np.random.default_rng([seed, number])
                size = int(rng.integers(1, how.defaults.max_batch_size + 1))
                rows = rng.integers(0, len(truth), size)
                result = await engine.infer(MODEL, truth.take(rows))
                truth.check(result, rows, [policy])
                for exit_ in result.exits.tolist():
                    left[exit_] = left.get(exit_, 0) + 1

        await asyncio.gather(*(client() for _ in range(8)))
        statistics = engine.statistics()[MODEL]
        assert statistics.restarts == 0
        assert await engine.drain(30.0)
    return tuple(left.get(exit_, 0) for exit_ in truth.answer)


async def bad_fails_alone(
    backend: Backend,
    path: Path,
    truth: Truth,
    bad: Tensors,
    how: EngineOptions,
) -> str:
    """Check that a refused request fails alone and others are answered; return its error."""
    rng = np.random.default_rng(0)
    said: list[str] = []
    async with await Engine.open({MODEL: path}, how, backend=backend) as engine:
        policy = engine.model(MODEL).policy

        async def good() -> None:
            for _ in range(10):
                rows = rng.integers(0, len(truth), 3)
                truth.check(await engine.infer(MODEL, truth.take(rows)), rows, [policy])

        async def wrong() -> None:
            for _ in range(3):
                try:
                    await engine.infer(MODEL, bad)
                except BackendError as error:
                    said.append(str(error))

        await asyncio.gather(good(), wrong(), good())
        assert len(said) == 3, "what the backend cannot run was answered"
        assert engine.ready(MODEL)
        await good()
    return said[0]


async def drained(backend: Backend, path: Path, truth: Truth, how: EngineOptions) -> None:
    """Draining answers what is in flight, and takes nothing more."""
    async with await Engine.open({MODEL: path}, how, backend=backend) as engine:
        policy = engine.model(MODEL).policy
        rng = np.random.default_rng(1)
        chosen = [rng.integers(0, len(truth), 5) for _ in range(40)]
        asked = [asyncio.create_task(engine.infer(MODEL, truth.take(rows))) for rows in chosen]
        await asyncio.sleep(0)
        assert await engine.drain(60.0)
        for task, rows in zip(asked, chosen, strict=True):
            truth.check(await task, rows, [policy])
        assert not engine.ready(MODEL)


async def swapped(
    backend: Backend, path: Path, truth: Truth, how: EngineOptions, *, swaps: int
) -> None:
    """Policies change while requests come: each answer fits one that was in force."""
    assert how.mode.observed
    policies = [Bundle.open(path).policy]
    async with await Engine.open({MODEL: path}, how, backend=backend) as engine:
        control = engine._versions[MODEL].model.control
        assert control is not None
        stop = asyncio.Event()

        async def ask(rng: np.random.Generator) -> None:
            rows = rng.integers(0, len(truth), int(rng.integers(1, 9)))
            truth.check(await engine.infer(MODEL, truth.take(rows)), rows, policies)

        async def client(number: int) -> None:
            rng = np.random.default_rng(number)
            while not stop.is_set():
                await ask(rng)

        async def swap() -> None:
            rng = np.random.default_rng(99)
            try:
                for version in range(2, swaps + 2):
                    policies.append(another(policies[0], version, rng))
                    made = await asyncio.to_thread(control.deployments.make, policies[-1])
                    chosen = made.scheduled_by(how.defaults.scheduling, how.streams)
                    engine._executor.hot_swap(MODEL, made, chosen)
                    for _ in range(3):
                        await ask(rng)
            finally:
                stop.set()

        await asyncio.gather(swap(), *(client(number) for number in range(4)))
        assert engine.statistics()[MODEL].restarts == 0


def another(policy: ExitPolicy, version: int, rng: np.random.Generator) -> ExitPolicy:
    """Some of its exits, at other thresholds."""
    active = tuple(
        replace(a, threshold=float(rng.uniform(0.2, 1.0)))
        for a in policy.active
        if rng.random() < 0.7
    )
    return replace(policy, version=version, active=active)


def opened_and_closed(
    make: Callable[[], Backend],
    path: Path,
    truth: Truth,
    how: EngineOptions,
    *,
    times: int,
    free_bytes: Callable[[], int],
) -> list[int]:
    """Serve and close again and again; gives the memory that was free after each time."""
    free = []
    for seed in range(times):
        backend = make()
        try:
            asyncio.run(agree(backend, path, truth, how, requests=20, seed=seed))
        finally:
            backend.close()
        free.append(free_bytes())
    return free


async def replaced(
    backend: Backend,
    bundles: Sequence[Bundle],
    truths: Sequence[Truth],
    how: EngineOptions,
    *,
    times: int,
    at: Path | None = None,
    settled: Callable[[Engine], Awaitable[None]] | None = None,
) -> ModelStatistics:
    """Replace bundles by each other in turn while requests come; gives the last statistics.

    Each request is answered once, whole, by the version that was current when it was sent; some of
    them want second answers, and some are withdrawn. With ``at``, the bundles are written over each
    other at that path. ``settled`` is awaited after each removal.
    """
    assert all(
        not np.array_equal(first, second)
        for exit_, first in truths[0].answer.items()
        for second in [truths[1].answer.get(exit_)]
    ), "the versions cannot be told apart"
    # Controllers that are not static may switch exits off.
    allowed = [
        [policy, replace(policy, active=tuple(replace(a, threshold=NEVER) for a in policy.active))]
        if how.defaults.controller != "static"
        else [policy]
        for policy in (bundle.policy for bundle in bundles)
    ]
    sent = withdrawn = 0
    async with await Engine.open({MODEL: bundles[0].path}, how, backend=backend) as engine:
        ended = asyncio.Event()

        async def ask(rng: np.random.Generator, *, twice: bool) -> None:
            nonlocal sent
            sent += 1
            which = (engine._versions[MODEL].number - 1) % len(bundles)
            truth, policies = truths[which], allowed[which]
            rows = rng.integers(0, len(truth), int(rng.integers(1, 9)))
            if not twice:
                truth.check(await engine.infer(MODEL, truth.take(rows)), rows, policies)
                return
            first, *others = [r async for r in engine.infer_stream(MODEL, truth.take(rows))]
            truth.check(first, rows, policies)
            assert len(others) == (first.kind is ResultKind.EARLY)
            for result in others:
                ends = np.flatnonzero(result.exits == MODEL_END)
                (found,) = result.outputs.values()
                wanted = truth.answer[MODEL_END][rows[ends]]
                np.testing.assert_allclose(found[ends], wanted, atol=truth.tolerance)

        async def client(seed: int) -> None:
            nonlocal withdrawn
            rng = np.random.default_rng(seed)
            while not ended.is_set():
                task = asyncio.create_task(ask(rng, twice=seed % 4 == 1))
                if seed % 4 == 2:
                    await asyncio.sleep(0.001 * rng.random())
                    withdrawn += task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        clients = [asyncio.create_task(client(seed)) for seed in range(8)]
        try:
            for number in range(1, times + 1):
                source = bundles[number % len(bundles)].path
                if at is not None:
                    shutil.rmtree(at, ignore_errors=True)
                    shutil.copytree(source, at)
                await engine.replace(MODEL, at or source)
                while engine._versions._removals:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert not any(task.done() for task in clients)
                if settled is not None:
                    await settled(engine)
        finally:
            ended.set()
            await asyncio.gather(*clients)
        statistics = engine.statistics()[MODEL]
        assert await engine.drain(30.0)
    total = totals_of(statistics)
    failed = total.failed.pop("cancelled", 0)
    assert (total.failed, total.retried) == ({}, 0), "no batch fails for being replaced"
    assert (statistics.version, statistics.restarts) == (times + 1, 0)
    assert total.requests == sent, "each is counted once"
    assert failed <= 8 * withdrawn
    assert sent > 8 * times
    return statistics
