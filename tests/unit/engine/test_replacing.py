"""A served model is replaced by another, and no request notices."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cluster.loops import profiles_of
from tests.facts import facts
from tests.fakes import ScriptedController, fake_model, policy_of, script
from tests.unit.engine.serving import LIMIT_S, Gate, until

from offramp.bundle import BundleError
from offramp.bundle.locks import FileLock
from offramp.cluster.serving.profile_file import ProfileFile
from offramp.engine.common.control_state import load_state
from offramp.engine.common.errors import (
    BackendError,
    BadInputError,
    DrainingError,
    ModelNotServedError,
    OptionsError,
    OutOfServiceError,
)
from offramp.engine.core import Engine
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.requests.results import ResultKind
from offramp.engine.scheduling import DeviceScheduler
from offramp.engine.serving import versions
from offramp.engine.serving.control_loop import ControlLoop
from offramp.engine.serving.engine_upgrades import EngineUpgrades
from offramp.engine.serving.executor import Executor
from offramp.engine.serving.opening import LoadedModel
from offramp.engine.stages.backend_protocol import MissingEngine
from offramp.engine.stages.plan import Mode
from offramp.testing.backend import SCRIPT, FakeBackend

PATH = Path("new.ee")
HALF_SURE = {SCRIPT: script([0.8, 0.3])}
"""Exit 0 of the second version answers it, of the first one the model's end."""


@dataclass
class Loader:
    """Loads what the test says, and keeps what it was asked for."""

    make: Callable[[], ServedModel]
    asked: list[tuple[str, Path, Mode | None]] = field(default_factory=list)
    options: list[ModelOptions | None] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    gate: Callable[[], None] = lambda: None
    loading: int = 0
    most_loading: int = 0

    async def __call__(
        self, name: str, path: Path, mode: Mode | None, options: ModelOptions | None = None
    ) -> LoadedModel:
        self.asked.append((name, path, mode))
        self.options.append(options)
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        number = len(self.asked)
        try:
            await asyncio.to_thread(self.gate)
            return LoadedModel(self.make(), lambda: self.released.append(number))
        finally:
            self.loading -= 1


@asynccontextmanager
async def serving(
    first: ServedModel, backend: FakeBackend, second: Callable[[], ServedModel], streams: int = 1
) -> AsyncIterator[tuple[Engine, Loader]]:
    """Yield an engine that serves ``first``, and loads ``second`` for any path."""
    load = Loader(second)
    engine = Engine({"fake": first}, backend, streams=streams, load=load)
    del first
    try:
        async with asyncio.timeout(LIMIT_S):
            yield engine, load
    finally:
        await engine.close()
        backend.close()


def removed(engine: Engine) -> Callable[[], bool]:
    """Return a function that is true when only one version is left everywhere."""
    return lambda: (
        len(engine._executor._models) == 1
        and len(engine._control._states) <= 1
        and len(profiles_of(engine)._recorded) <= 1
        and not engine._versions._removals
    )


async def exit_of(engine: Engine) -> int:
    (found,) = (await engine.infer("fake", HALF_SURE)).exits.tolist()
    return int(found)


def test_new_requests_go_to_the_new_version_and_old_ones_end_with_the_old() -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: None if gate.entered.is_set() else gate(stage, rows)

    async def body() -> None:
        first = fake_model(backend, streams=2)
        second = partial_model(backend, (0.6,), streams=2)
        async with serving(first, backend, second, streams=2) as (engine, load):
            running = asyncio.create_task(exit_of(engine))
            await gate.wait_entered()
            await engine.replace("fake", PATH, mode=Mode.AUDIT)
            assert load.asked == [("fake", PATH, Mode.AUDIT)]
            assert await exit_of(engine) == 0
            before = engine.statistics()["fake"]
            assert (before.version, before.requests) == (2, 1)
            assert before.earlier is not None
            assert (before.earlier.requests, before.earlier.in_flight) == (1, 1)
            assert len(engine._executor._models) == 2
            gate.open()
            assert await running == -1
            await until(removed(engine))
            after = engine.statistics()["fake"]
            assert after.earlier is not None
            assert (after.requests, after.earlier.answered, after.earlier.in_flight) == (1, 1, 0)
            assert engine.ready("fake")
            assert [m.name for m in engine.models()] == ["fake"]

    asyncio.run(body())


def partial_model(backend: FakeBackend, *given: Any, **options: Any) -> Callable[[], ServedModel]:
    return lambda: fake_model(backend, *given, **options)


def test_a_model_comes_and_goes_while_another_is_served() -> None:
    """Its requests in flight are answered, and its counts are kept until it is loaded again."""
    gate, backend = Gate(), FakeBackend()
    options = ModelOptions(max_batch_size=7)

    async def body() -> None:
        first = fake_model(backend, streams=2)
        second = partial_model(backend, (0.6,), streams=2)
        async with serving(first, backend, second, streams=2) as (engine, load):
            await engine.load("other", PATH, options=options)
            assert (load.asked, load.options) == ([("other", PATH, None)], [options])
            assert [m.name for m in engine.models()] == ["fake", "other"]
            assert (await engine.infer("other", HALF_SURE)).exits.tolist() == [0]
            backend.on_run = lambda stage, rows: (
                None if gate.entered.is_set() else gate(stage, rows)
            )
            running = asyncio.create_task(engine.infer("other", HALF_SURE))
            await gate.wait_entered()
            await engine.unload("other")
            with pytest.raises(ModelNotServedError, match="no model 'other' is served here"):
                await engine.infer("other", HALF_SURE)
            assert await exit_of(engine) == -1
            gate.open()
            assert (await running).exits.tolist() == [0]
            await until(removed(engine))
            await engine.load("other", PATH)
            again = engine.statistics()["other"]
            assert (again.version, again.requests, again.earlier) == (1, 0, None)

    asyncio.run(body())


def test_the_log_says_which_model_answers_and_which_was_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend)) as (engine, _):
            await engine.load("other", PATH)
            await engine.load("other", PATH)
            await until(removed_from_log(1))
            await engine.unload("other")
            await until(removed_from_log(2))

    def removed_from_log(count: int) -> Callable[[], bool]:
        return lambda: caplog.text.count("was removed") == count

    with caplog.at_level(logging.INFO, versions.__name__):
        asyncio.run(body())
    lines = [re.sub(r"\d+\.\d s", "N s", record.getMessage()) for record in caplog.records]
    assert lines == [
        "other: new.ee answers from now on, loaded in N s",
        "other: new.ee answers from now on, loaded in N s; it replaces the model loaded before",
        "other: the model loaded before was removed",
        "other: the model was removed",
    ]


def test_nothing_is_left_of_names_that_are_served_no_more() -> None:
    """A repository has a name for each version that ever was."""

    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend)) as (engine, _):
            for number in range(5):
                await engine.load(f"other:{number}", PATH)
                await engine.infer(f"other:{number}", HALF_SURE)
                await engine.unload(f"other:{number}")
            await until(removed(engine))
            versions = engine._versions
            assert [*versions._numbers] == [*versions.current] == ["fake"]
            assert not versions._earlier

    asyncio.run(body())


def test_all_models_may_be_unloaded_and_none_need_be_there_at_the_start() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend)) as (engine, _):
            await engine.unload("fake")
            await until(lambda: not engine._executor._models)
            assert (engine.models(), engine.live()) == ((), True)
            with pytest.raises(ModelNotServedError):
                await engine.unload("fake")
            await engine.load("fake", PATH)
            assert await exit_of(engine) == -1

    asyncio.run(body())


def test_versions_follow_each_other_and_their_counts_add_up() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend, (0.6,))) as (
            engine,
            load,
        ):
            for number in range(2, 6):
                await engine.infer("fake", HALF_SURE)
                await engine.replace("fake", PATH)
                assert engine.statistics()["fake"].version == number
            await until(removed(engine))
            statistics = engine.statistics()["fake"]
            assert (statistics.requests, statistics.earlier and statistics.earlier.requests) == (
                0,
                4,
            )
            await until(lambda: load.released == [1, 2, 3])
        assert load.released == [1, 2, 3, 4]  # the last one when the engine was closed

    asyncio.run(body())


def test_inputs_may_differ_and_are_checked_against_the_new_ones() -> None:
    async def body() -> None:
        backend = FakeBackend()
        wider = partial_model(backend, (0.6, 0.7))
        async with serving(fake_model(backend), backend, wider) as (engine, _):
            await engine.replace("fake", PATH)
            with pytest.raises(BadInputError, match="fake: input 'script'"):
                await engine.infer("fake", HALF_SURE)
            answer = await engine.infer("fake", {SCRIPT: script([0.5, 0.5, 0.5])})
            assert answer.exits.tolist() == [-1]
            assert engine.model("fake").inputs[0].shape == ("batch", 3, 2)

    asyncio.run(body())


def test_a_request_that_leaves_after_the_switch_is_withdrawn_from_its_version() -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: None if gate.entered.is_set() else gate(stage, rows)

    async def body() -> None:
        first, second = fake_model(backend), partial_model(backend, (0.6,))
        async with serving(first, backend, second) as (engine, _):
            running = asyncio.create_task(engine.infer("fake", HALF_SURE))
            await gate.wait_entered()
            waiting = asyncio.create_task(engine.infer("fake", HALF_SURE))
            await asyncio.sleep(0)
            await engine.replace("fake", PATH)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.open()
            await running
            await until(removed(engine))
            statistics = engine.statistics()["fake"]
            assert statistics.earlier is not None
            assert (statistics.failed, statistics.earlier.failed) == ({}, {"cancelled": 1})
            assert backend.runs == [(0, 1), (1, 1)]

    asyncio.run(body())


def test_a_stream_that_is_closed_after_its_version_was_removed_is_no_error() -> None:
    async def body() -> None:
        backend = FakeBackend()
        first, second = fake_model(backend), partial_model(backend, (0.6,))
        async with serving(first, backend, second) as (engine, _):
            results = engine.infer_stream("fake", HALF_SURE)
            assert (await anext(results)).kind is ResultKind.ANSWER
            await engine.replace("fake", PATH)
            await until(removed(engine))
            await results.aclose()

    asyncio.run(body())


def test_what_waits_for_batch_mates_goes_at_once_when_its_version_is_replaced() -> None:
    async def body() -> None:
        backend = FakeBackend()
        patient = fake_model(backend, max_delay_s=3600.0)
        async with serving(patient, backend, partial_model(backend, (0.6,))) as (engine, _):
            waiting = asyncio.create_task(exit_of(engine))
            await asyncio.sleep(0)
            await engine.replace("fake", PATH)
            assert await waiting == -1

    asyncio.run(body())


def test_engines_are_built_for_the_current_version_alone() -> None:
    built: list[str] = []

    class Upgrades(EngineUpgrades):
        def check_missing(self, model: str, missing: Sequence[MissingEngine]) -> bool:
            built.append(model)
            return False

    backend = FakeBackend()
    first, second = controlled(backend), controlled(backend)
    executor = Executor(
        backend, {"fake": first}, DeviceScheduler({"fake": first.scheduler}), streams=1
    )
    loop = ControlLoop(executor, {"fake": first}, upgrades=Upgrades())
    executor.add("fake 2", "fake", second)
    loop.add("fake 2", "fake", second)
    loop.retire("fake")
    loop.retire("other")
    loop.poll()
    assert built == ["fake"]
    loop.stop()


def test_audits_that_no_stream_can_run_do_not_keep_a_version() -> None:
    async def body() -> None:
        backend = FakeBackend()
        first, second = fake_model(backend), partial_model(backend, (0.6,))
        async with serving(first, backend, second) as (engine, _):
            first.scheduler._in_flight.buffered = 1
            await engine.replace("fake", PATH)
            await asyncio.sleep(0.05)
            assert len(engine._executor._models) == 2
            broken = OutOfServiceError("fake: out of service, no stream can run it")
            engine._executor._available.refusals["fake"] = broken
            await until(removed(engine))
            assert await exit_of(engine) == 0

    asyncio.run(body())


def controlled(backend: FakeBackend, path: Path | None = None, version: int = 3) -> ServedModel:
    controller = ScriptedController(policy_of(version, e0=0.7))
    controller.kept = {"policy": version, "seen": 0}
    return fake_model(backend, controller=controller, state_path=path)


def controller_of(model: ServedModel) -> ScriptedController:
    assert model.control is not None
    return cast(ScriptedController, model.control.controller)


def kept_in(path: Path) -> Any:
    state = load_state(path, fingerprint={})
    return None if state is None else state["policy"]


def test_audits_of_the_old_version_end_before_it_goes_and_what_it_learned_is_kept(
    tmp_path: Path,
) -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: gate(stage, rows) if stage == 1 else None
    path = tmp_path / "old.state.npz"

    async def body() -> None:
        first = controlled(backend, path)
        second = partial_model(backend, (0.6,))
        async with serving(first, backend, second) as (engine, _):
            results = engine.infer_stream("fake", HALF_SURE)
            assert (await anext(results)).kind is ResultKind.EARLY
            await gate.wait_entered()
            await engine.replace("fake", PATH)
            assert engine.statistics()["fake"].control is None
            assert not path.exists()
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert len(engine._executor._models) == 2
            gate.open()
            assert (await anext(results)).kind is ResultKind.CORRECTION
            await until(removed(engine))
            (seen,) = controller_of(first).seen
            assert (len(seen), seen.loss.tolist()) == (1, [1.0])
            assert kept_in(path) == 3
            assert FileLock(path.with_name("old.state.lock")).take()

    asyncio.run(body())


def test_audits_that_nobody_waits_for_are_waited_for_too() -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: gate(stage, rows) if stage == 1 else None

    async def body() -> None:
        first, second = controlled(backend), partial_model(backend, (0.6,))
        async with serving(first, backend, second) as (engine, _):
            assert (await engine.infer("fake", HALF_SURE)).exits.tolist() == [0]
            await gate.wait_entered()
            await engine.replace("fake", PATH)
            await asyncio.sleep(0.05)
            statistics = engine.statistics()["fake"]
            assert statistics.earlier is not None and statistics.earlier.auditing == 1
            assert engine._control._states["fake"].retired
            gate.open()
            await until(removed(engine))
            assert len(controller_of(first).seen) == 1

    asyncio.run(body())


def test_the_state_at_one_path_belongs_to_one_version_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: gate(stage, rows) if stage == 1 else None
    path = tmp_path / "same.state.npz"

    async def body() -> None:
        first, second = controlled(backend, path), controlled(backend, path, version=4)
        controller_of(second).kept = None
        async with serving(first, backend, lambda: second) as (engine, _):
            await engine.infer("fake", HALF_SURE)
            await gate.wait_entered()
            controller_of(first).kept = {"policy": 3, "seen": 17}
            await engine.replace("fake", path)
            assert controller_of(second).kept == {"policy": 3, "seen": 17}
            controller_of(second).kept = {"policy": 4, "seen": 1}
            controller_of(first).kept = {"policy": 3, "seen": 99}
            gate.open()
            await until(removed(engine))
            assert load_state(path, fingerprint={}) == {"policy": 3, "seen": 17}
        assert load_state(path, fingerprint={}) == {"policy": 4, "seen": 1}

    asyncio.run(body())
    assert "kept by another server" not in caplog.text


@pytest.mark.parametrize("failing", ["control", "profiles"])
def test_what_fails_before_the_switch_leaves_the_old_version_whole(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, profile = tmp_path / "same.state.npz", ProfileFile.of(tmp_path / "same.ee", "fake").path

    def model(version: int) -> ServedModel:
        made = controlled(backend, path, version)
        return replace(made, state_bundle=tmp_path / "same.ee")

    backend = FakeBackend()

    async def body() -> None:
        first = model(3)
        async with serving(first, backend, lambda: model(4)) as (engine, load):
            await engine.infer("fake", HALF_SURE)
            profiles = profiles_of(engine)
            loop = {"control": engine._control, "profiles": profiles}[failing]
            adds = loop.add

            def add(*arguments: Any) -> None:
                adds(*arguments)
                raise OSError("no room on the device")

            monkeypatch.setattr(loop, "add", add)
            with pytest.raises(OSError, match="no room"):
                await engine.replace("fake", PATH)
            await until(removed(engine))
            assert load.released == [1]
            statistics = engine.statistics()["fake"]
            assert (statistics.version, statistics.earlier) == (1, None)
            assert await exit_of(engine) == 0
            controller_of(first).kept = {"policy": 3, "seen": 5}
            profiles.poll()
        assert load_state(path, fingerprint={}) == {"policy": 3, "seen": 5}
        assert profile.exists()

    asyncio.run(body())


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_serving() -> None:
    async def body() -> None:
        backend = FakeBackend()

        def damaged() -> ServedModel:
            raise BundleError("segments/00.onnx is damaged")

        async with serving(fake_model(backend), backend, damaged) as (engine, _):
            with pytest.raises(BundleError, match="damaged"):
                await engine.replace("fake", PATH)
            assert await exit_of(engine) == -1
            assert engine.statistics()["fake"].version == 1
            assert removed(engine)()

    asyncio.run(body())


def test_replacements_take_their_turns() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend, (0.6,))) as (
            engine,
            load,
        ):
            await asyncio.gather(*(engine.replace("fake", PATH) for _ in range(3)))
            assert load.most_loading == 1
            assert engine.statistics()["fake"].version == 4

    asyncio.run(body())


def test_what_cannot_be_replaced_is_said() -> None:
    async def body() -> None:
        backend = FakeBackend()
        split = replace(fake_model(backend), split_by=cast(Any, object()))
        async with serving(split, backend, partial_model(backend)) as (engine, load):
            with pytest.raises(ModelNotServedError, match="did you mean 'fake'"):
                await engine.replace("fakee", PATH)
            with pytest.raises(OptionsError, match=facts("fake", "plan")):
                await engine.replace("fake", PATH)
            assert load.asked == []
            assert await engine.drain(LIMIT_S)
            with pytest.raises(DrainingError, match="shutting down"):
                await engine.replace("fake", PATH)

    asyncio.run(body())


def test_an_engine_over_models_of_others_replaces_none() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with Engine({"fake": fake_model(backend)}, backend) as engine:
            with pytest.raises(OptionsError, match=r"Engine\.open"):
                await engine.replace("fake", PATH)

    asyncio.run(body())


@pytest.mark.parametrize("how", ["drain", "close", "cancel"])
def test_a_replacement_that_is_under_way_gives_up(how: str) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def gate() -> None:
        loading.set()
        assert go_on.wait(LIMIT_S)

    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend, (0.6,))) as (
            engine,
            load,
        ):
            load.gate = gate
            replacing = asyncio.create_task(engine.replace("fake", PATH))
            assert await asyncio.to_thread(loading.wait, LIMIT_S)
            if how == "cancel":
                replacing.cancel()
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await replacing
                assert await exit_of(engine) == -1
                return
            ending = asyncio.create_task(
                engine.drain(LIMIT_S) if how == "drain" else engine.close()
            )  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
            go_on.set()
            with pytest.raises(DrainingError, match="shutting down"):
                await replacing
            await ending
            assert load.released == [1]

    asyncio.run(body())


def test_closing_does_not_wait_for_audits_of_an_old_version_and_keeps_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, backend = Gate(), FakeBackend()
    backend.on_run = lambda stage, rows: gate(stage, rows) if stage == 1 else None
    monkeypatch.setattr("offramp.engine.serving.executor._JOIN_LIMIT_S", 0.05)
    path = tmp_path / "old.state.npz"

    async def body() -> None:
        load = Loader(partial_model(backend, (0.6,)))
        engine = Engine({"fake": controlled(backend, path)}, backend, load=load)
        await engine.infer("fake", HALF_SURE)
        await gate.wait_entered()
        await engine.replace("fake", PATH)
        await asyncio.wait_for(engine.close(), LIMIT_S)
        assert kept_in(path) == 3
        assert load.released == [1]
        gate.open()
        await until(lambda: not backend.open_slots)

    asyncio.run(body())


def test_nothing_of_an_old_version_stays_in_memory() -> None:
    """Idle streams are included."""

    async def body() -> None:
        backend = FakeBackend()
        first = controlled(backend)
        kept = [weakref.ref(first.deployment.pipeline), weakref.ref(controller_of(first))]
        async with serving(first, backend, lambda: controlled(backend)) as (engine, _):
            del first
            await engine.infer("fake", HALF_SURE)
            kept.append(weakref.ref(engine._executor._models["fake"]))
            await engine.replace("fake", PATH)
            await until(removed(engine))

            def gone() -> bool:
                gc.collect()
                return [reference() for reference in kept] == [None] * 3

            await until(gone)
            assert not any(key == "fake" for _, key in engine._executor.health._proven)

    asyncio.run(body())


def test_observers_see_what_is_answered_whichever_version_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[NDArray[Any]] = []

    def see(inputs: Mapping[str, NDArray[Any]], answers: NDArray[Any]) -> None:
        assert len(answers) == len(inputs[SCRIPT])
        seen.append(inputs[SCRIPT])

    async def body() -> None:
        backend = FakeBackend()
        async with serving(fake_model(backend), backend, partial_model(backend, (0.6,))) as (
            engine,
            _,
        ):
            with pytest.raises(ModelNotServedError):
                engine.observe_inputs("other", lambda *_: None)
            engine.observe_inputs("fake", see)
            await engine.infer("fake", HALF_SURE)
            with pytest.raises(BadInputError):
                await engine.infer("fake", {})
            await engine.replace("fake", PATH)
            await engine.infer("fake", HALF_SURE)
            engine.observe_inputs("fake", None)
            await engine.infer("fake", HALF_SURE)
            assert [s is HALF_SURE[SCRIPT] for s in seen] == [True, True]

            def fail(*_: Any) -> None:
                seen.append(np.zeros(0))
                raise ValueError("no room")

            engine.observe_inputs("fake", fail)
            for _ in range(2):
                assert await exit_of(engine) == 0
            assert len(seen) == 3

    asyncio.run(body())
    assert "fake: the observer of its inputs failed and was removed" in caplog.text


class ColdSlots(FakeBackend):
    """Each of its slots has to be warmed up."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(on_cpu=False, **settings)


def test_on_a_device_every_stream_warms_up_the_new_version_before_it_answers() -> None:
    async def body() -> None:
        backend = ColdSlots()
        second = partial_model(backend, (0.6,), streams=2, max_batch_size=2)
        first = fake_model(backend, streams=2, max_batch_size=2)
        async with serving(first, backend, second, streams=2) as (engine, _):
            await until(lambda: engine.statistics()["fake"].streams_in_service == 2)
            await engine.infer("fake", HALF_SURE)
            await until(lambda: len(backend.runs) == 2 * 8 + 2)
            await engine.replace("fake", PATH)
            once = [(stage, size) for size in (2, 1) for _ in range(2) for stage in (0, 1)]
            assert sorted(backend.runs[18:]) == sorted([*once, *once])
            assert await exit_of(engine) == 0
            await until(removed(engine))

    asyncio.run(body())


def test_a_version_that_is_warmed_up_is_given_up_when_the_engine_drains() -> None:
    gate = Gate()

    async def body() -> None:
        backend = ColdSlots(on_run=lambda stage, rows: gate(stage, rows) if stage == 2 else None)
        second = partial_model(backend, (0.6, 0.6))
        async with serving(fake_model(backend), backend, second) as (engine, load):
            replacing = asyncio.create_task(engine.replace("fake", PATH))
            await gate.wait_entered()
            assert await engine.drain(LIMIT_S)
            with pytest.raises(DrainingError, match="shutting down"):
                await replacing
            assert removed(engine)()
            assert load.released == [1]
            gate.open()

    asyncio.run(body())


def test_an_engine_that_drains_at_the_last_moment_does_not_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        backend = FakeBackend()
        second = partial_model(backend, (0.6,))
        async with serving(fake_model(backend), backend, second) as (engine, _):
            monkeypatch.setattr(profiles_of(engine), "add", lambda *_: engine._versions.end())
            with pytest.raises(DrainingError, match="shutting down"):
                await engine.replace("fake", PATH)
            assert removed(engine)()
            assert await exit_of(engine) == -1

    asyncio.run(body())


def test_on_a_device_a_version_that_cannot_be_warmed_up_is_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 0.001)

    def on_run(stage: int, rows: int) -> None:
        if stage == 2:  # the new version alone has it
            raise BackendError("out of memory on the device")

    async def body() -> None:
        backend = ColdSlots(on_run=on_run)
        second = partial_model(backend, (0.6, 0.6), streams=2)
        first = fake_model(backend, streams=2)
        async with serving(first, backend, second, streams=2) as (engine, load):
            with pytest.raises(OutOfServiceError, match=r"fake: .* out of memory on the device"):
                await engine.replace("fake", PATH)
            assert removed(engine)()
            assert load.released == [1]
            assert engine.ready("fake")
            assert await exit_of(engine) == -1

    asyncio.run(body())
    assert "\n2" not in caplog.text


def test_a_stream_that_is_out_of_service_stays_so_for_the_new_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offramp.engine.serving.stream_health.FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("offramp.engine.serving.stream_health.LONGEST_PAUSE_S", 3600.0)

    class Half(FakeBackend):
        def open_slot(self) -> Any:
            if threading.current_thread().name == "fake-stream-0":
                raise BackendError("no device")
            return super().open_slot()

    async def body() -> None:
        backend = Half()
        first = fake_model(backend, streams=2)
        second = partial_model(backend, (0.6,), streams=2)
        async with serving(first, backend, second, streams=2) as (engine, _):
            await until(lambda: engine.statistics()["fake"].streams_in_service == 1)
            await engine.replace("fake", PATH)
            (scheduler,) = {m.scheduler for m in engine._executor._models.values()} - {
                first.scheduler
            }
            assert (scheduler.suspends(0), scheduler.suspends(1)) == (True, False)
            assert await exit_of(engine) == 0

    asyncio.run(body())
