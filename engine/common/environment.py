"""The environment of a measurement: processor and its instructions, load, versions, command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from offramp.bundle.schema.compilation import CPU_FLAGS, CpuFeatures

CPUINFO: Final = Path("/proc/cpuinfo")


def common_facts(packages: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts about the machine and the run that every report has, as JSON values.

    ``packages`` are versions by package; each report chooses the packages.
    """
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(packages),
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "measured_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _program() -> Sequence[str]:
    """Return the words that start this program: ``python -m MODULE``, or the name of a script."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None and sys.argv[0] == main.__file__:
        return "python", "-m", main.__spec__.name.removesuffix(".__main__")
    return (Path(sys.argv[0]).name,)


def package_version(package: str) -> str | None:
    """Return the version of an installed package; ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the name of the processor, as far as the system knows it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.startswith("model name")]
    # ARM has no model name; implementer and part distinguish CPUs there.
    named = named[:1] or sorted({line for line in lines if line.startswith("CPU ")})
    words = " ".join(line.partition(":")[2].strip() for line in named)
    return words or platform.processor() or platform.machine()


def cpu_features(cpuinfo: Path = CPUINFO) -> CpuFeatures:
    """Return the CPU's features from Linux's ``/proc/cpuinfo``; unknown on other systems."""
    machine = platform.machine()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return CpuFeatures(machine=machine, names=None)
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
            names = tuple(name for flag, name in CPU_FLAGS.items() if flag in flags)
            return CpuFeatures(machine=machine, names=names)
    return CpuFeatures(machine=machine, names=None)


_core_limit: int | None = None


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, _core_limit or cores)


def limit_cores(cores: int) -> None:
    """Limit the count that :func:`available_cores` returns in this process."""
    global _core_limit  # noqa: PLW0603 - a setting of the process, as its affinity
    _core_limit = max(1, cores)
