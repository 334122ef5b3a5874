"""The engine on a GPU: TensorRT, and ONNX Runtime's CUDA provider, against the CPU.

The checks themselves are rehearsed on the fake driver by tests/unit/cuda/test_serving.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.conftest import carried, copied
from tests.serving_checks import (
    Truth,
    agree,
    bad_fails_alone,
    drained,
    opened_and_closed,
    options,
    swapped,
)
from tests.small_bert import sentences, small_bert
from tests.small_bert import truth as truth_of

from offramp.bundle import Bundle
from offramp.compiler.commands.cli import main
from offramp.engine.backends import Backend, make_backend
from offramp.engine.backends.onnxruntime_cuda import require_provider
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.plan import Mode
from offramp.engine.tensorrt import probe
from offramp.engine.tensorrt.lookup import TOLERANCES
from offramp.tools.gpu.machine import GpuMachine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

BACKENDS = ("tensorrt", "cuda")
MOST = 32
PROFILES = (1, 8, MOST)
REQUESTS = 10_000
EXAMPLE_DATA = Path(__file__).parents[2] / "examples" / "fashion" / "calibration.npz"
TOLERANCE = TOLERANCES["fp32"]
"""Tolerance of answers, relative to the largest, and of confidences."""
KEPT_BYTES = 8 << 20
"""Device memory that libraries may allocate again after their first use."""


def lacking(backend: str) -> str:
    """Return the reason why a backend cannot run here; empty if it can."""
    try:
        if backend == "tensorrt":
            probe.require("cuda:0")
        else:
            require_provider()
    except BackendError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", params=BACKENDS)
def machine(request: pytest.FixtureRequest) -> GpuMachine:
    reason = lacking(request.param)
    if reason:
        pytest.skip(reason)
    return GpuMachine(request.param)


Prepare = Callable[[Bundle], Bundle]


@pytest.fixture(scope="module")
def prepared(machine: GpuMachine, tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Copies a bundle, and builds what the backend needs."""

    def prepare(bundle: Bundle) -> Bundle:
        path = copied(bundle, tmp_path_factory.mktemp("bundles"))
        machine.build(path, PROFILES)
        return Bundle.open(path)

    return prepare


@pytest.fixture(scope="module")
def bundle(prepared: Prepare, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return prepared(small_bert(tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def truth(bundle: Bundle) -> Truth:
    return truth_of(bundle, samples=512, tolerance=TOLERANCE)


Maker = Callable[..., Backend]


@pytest.fixture
def make(machine: GpuMachine, bundle: Bundle) -> Maker:
    return partial(make_backend, machine.backend, max_rows=MOST, bundles=(bundle.path,))


@pytest.fixture(params=[True, False], ids=["graphs", "no graphs"])
def backend(request: pytest.FixtureRequest, make: Maker) -> Iterator[Backend]:
    made = make(graphs=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT])
def test_the_engine_answers_as_the_cpu(
    backend: Backend, bundle: Bundle, truth: Truth, mode: Mode
) -> None:
    how = options(mode, streams=3, most=MOST)
    left = asyncio.run(agree(backend, bundle.path, truth, how, requests=REQUESTS // 4))
    assert min(left) > REQUESTS // 10


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT])
def test_the_example_answers_as_the_cpu(machine: GpuMachine, prepared: Prepare, mode: Mode) -> None:
    """Ten thousand requests of real data, on a trained model."""
    bundle = prepared(carried("fashion"))
    with np.load(EXAMPLE_DATA) as archive:
        inputs = {spec.name: archive[spec.name][:2000] for spec in bundle.manifest.inputs}
    truth = Truth.of(bundle, inputs, TOLERANCE)
    backend = make_backend(machine.backend, max_rows=MOST, bundles=(bundle.path,))
    try:
        how = options(mode, streams=3, most=MOST)
        left = asyncio.run(agree(backend, bundle.path, truth, how, requests=REQUESTS))
    finally:
        backend.close()
    assert sum(map(bool, left)) > 1


def test_a_request_beyond_the_largest_profile_fails_by_itself(
    machine: GpuMachine, tmp_path: Path
) -> None:
    if machine.backend != "tensorrt":
        pytest.skip("ONNX Runtime takes any shape")
    path = copied(carried("bert"), tmp_path)
    sizes = ["--batch-profiles", f"1-{MOST}", "--buckets", "sequence=8,16"]
    assert main(["build", str(path), "--device", "cuda:0", *sizes]) == 0
    backend = make_backend("tensorrt", max_rows=MOST, bundles=(path,))
    good = Truth.of(Bundle.open(path), sentences(64, tokens=12), TOLERANCE)
    bad = sentences(2, tokens=17)
    try:
        said = asyncio.run(bad_fails_alone(backend, path, good, bad, options(most=MOST)))
    finally:
        backend.close()
    assert "no profile" in said


def test_draining_answers_what_is_in_flight(backend: Backend, bundle: Bundle, truth: Truth) -> None:
    asyncio.run(drained(backend, bundle.path, truth, options(streams=3, most=MOST)))


def test_policies_are_swapped_while_serving(make: Maker, bundle: Bundle, truth: Truth) -> None:
    """Stages that no engine was built for run as chains: each segment has one, as a stage."""
    backend = make()
    try:
        how = options(Mode.AUDIT, streams=2, most=MOST)
        asyncio.run(swapped(backend, bundle.path, truth, how, swaps=20))
    finally:
        backend.close()


def test_serving_again_and_again_leaves_no_memory_behind(
    machine: GpuMachine, make: Maker, bundle: Bundle, truth: Truth
) -> None:
    how = options(streams=2, most=MOST)
    free = opened_and_closed(make, bundle.path, truth, how, times=4, free_bytes=machine.free_bytes)
    # The first time loads what stays loaded.
    assert free[1] - free[-1] <= KEPT_BYTES
