"""A worker that answers by script and takes as long as a device would: for measurements.

``python -P -m offramp.testing.emulated_worker FD --device FILE --number N`` is what
:mod:`offramp.testing.scripted_worker` is, without faults. A stage sleeps for as long as
:class:`EmulatedDevice` says that it takes, and rows that another worker had before are waited for
as long as they would travel. Router, scheduler, wire and processes are the real ones: what is
measured so is *measured on emulated devices*.
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
    """What a device takes, in seconds as they pass here."""

    segments_s: tuple[tuple[float, ...], ...]
    """[segments][rows + 1]."""
    exits_s: tuple[tuple[float, ...], ...] = ()
    """[exits][rows + 1]."""
    link_s: float = 0.0
    """Until the first of the rows that come from another device is here."""
    row_s: float = 0.0
    """For each of them."""
    slowdown: str = ""
    """File with a number that all times are multiplied by, read for each stage; empty is 1."""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what :meth:`write` wrote."""
        return cls(**json.loads(path.read_text()))

    def stage_s(self, spec: StageSpec, rows: int) -> float:
        """Seconds of a stage for a batch."""
        segments = self.segments_s[spec.first_segment : spec.last_segment + 1]
        found = sum(seconds[rows] for seconds in segments)
        if spec.exit is not None and spec.exit >= 0:
            found += self.exits_s[spec.exit][rows]
        return found * (float(Path(self.slowdown).read_text()) if self.slowdown else 1.0)


class EmulatedBackend(ScriptedBackend):
    """Answers by script, marks rows as its own, and takes its time.

    The script has a place more than the model has segments, where the mark is: [rows, segments + 1,
    classes].
    """

    def __init__(self, device: EmulatedDevice, number: int) -> None:
        super().__init__()
        self.device, self.mark = device, float(number + 1)

    def prepare(self, spec: StageSpec) -> HostStage:
        """Make a stage that sleeps, answers, and carries the script on."""
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
        """Open a slot to which rows of other devices travel."""
        return _EmulatedSlot(self)


class _EmulatedSlot(HostSlot):
    def __init__(self, backend: EmulatedBackend) -> None:
        self._device, self._mark = backend.device, backend.mark

    def upload(self, tensors: Mapping[str, NDArray[Any]]) -> HostBatch:
        """Wait until rows that another device had are here."""
        marks = tensors[SCRIPT][:, -1, 0]
        if moved := int(np.count_nonzero((marks != 0) & (marks != self._mark))):
            time.sleep(self._device.link_s + moved * self._device.row_s)
        return super().upload(tensors)


def main() -> None:
    """Be a worker for the process that started it."""
    given = {name: sys.argv.pop(sys.argv.index(name) + 1) for name in _OPTIONS}
    sys.argv = [word for word in sys.argv if word not in _OPTIONS]
    device = EmulatedDevice.read(Path(given["--device"]))

    def make(_: Hello) -> Backend:
        return EmulatedBackend(device, int(given["--number"]))

    run(make)


if __name__ == "__main__":
    main()
