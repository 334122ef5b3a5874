"""A worker with scripted answers and the speed of an emulated device, for measurements.

``python -P -m offramp.testing.emulated_worker FD --device FILE --number N`` is
:mod:`offramp.testing.scripted_worker` without faults. A stage sleeps for the time that
:class:`EmulatedDevice` states, and rows from another worker are delayed by their transfer time.
Router, scheduler, messages and processes are the real ones; results are reported as *measured on
emulated devices*.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote.worker import run
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.backends.host import HostBatch, HostSlot, HostStage
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend

MODULE: Final = "offramp.testing.emulated_worker"
_OPTIONS: Final = ("--device", "--number")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """Times of a device, in seconds of real time."""

    segments_s: tuple[tuple[float, ...], ...]
    """[segments][rows + 1]: seconds of each segment by number of rows."""
    exits_s: tuple[tuple[float, ...], ...] = ()
    """[exits][rows + 1]: seconds of each exit by number of rows."""
    link_s: float = 0.0
    """Seconds that a transfer from another device takes, in addition to the time of its rows."""
    row_s: float = 0.0
    """Seconds of transfer for each row from another device."""
    slowdown: str = ""
    """Path of a file with a factor on all times, which is read for each stage; empty means factor
    1."""

    def write(self, path: Path) -> None:
        """Write the times as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the times in a file of :meth:`write`."""
        return cls(**json.loads(path.read_text()))

    def stage_s(self, spec: StageSpec, rows: int) -> float:
        """Return the seconds of a stage for a batch of ``rows``."""
        segments = self.segments_s[spec.first_segment : spec.last_segment + 1]
        found = sum(seconds[rows] for seconds in segments)
        if spec.exit is not None and spec.exit >= 0:
            found += self.exits_s[spec.exit][rows]
        return found * (float(Path(self.slowdown).read_text()) if self.slowdown else 1.0)


class EmulatedBackend(ScriptedBackend):
    """Backend that answers from a script, marks rows as its own, and takes a device's time.

    The script is [rows, segments + 1, classes]; the additional entry is for the mark.
    """

    def __init__(self, device: EmulatedDevice, number: int) -> None:
        super().__init__()
        self.device, self.mark = device, float(number + 1)

    def prepare(self, spec: StageSpec) -> HostStage:
        """Return a stage that sleeps, answers, and passes the script on."""
        stage = super().prepare(spec)

        def execute(
            fetched: Sequence[str], tensors: Mapping[str, NDArray[Any]], _: None
        ) -> list[Any]:
            ends_s = time.perf_counter() + self.device.stage_s(spec, len(tensors[SCRIPT]))
            found = stage.execute(fetched, tensors, None)
            for name, array in zip(fetched, found, strict=True):
                if name == SCRIPT:
                    array[:, -1, 0] = self.mark
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            return found

        return HostStage(
            spec=spec,
            execute=execute,
            added=False,
            inputs=stage.inputs,
            fetched=stage.fetched,
            computed=stage.computed,
            passed=(),
        )

    def open_slot(self) -> HostSlot:
        """Return a slot that delays rows of other devices."""
        return _EmulatedSlot(self)


class _EmulatedSlot(HostSlot):
    def __init__(self, backend: EmulatedBackend) -> None:
        self._device, self._mark = backend.device, backend.mark

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> HostBatch:
        """Accept rows; for rows from another device, wait for the transfer time."""
        marks = tensors[SCRIPT][:, -1, 0]
        if moved := int(np.count_nonzero((marks != 0) & (marks != self._mark))):
            time.sleep(self._device.link_s + moved * self._device.row_s)
        return super().upload(tensors)


def main() -> None:
    """Run a worker for the process that started it."""
    given = {name: sys.argv.pop(sys.argv.index(name) + 1) for name in _OPTIONS}
    sys.argv = [word for word in sys.argv if word not in _OPTIONS]
    device = EmulatedDevice.read(Path(given["--device"]))

    def make(_: Hello) -> Backend:
        return EmulatedBackend(device, int(given["--number"]))

    run(make)


if __name__ == "__main__":
    main()
