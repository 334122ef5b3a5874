"""Which of the CPU's runtimes serves some bundles faster, measured where they will be served.

Neither is faster everywhere: on one machine OpenVINO took 0.7 of ONNX Runtime's time on a BERT and
1.15 on a small CNN. So both run the model, whole and in its stages, in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.engine.common.timing import Effort, Rounds, Timer, repeats_of, time_rounds
from offramp.engine.stages.backend_protocol import Backend, Slot
from offramp.engine.stages.pipeline import Pipeline, zeros
from offramp.engine.stages.plan import Mode, make_plan

_EFFORT: Final = Effort(least=5, most=60, seconds=1.0, half_width=0.0)
"""For each bundle; until it is decided."""
_MOST_ROWS: Final = 8
LEAST_GAIN: Final = 0.05
"""Share of the time that a runtime has to save, for sure, to be chosen: a tie is broken in favour
of the one that the bundle was certified and profiled with."""


def relative_time(
    bundle: Bundle,
    ours: Backend,
    other: Backend,
    *,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Give the time that ``other`` takes for a bundle's model, over that which ``ours`` takes.

    The geometric mean over the source model and the stages of the bundle's policy with nobody
    leaving, each at a batch of one and of eight (or ``max_rows``, if that is less); and how far it
    may be off, in the same unit. BackendError if one of them cannot run a stage.
    """
    plans = [make_plan(bundle, mode=Mode.OFF), make_plan(bundle, bundle.policy, Mode.LEAVE)]
    sizes = sorted({1, min(_MOST_ROWS, max_rows)})
    slots = [backend.open_slot() for backend in (ours, other)]
    try:
        timers: list[list[Timer]] = [[] for _ in sizes for _ in plans]
        for backend, slot in zip((ours, other), slots, strict=True):
            pipelines = [Pipeline(backend, plan) for plan in plans]
            cases = [(pipeline, size) for size in sizes for pipeline in pipelines]
            for timer, (pipeline, size) in zip(timers, cases, strict=True):
                tensors = zeros(bundle.manifest, size)
                timer.append(partial(_run_ms, pipeline, slot, tensors, clock))
        repeats = np.repeat(repeats_of(sizes), len(plans)).tolist()
        found = time_rounds(timers, repeats, _EFFORT, _undecided, clock=clock)
    finally:
        for slot in slots:
            slot.close()
    return _mean(found.rounds)


def _undecided(rounds: Sequence[Rounds]) -> float:
    ratio, width = _mean(rounds)
    return 0.0 if abs(ratio - (1 - LEAST_GAIN)) > width else width


def _mean(rounds: Sequence[Rounds]) -> tuple[float, float]:
    if not all((r.times_ms > 0).all() for r in rounds):
        return 1.0, math.inf  # the clock stood still, as a virtual one may: nothing was measured
    ratios = [r.ratios()[0] for r in rounds]
    mean = float(np.exp(np.mean([np.log(ratio.value) for ratio in ratios])))
    # as if all were off in the same direction: what disturbs one disturbs the others
    return mean, mean * float(np.mean([ratio.half_width / ratio.value for ratio in ratios]))


def _run_ms(
    pipeline: Pipeline,
    slot: Slot,
    tensors: Mapping[str, NDArray[Any]],
    clock: Callable[[], float],
) -> float:
    started_s = clock()
    pipeline.warm_up(slot, tensors)
    return (clock() - started_s) * 1e3
