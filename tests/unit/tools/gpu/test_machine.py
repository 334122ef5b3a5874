"""Measurements on a GPU, with fakes of the parts that only a GPU has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import facts
from tests.fake_builder import FakeBuilder
from tests.small_bert import small_bert
from tests.unit.cuda.fake_pycuda import Gpu

from offramp.bundle.engines import EngineStore, list_targets
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines import build
from offramp.engine.cuda.pycuda_driver import PyCudaStream
from offramp.engine.kernels.compilers import KernelCompilerNotFoundError
from offramp.tools.gpu.machine import BareEngine, GpuMachine, profiles_of
from offramp.tools.gpu.timing import PyCudaTimer


def test_profiles_end_at_the_sizes_that_are_asked_for() -> None:
    assert profiles_of((1, 8, 32)) == "1,2-8,9-32"
    assert profiles_of((16, 32)) == "1-16,17-32"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    made = FakeBuilder()

    def no_compiler(*_: object, **__: object) -> bytes:
        raise KernelCompilerNotFoundError("none here")

    monkeypatch.setattr(build, "make_builder", lambda _: made)
    monkeypatch.setattr(build, "load_kernels", no_compiler)
    return made


def test_source_and_stages_are_built_once(builder: FakeBuilder, tmp_path: Path) -> None:
    bundle = small_bert(tmp_path)
    machine = GpuMachine("tensorrt", precision="tf32")
    times = machine.build(bundle.path, (4, 8))
    assert set(times) == {"00-02", "00-00-exit0", "01-01-exit1", "02-02"}
    (target,) = list_targets(bundle.path)
    assert target.precision == "tf32"
    for entry in EngineStore.open(bundle.path, target).index.engines:
        assert [(p.first_batch, p.last_batch) for p in entry.profiles] == [(1, 4), (5, 8)]
    assert machine.build(bundle.path, (4, 8)) == times
    assert len(builder.builds) == 4


def test_an_engine_that_cannot_be_built_ends_the_part(
    builder: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise EngineBuildError("TensorRT says no")

    monkeypatch.setattr(builder, "_before_build", fail)
    bundle = small_bert(tmp_path)
    with pytest.raises(EngineBuildError, match=facts("bert-small-0.ee, 00-02", "TensorRT says no")):
        GpuMachine("tensorrt").build(bundle.path, (4,))


def test_onnx_runtime_needs_nothing_built(tmp_path: Path) -> None:
    assert GpuMachine("cuda").build(tmp_path, (4,)) == {}
    assert GpuMachine("cuda").bare(small_bert(tmp_path), (4,)) is None


class FakeEngine:
    """Doubles what it is given; knows which contexts are open."""

    inputs = ("x",)

    def __init__(self) -> None:
        self.open: list[tuple[int, tuple[int, ...]]] = []

    @contextmanager
    def prepare(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[FakeEngine]:
        key = (profile, shapes["x"])
        self.open.append(key)
        yield self
        self.open.remove(key)

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {"y": 2 * tensors["x"]}


def test_the_bare_engine_has_a_context_for_every_size_that_is_measured() -> None:
    engine = FakeEngine()
    with ExitStack() as stack:
        bare = BareEngine(engine, "y", stack, (4, 8))
        for rows in (1, 4, 4, 8):
            bare.warm_up({"x": np.ones((rows, 1)), "replay": np.ones((rows, 2))})
        assert engine.open == [(0, (4, 1)), (1, (8, 1))]
        (departure,) = bare.run({"x": np.arange(4.0).reshape(4, 1)})
        assert departure.rows.tolist() == [0, 1, 2, 3]
        assert departure.answer.tolist() == [[0], [2], [4], [6]]
    assert engine.open == []


def test_times_on_a_gpu_are_those_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    package = ModuleType("pycuda")
    monkeypatch.setattr(package, "driver", gpu.driver, raising=False)
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", gpu.driver)
    event = gpu.driver.Event
    monkeypatch.setattr(event, "time_since", lambda self, other: 7.5, raising=False)
    context = gpu.driver.Context()
    context.push()
    timer = PyCudaTimer()
    stream = PyCudaStream(gpu.driver.Stream())
    marks = [timer.mark(stream), timer.mark(stream)]
    assert all(isinstance(mark, event) for mark in marks)
    assert timer.elapsed_ms(*marks) == 7.5
    timer.release(list(marks))
    again = timer.mark(stream)
    assert again in marks  # used anew
    timer.close()
    stream.close()
    del marks, again
    context.pop()
    assert gpu.alive == []
