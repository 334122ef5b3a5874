"""What a measurement ran on: without it a figure says nothing."""

from __future__ import annotations

import datetime
import json
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


def check_outputs(*paths: Path | None) -> None:
    """Check before long work that files can be written there.

    Raises:
        ValueError: One cannot.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(f"{path} cannot be written: {what}; name a file in one that exists")


def write_json(path: Path | None, document: Any) -> None:
    """Write a result, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


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
