"""The profile of a model on the serving device, measured if it was not compiled there.

A bundle is profiled where it is compiled, on a CPU. A GPU is not only faster: its time hardly grows
with the batch until it is full. Scheduling and control need to know how time grows with the batch,
not only a speed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, Profile
from offramp.certify import MODEL_END
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.backend_protocol import Backend, Slot
from offramp.engine.stages.pipeline import Pipeline, zeros
from offramp.engine.stages.plan import Mode, make_chained_plan, make_plan

_log = logging.getLogger(__name__)

ROUNDS: Final = 9
WARM_UP_ROUNDS: Final = 2
QUANTILE: Final = 0.25
"""Quantile of times over the rounds, equal to that of the compiler's profiles. It is low because
other load only adds time."""


def measure_profile(
    bundle: Bundle,
    backend: Backend,
    compiled: Profile,
    *,
    max_batch_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time the source model and its segments on a backend, in seconds of ``clock``.

    The inputs are zeros, at the batch sizes of the bundle's own profile up to ``max_batch_size``.
    The source model runs, and then its segments one after another. If the segments together take
    longer than the source model, the excess is attributed to the borders (the cuts between stages).
    The excess includes exits that are fused into engines of segments; this makes predictions
    conservative. On a device, heads have no graph of their own. Their times are predicted from
    their share of the source model's time in the compiler's profile. Times of segments that cannot
    run alone are predicted in the same way. BackendError if the source model cannot be run.
    """
    sizes = [*(s for s in compiled.batch_sizes if s < max_batch_size), max_batch_size]
    unmodified = Pipeline(backend, make_plan(bundle, mode=Mode.OFF))
    # in a cascade the chain is the source model alone: timing it would add nothing
    chain = None if bundle.manifest.source_begins else _chained(bundle, backend)
    measured: list[tuple[int, float, list[float]]] = []
    slot = backend.open_slot()
    try:
        for size in sizes:
            tensors = zeros(bundle.manifest, size)
            whole = sum(_stages_ms(unmodified, slot, tensors, clock))
            try:
                parts = _stages_ms(chain, slot, tensors, clock) if chain else []
            except BackendError as error:
                _say_why(bundle, error)
                chain, parts = None, []
            measured.append((size, whole, parts))
    finally:
        slot.close()
    columns = [_column(compiled, n, whole, parts if chain else []) for n, whole, parts in measured]
    return _from_columns(backend, compiled, sizes, columns)


def _from_columns(
    backend: Backend, compiled: Profile, sizes: Sequence[int], columns: Sequence[_Column]
) -> Profile:
    source_ms, segments_ms, exits_ms, stages_ms = zip(*columns, strict=True)
    return Profile(
        device=backend.name,
        threads=compiled.threads,
        batch_sizes=tuple(sizes),
        source_ms=source_ms,
        segments_ms=tuple(zip(*segments_ms, strict=True)),
        exits_ms=tuple(zip(*exits_ms, strict=True)),
        stages_ms=tuple(zip(*stages_ms, strict=True)),
    )


def measure_variant(
    pipeline: Pipeline,
    compiled: Profile,
    *,
    max_batch_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Time the stages of a variant on its backend, in seconds of ``clock``.

    A variant's policy does not change while it serves, so only its stages are timed. The parts of
    each stage are taken from ``compiled``, the profile in its bundle, scaled so that their sum is
    the stage's time. Sizes and errors are as in :func:`measure_profile`.
    """
    stages = pipeline.plan.stages
    bundle = stages[0].bundle
    assert bundle is not None, "variants are of bundles"
    sizes = [*(s for s in compiled.batch_sizes if s < max_batch_size), max_batch_size]
    columns = []
    slot = pipeline.backend.open_slot()
    try:
        for size in sizes:
            taken = _stages_ms(pipeline, slot, zeros(bundle.manifest, size), clock)
            column = compiled.column(size)
            segments = [row[column] for row in compiled.segments_ms]
            exits = [row[column] for row in compiled.exits_ms]
            borders = [row[column] for row in compiled.stages_ms]
            for stage, took_ms in zip(stages, taken, strict=True):
                span = slice(stage.first_segment, stage.last_segment + 1)
                known_ms, exit_ = sum(segments[span]), stage.answered_by
                if exit_ != MODEL_END:
                    known_ms += exits[exit_] + borders[exit_]
                factor = took_ms / known_ms
                segments[span] = [factor * ms for ms in segments[span]]
                if exit_ != MODEL_END:
                    exits[exit_], borders[exit_] = factor * exits[exit_], factor * borders[exit_]
            columns.append((taken[-1], segments, exits, borders))
    finally:
        slot.close()
    return _from_columns(pipeline.backend, compiled, sizes, columns)


_Column: TypeAlias = tuple[float, list[float], list[float], list[float]]
"""Milliseconds of source model, segments, exits and borders at one batch size."""


def _column(compiled: Profile, size: int, whole: float, parts: list[float]) -> _Column:
    column = compiled.column(size)
    ratio = whole / compiled.source_ms[column]
    exits = [row[column] * ratio for row in compiled.exits_ms]
    if not parts:
        segments = [row[column] * ratio for row in compiled.segments_ms]
        borders = [row[column] * ratio for row in compiled.stages_ms]
        return whole, segments, exits, borders
    chained = sum(parts)
    border = max(chained - whole, 0.0) / max(len(parts) - 1, 1)
    borders = [border] * len(exits)
    return whole, [part * whole / chained for part in parts], exits, borders


def _chained(bundle: Bundle, backend: Backend) -> Pipeline | None:
    try:
        return Pipeline(backend, make_chained_plan(bundle))
    except BackendError as error:
        _say_why(bundle, error)
        return None


def _say_why(bundle: Bundle, error: BackendError) -> None:
    _log.info("%s: segments are not timed by themselves: %s", bundle.path.name, error)


def _stages_ms(
    pipeline: Pipeline, slot: Slot, tensors: Mapping[str, NDArray[Any]], clock: Callable[[], float]
) -> list[float]:
    """Time every stage of a batch from which no sample leaves, in milliseconds."""
    rounds = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        batch, times = slot.upload(tensors), []
        for index in range(len(pipeline.plan.stages)):
            started_s = clock()
            result = pipeline.step(slot, index, batch).result
            times.append((clock() - started_s) * 1e3)
            if result.carry is not None:
                batch = result.carry
        rounds.append(times)
    typical: list[float] = np.quantile(rounds[WARM_UP_ROUNDS:], QUANTILE, axis=0).tolist()
    return typical
