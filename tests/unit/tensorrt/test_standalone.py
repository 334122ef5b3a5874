"""Single runs of an engine: calls, their arguments, and no leaked resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.tensorrt.fake_tensorrt import SCRATCH_BYTES, FakeTensorRT

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.primary_context import primary_context
from offramp.engine.tensorrt.standalone import StandaloneEngine, run_plan, time_plans
from offramp.tools.gpu.device import time_ms

PROFILES = [{"x": [[1, 3], [1, 3], [1, 3]]}, {"x": [[2, 3], [8, 3], [8, 3]]}]


def plan_of(fake: FakeTensorRT, **changes: Any) -> bytes:
    graph = {
        "inputs": {"x": ["FLOAT", [-1, 3]]},
        "outputs": {"y": ["FLOAT", [-1, 3]], "z": ["HALF", [-1, 3]]},
    }
    plan = {"version": fake.module.__version__, "graph": graph, "profiles": PROFILES}
    return json.dumps({**plan, **changes}).encode()


@pytest.fixture
def current(fake: FakeTensorRT) -> Iterator[FakeTensorRT]:
    with primary_context(0).current():
        yield fake


def test_once(current: FakeTensorRT) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    outputs = run_plan(plan_of(current), {"x": x, "unread": x}, 1)
    assert {name: array.dtype for name, array in outputs.items()} == {
        "y": np.float32,
        "z": np.float16,
    }
    np.testing.assert_array_equal(outputs["y"], 2 * x)
    np.testing.assert_array_equal(outputs["z"], 2 * x)
    assert current.called("set_optimization_profile_async") == [(1,)]
    size = (SCRATCH_BYTES[1],)
    assert current.called("set_device_memory") == ([size] if current.major >= 10 else [])
    assert len(current.called("execute_async_v3")) == 1


def test_engines_are_timed_in_interleaved_rounds(
    current: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs before the first round, then all in turn; the medians are of the device's clock."""
    clock = iter([1.0, 10.0, 3.0, 30.0, 2.0, 90.0])
    monkeypatch.setattr(current.cuda.driver.Event, "time_since", lambda *_: next(clock))
    x = np.ones((1, 3), np.float32)
    inputs = {"x": x}, {"x": x.repeat(4, axis=0)}
    plans = [(plan_of(current), inputs[0], 0), (plan_of(current), inputs[1], 1)]
    found = time_plans(plans, rounds=3)
    assert found == [0.002, 0.03]
    assert current.called("execute_async_v3") == [(7001,), (7002,)] * 4  # by stream


def test_an_engine_that_cannot_be_timed_is_told(current: FakeTensorRT) -> None:
    current.fails_to_run = True
    with pytest.raises(BackendError, match="TensorRT could not run the engine"):
        time_plans([(plan_of(current), {"x": np.ones((1, 3), np.float32)}, 0)], rounds=3)


def test_arrays_in_any_order_of_memory(current: FakeTensorRT) -> None:
    x = np.arange(24, dtype=np.float32).reshape(3, 8).T[:, ::-1]
    np.testing.assert_array_equal(run_plan(plan_of(current), {"x": x}, 1)["y"], 2 * x)


def test_token_ids(current: FakeTensorRT) -> None:
    """64-bit ones go into 8.6's 32-bit inputs."""
    type_ = "INT64" if current.major >= 10 else "INT32"
    graph = {"inputs": {"x": [type_, [-1, 3]]}, "outputs": {"y": [type_, [-1, 3]]}}
    ids = np.array([[101, 7592, 102]])
    outputs = run_plan(plan_of(current, graph=graph), {"x": ids}, 0)
    assert outputs["y"].dtype == (np.int64 if current.major >= 10 else np.int32)
    assert outputs["y"].tolist() == [[202, 15184, 204]]
    if current.major == 8:
        with pytest.raises(BackendError, match=facts("x:", "int32")):
            run_plan(plan_of(current, graph=graph), {"x": ids + 2**40}, 0)


@pytest.mark.parametrize("version", ["10.16", "11.4"], indirect=True)
def test_bfloat16_comes_as_float32(current: FakeTensorRT) -> None:
    graph = {"inputs": {"x": ["BF16", [-1, 3]]}, "outputs": {"y": ["BF16", [-1, 3]]}}
    x = np.array([[1.5, -2, 0.25]], np.float32)
    y = run_plan(plan_of(current, graph=graph), {"x": x}, 0)["y"]
    assert y.dtype == np.float32
    assert y.tolist() == [[3, -4, 0.5]]


def test_an_engine_is_kept_loaded(current: FakeTensorRT) -> None:
    with StandaloneEngine(plan_of(current)) as engine:
        assert (engine.inputs, engine.outputs, engine.profiles) == (("x",), ("y", "z"), 2)
        assert engine.load_s > 0
        for value in (1.0, 2.0):
            x = np.full((1, 3), value, np.float32)
            assert engine.run({"x": x})["y"].tolist() == [[2 * value] * 3]
        assert current.cuda.memory == {}
        with engine.prepare(0, {"x": (1, 3)}) as one, engine.prepare(1, {"x": (8, 3)}) as eight:
            assert len(current.cuda.memory) == 8  # scratch, x, y and z, twice
            assert eight.run({"x": np.ones((8, 3), np.float32)})["y"].shape == (8, 3)
            assert one.run({"x": np.ones((1, 3), np.float32)})["y"].shape == (1, 3)
            with pytest.raises(BackendError, match=r"shape \(2, 3\), but \(8, 3\) was prepared"):
                eight.run({"x": np.ones((2, 3), np.float32)})
        with pytest.raises(BackendError, match="have been released"):
            one.run({"x": np.ones((1, 3), np.float32)})
    with pytest.raises(BackendError, match="the engine has been released"):
        engine.run({"x": np.ones((1, 3), np.float32)})


def test_timing(current: FakeTensorRT) -> None:
    with (
        StandaloneEngine(plan_of(current)) as engine,
        engine.prepare(1, {"x": (8, 3)}) as eight,
    ):
        assert time_ms(eight, 5) == [0.5] * 5
    assert len(current.called("execute_async_v3")) == 3 + 5  # warm-up, rounds


@pytest.mark.parametrize(
    ("shape", "profile", "said"),
    [
        ((1, 3), 1, ("(1, 3)", "x", "[2, 3] to [8, 3]")),
        ((1, 3), 2, ("profile 2", "2")),
    ],
)
def test_what_the_profile_does_not_hold(
    current: FakeTensorRT, shape: tuple[int, ...], profile: int, said: Told
) -> None:
    with pytest.raises(BackendError, match=facts(*said)):
        run_plan(plan_of(current), {"x": np.zeros(shape, np.float32)}, profile)


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ({"refuses_profiles": True}, ("profile 0", "in use")),
        ({"fails_to_run": True}, ("could not run the engine", "enqueue failed")),
    ],
)
def test_an_engine_that_fails(current: FakeTensorRT, flaw: dict[str, bool], said: Told) -> None:
    vars(current).update(flaw)
    with pytest.raises(BackendError, match=facts(*said)):
        run_plan(plan_of(current), {"x": np.zeros((1, 3), np.float32)})


def test_a_missing_input(current: FakeTensorRT) -> None:
    with pytest.raises(BackendError, match=r"the engine needs \['x'\], but it was given \['w'\]"):
        run_plan(plan_of(current), {"w": np.zeros((1, 3), np.float32)})


def test_an_engine_of_another_version(current: FakeTensorRT) -> None:
    with pytest.raises(BackendError, match=facts("engine", "version 9")):
        run_plan(plan_of(current, version="9.0"), {})


def test_outputs_whose_shape_depends_on_data(current: FakeTensorRT) -> None:
    graph = {"inputs": {"x": ["FLOAT", [-1, 3]]}, "outputs": {"y": ["FLOAT", [-2]]}}
    with pytest.raises(BackendError, match=facts("(-2,) of y")):
        run_plan(plan_of(current, graph=graph), {"x": np.zeros((1, 3), np.float32)})


def test_too_little_memory(current: FakeTensorRT) -> None:
    current.cuda.free_bytes = SCRATCH_BYTES[0] - 1
    with pytest.raises(BackendError, match="CUDA failed: cuMemAlloc failed: out of memory"):
        run_plan(plan_of(current), {"x": np.zeros((1, 3), np.float32)})


def test_a_kernel_that_goes_wrong(current: FakeTensorRT) -> None:
    with (
        StandaloneEngine(plan_of(current)) as engine,
        pytest.raises(BackendError, match=r"CUDA failed: .* illegal memory access"),
        engine.prepare(0, {"x": (1, 3)}) as prepared,
    ):
        current.cuda.broken = True
        prepared.run({"x": np.zeros((1, 3), np.float32)})


def test_what_runs_is_waited_for_before_its_memory_is_freed(current: FakeTensorRT) -> None:
    """The engine is enqueued; then the copy of its outputs fails, and all is released."""
    current.cuda.copy_fails = True
    with pytest.raises(BackendError, match="CUDA failed: cuMemcpyDtoHAsync failed"):
        run_plan(plan_of(current), {"x": np.zeros((1, 3), np.float32)})
    assert len(current.called("execute_async_v3")) == 1
    assert current.cuda.memory == {}
    assert not current.cuda.pending


def test_the_primary_context_is_shared_and_nests(fake: FakeTensorRT) -> None:
    context = primary_context(1)
    assert primary_context(1) is context
    assert fake.cuda.retained == [1]
    with context.current(), pytest.raises(ZeroDivisionError), context.current():
        assert fake.cuda.depth == 2
        _ = 1 / 0
    assert fake.cuda.depth == 0


def test_no_primary_context(fake: FakeTensorRT) -> None:
    fake.cuda.broken = True
    with pytest.raises(BackendError, match=facts("CUDA", "cuda:0", "out of memory", "nvidia-smi")):
        primary_context(0)
