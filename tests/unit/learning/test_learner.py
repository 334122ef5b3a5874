"""A model's learning from the first input to exits that serve, with faked compilations."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts, tells
from tests.learning import IDLE_REASON, FakeCompilation, argument, idle_copy
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.engine.common.errors import BackendError, DrainingError, OptionsError
from offramp.engine.control.controller import Evidence
from offramp.engine.learning import learner as learner_module
from offramp.engine.learning.learner import ModelLearner
from offramp.engine.learning.learning_loop import Learning, prepare_learner
from offramp.engine.learning.lifecycle import Phase
from offramp.engine.learning.recording_file import LOG_NAME, is_recording, read_recording
from offramp.engine.learning.state import STATE_NAME, LearnState
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import ModelInfo
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.stages.plan import Mode
from offramp.testing.engine import FakeEngine, fake_control, fake_model

SAMPLES = 900


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return compile_small(tmp_path_factory.mktemp("learned"))[0]


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "missing_packages", list)


@dataclass
class FakeLearningEngine:
    """Serves nothing, and does as if."""

    info: ModelInfo = field(default_factory=lambda: fake_model("m"))
    observer: Any = None
    replaced: list[Path] = field(default_factory=list)
    error: Exception | None = None
    early: int = 0
    answered: int = 0
    alarms: int = 0

    def model(self, name: str) -> ModelInfo:
        return self.info

    def statistics(self) -> Mapping[str, ModelStatistics]:
        control = replace(fake_control(Evidence.CERTIFIED), alarms=self.alarms)
        fake = FakeEngine(served=(self.info,), control=control)
        fake.answered = [self.early, self.answered - self.early]
        return fake.statistics()

    def observe_inputs(self, name: str, observer: Any) -> None:
        self.observer = observer

    async def replace(self, name: str, path: Path) -> None:
        if self.error is not None:
            raise self.error
        assert Bundle.open(path).policy.active
        self.replaced.append(path)


@dataclass
class Scene:
    """A learner with a fake engine, fake compilations and a clock."""

    folder: Path
    engine: FakeLearningEngine = field(default_factory=FakeLearningEngine)
    compilations: list[FakeCompilation] = field(default_factory=list)
    now_s: float = 1000.0
    options: LearnOptions = field(default_factory=lambda: LearnOptions(samples=SAMPLES))
    learner: ModelLearner = field(init=False)
    sent: int = 0

    @property
    def model(self) -> Path:
        return self.folder / "m.onnx"

    @property
    def learned(self) -> Path:
        return self.folder / "m.learn"

    async def begin(self, **options: Any) -> None:
        self.engine = FakeLearningEngine()
        self.learner = prepare_learner("m", self.model, ModelOptions(**options), self.options)
        self.learner._start_process = self._start  # type: ignore[assignment]
        self.learner._clock = lambda: self.now_s
        await self.learner.start(self.engine)

    def _start(self, arguments: Sequence[str], cores: int, priority: str) -> FakeCompilation:
        self.compilations.append(FakeCompilation(arguments))
        return self.compilations[-1]

    def send(self, count: int) -> None:
        numbers = np.arange(self.sent, self.sent + count, dtype=np.float32)
        self.sent += count
        inputs = {"x": np.repeat(numbers[:, None], 4, axis=1)}
        self.engine.observer(inputs, np.zeros((count, 3), np.float32))

    async def record(self, count: int = SAMPLES) -> None:
        before = self.learner.status().recorded
        self.send(count)
        for _ in range(2000):
            if self.learner.status().recorded == before + count:
                return
            await asyncio.sleep(0.002)
        raise AssertionError(self.learner.status())

    async def poll(self, times: int = 1) -> None:
        for _ in range(times):
            await self.learner.poll(may_compile=True)

    @property
    def phase(self) -> str:
        return self.learner.status().phase

    def kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads((self.learned / STATE_NAME).read_text())
        return kept


Story = Callable[[Scene], Awaitable[None]]


def write(path: Path, content: str) -> None:
    path.write_text(content)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Story], Scene]]:
    """Run a story; errors that look() only logs fail it."""
    (tmp_path / "m.onnx").write_bytes(b"a model")

    def run(story: Story) -> Scene:
        scene = Scene(tmp_path)

        async def all_of_it() -> None:
            await story(scene)
            await scene.learner.close()

        asyncio.run(all_of_it())
        assert not scene.learner._failing
        return scene

    yield run


async def to_serving(scene: Scene, bundle: Bundle) -> None:
    await scene.begin()
    await scene.record()
    await scene.poll()
    scene.compilations[-1].succeed(bundle.path)
    await scene.poll()


def test_it_records_compiles_switches_and_forgets(
    play: Callable[[Story], Scene], bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def story(scene: Scene) -> None:
        await scene.begin(max_disagreement=0.02, answer="logits", task="classification")
        assert scene.learner.path == scene.model
        assert stat.S_IMODE(scene.learned.stat().st_mode) == 0o700
        await scene.record(SAMPLES - 1)
        await scene.poll()
        assert scene.learner.status().text == f"recorded {SAMPLES - 1} of {SAMPLES}"
        assert not scene.compilations
        await scene.record(1)
        await scene.poll()
        assert (scene.phase, scene.kept()["phase"]) == ("compiling", "compiling")
        (compilation,) = scene.compilations
        assert compilation.arguments[0] == str(scene.model)
        assert argument(compilation.arguments, "data") == str(scene.learned)
        assert argument(compilation.arguments, "output") == str(scene.learned / "1.ee")
        assert argument(compilation.arguments, "max-disagreement") == "0.02"
        assert argument(compilation.arguments, "confidence") == "0.95"
        assert argument(compilation.arguments, "answer") == "logits"
        assert argument(compilation.arguments, "task") == "classification"
        assert len(read_recording(scene.learned)) == SAMPLES
        progress = Path(argument(compilation.arguments, "progress-file"))
        write(progress, '{"step": 4, "steps": 9, "title": "Train", "share": 0.4}\n{"st')
        await scene.poll()
        status = scene.learner.status()
        assert (status.step, status.steps) == (4, 9)
        assert status.text == "compiling, step 4 of 9: Train, 40 %"
        compilation.succeed(bundle.path)
        await scene.poll()
        assert scene.engine.replaced == [scene.learned / "1.ee"]
        assert scene.engine.observer is None
        assert compilation.ended
        assert scene.phase == "serving"
        assert "certified: disagreement ≤ 5 % at 95 %, predicted to save" in (
            scene.learner.status().text
        )
        assert "serving with exits since " in scene.learner.status().text
        assert scene.kept() == {**scene.kept(), "phase": "serving", "serving": 1}
        assert not is_recording(scene.learned)

    play(story)
    told = [record.message for record in caplog.records]
    assert any("recorded 900 of 900" in line for line in told)
    assert any("compiling, step 4 of 9: Train" in line for line in told)


def test_what_was_recorded_is_kept_if_asked(play: Callable[[Story], Scene], bundle: Bundle) -> None:
    async def story(scene: Scene) -> None:
        scene.options = replace(scene.options, keep=True)
        await to_serving(scene, bundle)
        assert len(read_recording(scene.learned)) == SAMPLES

    play(story)


def test_nothing_that_pays_is_said_with_its_reason(
    play: Callable[[Story], Scene], bundle: Bundle, tmp_path: Path
) -> None:
    idle = idle_copy(bundle, tmp_path / "idle.ee")

    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        scene.compilations[-1].succeed(idle.path)
        await scene.poll()
        assert scene.phase == "nothing_pays"
        text = scene.learner.status().text
        tells(text, "no exit pays", IDLE_REASON, "1.ee/report.html", "unmodified model")
        assert not scene.engine.replaced
        assert scene.engine.observer is None
        assert not is_recording(scene.learned)
        await scene.poll(3)
        await scene.learner.close()
        await scene.begin()  # the same again
        assert scene.phase == "nothing_pays"
        assert scene.learner.status().text == text
        await scene.learner.close()
        scene.options = replace(scene.options, samples=2000)
        await scene.begin()
        assert scene.phase == "recording"

    play(story)


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (1, "eecompile: there is no memory", "there is no memory (exit status 1)"),
        (-9, "", "its process was ended by SIGKILL"),
        (-77, "", "its process was ended by signal 77"),
        (0, "", "it wrote no complete bundle"),
    ],
)
def test_a_failed_compilation_is_logged_and_retried(
    play: Callable[[Story], Scene], bundle: Bundle, status: int, said: str, reason: str
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        (scene.learned / ".1.ee.abc").mkdir()  # what a killed compiler leaves
        scene.compilations[-1].fail(status, said)
        await scene.poll()
        found = scene.learner.status()
        assert (found.phase, found.failures, found.attempts) == ("waiting", 1, 1)
        assert found.reason == reason
        assert found.text.startswith(f"compiling failed: {reason}; again at ")
        assert not (scene.learned / ".1.ee.abc").exists()
        scene.now_s += 9.9
        await scene.poll()
        assert len(scene.compilations) == 1
        scene.send(5000)  # the next attempt is made with what is asked since
        scene.now_s += 0.1
        await scene.poll()
        assert len(scene.compilations) == 2
        scene.compilations[-1].succeed(bundle.path)
        await scene.poll()
        assert scene.phase == "serving"
        assert scene.learner.status().failures == 0

    play(story)


def test_a_process_that_cannot_be_started_is_tried_again(play: Callable[[Story], Scene]) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()

        def refuse(*_: object) -> FakeCompilation:
            raise OSError("no more processes")

        scene.learner._start_process = refuse  # type: ignore[assignment]
        await scene.record()
        await scene.poll()
        tells(scene.learner.status().reason, "no process", "no more processes")
        assert scene.phase == "waiting"

    play(story)


def test_packages_that_are_missing_are_told_and_looked_for_again(
    play: Callable[[Story], Scene],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(learner_module, "missing_packages", lambda: ["torch"])

    async def story(scene: Scene) -> None:
        await scene.begin()
        assert any(
            "compiling needs torch: pip install 'offramp[compile]'; inputs are "
            "recorded until then" in record.message
            for record in caplog.records
        )
        await scene.record()
        await scene.poll()
        tells(scene.learner.status().reason, "torch", "pip install 'offramp[compile]'")
        monkeypatch.setattr(learner_module, "missing_packages", list)
        scene.now_s += 60
        await scene.poll()
        assert scene.phase == "compiling"

    play(story)


def test_a_bundle_that_cannot_be_served_is_a_failed_attempt(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        scene.engine.error = BackendError("no memory for stage 0")
        scene.compilations[-1].succeed(bundle.path)
        await scene.poll()
        assert scene.phase == "waiting"
        tells(scene.learner.status().reason, "compiled bundle", "no memory for stage 0")
        assert scene.engine.observer is not None, "recording goes on"
        assert not (scene.learned / "1.ee").exists()

    play(story)


@pytest.mark.parametrize("when", ["compile", "switch"])
def test_whatever_else_goes_wrong_is_a_failed_attempt(
    play: Callable[[Story], Scene], bundle: Bundle, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        if when == "switch":
            await scene.poll()
            scene.engine.error = RuntimeError("a defect")
            scene.compilations[-1].succeed(bundle.path)
            await scene.poll()
        else:
            with monkeypatch.context() as patched:

                def refuse(*_: object) -> None:
                    raise OSError(28, "No space left on device")

                patched.setattr(LearnState, "save", refuse)
                await scene.poll()
        assert scene.phase == "waiting"
        assert scene.learner._failing
        scene.engine.error = None
        scene.now_s += 10
        await scene.poll()
        assert scene.phase == "compiling"

    play(story)


def test_a_server_that_ends_while_it_switches_leaves_the_bundle_to_the_next(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        scene.engine.error = DrainingError("the server is shutting down")
        scene.compilations[-1].succeed(bundle.path)
        await scene.poll()
        assert scene.kept()["phase"] == "switching"
        await scene.learner.close()
        await scene.begin()
        assert scene.phase == "serving"
        assert scene.learner.path == scene.learned / "1.ee"
        assert not is_recording(scene.learned)

    play(story)


def test_killed_while_recording_it_goes_on_recording(play: Callable[[Story], Scene]) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record(500)
        scene.learner.release()  # as the end of a process does, and nothing else
        await scene.begin()
        assert scene.learner.status().text == f"recorded 500 of {SAMPLES}"
        await scene.record(SAMPLES - 500)
        await scene.poll()
        assert scene.phase == "compiling"

    play(story)


def test_killed_while_compiling_it_compiles_again(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        scene.learner.release()
        await scene.begin()
        assert scene.learner.path == scene.model
        await scene.poll()
        assert scene.phase == "compiling"
        assert scene.compilations[1].output.name == "1.ee"
        scene.compilations[1].succeed(bundle.path)
        await scene.poll()
        assert scene.phase == "serving"

    play(story)


def test_killed_after_a_compilation_it_serves_what_was_compiled(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record()
        await scene.poll()
        scene.compilations[0].succeed(bundle.path)
        scene.learner.release()
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("serving", scene.learned / "1.ee")
        assert not is_recording(scene.learned)
        scene.learner.release()
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("serving", scene.learned / "1.ee")

    play(story)


def test_a_damaged_bundle_is_not_served(
    play: Callable[[Story], Scene], bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(scene: Scene) -> None:
        await to_serving(scene, bundle)
        await scene.learner.close()
        (scene.learned / "1.ee" / "policy.json").write_text("{}")
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("recording", scene.model)
        assert not (scene.learned / "1.ee").exists()

    play(story)
    assert any("cannot be used any more" in record.message for record in caplog.records)


def test_learning_restarts_for_another_model(
    play: Callable[[Story], Scene], bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(scene: Scene) -> None:
        await to_serving(scene, bundle)
        await scene.learner.close()
        scene.model.write_bytes(b"another model")
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("recording", scene.model)
        assert not (scene.learned / "1.ee").exists()

    play(story)
    assert any("the model differs from that of" in record.message for record in caplog.records)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phase": "x"}', '{"model_sha256": 3}'])
def test_learning_restarts_from_unusable_state(
    play: Callable[[Story], Scene], bundle: Bundle, content: str
) -> None:
    async def story(scene: Scene) -> None:
        await to_serving(scene, bundle)
        await scene.learner.close()
        (scene.learned / STATE_NAME).write_text(content)
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("recording", scene.model)

    play(story)


def test_permanent_drift_is_learned_from_later_requests(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await to_serving(scene, bundle)
        scene.engine.answered, scene.engine.early = 5000, 4000
        await scene.poll()
        assert scene.engine.observer is None
        scene.engine.alarms = 1
        await scene.poll()
        assert scene.phase == "relearning"
        tells(scene.learner.status().text, "exits no longer answer requests", f"0 of {SAMPLES}")
        first = scene.sent
        await scene.record()
        await scene.poll(2)
        assert len(scene.compilations) == 1, "too few answers to tell whether exits come back"
        scene.engine.answered += 1000
        await scene.poll()
        assert scene.phase == "compiling"
        found = read_recording(scene.learned)
        assert found.sample(0)["x"][0] == first
        assert scene.compilations[1].output == scene.learned / "2.ee"
        scene.compilations[1].succeed(bundle.path)
        await scene.poll()
        assert scene.engine.replaced[-1] == scene.learned / "2.ee"
        assert not (scene.learned / "1.ee").exists()
        assert scene.kept()["serving"] == 2

    play(story)


def test_exits_that_come_back_end_the_recording(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        scene.options = replace(scene.options, keep=True)
        await to_serving(scene, bundle)
        await scene.poll()
        scene.engine.alarms = 1
        await scene.poll()
        await scene.record(100)
        scene.engine.answered, scene.engine.early = 1000, 300
        await scene.poll()
        assert scene.phase == "serving"
        assert scene.engine.observer is None
        assert not is_recording(scene.learned), "it is of no use, and not kept"

    play(story)


def test_a_restart_while_relearning_serves_the_old_exits_and_goes_on(
    play: Callable[[Story], Scene], bundle: Bundle
) -> None:
    async def story(scene: Scene) -> None:
        await to_serving(scene, bundle)
        await scene.poll()
        scene.engine.alarms = 1
        await scene.poll()
        await scene.record(200)
        await scene.learner.close()
        await scene.begin()
        assert (scene.phase, scene.learner.path) == ("relearning", scene.learned / "1.ee")
        assert scene.learner.status().recorded == 200

    play(story)


def test_samples_too_large_for_the_limit_are_refused_at_the_start(
    play: Callable[[Story], Scene], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(scene: Scene) -> None:
        scene.options = LearnOptions(samples=5000, max_gib=0.0001)
        with pytest.raises(OptionsError, match=facts("m: 0.0001 GiB", "60 bytes", "at least 866")):
            await scene.begin()
        scene.learner.release()
        scene.options = LearnOptions(samples=5000, max_gib=0.0005)
        await scene.begin()
        assert 866 < scene.learner.status().wanted < 5000

    play(story)
    assert any("5,000 were requested" in record.message for record in caplog.records)


def test_samples_that_turn_out_too_large_stop_it(
    play: Callable[[Story], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "sample_bytes", lambda _: 0)  # as of symbolic sizes

    async def story(scene: Scene) -> None:
        scene.options = LearnOptions(samples=5000, max_gib=0.00005)
        await scene.begin()
        scene.send(5000)
        for _ in range(500):
            await scene.poll()
            if scene.phase == "stopped":
                break
            await asyncio.sleep(0.01)
        text = scene.learner.status().text
        assert text.startswith("stopped: 5e-05 GiB hold")
        assert text.endswith("start again with a larger --learn-gib")
        assert scene.engine.observer is None
        assert not is_recording(scene.learned)

    play(story)


def test_a_second_server_is_refused(play: Callable[[Story], Scene]) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        with pytest.raises(OptionsError, match=facts("m.learn", "another server", "stop that")):
            prepare_learner("m", scene.model, ModelOptions(), scene.options)

    play(story)


@pytest.mark.parametrize(
    ("files", "samples", "told"),
    [
        (["m.onnx"], 500, ("m: 500 samples", "1 % at 95 %", "866", "--learn-samples 866")),
        (["m.onnx", "m.learn"], 10_000, ("m.learn", "--learn-folder")),
        ([], 10_000, ("m.onnx", "No such file")),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused(
    tmp_path: Path, files: list[str], samples: int, told: Told
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"a file")
    with pytest.raises(OptionsError, match=facts(*told)):
        prepare_learner("m", tmp_path / "m.onnx", ModelOptions(), LearnOptions(samples=samples))


def test_somebody_elses_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(b"a model")
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    with pytest.raises(OptionsError, match=facts("m.learn", "user", "user 4321")):
        prepare_learner("m", tmp_path / "m.onnx", ModelOptions(), LearnOptions())


def test_folders_are_beside_the_model_or_where_they_are_asked_for(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"a model")
    options = EngineOptions(learning=LearnOptions(folder=tmp_path / "all"), mode=Mode.AUDIT)
    asyncio.run(_closed(Learning.prepare({"one": model, "a/b": model}, options)))
    assert sorted(place.name for place in (tmp_path / "all").iterdir()) == [
        "a_b.learn",
        "one.learn",
    ]


async def _closed(learning: Learning) -> None:
    await learning.close()


def test_there_must_be_something_to_learn(tmp_path: Path, bundle: Bundle) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"a model")
    options = EngineOptions(learning=LearnOptions(), mode=Mode.AUDIT)
    with pytest.raises(OptionsError, match=facts("bundles", "ONNX file")):
        Learning.prepare({"b": bundle.path}, options)
    left_out = replace(options, models={"m": ModelOptions(learn=False)})
    with pytest.raises(OptionsError, match="there is nothing to learn"):
        Learning.prepare({"m": model}, left_out)
    with pytest.raises(OptionsError, match=facts("mode is off")):
        Learning.prepare({"m": model}, replace(options, mode=Mode.OFF))
    assert not (tmp_path / "m.learn").exists()
    assert Learning.prepare({"m": model}, EngineOptions()).paths({"m": model}) == {"m": model}


def test_what_is_taken_is_given_back_if_another_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"a model")
    options = EngineOptions(learning=LearnOptions(), mode=Mode.AUDIT)
    for _ in range(2):
        with pytest.raises(OptionsError, match="cannot be read"):
            Learning.prepare({"m": model, "n": tmp_path / "n.onnx"}, options)


def test_states_are_checked() -> None:
    assert LearnState(model_sha256="").phase is Phase.RECORDING
    with pytest.raises(ValueError, match="negative"):
        LearnState(model_sha256="", serving=-1)
    with pytest.raises(TypeError, match="serving is True"):
        LearnState(model_sha256="", serving=True)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=facts("samples 0", "1 to")):
        LearnOptions(samples=0)
    with pytest.raises(ValueError, match="learning max_gib 0 is not above 0"):
        LearnOptions(max_gib=0)


def test_the_log_is_for_the_owner_alone(play: Callable[[Story], Scene]) -> None:
    async def story(scene: Scene) -> None:
        await scene.begin()
        await scene.record(3)
        for name in (LOG_NAME, STATE_NAME):
            assert stat.S_IMODE((scene.learned / name).stat().st_mode) == 0o600

    play(story)
