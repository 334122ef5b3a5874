"""Release and audit: immediate answers, feedback afterwards, policies swapped while serving."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import FakeDeployments, ScriptedController, fake_model, policy_of, script
from tests.unit.engine.serving import LIMIT_S, Gate, until, with_engine

from offramp.bundle import NEVER
from offramp.certify import MODEL_END, Observations
from offramp.engine.common.control_state import load_state
from offramp.engine.common.errors import BackendError
from offramp.engine.control.controller import ControlStatus, Job
from offramp.engine.control.evidence_window import EvidenceWindow
from offramp.engine.core import Engine
from offramp.engine.requests.results import ResultKind, StreamResult
from offramp.testing.backend import SCRIPT, FakeBackend

TWO_EXITS = (0.9, 0.9)


def observed(controller: ScriptedController) -> Observations:
    """Everything that a controller was shown."""
    parts = controller.seen
    return Observations(
        **{
            name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in Observations.__dataclass_fields__
        }
    )


async def told(controller: ScriptedController, count: int) -> Observations:
    """Wait until the controller was shown so many samples."""
    await until(lambda: sum(map(len, controller.seen)) >= count)
    return observed(controller)


def of_control(engine: Engine) -> ControlStatus:
    status = engine.statistics()["fake"].control
    assert status is not None
    return status


async def streamed(engine: Engine, rows: Any) -> list[StreamResult]:
    return [result async for result in engine.infer_stream("fake", {SCRIPT: rows})]


def test_in_release_mode_everything_runs_on_and_is_recorded() -> None:
    controller = ScriptedController(policy_of(3, e0=0.9, e1=0.8))

    async def body(engine: Engine, backend: FakeBackend) -> None:
        # class 0 with these probabilities at exit 0, exit 1, and the end
        rows = script([0.95, 0.3, 0.4], [0.6, 0.85, 0.9], [0.5, 0.6, 0.7], [0.02, 0.1, 0.8])
        result = await engine.infer("fake", {SCRIPT: rows})
        assert result.exits.tolist() == [0, 1, -1, 0]
        assert result.policy_version == 3
        seen = await told(controller, 4)
        assert backend.runs == [(0, 4), (1, 4), (2, 4)]
        assert seen.answered_at.tolist() == [0, 1, MODEL_END, 0]
        assert seen.final.tolist() == [1, 0, 0, 0]
        assert seen.prediction.tolist() == [[0, 0, 0, 1], [1, 0, 0, 1]]
        np.testing.assert_allclose(
            seen.confidence, [[0.95, 0.6, 0.5, 0.98], [0.7, 0.85, 0.6, 0.9]], rtol=1e-6
        )
        assert seen.loss.tolist() == [1.0, 0.0, 0.0, 1.0]
        assert seen.policy_version.tolist() == [3] * 4
        # Statistics are brought up to date after the controller was shown the samples.
        await until(lambda: of_control(engine).observed == 4)
        statistics = engine.statistics()["fake"]
        assert (statistics.answered, statistics.in_flight, statistics.auditing) == (4, 0, 0)
        assert [s.answered for s in statistics.stages] == [2, 1, 1]

    with_engine(body, thresholds=TWO_EXITS, controller=controller)


def test_in_audit_mode_a_share_runs_on_and_the_rest_leaves() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9), audit_probability=0.25)

    async def body(engine: Engine, backend: FakeBackend) -> None:
        rows = script(*[[0.95, 0.2 + 1e-4 * number] for number in range(400)])
        result = await engine.infer("fake", {SCRIPT: rows})
        assert result.exits.tolist() == [0] * 400
        seen = await told(controller, 400)
        audited = int(seen.complete.sum())
        ran_on = sum(n for stage, n in backend.runs if stage == 1)
        assert audited == ran_on
        # 400 coins of 1/4: 100 ± 43 is five standard deviations
        assert 57 <= audited <= 143
        np.testing.assert_allclose(seen.loss[seen.complete], 4.0)
        assert not seen.loss[~seen.complete].any()
        assert np.array_equal(seen.complete, seen.final == 1)

    with_engine(body, controller=controller)


@pytest.mark.parametrize("release", [False, True])
def test_copies_are_no_evidence_and_run_on_in_release_mode_only(release: bool) -> None:
    """Whichever requests and batches they come in."""
    controller = ScriptedController(policy_of(1, e0=0.9))

    async def body(engine: Engine, backend: FakeBackend) -> None:
        copies = script(*[[0.95, 0.2]] * 40)
        results = [await engine.infer("fake", {SCRIPT: copies}) for _ in range(3)]
        assert all(result.exits.tolist() == [0] * 40 for result in results)
        await engine.infer("fake", {SCRIPT: script([0.96, 0.3])})
        seen = await told(controller, 2)
        assert len(seen) == 2
        assert seen.complete.all()
        await until(lambda: engine.statistics()["fake"].discounted == 119)
        assert engine.statistics()["fake"].lost_feedback == 0
        ran_on = sum(n for stage, n in backend.runs if stage == 1)
        assert ran_on == (121 if release else 2)

    with_engine(body, controller=controller, release=release)


def test_one_source_has_at_most_its_share_of_the_evidence() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))
    window = EvidenceWindow(max_source_share=0.1, shared=100)

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        for number in range(30):
            x = {SCRIPT: script([0.5 + 1e-3 * number, 0.2])}
            await engine.infer("fake", x, source="one")
        await engine.infer("fake", {SCRIPT: script([0.96, 0.3])}, source="other")
        assert len(await told(controller, 11)) == 11

    with_engine(body, controller=controller, window=window)


def test_a_stream_gives_the_early_answer_and_then_the_final_one() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))
    gate = Gate()

    def hold_the_end(stage: int, rows: int) -> None:
        if stage == 1:
            gate(stage, rows)

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        stream = engine.infer_stream("fake", {SCRIPT: script([0.95, 0.2], [0.03, 0.4])})
        early = await anext(stream)  # though the end is held
        assert early.kind is ResultKind.EARLY
        assert early.exits.tolist() == [0, 0]
        assert early.final.tolist() == [False, False]
        np.testing.assert_allclose(early.outputs["answer"][:, 0], [0.95, 0.03], rtol=1e-6)
        gate.open()
        late = await anext(stream)
        assert late.kind is ResultKind.CORRECTION
        assert late.corrected.tolist() == [True, False]
        assert late.final.tolist() == [True, True]
        assert late.exits.tolist() == [-1, -1]
        np.testing.assert_allclose(late.outputs["answer"][:, 0], [0.2, 0.4], rtol=1e-6)
        np.testing.assert_allclose(early.outputs["answer"][:, 0], [0.95, 0.03], rtol=1e-6)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_engine(body, hold_the_end, controller=controller)


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([[0.95, 0.8]], [ResultKind.EARLY, ResultKind.CONFIRMATION]),
        ([[0.5, 0.8]], [ResultKind.ANSWER]),
        ([[0.5, 0.8], [0.95, 0.1]], [ResultKind.EARLY, ResultKind.CORRECTION]),
    ],
)
def test_a_second_answer_comes_only_where_the_first_was_early(
    rows: list[list[float]], kinds: list[ResultKind]
) -> None:
    async def body(engine: Engine, _backend: FakeBackend) -> None:
        assert [result.kind for result in await streamed(engine, script(*rows))] == kinds

    with_engine(body, controller=ScriptedController(policy_of(1, e0=0.9)))


def test_in_leave_mode_a_stream_gives_one_answer() -> None:
    async def body(engine: Engine, _backend: FakeBackend) -> None:
        results = await streamed(engine, script([0.95, 0.1], [0.5, 0.1]))
        assert [result.kind for result in results] == [ResultKind.ANSWER]
        assert results[0].final.tolist() == [False, True]

    with_engine(body)


def test_requests_larger_than_a_batch_are_streamed_whole() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        first = np.random.default_rng(0).random((60, 2, 1), np.float32)
        rows = np.concatenate([first, 1 - first], axis=-1)
        early, late = await streamed(engine, rows)
        left = rows[:, 0].max(axis=1) >= np.float32(0.9)
        assert np.array_equal(early.exits == 0, left)
        assert late.final.all()
        np.testing.assert_array_equal(late.outputs["answer"], rows[:, 1])
        assert np.array_equal(
            late.corrected, left & (rows[:, 0].argmax(axis=1) != rows[:, 1].argmax(axis=1))
        )
        await told(controller, 60)

    with_engine(body, streams=3, controller=controller)


def test_an_early_answer_stands_when_the_final_one_is_lost() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))

    def fail_at_the_end(stage: int, rows: int) -> None:
        if stage == 1:
            raise BackendError("no end")

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        results = await streamed(engine, script([0.95, 0.1]))
        assert [result.kind for result in results] == [ResultKind.EARLY]
        await until(lambda: engine.statistics()["fake"].lost_feedback == 1)
        statistics = engine.statistics()["fake"]
        assert (statistics.answered, statistics.failed) == (1, {})
        assert not controller.seen

    with_engine(body, fail_at_the_end, controller=controller)


def test_leaving_a_stream_early_withdraws_nothing_from_others() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        stream = engine.infer_stream("fake", {SCRIPT: script([0.95, 0.1])})
        assert (await anext(stream)).kind is ResultKind.EARLY
        await stream.aclose()
        await told(controller, 1)  # it ran on for the controller all the same
        assert await engine.drain(LIMIT_S)

    with_engine(body, controller=controller)


def test_a_new_policy_is_active_for_batches_that_start_after_it() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        assert (await engine.infer("fake", {SCRIPT: script([0.7, 0.1])})).exits.tolist() == [-1]
        controller.policy = policy_of(2, e0=0.6)
        await until(lambda: engine.statistics()["fake"].policy_version == 2)
        result = await engine.infer("fake", {SCRIPT: script([0.7, 0.2])})
        assert (result.exits.tolist(), result.policy_version) == ([0], 2)
        assert engine.model("fake").policy == controller.policy
        assert (await told(controller, 2)).policy_version.tolist() == [1, 2]
        stages = engine.statistics()["fake"].stages
        assert [(s.label, s.threshold) for s in stages] == [
            ("exit 0", pytest.approx(0.6)),
            ("final", 0.0),
        ]

    with_engine(body, controller=controller)


def test_a_batch_keeps_the_policy_that_it_was_started_under() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9, e1=0.9))
    gate = Gate()

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        asked = asyncio.create_task(engine.infer("fake", {SCRIPT: script([0.7, 0.7, 0.1])}))
        await gate.wait_entered()
        controller.policy = policy_of(2, e0=0.6, e1=0.6)
        await until(lambda: engine.statistics()["fake"].policy_version == 2)
        gate.open()
        result = await asked
        assert (result.exits.tolist(), result.policy_version) == ([-1], 1)

    with_engine(body, gate, thresholds=TWO_EXITS, controller=controller)


def with_deployments(
    body: Callable[[Engine, FakeBackend, FakeDeployments], Coroutine[Any, Any, None]],
    controller: ScriptedController,
) -> None:
    """An engine with one observed model of two exits, of which only exit 1 is prepared."""

    async def run() -> None:
        backend = FakeBackend()
        model = fake_model(backend, TWO_EXITS, controller=controller)
        assert model.control is not None
        deployments = model.control.deployments
        assert isinstance(deployments, FakeDeployments)
        deployments.there = {(1,)}
        async with Engine({"fake": model}, backend) as engine:
            await asyncio.wait_for(body(engine, backend, deployments), LIMIT_S)

    asyncio.run(run())


def test_no_request_waits_for_stages_that_are_being_assembled() -> None:
    controller = ScriptedController(policy_of(1, e1=0.9))
    assembling, assembled = threading.Event(), threading.Event()

    async def body(engine: Engine, backend: FakeBackend, deployments: FakeDeployments) -> None:
        def hold() -> None:
            assembling.set()
            assert assembled.wait(LIMIT_S)

        deployments.gate = hold
        controller.policy = policy_of(2, e0=NEVER, e1=0.8)
        await until(assembling.is_set)
        # Same answers on the exits that are there, and served meanwhile:
        await until(lambda: engine.statistics()["fake"].policy_version == 2)
        for _ in range(20):
            result = await engine.infer("fake", {SCRIPT: script([0.1, 0.85, 0.1])})
            assert (result.exits.tolist(), result.policy_version) == ([1], 2)
        assert {stage for stage, _ in backend.runs} == {0, 1}
        # An alarm meanwhile is heeded at once:
        controller.policy = policy_of(3, e0=NEVER, e1=NEVER)
        await until(lambda: engine.statistics()["fake"].policy_version == 3)
        result = await engine.infer("fake", {SCRIPT: script([0.1, 0.99, 0.1])})
        assert result.exits.tolist() == [-1]
        assert not assembled.is_set()
        assembled.set()
        await until(lambda: len(engine.model("fake").policy.active) == 2)
        before = len(backend.runs)
        await engine.infer("fake", {SCRIPT: script([0.1, 0.99, 0.1])})
        await until(lambda: len(backend.runs) == before + 3)
        assert [stage for stage, _ in backend.runs[before:]] == [0, 1, 2]

    with_deployments(body, controller)


def test_exits_that_cannot_be_put_in_use_leave_the_policy_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller = ScriptedController(policy_of(1, e1=0.9))

    async def body(engine: Engine, _backend: FakeBackend, deployments: FakeDeployments) -> None:
        def fail() -> None:
            raise BackendError("no such file")

        deployments.gate = fail
        controller.policy = policy_of(2, e0=0.5, e1=0.9)  # exit 0 would answer: no stand-in
        await until(lambda: "cannot be activated: no such file" in caplog.text)
        result = await engine.infer("fake", {SCRIPT: script([0.9, 0.95, 0.1])})
        assert (result.exits.tolist(), result.policy_version) == ([1], 1)

    with_deployments(body, controller)


def test_a_job_is_run_elsewhere_and_its_result_handed_back() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))

    async def body(_engine: Engine, _backend: FakeBackend) -> None:
        controller.jobs.append(
            Job(number=5, purpose="a turn", function=np.roll, arguments=(np.arange(3), -1))
        )
        controller.jobs.append(
            Job(number=6, purpose="a failure", function=np.reshape, arguments=(np.arange(3), (2,)))
        )
        await until(lambda: len(controller.results) == 2)
        (first, result), (second, failed) = controller.results
        assert (first, result.tolist(), second, failed) == (5, [1, 2, 0], 6, None)

    with_engine(body, controller=controller)


def test_a_drain_waits_for_second_answers() -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))
    gate = Gate()

    def hold_the_end(stage: int, rows: int) -> None:
        if stage == 1:
            gate(stage, rows)

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        stream = engine.infer_stream("fake", {SCRIPT: script([0.95, 0.2])})
        assert (await anext(stream)).kind is ResultKind.EARLY
        assert not await engine.drain(0.02)
        gate.open()
        assert await engine.drain(LIMIT_S)
        assert (await anext(stream)).kind is ResultKind.CORRECTION

    with_engine(body, hold_the_end, controller=controller)


def test_what_an_alarm_took_back_does_not_come_back_after_a_crash(tmp_path: Path) -> None:
    controller = ScriptedController(policy_of(1, e0=0.9))
    controller.kept = {"policy": 1}
    path = tmp_path / "m.state.npz"

    async def body(engine: Engine, _backend: FakeBackend) -> None:
        controller.kept = {"policy": 2}
        controller.policy = policy_of(2, e0=NEVER)
        await until(lambda: load_state(path, fingerprint={}) is not None)  # while it serves
        assert load_state(path, fingerprint={}) == {"policy": 2}

    with_engine(body, controller=controller, state_path=path)


def test_a_model_whose_control_fails_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(ScriptedController):
        def observe(self, seen: Observations) -> None:
            raise ArithmeticError("no number")

    broken, sound = (kind(policy_of(1, e0=0.9)) for kind in (Broken, ScriptedController))

    async def run() -> None:
        backend = FakeBackend()
        models = {
            "broken": fake_model(backend, controller=broken),
            "sound": fake_model(backend, controller=sound),
        }
        async with Engine(models, backend) as engine:
            await engine.infer("broken", {SCRIPT: script([0.95, 0.1])})
            await until(lambda: "broken: control failed" in caplog.text)
            for name, sure in (("sound", 0.95), ("broken", 0.94), ("sound", 0.93)):
                await engine.infer(name, {SCRIPT: script([sure, 0.1])})
            await asyncio.wait_for(told(sound, 2), LIMIT_S)

    asyncio.run(run())
    assert "sound: control failed" not in caplog.text
