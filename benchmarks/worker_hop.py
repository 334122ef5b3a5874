"""Cost of running a stage in a worker process instead of this one.

    python -m benchmarks.worker_hop [--rows 8] [--rounds 40] [--runs 50] [--json FILE]

The stage copies its input, and answers with a part of it: here and in a worker, in turns. Measured
is the worker's additional time, both for input in this process's memory (the first stage: it is
copied to shared memory) and for input carried from the stage before (nothing is copied again). Wall
time in microseconds; for each round the median run, of these the median difference and the
quartiles. Other work on the machine is included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END
from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.backends import Backend, Slot
from offramp.engine.stages.backend_protocol import Stage, TensorBatch
from offramp.engine.stages.plan import StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend
from offramp.tools.bench.common.output import (
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)

SIZES_KIB: Final = (4, 64, 1024, 4096)
GOAL_US: Final = {64: 60.0}
WARM_UP: Final = 100


def stage_of(index: int, *, final: bool) -> StageSpec:
    """Return a stage that belongs to no bundle and answers from a script."""
    return StageSpec(
        index=index,
        first_segment=index,
        last_segment=index,
        exit=MODEL_END if final else index,
        load=bytes,
        inputs=(SCRIPT,),
        carried=() if final else (SCRIPT,),
        answer="answer",
        form="probabilities",
        threshold=0.5,
    )


class Chain:
    """Two stages on a slot, timed one after the other."""

    def __init__(self, backend: Backend) -> None:
        self.slot: Slot = backend.open_slot()
        self._stages: list[Stage] = [backend.prepare(stage_of(k, final=False)) for k in (0, 1)]

    def run(self, script: NDArray[Any]) -> tuple[float, float]:
        """Return the seconds of the first stage, with upload, and of the second, on carried
        input.
        """
        first, second = self._stages
        began_s = time.perf_counter()
        carry: TensorBatch | None = self.slot.run(first, self.slot.upload({SCRIPT: script})).carry
        between_s = time.perf_counter()
        assert carry is not None
        self.slot.run(second, carry)
        return between_s - began_s, time.perf_counter() - between_s


def round_of(run: Callable[[], tuple[float, float]], runs: int) -> NDArray[np.float64]:
    """Return [2]: median microseconds of the first and of the second stage."""
    found: NDArray[np.float64] = np.median([run() for _ in range(runs)], axis=0) * 1e6
    return found


def measured(here: Chain, there: Chain, script: NDArray[Any], rounds: int, runs: int) -> Any:
    """Measure both places in turns; return their times and the differences."""
    chains = (here, there)
    for chain in chains:
        round_of(lambda chain=chain: chain.run(script), WARM_UP)  # type: ignore[misc]
    times = np.array(
        [
            [round_of(lambda chain=chain: chain.run(script), runs) for chain in chains]  # type: ignore[misc]
            for _ in range(rounds)
        ]
    )
    found = {}
    for column, name in enumerate(("first_stage", "later_stage")):
        in_process, in_worker = times[:, 0, column], times[:, 1, column]
        quartiles = np.quantile(in_worker - in_process, [0.25, 0.5, 0.75])
        found[name] = {
            "in_process_us": float(np.median(in_process)),
            "in_worker_us": float(np.median(in_worker)),
            "hop_us": float(quartiles[1]),
            "hop_quartiles_us": [float(quartiles[0]), float(quartiles[2])],
        }
    return found


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=int, default=50, help="number of runs in each round")
    options = parser.parse_args()
    command = WorkerCommand(module="offramp.testing.scripted_worker")
    remote = RemoteBackend(ScriptedBackend(), launchers=[LocalLauncher(command)])
    here, there, results = Chain(ScriptedBackend()), Chain(remote), {}
    try:
        for kib in SIZES_KIB:
            numbers = kib * 1024 // 4 // options.rows // 4
            script = np.random.default_rng(0).random((options.rows, 4, numbers), np.float32)
            results[kib] = measured(here, there, script, options.rounds, options.runs)
    finally:
        there.slot.close()
        remote.close()
    _print(results)
    write_json(
        options.json,
        {
            "measured": True,
            "goal_us": GOAL_US,
            "kib": results,
            "environment": describe_environment(
                rows=options.rows,
                rounds=options.rounds,
                runs=options.runs,
                load_average=os.getloadavg(),
            ),
        },
    )


def _print(results: Any) -> None:
    table = figure_table(
        "MEASURED, a stage in a worker process, µs",
        f"median of rounds in turns, and quartiles of the difference; goal at 64 KiB: "
        f"{GOAL_US[64]:g} µs",
        ("input", "", "in process", "in worker", "hop", "quartiles"),
        names=("input", ""),
    )
    for kib, stages in results.items():
        for name, found in stages.items():
            low, high = found["hop_quartiles_us"]
            figures = (found["in_process_us"], found["in_worker_us"], found["hop_us"])
            table.add_row(
                f"{kib} KiB" if name == "first_stage" else "",
                name.replace("_", " "),
                *(f"{value:.1f}" for value in figures),
                f"{low:.1f} to {high:.1f}",
            )
    wide_console(120).print(table)


if __name__ == "__main__":
    main()
