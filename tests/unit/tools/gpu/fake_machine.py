"""A machine to rehearse measurements on: a fake driver, and stages that the CPU runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.cuda_fakes import FakeExecutables

from offramp.bundle import Bundle
from offramp.calibration.measure.paired import BatchRunner
from offramp.testing.cuda_driver import FakeDriver
from offramp.tools.gpu.machine import BackendParts
from offramp.tools.gpu.timing import FakeTimer


class FakeMachine:
    """Closing its backends checks that memory and streams were used and released rightly."""

    def __init__(self) -> None:
        self.drivers: list[FakeDriver] = []
        self.built: list[Path] = []

    def ingredients(self, bundle: Path, *, graphs: bool, max_rows: int) -> BackendParts:
        assert bundle.is_dir()
        driver = FakeDriver(graphs=graphs)
        self.drivers.append(driver)
        return BackendParts(
            driver=driver,
            timer=FakeTimer(driver),
            factory=lambda _: FakeExecutables(driver=driver, max_rows=max_rows),
            kernels=b"cubin",
        )

    def build(self, bundle: Path, batches: Sequence[int]) -> Mapping[str, float]:
        assert list(batches) == sorted(batches)
        self.built.append(bundle)
        return {"00-01": 1.5}

    def bare(
        self, bundle: Bundle, batches: Sequence[int]
    ) -> AbstractContextManager[BatchRunner] | None:
        return None

    def free_bytes(self) -> int:
        driver = self.drivers[-1]
        with driver.current():
            return driver.memory()[0]
