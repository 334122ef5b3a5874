"""What is said of a CPU is what the system and ONNX Runtime say."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from onnx import TensorProto

from offramp.calibration.precision.cpu import (
    CpuFeatures,
    computes_natively,
    cpu_features,
    half_precision,
)


def features(folder: Path, text: str) -> CpuFeatures:
    path = folder / "cpuinfo"
    path.write_text(text)
    return cpu_features(path)


def test_flags_of_x86_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    text = "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_int8 amx_bf16\n"
    found = features(tmp_path, text)
    assert found.names == ("AVX2", "AVX512", "AVX512_VNNI", "AMX_INT8", "AMX_BF16")
    assert found.saturates is False
    assert found.describe() == "x86_64 with AVX2, AVX512, AVX512_VNNI, AMX_INT8, AMX_BF16"


def test_features_of_arm_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = features(tmp_path, "Features\t: fp asimd asimddp i8mm bf16\n")
    assert found.names == ("DOTPROD", "I8MM", "BF16")
    assert found.saturates is False


def test_x86_without_vnni_saturates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert features(tmp_path, "flags : fpu avx2\n").saturates is True


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    for found in (cpu_features(tmp_path / "none"), features(tmp_path, "nothing : here\n")):
        assert found.names is None
        assert found.saturates is None
        assert "instructions unknown" in found.describe()


def test_float32_is_computed_in_float32() -> None:
    assert computes_natively(TensorProto.FLOAT)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have kernels of float16")
def test_x86_has_no_kernels_of_16_bits() -> None:
    assert half_precision() == {"float16": False, "bfloat16": False}
