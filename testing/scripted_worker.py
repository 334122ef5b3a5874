"""A worker without a model, which ends, hangs or slows down where a test requests it.

``python -P -m offramp.testing.scripted_worker FD`` replaces :mod:`offramp.cluster.remote.worker`.
It answers from a script, like :mod:`offramp.testing.backend`, and imports no runtime. With
``--listen`` as an argument it replaces ``eeworker``. The server's first message (hello) can still
name a real backend. ``OFFRAMP_WORKER_FAULTS`` names a folder of files ``ACTION@POINT@COUNT``, for
instance ``kill@before-run@3``: the first worker that reaches the point for the COUNT-th time, by
its own count, removes the file and performs the action.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.cluster.remote import eeworker
from offramp.cluster.remote.worker import make_local, run
from offramp.cluster.remote.worker_messages import Hello
from offramp.engine.backends.host import HostBackend, HostStage
from offramp.engine.stages.backend_protocol import Backend
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT

MODULE: Final = "offramp.testing.scripted_worker"
FAULTS: Final = "OFFRAMP_WORKER_FAULTS"
"""The environment variable that names the folder of faults."""
SCRIPTED: Final = "scripted"
"""Name of the scripted backend."""


class Faults:
    """The faults of this process, and the points at which they happen."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        """Perform the action of a file in the folder that matches this point and count."""
        if self._folder is None:
            return
        with self._lock:
            self._reached[point] += 1
            count = self._reached[point]
        for action in ("kill", "hang"):
            try:
                (self._folder / f"{action}@{point}@{count}").unlink()
            except FileNotFoundError:
                continue
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()


class ScriptedBackend(HostBackend):
    """A backend of host arrays with scripted answers; every stage reaches the point ``mid-run``."""

    name = SCRIPTED
    runtime_name = "script"

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__(version="1", threads=1)
        self._faults = faults or Faults(None)

    def prepare(self, spec: StageSpec) -> HostStage:
        """Return a stage that answers with its part of the script, and passes the script on."""

        def execute(
            fetched: Sequence[str], tensors: Mapping[str, NDArray[Any]], _: None
        ) -> list[Any]:
            self._faults("mid-run")
            given = {SCRIPT: tensors[SCRIPT].copy()}
            if spec.answer is not None:
                given[spec.answer] = np.array(tensors[SCRIPT][:, spec.last_segment])
            return [given[name] for name in fetched]

        answered = () if spec.answer is None else (spec.answer,)
        return HostStage(
            spec=spec,
            execute=execute,
            added=False,
            inputs=spec.inputs,
            fetched=(*answered, *spec.carried),
            computed=spec.carried,
            passed=(),
        )


def main() -> None:
    """Run a worker with faults, for the process that started it or over a network."""
    folder = os.environ.get(FAULTS)
    faults = Faults(Path(folder) if folder else None)

    def make(hello: Hello) -> Backend:
        return ScriptedBackend(faults) if hello.backend == SCRIPTED else make_local(hello)

    if "--listen" in sys.argv:
        sys.exit(eeworker.main(make=make, reached=faults, any_graph=True, module=MODULE))
    run(make, faults)


if __name__ == "__main__":
    main()
