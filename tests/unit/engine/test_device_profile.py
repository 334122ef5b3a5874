"""Profiles measured on the device that serves, on a clock that only the backend moves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.engines import engine_bundle

from offramp.bundle import Bundle, Profile, write_bundle
from offramp.bundle.files import dump
from offramp.engine.backends.host import HostSlot
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError
from offramp.engine.models.device_profile import measure_profile
from offramp.engine.stages.backend_protocol import StageResult, TensorBatch
from offramp.engine.stages.plan import StageSpec

COMPILED = Profile(
    device="cpu",
    threads=1,
    batch_sizes=(1, 2, 8),
    source_ms=(10.0, 20.0, 80.0),
    segments_ms=((2.0, 4.0, 16.0), (3.0, 6.0, 24.0), (4.0, 8.0, 32.0), (1.0, 2.0, 8.0)),
    exits_ms=((1.0, 2.0, 8.0), (0.5, 1.0, 4.0)),
    stages_ms=((0.1, 0.2, 0.8), (0.2, 0.4, 1.6)),
)


class TimedBackend(OnnxRuntimeBackend):
    """Moves a clock by what (first segment, last segment) cost, per batch and per row."""

    def __init__(self, costs_s: Mapping[tuple[int, int], tuple[float, float]]) -> None:
        super().__init__()
        self.costs_s = costs_s
        self.now_s = 0.0
        self.most_rows = 0
        self.open = 0
        self.chain_takes = 99

    @property
    def name(self) -> str:
        return "timed"

    def prepare(self, spec: StageSpec):
        if (spec.first_segment, spec.last_segment) not in self.costs_s:
            raise BackendError(f"no engine for {spec.first_segment} to {spec.last_segment}")
        return super().prepare(spec)

    def open_slot(self):
        self.open += 1
        return TimedSlot(self)


class TimedSlot(HostSlot):
    def __init__(self, backend: TimedBackend) -> None:
        self.backend = backend

    def run(self, stage, batch: TensorBatch, threshold: float | None = None) -> StageResult:
        spec = stage.spec
        if spec.last_segment == 0 and len(batch) > self.backend.chain_takes:
            raise BackendError("no profile holds so many")
        fixed_s, row_s = self.backend.costs_s[spec.first_segment, spec.last_segment]
        self.backend.now_s += fixed_s + row_s * len(batch)
        self.backend.most_rows = max(self.backend.most_rows, len(batch))
        return super().run(stage, batch, threshold)

    def close(self) -> None:
        self.backend.open -= 1


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    made = engine_bundle("mlp", tmp_path / "plain.ee")
    assert len(made.manifest.segments) == 4
    files = {entry.path: made.read(entry.path) for entry in made.manifest.files}
    files["profiles/cpu.json"] = dump(COMPILED)
    return write_bundle(tmp_path / "profiled.ee", made.manifest, made.policy, files)


def measured(bundle: Bundle, backend: TimedBackend, *, most: int) -> Profile:
    return measure_profile(
        bundle, backend, bundle.profile(), max_batch_size=most, clock=lambda: backend.now_s
    )


def test_segments_add_up_to_the_source_model_and_borders_are_what_is_left(bundle: Bundle) -> None:
    alone = {(0, 0): (0.002, 0.0), (1, 1): (0.003, 0.0), (2, 2): (0.005, 0.001)}
    backend = TimedBackend({(0, 3): (0.008, 0.001), **alone, (3, 3): (0.002, 0.001)})
    profile = measured(bundle, backend, most=4)
    assert (profile.device, profile.batch_sizes) == ("timed", (1, 2, 4))
    assert profile.source_ms == pytest.approx((9.0, 10.0, 12.0))
    # chained 14 ms at batch 1 for a source model of 9
    assert [row[0] for row in profile.segments_ms] == pytest.approx(
        [18 / 14, 27 / 14, 54 / 14, 27 / 14]
    )
    for column, whole in enumerate(profile.source_ms):
        assert sum(row[column] for row in profile.segments_ms) == pytest.approx(whole)
    for row in profile.stages_ms:
        assert row == pytest.approx((5 / 3, 2.0, 8 / 3))
    # heads: a tenth and a twentieth of the source model's time, as compiled
    assert profile.exits_ms[0] == pytest.approx((0.9, 1.0, 1.2))
    assert profile.exits_ms[1] == pytest.approx((0.45, 0.5, 0.6))
    assert (backend.most_rows, backend.open) == (4, 0)


def test_without_segments_of_their_own_the_compilers_shares_are_kept(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    profile = measured(bundle, TimedBackend({(0, 3): (0.005, 0.0)}), most=8)
    assert profile.source_ms == pytest.approx((5.0, 5.0, 5.0))
    assert [row[1] for row in profile.segments_ms] == pytest.approx([1.0, 1.5, 2.0, 0.5])
    assert profile.stages_ms[0] == pytest.approx((0.05, 0.05, 0.05))
    assert profile.stages_ms[1] == pytest.approx((0.1, 0.1, 0.1))
    assert "no engine for 0 to 0" in caplog.text


def test_segments_that_fail_at_some_size_are_not_mixed_with_measured_ones(bundle: Bundle) -> None:
    alone = {(k, k): (0.001, 0.0) for k in range(4)}
    backend = TimedBackend({(0, 3): (0.005, 0.0), **alone})
    backend.chain_takes = 2
    profile = measured(bundle, backend, most=8)
    assert [row[0] for row in profile.segments_ms] == pytest.approx([1.0, 1.5, 2.0, 0.5])
    assert profile.source_ms == pytest.approx((5.0, 5.0, 5.0))


def test_a_chain_that_is_faster_than_the_source_model_has_free_borders(bundle: Bundle) -> None:
    fast = {(k, k): (0.001, 0.0) for k in range(4)}
    profile = measured(bundle, TimedBackend({(0, 3): (0.009, 0.0), **fast}), most=1)
    assert profile.stages_ms == ((0.0,), (0.0,))


def test_the_slot_is_closed_when_a_run_fails(bundle: Bundle) -> None:
    backend = TimedBackend({(0, 3): (0.001, 0.0)})

    class Failing(TimedSlot):
        def run(self, stage, batch: TensorBatch, threshold: float | None = None) -> StageResult:
            raise BackendError("the device is gone")

    def open_slot() -> Failing:
        backend.open += 1
        return Failing(backend)

    backend.open_slot = open_slot
    with pytest.raises(BackendError, match="the device is gone"):
        measured(bundle, backend, most=2)
    assert backend.open == 0
