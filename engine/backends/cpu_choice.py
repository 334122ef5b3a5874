"""Comparison of the CPU runtimes on the machine that serves: which is faster for given bundles.

Neither runtime is always faster: on one machine OpenVINO took 0.7 of ONNX Runtime's time on a BERT
and 1.15 on a small CNN. So both run the whole model and its stages, alternately.
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
"""Effort for each bundle; measuring stops earlier once the result is clear."""
_MOST_ROWS: Final = 8
LEAST_GAIN: Final = 0.05
"""Share of the time that a runtime must certainly save to be chosen. In a tie ONNX Runtime is
chosen, because the bundle was certified and profiled with it."""


def relative_time(
    bundle: Bundle,
    ours: Backend,
    other: Backend,
    *,
    max_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Return the time that ``other`` takes for a bundle's model, divided by that of ``ours``.

    The first number is the geometric mean over the source model and the stages of the bundle's
    policy (no sample leaves), each at a batch of one and of eight (or ``max_rows``, if less). The
    second is the half-width of its confidence interval, in the same unit. BackendError if a backend
    cannot run a stage.
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
        return 1.0, math.inf  # the clock did not advance (a virtual clock): no measurement
    ratios = [r.ratios()[0] for r in rounds]
    mean = float(np.exp(np.mean([np.log(ratio.value) for ratio in ratios])))
    # Errors are assumed to have the same direction: a disturbance of one affects the others, too.
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
