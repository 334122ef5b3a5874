"""Results of a self-check: what each check asserts and found, on which environment, and the report.

The environment is the device and its driver, and what every measurement says of its machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from offramp.engine.backends import Backend
from offramp.engine.common.environment import common_facts, package_version
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.tensorrt import probe

Facts: TypeAlias = dict[str, Any]
"""What a check measured, as JSON values."""

_T = TypeVar("_T")


class CheckVerdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckFailedError(Exception):
    """What a check asserts does not hold; the facts say by how much."""

    def __init__(self, reason: str, facts: Facts | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


class CheckSkippedError(Exception):
    """A check does not apply here; the message says why."""


class TimeLimit:
    """The time that a check may take: its first case is run, and others while there is some left.

    ``clock`` gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = 0
        """Cases that there was no time for."""
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at the least."""
        return max(0.0, self._end_s - self._clock())

    def cases(self, cases: Iterable[_T]) -> Iterator[_T]:
        """Give cases while there is time, and count the others."""
        for index, case in enumerate(cases):
            if index and not self.left_s:
                self.left_out += 1
            else:
                yield case


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is asserted, of a bundle's stages or of the backend itself."""

    name: str
    asserts: str
    """What holds if it passes, in one line."""
    run: Callable[[TimeLimit], Facts]
    """Measures; raises CheckFailedError or CheckSkippedError. Any other exception is a failure."""
    bundle: str | None = None
    """Name of the model whose stages are run; ``None`` where none is."""
    share: float = 1.0
    """Of the time for all checks, relative to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What became of a check."""

    name: str
    asserts: str
    bundle: str | None
    verdict: CheckVerdict
    reason: str
    """Why it failed or was skipped; empty where it passed."""
    facts: Facts
    seconds: float

    def line(self) -> str:
        """Describe it in a line, for people."""
        what = self.reason or self.asserts
        if self.verdict is CheckVerdict.PASSED and "largest_difference" in self.facts:
            worst, allowed = self.facts["largest_difference"], self.facts.get("allowed")
            what += f" (largest difference {worst:.1e}"
            what += ")" if allowed is None else f", allowed {allowed:.1e})"
        where = f"{self.bundle}: " if self.bundle else ""
        return f"{self.verdict:<8}{self.name:<18}{self.seconds:6.1f} s  {where}{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """All results, and what they were found on."""

    environment: Mapping[str, Any]
    results: tuple[CheckResult, ...]
    hangs: bool = False
    """Whether a check did not come to its end, so that the process may not end by itself."""

    @property
    def passed(self) -> bool:
        """Whether no check failed, and some passed."""
        verdicts = {result.verdict for result in self.results}
        return CheckVerdict.PASSED in verdicts and CheckVerdict.FAILED not in verdicts

    def summary(self) -> str:
        """Count them in a line."""
        counts = {v: sum(r.verdict is v for r in self.results) for v in CheckVerdict}
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        failed = [r.name for r in self.results if r.verdict is CheckVerdict.FAILED]
        return f"{said}{': ' if failed else ''}{', '.join(dict.fromkeys(failed))}"

    def document(self) -> dict[str, Any]:
        """Give everything as JSON values."""
        return {
            "passed": self.passed,
            "summary": self.summary(),
            "environment": dict(self.environment),
            "checks": [_plain(asdict(result)) for result in self.results],
        }


def _plain(value: Any) -> Any:
    """Give what JSON has no numbers for, such as an infinite difference, as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
