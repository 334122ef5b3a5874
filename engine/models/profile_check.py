"""The check whether a bundle's profile holds on this CPU, when the bundle is loaded.

A bundle is profiled where it is compiled. On another CPU, not only the speed differs: heads and
borders (cuts between stages) have another relative cost, and an exit that pays on one CPU may not
pay on another. Therefore the source model and the stages run in turns for a second or two, at a few
batch sizes; no sample leaves at an exit. Each runs at least a few times, which takes longer for
slow models. The profile is then scaled, part by part, to the measured times. The measurement is
stored by CPU in a file next to the bundle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, BundleError, Profile
from offramp.bundle.files import MAX_JSON_BYTES, parse_json, read_limited, write_whole
from offramp.bundle.records import CERTIFY
from offramp.bundle.schema.serde import to_plain
from offramp.certify import FloatArray, count_answers, first_exit, savings_of
from offramp.engine.common.control_state import identity_of
from offramp.engine.common.environment import available_cores, cpu_model
from offramp.engine.common.timing import Effort, Timer, disturbances, repeats_of, time_rounds
from offramp.engine.control.costs import CostModel
from offramp.engine.stages.backend_protocol import Backend, Slot, TensorBatch
from offramp.engine.stages.loaded import Loaded, fits_together
from offramp.engine.stages.pipeline import Pipeline, zeros
from offramp.engine.stages.plan import Mode, Plan, make_plan

_log = logging.getLogger(__name__)

SUFFIX = ".measured.json"
"""Suffix of the file next to a bundle that stores the measurements."""
LIMIT_S = 1.5
"""Time limit for the rounds of a model, without loading its sessions."""
_EFFORT = Effort(least=4, most=40, seconds=0.5 * LIMIT_S, half_width=0.01)
_RUNS = 2.5 * (_EFFORT.least + 3)
"""Time of the smallest possible measurement at one batch size, in runs of the source model,
including warm-up. A round runs the source model and the stages, which take somewhat longer."""
_LEAST_SHARE = 1e-6
"""Smallest share of the model's time that a stage is assumed to have, so that the share can be
scaled."""
_KEPT = 16
"""Largest number of machines whose measurements are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Median times at one batch size."""

    batch_size: int
    source_ms: float
    stages: tuple[float, ...]
    """Time of each stage, as a share of the source model's time in the same round."""


def profile_here(
    bundle: Bundle, backend: Backend, compiled: Profile, *, max_batch_size: int, keep: bool
) -> Profile:
    """Return the profile of a bundle on this CPU, measured if it is not known yet.

    The source model and the stages of the bundle's policy are run, at batch sizes that will be
    served. ``keep`` is whether to read and write the file next to the bundle. BackendError if a
    stage cannot be run.
    """
    path = (place := bundle.path.resolve()).with_name(place.name + SUFFIX)
    here = fingerprint(bundle, backend, max_batch_size)
    if keep and (known := read_kept(path, here, bundle.parse_profile)) is not None:
        return known
    plan = make_plan(bundle, bundle.policy, Mode.LEAVE)
    seen, disturbed = measure(bundle, backend, plan, compiled, max_batch_size)
    begins = bundle.manifest.source_begins
    profile = replace(scaled(compiled, plan, seen, source_begins=begins), disturbed=disturbed)
    if keep and not disturbed:  # a measurement on a busy machine must not be stored
        write_kept(path, here, profile)
    return profile


def fingerprint(bundle: Bundle, backend: Backend, max_batch_size: int) -> dict[str, str]:
    """Return the facts that a measurement depends on."""
    return {
        **identity_of(bundle),
        "cpu": cpu_model(),
        "cores": str(available_cores()),
        "backend": backend.name,
        "runtime": getattr(backend, "runtime", ""),
        "max_batch_size": str(max_batch_size),
    }


def measure(
    bundle: Bundle,
    backend: Backend,
    plan: Plan,
    compiled: Profile,
    max_batch_size: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] | None = None,
) -> tuple[list[MeasuredTimes], tuple[str, ...]]:
    """Run the source model and the stages of a plan in turns, at a few batch sizes.

    Returns the measured times, and the ways in which the machine was disturbed. ``cpu_clock``
    measures processor time. It is the backend's clock, if the backend has one: if workers run the
    stages, the processor time of the workers counts.
    """
    if cpu_clock is None:
        cpu_clock = getattr(backend, "cpu_clock", time.process_time)
    loaded = Loaded(
        [partial(Pipeline, backend, each) for each in (make_plan(bundle, mode=Mode.OFF), plan)],
        together=fits_together(bundle.graph(bundle.manifest.source.file)),
    )
    slot = backend.open_slot()
    try:
        for place in (1, 0):
            loaded[place].warm_up(slot, zeros(bundle.manifest, 1))
        one = slot.upload(zeros(bundle.manifest, 1))
        whole_ms = min(_step_ms(loaded, (0, 0), slot, one, clock) for _ in range(3))
        slowdown = whole_ms / compiled.source_ms[compiled.column(1)]
        sizes = sizes_within(compiled, max_batch_size, slowdown, LIMIT_S)
        batches = [zeros(bundle.manifest, size) for size in sizes]
        timers = [_timers(loaded, slot, inputs, clock) for inputs in batches]
        rounds, load = time_rounds(
            timers,
            repeats_of(sizes),
            _EFFORT,
            lambda so_far: max(e.half_width for r in so_far for e in r.ratios()),
            clock=clock,
            cpu_clock=cpu_clock,
            one_by_one=not loaded.together,
        )
    finally:
        slot.close()
    seen = [
        MeasuredTimes(
            batch_size=size, source_ms=r.base().value, stages=tuple(e.value for e in r.ratios())
        )
        for size, r in zip(sizes, rounds, strict=True)
    ]
    return seen, disturbances("stages", load, rounds)


def sizes_within(
    compiled: Profile, max_batch_size: int, slowdown: float, limit_s: float
) -> list[int]:
    """Return the batch sizes within the time limit: 1, and a middle and the largest if they fit."""
    sizes = sorted({1, min(8, max_batch_size), max_batch_size})

    def takes_s(size: int) -> float:
        column = compiled.column(size)
        per_row = compiled.source_ms[column] / compiled.batch_sizes[column]
        return _RUNS * slowdown * per_row * size / 1e3

    while len(sizes) > 1 and sum(map(takes_s, sizes)) > limit_s:
        sizes.pop()
    return sizes


def _timers(
    loaded: Loaded[Pipeline],
    slot: Slot,
    inputs: Mapping[str, NDArray[Any]],
    clock: Callable[[], float],
) -> list[Timer]:
    """Return timers of the source model and the stages, each with the inputs of a whole batch."""
    batch: TensorBatch = slot.upload(inputs)
    timers: list[Timer] = [partial(_step_ms, loaded, (0, 0), slot, batch, clock)]
    staged = loaded[1]
    for index in range(len(staged.plan.stages)):
        timers.append(partial(_step_ms, loaded, (1, index), slot, batch, clock))
        carry = staged.step(slot, index, batch).result.carry
        if carry is not None:
            batch = carry
    return timers


def _step_ms(
    loaded: Loaded[Pipeline],
    at: tuple[int, int],
    slot: Slot,
    batch: TensorBatch,
    clock: Callable[[], float],
) -> float:
    """Time one stage of one of the two pipelines (source model, stages), in milliseconds."""
    place, index = at
    pipeline = loaded[place]
    started_s = clock()
    pipeline.step(slot, index, batch)
    return (clock() - started_s) * 1e3


def scaled(
    compiled: Profile, plan: Plan, seen: Sequence[MeasuredTimes], *, source_begins: int = 0
) -> Profile:
    """Scale a profile, part by part, to the measured times of a plan's stages.

    ``source_begins`` is the first segment of the source model.

    At each measured size, the time of the source model is scaled to its measured time, and the
    times of segments by the change of their stage's share. Between measured sizes, factors are
    interpolated over the logarithm of the size; outside of them, the nearest factors apply. Heads
    and borders are scaled by the excess of all stages over the model. One factor holds for all
    sizes, because the excess is a small difference of large times. In a cascade the source model is
    a stage, and the times of the quantised model are known only from its stages.
    """
    sizes = np.log2(compiled.batch_sizes)
    known = np.log2([s.batch_size for s in seen])
    factors = [_factors(compiled, plan, s, is_cascade=source_begins > 0) for s in seen]
    source = np.interp(sizes, known, [f.source for f in factors])
    expected, beyond = sum(f.expected for f in factors), sum(f.beyond for f in factors)
    added = max(beyond, 0.0) / expected if expected else 1.0
    source_ms = np.array(compiled.source_ms) * source
    segments = np.array(compiled.segments_ms)
    # segments after the last exit of a cascade are in no stage: scale them like the front's others
    segments[:source_begins] *= np.interp(sizes, known, [f.unseen for f in factors])
    for index, stage in enumerate(plan.stages):
        rows = slice(stage.first_segment, stage.last_segment + 1)
        before = np.array(compiled.segments_ms[rows])
        segments[rows] = before * np.interp(sizes, known, [f.stages[index] for f in factors])
    segments *= source if source_begins else source_ms / segments.sum(axis=0)
    return replace(
        compiled,
        source_ms=tuple(source_ms.tolist()),
        segments_ms=_rows(segments),
        exits_ms=_rows(_table(compiled.exits_ms, sizes.size) * source * added),
        stages_ms=_rows(_table(compiled.stages_ms, sizes.size) * source * added),
        spread=None,
        disturbed=(),
    )


def _table(rows: Sequence[Sequence[float]], columns: int) -> FloatArray:
    """Return a table as an array [rows, columns], also for a bundle without exits (no rows)."""
    return np.array(rows, np.float64).reshape(-1, columns)


def _rows(table: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factors:
    """The ratios of measured times to profiled ones, at one batch size."""

    source: float
    stages: tuple[float, ...]
    """Ratio for the segments of each stage; their times are shares of the source model's time."""
    expected: float
    """Profiled time of heads and borders, as a share of the source model's time."""
    beyond: float
    """Measured excess time of all stages over the source model, as a share of the source model's
    time. Noise can make the excess negative, except in a cascade."""
    unseen: float = 1.0
    """Ratio for segments of the quantised model that belong to no stage."""


def _factors(compiled: Profile, plan: Plan, seen: MeasuredTimes, *, is_cascade: bool) -> _Factors:
    column = compiled.column(seen.batch_size)
    rows = seen.batch_size / compiled.batch_sizes[column]
    whole = compiled.source_ms[column]
    model, extra = [], []
    for stage in plan.stages:
        segments = compiled.segments_ms[stage.first_segment : stage.last_segment + 1]
        model.append(max(sum(row[column] for row in segments) / whole, _LEAST_SHARE))
        own = () if stage.final else (compiled.exits_ms, compiled.stages_ms)
        extra.append(sum(table[stage.answered_by][column] for table in own) / whole)
    predicted = np.array(model) + extra
    part = np.array(seen.stages) * model / predicted
    if is_cascade:
        front, known = float(part[:-1].sum()), sum(model[:-1])
        return _Factors(
            source=seen.source_ms / (whole * rows),
            stages=(*(part[:-1] / model[:-1]).tolist(), 1.0),
            expected=sum(extra),
            beyond=float(sum(seen.stages[:-1])) - front,
            unseen=front / known if known else 1.0,
        )
    return _Factors(
        source=seen.source_ms / (whole * rows),
        stages=tuple((part / part.sum() / model).tolist()),
        expected=sum(extra),
        beyond=sum(seen.stages) - 1.0,
    )


def log_predicted_savings(name: str, bundle: Bundle, here: Profile, compiled: Profile) -> None:
    """Log the predicted savings of the policy on this CPU; as a warning if there are none."""
    if not bundle.policy.active:
        return
    reference = bundle.manifest.calibration.reference_batch_size
    size = here.batch_sizes[here.column(reference)]
    saved, promised = (predicted_savings(bundle, p, size) for p in (here, compiled))
    if saved > 0:
        _log.info(
            "%s: exits are predicted to save %.1f %% of the model's time at batch %d on this CPU "
            "(where it was compiled: %.1f %%)", name, 100 * saved, size, 100 * promised
        )  # fmt: skip
        return
    _log.warning(
        "%s: EXITS DO NOT PAY HERE: at batch %d they are predicted to make answers %.1f %% later "
        "in the mean on this CPU; where the bundle was compiled they saved %.1f %%. Compile it "
        "again on a machine like this one, or serve it with --mode off%s",
        name, size, -100 * saved, 100 * promised,
        f" (the machine was disturbed: {'; '.join(here.disturbed)})" if here.disturbed else "",
    )  # fmt: skip


def predicted_savings(bundle: Bundle, profile: Profile, batch_size: int) -> float:
    """Return the share of the source model's time that the policy saves, on the certify split."""
    records = bundle.records()
    rows = [a.exit for a in bundle.policy.active]
    if not rows:
        return 0.0
    confidence = records["confidence"][rows][:, records["split"] == CERTIFY]
    first = first_exit(confidence, np.array([a.threshold for a in bundle.policy.active]))
    cost = CostModel.of(bundle.manifest, profile, batch_size)
    counts = count_answers(first, len(rows))
    return float(savings_of(counts, cost.latency_ms(rows), cost.source_ms))


def read_kept(
    path: Path, here: dict[str, str], parse: Callable[[Any, str], Profile]
) -> Profile | None:
    """Return the profile measured on a machine like this one; ``None`` if there is none.

    ``parse`` is :meth:`.Bundle.parse_profile` of the bundle.
    """
    try:
        return parse(_kept(path)[_key(here)]["profile"], path.name)
    except (KeyError, TypeError, BundleError) as error:
        _log.debug("%s has no profile for this machine: %s", path, error)
        return None


def write_kept(path: Path, here: dict[str, str], profile: Profile) -> None:
    """Store a measurement, replacing the whole file; after a failure it is repeated later."""
    kept = dict(list(_kept(path).items())[-_KEPT + 1 :])
    kept[_key(here)] = {"machine": here, "profile": to_plain(profile)}
    try:
        write_whole(path, json.dumps(kept).encode(), durable=False)
    except OSError as error:
        _log.debug("%s is not kept: %s", path, error)


def _kept(path: Path) -> dict[str, Any]:
    """Return the file's contents by machine; empty if it is missing or damaged."""
    try:
        plain = parse_json(read_limited(path, MAX_JSON_BYTES), path.name)
    except FileNotFoundError:
        return {}
    except (OSError, BundleError) as error:
        _log.warning("%s cannot be read (%.200s): measuring again", path, error)
        return {}
    return plain if isinstance(plain, dict) else {}


def _key(here: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()
