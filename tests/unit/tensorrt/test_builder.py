"""TensorRTBuilder against stand-ins of three versions: what it calls, in which order, with what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.tensorrt.fake_driver import FakeDriver
from tests.unit.tensorrt.fake_tensorrt import FakeTensorRT

from offramp.bundle.engines import ShapeProfile, ShapeRange
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines import tensorrt_builder
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.builder_protocol import EngineBuilder, TimedEngine
from offramp.compiler.engines.tensorrt_builder import TensorRTBuilder
from offramp.engine.common.errors import BackendError

GRAPH = {
    "inputs": {"x": ["FLOAT", [-1, 3]], "mask": ["INT64", [-1, -1]]},
    "outputs": {"y": ["FLOAT", [-1, 3]]},
    "layers": [["ELEMENTWISE", ["x", "x"], {"y": "FLOAT"}]],
}
PROFILES = [
    ShapeProfile(
        first_batch=1,
        last_batch=1,
        inputs={
            "x": ShapeRange(least=(1, 3), best=(1, 3), most=(1, 3)),
            "mask": ShapeRange(least=(1, 1), best=(1, 64), most=(1, 64)),
        },
    ),
    ShapeProfile(
        first_batch=2,
        last_batch=8,
        inputs={
            "x": ShapeRange(least=(2, 3), best=(8, 3), most=(8, 3)),
            "mask": ShapeRange(least=(2, 1), best=(8, 32), most=(8, 64)),
        },
    ),
]
FP32 = BuildSettings(precision="fp32")


@pytest.fixture
def builder(fake: FakeTensorRT) -> Iterator[TensorRTBuilder]:
    made = TensorRTBuilder("cuda:0")
    yield made
    made.close()


def silent(phase: str, step: int, steps: int) -> None:
    pass


def build(builder: TensorRTBuilder, **changes: Any) -> tuple[bytes, bytes]:
    arguments: dict[str, Any] = {
        "graph": json.dumps(GRAPH).encode(),
        "profiles": PROFILES,
        "settings": FP32,
        "timing_cache": b"",
        "progress": silent,
    }
    return builder.build(**{**arguments, **changes})


def test_it_is_an_engine_builder_of_its_device(
    builder: TensorRTBuilder, fake: FakeTensorRT
) -> None:
    protocol: EngineBuilder = builder
    assert (protocol.gpu, protocol.compute_capability) == ("NVIDIA H200", (9, 0))
    assert protocol.version == fake.module.__version__
    assert fake.cuda.retained == [0]


def test_the_whole_of_a_build(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    settings = BuildSettings(precision="fp16", workspace_bytes=1 << 30, optimization_level=5)
    plan, timing_cache = build(builder, settings=settings, timing_cache=b"before")
    shapes = [
        {"x": [[1, 3]] * 3, "mask": [[1, 1], [1, 64], [1, 64]]},
        {"x": [[2, 3], [8, 3], [8, 3]], "mask": [[2, 1], [8, 32], [8, 64]]},
    ]
    old = fake.major == 8
    assert [call for call in fake.calls if call[0] != "progress_monitor"] == [
        ("Builder",),
        ("create_network", {8: 1, 10: 2, 11: 0}[fake.major]),
        ("parse", len(json.dumps(GRAPH))),
        ("builder_optimization_level", 5),
        ("max_aux_streams", 0),
        ("set_memory_pool_limit", "WORKSPACE", 1 << 30),
        ("clear_flag", "TF32"),
        *([("set_flag", "FP16"), ("set_tactic_sources", 0b11000)] if old else []),
        *([("set_preview_feature", "PROFILE_SHARING_0806", True)] if old else []),
        *([("set_flag", "OBEY_PRECISION_CONSTRAINTS")] if old else []),
        *([("precision", "y", "FLOAT"), ("set_output_type", "y", "FLOAT")] if old else []),
        ("add_optimization_profile", shapes[0]),
        ("add_optimization_profile", shapes[1]),
        ("set_timing_cache", b"before"),
        ("build_serialized_network",),
    ]
    assert timing_cache == b"before+measured"
    built = json.loads(plan)
    assert built["profiles"] == shapes
    assert built["graph"]["inputs"]["mask"][0] == ("INT32" if old else "INT64")


def test_all_free_memory_is_the_default(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    build(builder)
    assert fake.called("set_memory_pool_limit") == []
    assert fake.called("builder_optimization_level") == [(3,)]


def test_one_tensorrt_builder_and_one_timing_cache_for_all_units(
    builder: TensorRTBuilder, fake: FakeTensorRT
) -> None:
    _, first = build(builder)
    _, second = build(builder, timing_cache=first)
    assert (first, second) == (b"+measured", b"+measured+measured")
    assert len(fake.called("Builder")) == 1


def test_timing_caches_live_as_long_as_the_builder_that_used_them(
    builder: TensorRTBuilder, fake: FakeTensorRT
) -> None:
    _, first = build(builder)
    build(builder, timing_cache=first)
    _, third = build(builder, timing_cache=b"of another time")
    assert third == b"of another time+measured"
    inner: Any = builder._builder
    used = [cache() for cache in inner._caches]
    assert [cache is used[0] for cache in used] == [True, True, False]  # one goes on, one is new
    del used
    died: list[bool] = []
    weakref.finalize(inner, lambda: died.append(True))
    for cache in {cache() for cache in inner._caches}:
        weakref.finalize(cache, lambda: died.append(False))
    del inner, cache
    builder.close()
    assert died == [True, False, False]


def test_an_incompatible_timing_cache_is_replaced(
    builder: TensorRTBuilder, fake: FakeTensorRT
) -> None:
    fake.refuses_timing_cache = True
    assert build(builder, timing_cache=b"of another GPU")[1] == b"+measured"
    assert fake.called("set_timing_cache") == [(b"of another GPU",), (b"",)]


def test_an_engine_can_be_run(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    plan, _ = build(builder)
    inputs = {"x": np.ones((4, 3), np.float32), "mask": np.ones((4, 64), np.int64)}
    assert builder.run(plan, inputs, 1)["y"].tolist() == [[2, 2, 2]] * 4
    with pytest.raises(EngineBuildError, match=facts("(4, 3)", "x")):
        builder.run(plan, inputs, 0)


def test_engines_can_be_timed(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    plan, _ = build(builder)
    inputs = {"x": np.ones((4, 3), np.float32), "mask": np.ones((4, 64), np.int64)}
    timed = TimedEngine(plan=plan, inputs=inputs, profile=1)
    assert builder.time([timed, timed], rounds=5) == [0.0005, 0.0005]  # the fake's clock
    assert len(fake.called("execute_async_v3")) == 2 * (1 + 5)
    with pytest.raises(EngineBuildError, match=facts("(4, 3)", "x")):
        builder.time([timed._replace(profile=0)], rounds=5)


def test_progress_is_passed_on(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    seen: list[tuple[str, int, int]] = []
    build(builder, progress=lambda *report: seen.append(report))
    if fake.major == 8:
        assert seen == []
        return
    assert seen == [
        ("Building", 0, 3),
        ("Tactics", 0, 2),
        ("Tactics", 1, 2),
        ("Tactics", 2, 2),
        ("Tactics", 2, 2),
        ("Building", 1, 3),
        ("Building", 2, 3),
        ("Building", 3, 3),
        ("Building", 3, 3),
    ]


def test_what_the_parser_refuses(
    builder: TensorRTBuilder, fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_builder, "node_of", lambda _graph, number: f"operator of {number}")
    graph = {**GRAPH, "errors": [[3, "pool", "MaxPool", "no such pooling"]]}
    where = "MaxPool pool" if fake.major >= 10 else "operator of 3"
    said = rf"^TensorRT could not read the graph: no such pooling \(node 3, {where}\)$"
    with pytest.raises(EngineBuildError, match=said):
        build(builder, graph=json.dumps(graph).encode())
    assert fake.called("build_serialized_network") == []
    build(builder)  # it stays usable


def test_what_tensorrt_cannot_build(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    fake.build_errors = ["[graph.cpp] no kernel for conv1", "Error code 10"]
    said = r"could not build the engine: \[graph.cpp\] no kernel for conv1; Error code 10$"
    with pytest.raises(EngineBuildError, match=said):
        build(builder)


def test_tensorrt_that_does_not_start(builder: TensorRTBuilder, fake: FakeTensorRT) -> None:
    fake.fails_to_start = True
    with pytest.raises(EngineBuildError, match="could not start: CUDA initialization failure"):
        build(builder)


def test_no_tensorrt_no_builder(driver: FakeDriver) -> None:
    driver.names = ()
    with pytest.raises(BackendError, match=facts("TensorRT", "cuda:0", "no GPU")):
        TensorRTBuilder("cuda:0")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": ((1, 3),) * 3}, ("['x']", "['mask', 'x']")),
        ({"x": ((1, 4),) * 3, "mask": ((1, 1),) * 3}, ("profile 0", "(1, 4)", "x", "(-1, 3)")),
        (
            {"x": ((1, 3),) * 3, "mask": ((1, 1, 1),) * 3},
            ("profile 0", "(1, 1, 1)", "mask", "(-1, -1)"),
        ),
    ],
)
def test_profiles_that_do_not_fit_the_graph(
    builder: TensorRTBuilder, inputs: dict[str, Any], said: Told
) -> None:
    ranges = {n: ShapeRange(least=s[0], best=s[1], most=s[2]) for n, s in inputs.items()}
    profile = ShapeProfile(first_batch=1, last_batch=1, inputs=ranges)
    with pytest.raises(EngineBuildError, match=facts(*said)):
        build(builder, profiles=[profile])


@pytest.mark.parametrize("version", ["10.16", "11.4"], indirect=True)
def test_an_error_of_the_progress_ends_the_build(
    builder: TensorRTBuilder, fake: FakeTensorRT
) -> None:
    def fail(phase: str, step: int, steps: int) -> None:
        if (phase, step) == ("Tactics", 1):
            raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        build(builder, progress=fail)
    assert fake.stopped_after == 1
    build(builder)


@pytest.mark.parametrize("version", ["10.16", "11.4"], indirect=True)
def test_ctrl_c_ends_the_build_at_its_next_step(
    builder: TensorRTBuilder, fake: FakeTensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    """The signal reaches this process's main thread while TensorRT builds."""
    fake.phases = [("Building", None, 100_000)]
    handler = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            pytest.fail("TensorRT has to work in a thread of its own")
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        assert time.monotonic() < give_up

    sent, give_up = threading.Event(), time.monotonic() + 60
    fake.during_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        build(builder)
    assert fake.stopped_after is not None
    assert 1 <= fake.stopped_after < 100_000
    assert "the build ends at its next step" in caplog.text
    assert signal.getsignal(signal.SIGINT) is handler
    fake.phases, fake.during_step = [], lambda: None
    build(builder)


def test_a_second_ctrl_c_ends_the_process() -> None:
    """Even one whose build takes no notice, as TensorRT 8.6's do."""
    code = """
import os, signal, threading
from offramp.compiler.engines import tensorrt_builder
tensorrt_builder.compat.has_progress = lambda: False
def work():
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        pass
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
tensorrt_builder._in_a_thread(work, on_interrupt=lambda: print("interrupted", flush=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "interrupted\n"
    assert "the build ends when this engine is done; press Ctrl-C again" in done.stderr


def test_closing_leaves_nothing_current(fake: FakeTensorRT) -> None:
    builder = TensorRTBuilder("cuda:0")
    build(builder)
    builder.close()
    assert builder._builder is None
    assert fake.cuda.depth == 0
    assert not any(fake.cuda.stacks.values())
