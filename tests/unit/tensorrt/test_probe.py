"""One-line messages about missing parts for TensorRT; without TensorRT, PyCUDA or a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import Told, facts, tells
from tests.unit.tensorrt.fake_driver import MISMATCH, NO_DEVICE, FakeDriver

from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import probe

_LIBRARY = """
#include <cstring>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = 40 + i; return 0; }
int cuDeviceGetName(char *s, int n, int d) {
    std::strncpy(s, d == 41 ? "NVIDIA L4" : "?", n);
    return 0;
}
int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 75 ? 8 : a == 76 ? 9 : -1;
    return d != 41;
}
int cuDeviceTotalMem_v2(size_t *s, int) { *s = 23ull << 30; return 0; }
int cuGetErrorName(int, const char **) { return 1; }
}
"""


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are installed; the test adds to it."""
    installed: set[str] = set()
    monkeypatch.setattr(probe, "find_spec", lambda name: object() if name in installed else None)
    return installed


def test_the_device_is_described(driver: FakeDriver, packages: set[str]) -> None:
    packages |= {"tensorrt", "pycuda"}
    driver.names = ("NVIDIA H200", "NVIDIA L4")
    assert probe.missing() == []
    driver.calls.clear()
    device = probe.require("cuda:1")
    assert device == probe.Device(
        index=1,
        name="NVIDIA L4",
        compute_capability=(9, 0),
        driver_version=(13, 0),
        total_bytes=140 << 30,
    )
    assert (device.device, device.architecture) == ("cuda:1", "sm_90")


def test_the_real_calling_convention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a library with the driver's C signatures."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    source = tmp_path / "driver.cpp"
    source.write_text(_LIBRARY)
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    monkeypatch.setattr(probe, "_LIBRARY", str(library))
    assert probe.find_device(1) == probe.Device(
        index=1,
        name="NVIDIA L4",
        compute_capability=(8, 9),
        driver_version=(12, 8),
        total_bytes=23 << 30,
    )
    with pytest.raises(BackendError, match="cuDeviceGetAttribute returns error 1,"):
        probe.find_device(0)


def test_no_driver(packages: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LIBRARY", "libcuda-that-is-nowhere.so.1")
    packages |= {"pycuda"}
    told = facts(
        "cuda:0", "libcuda-that-is-nowhere.so.1", "NVIDIA GPU", "pip install '.[tensorrt]'"
    )
    with pytest.raises(BackendError, match=told):
        probe.require("cuda:0")


def test_packages_only(driver: FakeDriver, packages: set[str]) -> None:
    (line,) = probe.missing()
    tells(line, "tensorrt and pycuda", "pip install '.[tensorrt]'")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ()}, ("finds no GPU", "nvidia-smi")),
        ({"start": NO_DEVICE}, ("finds no GPU", "nvidia-smi")),
        ({"names": ("A",)}, ("no GPU cuda:2", "cuda:0", "nvidia-smi")),
        ({"names": ("A", "B")}, ("no GPU cuda:2", "cuda:0 to cuda:1", "nvidia-smi")),
        ({"start": MISMATCH}, ("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")),
        ({"start": 999}, ("cuInit", "error 999")),
    ],
)
def test_a_driver_without_the_gpu(
    driver: FakeDriver, packages: set[str], change: dict[str, object], said: Told
) -> None:
    packages |= {"tensorrt", "pycuda"}
    for name, value in change.items():
        setattr(driver, name, value)
    with pytest.raises(BackendError) as caught:
        probe.require("cuda:2")
    message = str(caught.value)
    tells(message, "TensorRT", "cuda:2", *said)
    assert "\n" not in message


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_names_of_devices(device: str, index: int) -> None:
    assert probe.parse_device(device) == index


@pytest.mark.parametrize("device", ["", "cpu", "gpu:0", "cuda:", "cuda:-1", "cuda:0 ", "0"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(BackendError, match=facts("TensorRT", "cuda:0")):
        probe.require(device)


def test_probing_imports_neither_package() -> None:
    """Importing tensorrt where no driver is may end the process."""
    code = (
        "import sys\n"
        "from offramp.engine.tensorrt import probe, compat, standalone, tensorrt_messages\n"
        "from offramp.engine.cuda import primary_context\n"
        "import offramp.compiler.engines.tensorrt_builder\n"
        "probe.missing(); print(sorted({'tensorrt', 'pycuda'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
