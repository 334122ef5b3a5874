"""What a measurement ran on: without it a figure says nothing."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("offramp", "onnxruntime", "numpy", "grpcio", "protobuf")


def describe_environment(**settings: Any) -> dict[str, Any]:
    """Give hardware, versions, command and the settings of a measurement, as JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "measured_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **settings,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"
