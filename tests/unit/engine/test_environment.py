"""Measurements of all kinds say the same of the machine, in the same words."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.environment import common_facts, cpu_model, package_version
from offramp.engine.self_check import environment as self_check
from offramp.tools.bench import output
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
