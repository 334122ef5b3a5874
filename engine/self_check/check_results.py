"""Results of a self-check: claims and facts of each check, the environment, and the report.

The environment is the device with its driver, and the facts about the machine that all measurements
report.
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
"""Measured facts of a check, as JSON values."""

_T = TypeVar("_T")


class CheckVerdict(StrEnum):
    """Verdict of a check: passed, failed or skipped."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckFailedError(Exception):
    """The claim of a check does not hold; the facts have the difference."""

    def __init__(self, reason: str, facts: Facts | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


class CheckSkippedError(Exception):
    """A check does not apply here; the message has the reason."""


class TimeLimit:
    """Time limit of a check: the first case always runs, other cases run while time is left.

    ``clock`` returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = 0
        """Number of cases that were skipped for lack of time."""
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end_s - self._clock())

    def cases(self, cases: Iterable[_T]) -> Iterator[_T]:
        """Yield cases while there is time, and count the omitted cases."""
        for index, case in enumerate(cases):
            if index and not self.left_s:
                self.left_out += 1
            else:
                yield case


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of one claim, about a bundle's stages or the backend itself."""

    name: str
    asserts: str
    """The claim, in one line."""
    run: Callable[[TimeLimit], Facts]
    """Function that measures, and raises CheckFailedError or CheckSkippedError. Any other exception
    is a failure, too."""
    bundle: str | None = None
    """Name of the model whose stages are run; ``None`` if the check runs no stages."""
    share: float = 1.0
    """Share of the time for all checks, relative to the shares of other checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check of ``--self-check``, for one bundle or the machine."""

    name: str
    asserts: str
    bundle: str | None
    verdict: CheckVerdict
    reason: str
    """Reason of a failure or a skip; empty if it passed."""
    facts: Facts
    seconds: float

    def line(self) -> str:
        """Describe the result in one line: verdict, name, seconds and reason."""
        what = self.reason or self.asserts
        if self.verdict is CheckVerdict.PASSED and "largest_difference" in self.facts:
            worst, allowed = self.facts["largest_difference"], self.facts.get("allowed")
            what += f" (largest difference {worst:.1e}"
            what += ")" if allowed is None else f", allowed {allowed:.1e})"
        where = f"{self.bundle}: " if self.bundle else ""
        return f"{self.verdict:<8}{self.name:<18}{self.seconds:6.1f} s  {where}{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """All results of a self-check, and its environment."""

    environment: Mapping[str, Any]
    results: tuple[CheckResult, ...]
    hangs: bool = False
    """``True`` if a check did not end, so that the process may have to be killed."""

    @property
    def passed(self) -> bool:
        """``True`` if no check failed, and at least one passed."""
        verdicts = {result.verdict for result in self.results}
        return CheckVerdict.PASSED in verdicts and CheckVerdict.FAILED not in verdicts

    def summary(self) -> str:
        """Count the verdicts in one line."""
        counts = {v: sum(r.verdict is v for r in self.results) for v in CheckVerdict}
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        failed = [r.name for r in self.results if r.verdict is CheckVerdict.FAILED]
        return f"{said}{': ' if failed else ''}{', '.join(dict.fromkeys(failed))}"

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "passed": self.passed,
            "summary": self.summary(),
            "environment": dict(self.environment),
            "checks": [_plain(asdict(result)) for result in self.results],
        }


def _plain(value: Any) -> Any:
    """Convert numbers that JSON lacks, such as infinity, to text."""
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
    """Return the environment of a self-check, as JSON values, as far as it is known.

    ``device`` is the GPU's name, such as ``cuda:0``; ``settings`` are added unchanged.
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
    except BackendError:  # for instance with a fake driver
        return described
    return {**described, "cuda_of_driver": list(found.driver_version)}


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return None
