"""Bundles of precision int8 are for CPUs: a GPU refuses them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_fakes import fake_cuda
from tests.facts import facts, tells
from tests.unit.bundle.cascades import cascade_manifest, write_cascade
from tests.unit.bundle.examples import MANIFEST, write

from offramp.bundle import CpuFeatures, Manifest
from offramp.engine.common.errors import BackendError
from offramp.engine.control.costs import CostModel
from offramp.engine.models.controllers import ramp_budget
from offramp.engine.models.options import ModelOptions
from offramp.engine.stages.plan import Mode, make_plan
from offramp.engine.stages.precision import (
    is_rounded,
    require_plain,
    warn_of_other_kernels,
    warn_of_saturation,
)


def test_a_gpu_refuses_its_stages(tmp_path: Path) -> None:
    backend, _, _ = fake_cuda()
    for stage in make_plan(write_cascade(tmp_path)).stages:
        told = facts("small.ee", "int8", "CPUs", "--backend onnxruntime", "--precision fp32")
        with pytest.raises(BackendError, match=told):
            backend.prepare(stage)
    backend.close()


def test_bundles_of_fp32_are_refused_nowhere(tmp_path: Path) -> None:
    bundle = write(tmp_path)
    require_plain(bundle.manifest, bundle.path)


def test_the_quantised_model_is_within_a_ramp_budget_that_nobody_asked_for(tmp_path: Path) -> None:
    bundle = write_cascade(tmp_path)
    costs = CostModel.of(bundle.manifest, bundle.profile(), 8)  # 5 of 20 ms, and exits of 1 ms
    none = replace(bundle.policy, active=())
    plain = ModelOptions()
    assert ramp_budget(none, costs, plain, all_run_on=False) == pytest.approx(0.1 + 0.25)
    assert ramp_budget(bundle.policy, costs, plain, all_run_on=False) == pytest.approx(0.1 + 0.25)
    assert ramp_budget(none, costs, plain, all_run_on=True) == pytest.approx(0.02 + 0.25)
    asked = ModelOptions(ramp_budget=0.05)
    assert ramp_budget(none, costs, asked, all_run_on=False) == 0.05


NEW = CpuFeatures(machine="x86_64", names=("AVX2", "AVX512_VNNI"))
OLD = CpuFeatures(machine="x86_64", names=("AVX2",))
ARM = CpuFeatures(machine="aarch64", names=())
UNKNOWN = CpuFeatures(machine="x86_64", names=None)


def warned(
    caplog: pytest.LogCaptureFixture, manifest: Manifest, here: CpuFeatures, mode: Mode = Mode.AUDIT
) -> str:
    """Return the warning about a bundle on a CPU, if any."""
    caplog.clear()
    warn_of_saturation("small", manifest, here, mode)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return "".join(caplog.messages)


def test_a_cpu_without_vnni_is_warned_of_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    said = warned(caplog, cascade_manifest(cpu=NEW), OLD)
    tells(said, "small", "INT8 MAY ANSWER OTHERWISE HERE", "VNNI", "AVX2", "AVX512_VNNI", "Audits")
    tells(said, "saturate", "--precision fp32")
    older = warned(caplog, cascade_manifest(), OLD, Mode.LEAVE)
    tells(older, "does not name", "Nothing watches", "mode leave", "mode audit", "Compile")


def test_a_bundle_of_a_cpu_without_vnni_is_warned_of_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warned(caplog, cascade_manifest(cpu=OLD), NEW)
    tells(said, "(x86_64 with AVX2, AVX512_VNNI)", "x86_64 with")
    assert "MAY ANSWER OTHERWISE" in warned(caplog, cascade_manifest(cpu=OLD), ARM)


@pytest.mark.parametrize(
    ("manifest", "here", "mode"),
    [
        (MANIFEST, OLD, Mode.AUDIT),
        (cascade_manifest(cpu=NEW), OLD, Mode.OFF),
        (cascade_manifest(cpu=OLD), OLD, Mode.AUDIT),
        (cascade_manifest(cpu=OLD, weights_of_7_bits=True), NEW, Mode.AUDIT),
        (cascade_manifest(cpu=NEW, weights_of_7_bits=True), OLD, Mode.AUDIT),
        (cascade_manifest(cpu=NEW), ARM, Mode.AUDIT),
        (cascade_manifest(), NEW, Mode.AUDIT),
        (cascade_manifest(cpu=NEW), UNKNOWN, Mode.AUDIT),
        (cascade_manifest(cpu=UNKNOWN), NEW, Mode.AUDIT),
    ],
    ids=(
        "fp32",
        "off",
        "both saturate",
        "7 bits",
        "7 bits of another",
        "neither does",
        "older bundle",
        "here?",
        "there?",
    ),
)
def test_nothing_is_said_where_int8_is_the_same_or_is_not_served(
    manifest: Manifest, here: CpuFeatures, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, manifest, here, mode) == ""


@pytest.mark.parametrize(
    ("backend", "mode", "told"),
    [
        ("openvino-cpu", Mode.AUDIT, "Audits watch how far answers agree"),
        ("openvino-cpu", Mode.LEAVE, "Nothing watches how far answers agree in mode leave"),
        ("openvino-cpu", Mode.OFF, ""),
        ("onnxruntime-cpu", Mode.AUDIT, ""),
    ],
)
def test_int8_in_another_runtime_is_warned_of(
    caplog: pytest.LogCaptureFixture, backend: str, mode: Mode, told: str
) -> None:
    warn_of_other_kernels("small", cascade_manifest(), backend, mode)
    assert bool(caplog.text) == bool(told)
    assert told in caplog.text
    caplog.clear()
    warn_of_other_kernels("small", MANIFEST, backend, mode)
    assert not caplog.text


@pytest.mark.parametrize(
    ("change", "rounded"),
    [({}, False), ({"verified_tolerance": 0.01}, True), ({"batch_effect": True}, True)],
)
def test_what_is_computed_in_less_than_float32(change: dict[str, object], rounded: bool) -> None:
    """A model that is quantised itself, or of half precision, is of fp32 as a bundle."""
    assert is_rounded(replace(MANIFEST, **change)) is rounded  # type: ignore[arg-type]
    assert is_rounded(cascade_manifest())
