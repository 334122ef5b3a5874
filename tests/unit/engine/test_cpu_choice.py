"""Choice of the CPU's runtime: on virtual time, with noise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines import engine_bundle
from tests.facts import tells
from tests.unit.bundle.cascades import write_cascade

from offramp.bundle import Bundle
from offramp.engine.backends import cpu_choice, factory, make_backend
from offramp.engine.backends.cpu_choice import LEAST_GAIN, relative_time
from offramp.engine.backends.host import HostSlot, HostStage
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.backend_protocol import StageResult, TensorBatch
from offramp.engine.tensorrt import probe


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedBackend(OnnxRuntimeBackend):
    """Moves a clock by what a run of some rows takes, in seconds."""

    def __init__(self, clock: Clock, takes_s: Callable[[int], float]) -> None:
        super().__init__()
        self.clock, self.takes_s = clock, takes_s

    def open_slot(self) -> HostSlot:
        return TimedSlot(self)


class TimedSlot(HostSlot):
    def __init__(self, backend: TimedBackend) -> None:
        self.backend = backend

    def run(
        self, stage: HostStage, batch: TensorBatch, threshold: float | None = None
    ) -> StageResult:
        segments = stage.spec.last_segment - stage.spec.first_segment + 1
        self.backend.clock.now_s += segments * self.backend.takes_s(len(batch))
        return super().run(stage, batch, threshold)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return engine_bundle("mlp", tmp_path / "a.ee")


def ratio_of(
    bundle: Bundle,
    ours: Callable[[int], float],
    other: Callable[[int], float],
    max_rows: int = 32,
) -> tuple[float, float]:
    clock = Clock()
    backends = [TimedBackend(clock, takes_s) for takes_s in (ours, other)]
    return relative_time(bundle, *backends, max_rows=max_rows, clock=clock)


def test_it_is_the_geometric_mean_over_batch_sizes(bundle: Bundle) -> None:
    ours, other = (lambda _: 0.01), (lambda rows: 0.005 if rows == 1 else 0.008)
    assert ratio_of(bundle, ours, other) == pytest.approx((np.sqrt(0.5 * 0.8), 0.0))
    assert ratio_of(bundle, ours, other, max_rows=1) == pytest.approx((0.5, 0.0))


@pytest.mark.parametrize("still", [(0.01, 0.0), (0.0, 0.01), (0.0, 0.0)])
def test_a_clock_that_stands_still_decides_nothing(
    bundle: Bundle, still: tuple[float, float]
) -> None:
    ours, other = still
    assert ratio_of(bundle, lambda _: ours, lambda _: other) == (1.0, np.inf)


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_make_the_slower_one_the_choice(bundle: Bundle, seed: int) -> None:
    random = np.random.default_rng(seed)

    def noisy(takes_s: float) -> Callable[[int], float]:
        return lambda _: takes_s * float(random.lognormal(sigma=0.3))

    ratio, width = ratio_of(bundle, noisy(0.01), noisy(0.0105))
    assert ratio + width > 1 - LEAST_GAIN
    ratio, width = ratio_of(bundle, noisy(0.01), noisy(0.005))
    assert ratio + width < 1 - LEAST_GAIN


# The choice.


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libcuda-that-is-not-there.so.1")


def choice(caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[str, str]:
    caplog.clear()
    caplog.set_level(logging.INFO, factory.__name__)
    backend = make_backend(**options)
    lines = [r.getMessage() for r in caplog.records if r.name == factory.__name__]
    return backend.name, "\n".join(lines)


@pytest.mark.parametrize(
    ("found", "taken", "told"),
    [
        ((0.70, 0.10), "openvino-cpu", "OpenVINO takes 0.70 ± 0.10 of ONNX Runtime's time here"),
        ((0.92, 0.05), "onnxruntime-cpu", "OpenVINO takes 0.92 ± 0.05 of ONNX Runtime's time here"),
        ((1.30, 0.01), "onnxruntime-cpu", "OpenVINO takes 1.30 ± 0.01 of ONNX Runtime's time here"),
    ],
)
def test_openvino_is_taken_where_it_is_surely_faster(
    no_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bundle: Bundle,
    found: tuple[float, float],
    taken: str,
    told: str,
) -> None:
    asked = []

    def measured(*arguments: Any, **options: Any) -> tuple[float, float]:
        asked.append((*(b.name for b in arguments[1:]), options["max_rows"]))
        return found

    monkeypatch.setattr(cpu_choice, "relative_time", measured)
    name, said = choice(caplog, bundles=[bundle.path], max_rows=5)
    assert asked == [("onnxruntime-cpu", "openvino-cpu", 5)]
    assert name == taken
    assert told in said


def test_a_large_model_is_not_loaded_by_both(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bundle: Bundle
) -> None:
    monkeypatch.setattr("offramp.engine.stages.loaded.TOGETHER_BYTES", 100)
    monkeypatch.setattr(cpu_choice, "relative_time", lambda *_, **__: pytest.fail("was loaded"))
    name, said = choice(caplog, bundles=[bundle.path])
    assert name == "onnxruntime-cpu"
    tells(said, "MiB of weights", "--backend openvino")


def test_nothing_is_compared_without_bundles_or_without_openvino(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bundle: Bundle
) -> None:
    name, said = choice(caplog)
    assert (name, "OpenVINO" in said) == ("onnxruntime-cpu", False)
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    name, said = choice(caplog, bundles=[bundle.path])
    assert (name, "OpenVINO" in said) == ("onnxruntime-cpu", False)


def test_int8_stays_with_the_kernels_that_certified_it(
    no_gpu: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = write_cascade(tmp_path).path
    name, said = choice(caplog, bundles=[path])
    assert name == "onnxruntime-cpu"
    tells(said, f"{path}", "float32", "ONNX Runtime")


def test_a_damaged_bundle_is_left_to_whoever_opens_it(
    no_gpu: None, caplog: pytest.LogCaptureFixture, bundle: Bundle
) -> None:
    (bundle.path / "manifest.json").write_text("{}")
    assert choice(caplog, bundles=[bundle.path])[0] == "onnxruntime-cpu"


def test_it_is_really_measured(
    no_gpu: None, caplog: pytest.LogCaptureFixture, bundle: Bundle
) -> None:
    name, said = choice(caplog, bundles=[bundle.path])
    assert name in {"onnxruntime-cpu", "openvino-cpu"}
    assert "of ONNX Runtime's time here" in said
