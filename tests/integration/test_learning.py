"""Learning in a real engine: with stand-ins for the compiler, and with the compiler itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from tests.learning import IDLE_REASON, idle_copy
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.common.errors import OptionsError
from offramp.engine.core import Engine
from offramp.engine.learning import compilation, learning_loop, lifecycle
from offramp.engine.learning.recording_file import is_recording
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions
from offramp.engine.requests.results import EngineResult
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.stages.plan import Mode

SAMPLES = 900
OPTIONS = EngineOptions(
    mode=Mode.AUDIT,
    backend="onnxruntime",
    threads=1,
    keep_state=False,
    learning=LearnOptions(samples=SAMPLES),
)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    return compile_small(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def place(tmp_path: Path, compiled: tuple[Bundle, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model, whose compilations are faked and looked at often."""
    (tmp_path / "m.onnx").write_bytes((compiled[0].path.parent / "model.onnx").read_bytes())
    monkeypatch.setattr(compilation, "_WORKER", "tests.learning_worker")
    monkeypatch.setattr(learning_loop, "PERIOD_S", 0.05)
    monkeypatch.setattr(lifecycle, "FIRST_RETRY_S", 0.2)
    return tmp_path


def samples(count: int, seed: int) -> np.ndarray:
    from tests.small import _vectors

    return _vectors(count, seed)


class Client:
    """Asks without a pause, and holds every answer against the model's own."""

    def __init__(self, engine: Engine, model: Path) -> None:
        self._engine = engine
        self._session = ort.InferenceSession(model.read_bytes())
        self._rng = np.random.default_rng(3)
        self.data = samples(3000, 17)
        self.results: list[tuple[EngineResult, np.ndarray]] = []
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            rows = self.data[self._rng.integers(0, len(self.data), 3)]
            result = await self._engine.infer("m", {"x": rows})
            self.results.append((result, rows))
            await asyncio.sleep(0.001)

    def drift(self) -> None:
        """Ask of inputs that calibration never saw the like of, from now on."""
        self.data = self._rng.uniform(-6, 6, (3000, 16)).astype(np.float32)
        self.results.clear()

    async def stop(self) -> None:
        assert not self._task.done(), "a request failed"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Check that final answers equal the model's, and that most early answers agree."""
        agreed = []
        for result, rows in self.results:
            (wanted,) = self._session.run(None, {"x": rows})
            (found,) = result.outputs.values()
            end = result.exits < 0
            np.testing.assert_allclose(found[end], wanted[end], rtol=1e-4, atol=1e-5)
            agreed += (found.argmax(1) == wanted.argmax(1)).tolist()
        assert np.mean(agreed) > 0.9  # the bundle of the tests promises 95 %


def statistics(engine: Engine) -> ModelStatistics:
    return engine.statistics()["m"]


def phase(engine: Engine) -> str:
    learning = statistics(engine).learning
    assert learning is not None
    return learning.phase


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    place: Path, options: EngineOptions = OPTIONS
) -> AsyncIterator[tuple[Engine, Client]]:
    """An engine under load, all of whose answers are checked."""
    engine = await Engine.open({"m": place / "m.onnx"}, options)
    try:
        client = Client(engine, place / "m.onnx")
        yield engine, client
        await client.stop()
        client.check()
    finally:
        await engine.close()


def fake(place: Path, what: str) -> None:
    (place / "fake").write_text(what)


async def child_of(engine: Engine) -> int:
    """The compiling process, once there is one."""
    learner = engine._learning._learners["m"]
    await until(lambda: learner.compiling)
    process = learner._compilation
    assert isinstance(process, BuildProcess)
    return process._process.pid


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_learns_and_switches_under_load(place: Path, compiled: tuple[Bundle, Path]) -> None:
    fake(place, f"copy {compiled[0].path}")

    async def story() -> None:
        async with serving(place) as (engine, _):
            assert statistics(engine).mode == "off"
            await until(lambda: phase(engine) == "serving")
            assert statistics(engine).mode == "audit"
            before = statistics(engine).answered
            await until(lambda: statistics(engine).answered > before + 300)
            assert statistics(engine).exit_shares()["final"] < 0.9
            assert not is_recording(place / "m.learn")
        async with serving(place) as (engine, _):
            assert (phase(engine), statistics(engine).mode) == ("serving", "audit")
            before = statistics(engine).answered
            await until(lambda: statistics(engine).answered > before + 100)

    asyncio.run(story())


def test_a_compilation_that_fails_or_is_killed_is_tried_again(
    place: Path, compiled: tuple[Bundle, Path]
) -> None:
    fake(place, "fail the disk is full")

    async def story() -> None:
        async with serving(place) as (engine, _):
            await until(lambda: phase(engine) == "waiting")
            learning = statistics(engine).learning
            assert learning is not None
            assert learning.reason == "the disk is full (exit status 1)"
            fake(place, "hang")
            await until(lambda: phase(engine) == "compiling")
            await until(lambda: statistics(engine).learning.step == 3)  # type: ignore[union-attr]
            os.kill(await child_of(engine), signal.SIGKILL)
            await until(lambda: phase(engine) == "waiting")
            learning = statistics(engine).learning
            assert learning is not None
            assert (learning.reason, learning.failures) == (
                "its process was ended by SIGKILL",
                2,
            )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lifecycle, "_RETRY_S", 0.2)
        asyncio.run(story())


def test_a_compilation_ends_with_the_server(place: Path) -> None:
    fake(place, "hang")

    async def story() -> int:
        async with serving(place) as (engine, _):
            pid = await child_of(engine)
            assert runs(pid)
            return pid

    assert not runs(asyncio.run(story()))
    assert is_recording(place / "m.learn")


def test_nothing_that_pays_leaves_the_model_as_it_is(
    place: Path, compiled: tuple[Bundle, Path], tmp_path: Path
) -> None:
    fake(place, f"copy {idle_copy(compiled[0], tmp_path / 'idle.ee').path}")

    async def story() -> None:
        async with serving(place) as (engine, _):
            await until(lambda: phase(engine) == "nothing_pays")
            learning = statistics(engine).learning
            assert learning is not None
            assert IDLE_REASON in learning.text
            assert (statistics(engine).mode, statistics(engine).version) == ("off", 1)

    asyncio.run(story())


def test_inputs_that_the_model_answers_with_nan_are_not_recorded(place: Path) -> None:
    fake(place, "hang")

    async def story() -> None:
        async with serving(place) as (engine, _):
            for _ in range(10):
                await engine.infer("m", {"x": np.full((5, 16), np.nan, np.float32)})
            await until(lambda: phase(engine) == "compiling")
            learning = statistics(engine).learning
            assert learning is not None
            assert learning.unanswered > 0

    asyncio.run(story())


def test_inputs_that_drifted_are_recorded_and_learned(
    place: Path, compiled: tuple[Bundle, Path]
) -> None:
    fake(place, f"copy {compiled[0].path}")

    async def story() -> None:
        async with serving(place) as (engine, client):
            await until(lambda: phase(engine) == "serving")
            before = statistics(engine).answered
            await until(lambda: statistics(engine).answered > before + 1000)
            client.drift()
            await until(lambda: phase(engine) == "relearning")
            control = statistics(engine).control
            assert control is not None
            assert control.alarms > 0
            # the exits are certified again, or those of a new bundle answer
            await until(lambda: phase(engine) == "serving")

    asyncio.run(story())


def test_two_servers_do_not_share_a_folder(place: Path) -> None:
    async def story() -> None:
        async with serving(place) as (engine, _):
            await until(lambda: statistics(engine).answered > 0)
            with pytest.raises(OptionsError, match="in use by another server"):
                await Engine.open({"m": place / "m.onnx"}, OPTIONS)

    asyncio.run(story())


def test_what_cannot_be_learned_is_refused_and_the_folder_released(place: Path) -> None:
    options = replace(OPTIONS, learning=LearnOptions(samples=SAMPLES, max_gib=1e-5))

    async def story() -> None:
        for _ in range(2):
            with pytest.raises(OptionsError, match=r"use --learn-gib 0\.01 or more$"):
                await Engine.open({"m": place / "m.onnx"}, options)

    asyncio.run(story())


@pytest.mark.slow
def test_the_compiler_compiles_what_was_recorded(
    tmp_path: Path, compiled: tuple[Bundle, Path]
) -> None:
    (tmp_path / "m.onnx").write_bytes((compiled[0].path.parent / "model.onnx").read_bytes())
    options = replace(OPTIONS, learning=LearnOptions(samples=SAMPLES, keep=True))

    async def story() -> None:
        async with serving(tmp_path, options) as (engine, _):
            deadline_s, steps = time.monotonic() + 240, set()
            while phase(engine) in ("recording", "compiling", "switching"):
                assert time.monotonic() < deadline_s
                learning = statistics(engine).learning
                assert learning is not None
                steps.add((learning.step, learning.steps))
                await asyncio.sleep(0.05)
            assert phase(engine) in ("serving", "nothing_pays"), statistics(engine).learning
            assert {each for each in steps if each[0]} <= {(n, 9) for n in range(1, 10)}
            assert len(steps) > 4

    asyncio.run(story())
    bundle = Bundle.open(tmp_path / "m.learn" / "1.ee")
    counted = bundle.manifest.calibration
    assert counted.train_samples + counted.tune_samples + counted.certify_samples == SAMPLES
    assert is_recording(tmp_path / "m.learn")
