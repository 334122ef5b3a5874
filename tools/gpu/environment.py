"""Versions on this machine that TensorRT and our kernels need, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any

from offramp.engine.common.environment import cpu_model, package_version
from offramp.engine.common.errors import BackendError
from offramp.engine.tensorrt import probe

_PACKAGES = ("numpy", "onnx", "onnxruntime", "onnx-graphsurgeon", "pytest", "hypothesis")
_LIMIT_S = 60
_IMPORT = "import {0}; print(getattr({0}, '__version__', None) or {0}.VERSION_TEXT)"


def facts() -> dict[str, str]:
    """Return name and version of each dependency, or ``missing: reason``."""
    found = {"driver": _driver(), "gpu": _gpu(), "python": platform.python_version()}
    for module in ("tensorrt", "pycuda"):
        found[module] = _imported(module)
    found["nvcc"] = _output_of(["nvcc", "--version"], r"release [\d.]+, V([\d.]+)")
    found["compute-sanitizer"] = _output_of(["compute-sanitizer", "--version"], r"([\d.]{4,})")
    found.update({name: package_version(name) or "missing: not installed" for name in _PACKAGES})
    return found


def hardware() -> dict[str, Any]:
    """Return GPU, processor and versions, for measurements."""
    return {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), **facts()}


def _driver() -> str:
    try:
        major, minor = probe.find_device(0).driver_version
    except BackendError as error:
        return f"missing: {error}"
    version = _output_of(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"([\d.]+)"
    )
    runs = f"runs CUDA {major}.{minor}"
    return runs if version.startswith("missing") else f"{version}, {runs}"


def _gpu() -> str:
    try:
        device = probe.find_device(0)
    except BackendError:
        return "missing: see driver"
    gib = device.total_bytes / 2**30
    return f"{device.name}, {device.architecture}, {gib:.0f} GiB"


def _imported(module: str) -> str:
    """Return a module's version from another process: an incompatible package may crash it."""
    command = [sys.executable, "-c", _IMPORT.format(module)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"missing: its import takes more than {_LIMIT_S} s"
    if done.returncode == 0:
        return done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    return f"missing: {lines[-1] if lines else f'exit status {done.returncode}'}"


def _output_of(command: list[str], pattern: str) -> str:
    program = shutil.which(command[0])
    if program is None:
        return f"missing: no {command[0]} on PATH"
    done = subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    match = re.search(pattern, done.stdout)
    return match[1] if match else f"missing: {command[0]} says {done.stdout.strip()[:80]!r}"


def main() -> int:
    """Print the versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and the processor in it")
    if parser.parse_args().json:
        print(json.dumps(hardware(), indent=2))
        return 0
    found = facts()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
