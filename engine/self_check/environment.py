"""The environment of a self-check: device and driver, besides what every measurement says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from offramp.engine.backends import Backend
from offramp.engine.common.environment import common_facts, package_version
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.backend import CudaBackend
from offramp.engine.tensorrt import probe

_PACKAGES: Final = (
    "offramp",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "pycuda",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "protobuf",
)
_NVIDIA = Path("/proc/driver/nvidia/version")


def describe_environment(backend: Backend, device: str, **settings: Any) -> dict[str, Any]:
    """Give what a self-check ran on, as JSON values; asks for nothing that is not there.

    ``device`` is the GPU's name, such as ``cuda:0``; ``settings`` are added as they are.
    """
    return {
        "backend": backend.name,
        "device": _device(backend, device),
        "nvidia_driver": _first_line(_NVIDIA),
        **common_facts({name: found for name in _PACKAGES if (found := package_version(name))}),
        **settings,
    }


def _device(backend: Backend, device: str) -> dict[str, Any] | None:
    """Describe the device of a backend on a GPU; ``None`` on the CPU."""
    if not isinstance(backend, CudaBackend):
        return None
    driver = backend.driver
    with driver.current():
        free_bytes, total_bytes = driver.memory()
    described: dict[str, Any] = {
        "name": driver.device,
        "compute_capability": list(driver.compute_capability),
        "multiprocessors": driver.multiprocessors,
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }
    try:
        found = probe.find_device(probe.parse_device(device))
    except BackendError:  # as with a driver that is no real one
        return described
    return {**described, "cuda_of_driver": list(found.driver_version)}


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return None
