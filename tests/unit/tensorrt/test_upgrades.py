"""Control brings exits into use, and the engines that they lack are built and swapped in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engines import engine_bundle
from tests.fake_builder import FakeBuilder
from tests.fakes import ScriptedController, policy_of
from tests.sliced import inputs_of, sliced
from tests.unit.engine.serving import LIMIT_S, until
from tests.unit.tensorrt.fake_runtime import FakeRuntime

from offramp.bundle import Bundle
from offramp.bundle.engines import EngineStore, list_targets
from offramp.compiler.commands.cli import main
from offramp.compiler.engines import build as building
from offramp.compiler.engines.builder_protocol import Built
from offramp.engine import core
from offramp.engine.backends.tensorrt import TensorRTFactory
from offramp.engine.control.engine_builds import BuildBudget
from offramp.engine.core import Engine
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.models import served_model
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.serving.engine_upgrades import EngineUpgrades
from offramp.engine.stages.plan import Mode
from offramp.engine.tensorrt import tensorrt_messages
from offramp.testing.cuda_driver import FakeDriver

VERSION = "10.16"
INPUTS = inputs_of(sliced("mlp"), 8)


@pytest.fixture
def device() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def runtime(device: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = FakeRuntime(VERSION, device)
    monkeypatch.setitem(sys.modules, "tensorrt", made.module)
    tensorrt_messages.logger.cache_clear()
    yield made
    tensorrt_messages.logger.cache_clear()
    device.close()  # finds what was not released, and all misuse
    assert not made.contexts
    assert not made.engines


class PlanBuilder(FakeBuilder):
    """Builds what the fake runtime loads."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(version=runtime.module.__version__)
        self._runtime = runtime
        self._graphs: dict[bytes, bytes] = {}

    def build(self, graph: bytes, profiles: Any, *rest: Any, **how: Any) -> Built:
        theirs = super().build(graph, profiles, *rest, **how)
        plan = self._runtime.plan(graph, list(profiles))
        self._graphs[plan] = theirs.plan
        return Built(plan, theirs.timing_cache)

    def run(self, plan: bytes, *rest: Any) -> dict[str, NDArray[Any]]:
        return super().run(self._graphs[plan], *rest)


@pytest.fixture
def builder(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> PlanBuilder:
    made = PlanBuilder(runtime)
    monkeypatch.setattr(building, "make_builder", lambda device: made)
    monkeypatch.setattr(building, "load_kernels", lambda *_, **__: b"cubin")
    return made


@pytest.fixture
def bundle(tmp_path: Path, builder: PlanBuilder) -> Bundle:
    """Four segments; exit 1 is in use, whose stages are built; exit 0 is not."""
    made = engine_bundle("mlp", tmp_path / "b.ee")
    assert main(["build", str(made.path), "--batch-profiles", "1,2-8"]) == 0
    return made


class InThisProcess:
    """A build that is done when the test lets it, by the very command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.ended = False
        self._status: int | None = None

    def work(self) -> None:
        self._status = main(self.arguments)

    def poll(self) -> int | None:
        return self._status

    def last_words(self) -> str:
        return "it failed"

    def end(self) -> None:
        self.ended = True


class Serving:
    """An engine whose controller does as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, budget: bool = True) -> None:
        self.controller = ScriptedController(policy_of(1, e1=0.5))
        self.builds: list[InThisProcess] = []
        self.now_s = 0.0
        monkeypatch.setattr(served_model, "make_controller", lambda *_: (self.controller, {}))
        monkeypatch.setattr(core, "EngineUpgrades", self._upgrades)
        self._budget = BuildBudget(share=0.5) if budget else None

    def _upgrades(self, _: object) -> EngineUpgrades:
        return EngineUpgrades(self._budget, start=self._start, clock=lambda: self.now_s)

    def _start(self, arguments: Sequence[str]) -> InThisProcess:
        self.builds.append(InThisProcess(arguments))
        return self.builds[-1]

    def run(
        self, device: FakeDriver, bundle: Bundle, body: Callable[[Engine], Any], **options: Any
    ) -> None:
        backend = CudaBackend(TensorRTFactory(device), device, kernels=b"")
        settings = EngineOptions(
            mode=Mode.RELEASE, keep_state=False, defaults=ModelOptions(max_batch_size=8), **options
        )

        async def serve() -> None:
            async with await Engine.open({"m": bundle.path}, settings, backend=backend) as engine:
                await asyncio.wait_for(body(engine), LIMIT_S)

        asyncio.run(serve())
        backend.close()


async def ask(engine: Engine) -> NDArray[Any]:
    """Answers at the model's end, where all rows end."""
    result = await engine.infer("m", INPUTS)
    assert set(result.exits.tolist()) == {-1}
    (answer,) = result.outputs.values()
    return np.array(answer)


def missing(engine: Engine) -> list[str]:
    return [m.unit for m in engine._executor.deployment("m").pipeline.missing]


async def exit_0_in_use(engine: Engine, serving: Serving) -> None:
    """Wait until exit 0 is in use; no threshold is reached, so all answers are the model's end."""
    assert missing(engine) == []
    serving.controller.policy = policy_of(2, e0=0.9999, e1=0.9999)
    await until(lambda: engine._executor.deployment("m").plan.exits == (0, 1))
    assert missing(engine) == []  # 00-00-exit0 and 01-01-exit1 are segments
    serving.controller.policy = policy_of(3, e0=0.9999)
    await until(lambda: engine._executor.deployment("m").plan.exits == (0,))
    assert missing(engine) == ["01-03"]


def test_what_control_brings_into_use_is_built_once_and_swapped_in(
    device: FakeDriver,
    bundle: Bundle,
    builder: PlanBuilder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    serving, before = Serving(monkeypatch), len(builder.builds)
    (target,) = list_targets(bundle.path)
    timings = EngineStore.open(bundle.path, target).index.timing_cache

    async def body(engine: Engine) -> None:
        await exit_0_in_use(engine, serving)
        chained = await ask(engine)
        serving.now_s = 60.0
        await until(lambda: bool(serving.builds))
        number = engine._executor.deployment("m").number
        np.testing.assert_array_equal(await ask(engine), chained)
        serving.builds[0].work()
        await until(lambda: missing(engine) == [])
        deployment = engine._executor.deployment("m")
        assert deployment.number == number + 1
        assert deployment.policy == serving.controller.policy
        np.testing.assert_array_equal(await ask(engine), chained)
        serving.now_s = 1e6
        await asyncio.sleep(0.2)  # some looks of the loop more
        assert engine._executor.deployment("m").number == number + 1

    serving.run(device, bundle, body)
    (build,) = serving.builds
    assert build.arguments[-3:] == ["--units", "01-03", "--while-serving"]
    (built,) = builder.builds[before:]
    assert [(p.first_batch, p.last_batch) for p in built.profiles] == [(1, 1), (2, 8)]
    assert built.settings.workspace_bytes == 2**30
    assert built.timing_cache
    assert EngineStore.open(bundle.path, target).index.timing_cache == timings
    assert "m: building engines while serving: 01-03" in caplog.text
    assert "m: new engines run 01-03" in caplog.text


def test_what_somebody_builds_is_taken_without_a_restart(
    device: FakeDriver, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(monkeypatch, budget=False)

    async def body(engine: Engine) -> None:
        await exit_0_in_use(engine, serving)
        chained = await ask(engine)
        assert main(["build", str(bundle.path), "--units", "01-03", "--while-serving"]) == 0
        serving.now_s = 30.0
        await until(lambda: missing(engine) == [])
        np.testing.assert_array_equal(await ask(engine), chained)

    serving.run(device, bundle, body)
    assert serving.builds == []


def test_another_precision_that_is_built_meanwhile_is_not_mixed_in(
    device: FakeDriver, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy in force is certified for the precision that serving began with."""
    serving = Serving(monkeypatch, budget=False)

    async def body(engine: Engine) -> None:
        assert main(["build", str(bundle.path), "--precision", "tf32"]) == 0
        await exit_0_in_use(engine, serving)
        (lacking,) = engine._executor.deployment("m").pipeline.missing
        assert lacking.precision == "fp32"

    serving.run(device, bundle, body)


def test_an_engine_that_cannot_be_loaded_leaves_the_chain_in_use(
    device: FakeDriver,
    runtime: FakeRuntime,
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving = Serving(monkeypatch)

    async def body(engine: Engine) -> None:
        await exit_0_in_use(engine, serving)
        chained = await ask(engine)
        serving.now_s = 60.0
        await until(lambda: bool(serving.builds))
        runtime.fails_to_load = True
        serving.builds[0].work()
        await until(lambda: "new engines cannot be loaded" in caplog.text)
        runtime.fails_to_load = False
        serving.now_s = 1e6
        await asyncio.sleep(0.2)
        np.testing.assert_array_equal(await ask(engine), chained)
        assert missing(engine) == ["01-03"]

    serving.run(device, bundle, body)
    assert len(serving.builds) == 1


def test_closing_the_engine_ends_the_build(
    device: FakeDriver, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(monkeypatch)

    async def body(engine: Engine) -> None:
        await exit_0_in_use(engine, serving)
        serving.now_s = 60.0
        await until(lambda: bool(serving.builds))

    serving.run(device, bundle, body)
    assert serving.builds[0].ended


@pytest.mark.parametrize(("minutes", "share"), [(0.0, None), (6.0, 0.1), (60.0, 1.0)])
def test_the_budget_is_given_in_minutes_of_an_hour(minutes: float, share: float | None) -> None:
    budget = EngineOptions(engine_build_minutes=minutes).build_budget
    assert (budget and budget.share) == share


@pytest.mark.parametrize("minutes", [-1.0, 61.0, float("nan")])
def test_an_hour_has_sixty_minutes(minutes: float) -> None:
    with pytest.raises(ValueError, match=r"engine_build_minutes is .*, expected from 0 to 60"):
        EngineOptions(engine_build_minutes=minutes)
