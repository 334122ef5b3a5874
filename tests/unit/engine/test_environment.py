"""Measurements of all kinds say the same of the machine, in the same words."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from offramp.bundle import CpuFeatures
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.environment import common_facts, cpu_features, cpu_model, package_version
from offramp.engine.self_check import check_results as self_check
from offramp.tools.bench.common import output
from offramp.tools.gpu import environment as gpu_machine

COMMON = ["cpu", "cores", "load_average_1min", "platform", "python", "packages", "command"]
COMMON += ["measured_utc"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Another\n",
         "Some CPU @ 2 GHz"),
        ("CPU part\t: 0xd0c\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "0x41 0xd0c"),
        ("model name\t: Caf\u00e9 7\n", "Caf\u00e9 7"),
    ],
    ids=["x86", "ARM", "not ASCII"],
)  # fmt: skip
def test_a_processor_has_the_name_that_the_system_gives(
    tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert cpu_model(tmp_path / "cpuinfo") == named


def test_where_the_system_gives_no_name_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert cpu_model(tmp_path / "none") == "riscv64"
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert cpu_model(tmp_path / "none") == "a processor"


def test_versions_are_those_that_are_installed() -> None:
    assert package_version("numpy") == np.__version__
    assert package_version("no-package-of-this-name") is None


def test_the_common_facts_are_json_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/eebench", "load", "--rate", "3"])
    before = datetime.now(UTC).replace(microsecond=0)
    found = common_facts({"numpy": "2.0"})
    assert json.loads(json.dumps(found)) == found
    assert list(found) == COMMON
    assert found["cpu"] == cpu_model()
    assert found["cores"] == os.cpu_count()
    assert found["python"] == platform.python_version()
    assert found["packages"] == {"numpy": "2.0"}
    assert found["command"] == "eebench load --rate 3"
    assert before <= datetime.fromisoformat(found["measured_utc"]) <= datetime.now(UTC)


def test_the_command_of_a_module_can_be_run_again(tmp_path: Path) -> None:
    """With its arguments quoted as a shell needs them."""
    package = tmp_path / "measures"
    package.mkdir()
    for name in ("__init__", "__main__", "one"):
        (package / f"{name}.py").write_text(
            "from offramp.engine.common.environment import common_facts\n"
            "if __name__ == '__main__': print(common_facts({})['command'])\n"
        )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for module in ("measures", "measures.one"):
        ran = subprocess.run(
            [sys.executable, "-m", module, "--only", "a b", ""],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ran.stdout == f"python -m {module} --only 'a b' ''\n"


def test_a_system_without_load_averages_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    assert common_facts({})["load_average_1min"] is None


def test_what_is_not_installed_is_said_as_each_report_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (output, self_check, gpu_machine):
        monkeypatch.setattr(module, "_PACKAGES", ("numpy", "no-package-of-this-name"))
    bench = output.describe_environment(seed=3)
    assert list(bench) == [*COMMON, "seed"]
    assert bench["packages"] == {
        "numpy": np.__version__, "no-package-of-this-name": "source tree"
    }  # fmt: skip
    backend = OnnxRuntimeBackend(threads=1)
    checked = self_check.describe_environment(backend, "cuda:0", rows=4)
    backend.close()
    assert list(checked) == ["backend", "device", "nvidia_driver", *COMMON, "rows"]
    assert checked["packages"] == {"numpy": np.__version__}
    machine = gpu_machine.hardware()
    assert machine["cpu"] == bench["cpu"] == checked["cpu"]
    assert machine["numpy"] == np.__version__
    assert machine["no-package-of-this-name"] == "missing: not installed"


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
