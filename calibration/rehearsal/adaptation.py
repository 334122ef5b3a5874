"""Adaptation of a policy to a load that has changed (PAME 7.6).

    while an exit makes too many batches late:
        move it to the next later candidate
    raise thresholds until precision is kept

In this order of preference, since letting more samples leave to save time "brings great risk of
degrading the task precision". Thresholds never fall, and exits never move towards the start: for a
load that has become easier, rehearse anew.

The inference time matrix stays, as the hardware did not change; the batching pattern matrix is
that of the new load. Raised thresholds let more samples go on, so the latencies are looked at
with thresholds that are raised already, and both take turns until neither has anything to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp.bundle import NEVER, ActiveExit
from offramp.calibration.rehearsal import rehearsal
from offramp.calibration.rehearsal.load import (
    Position,
    Rehearsal,
    RehearsalLoad,
    RehearsalSettings,
    RehearsalStep,
    forecast,
)
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.certify import FloatArray, tuning_path, walk
from offramp.certify.binomial import count_allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The move of an exit that made too many batches late to a later place."""

    exit: int
    to: int | None
    """The later candidate that took its place; ``None`` if none could, or the next exit in use
    did."""
    violations: float
    """Share of late batches that it was moved for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Late:
    """An exit in use that makes too many batches late."""

    exit: int
    violations: float
    """Share of late batches."""
    at: Position
    """Where its first stage begins; not even one row may come where ``rows`` is below 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """A policy that was adapted to a load, and how."""

    least: tuple[ActiveExit, ...]
    """Exits after all moves; thresholds from before they were raised, below which none may go."""
    moves: tuple[Move, ...]
    """In order."""
    rehearsal: Rehearsal
    """With the thresholds as raised; its steps are those of the exits in use."""


def adapt(
    load: RehearsalLoad,
    times: StageTimes,
    active: Sequence[ActiveExit],
    settings: RehearsalSettings,
    *,
    allowed_errors: int | None = None,
) -> Adaptation:
    """Adapt a policy, in depth order, to a new load of all exits of the bundle.

    ``min_gain`` of the settings plays no part. At most ``allowed_errors`` samples are answered
    unlike the source model; default: as many as ``max_disagreement`` allows of the load.
    """
    rehearsal.check_load(load, times, settings)
    if allowed_errors is None:
        allowed_errors = count_allowed(settings.max_disagreement, load.samples)
    least = {a.exit: a.threshold for a in active if a.threshold < NEVER}
    moves: list[Move] = []
    while True:
        raised = raise_thresholds(load, least, allowed_errors)
        steps, late = look_at(load, times, raised, settings, allowed_errors=allowed_errors)
        if late is None:
            break
        least, move = _move(load, late, least, exits=times.exits, allowed_errors=allowed_errors)
        moves.append(move)
    return Adaptation(
        least=_as_active(least),
        moves=tuple(moves),
        rehearsal=Rehearsal(
            settings=settings,
            samples=load.samples,
            allowed_errors=allowed_errors,
            steps=steps,
            ended="kept",
            active=raised,
            forecast=forecast(load, times, raised),
        ),
    )


def raising_path(load: RehearsalLoad, least: Sequence[ActiveExit]) -> FloatArray:
    """Thresholds from no exits down to given ones: float64[levels, exits].

    On its way down the common path of the load's agreement curves, each exit stops at its own
    threshold: raised are the exits whose confidence means less than it did.
    """
    rows = [a.exit for a in least]
    floor = np.array([a.threshold for a in least])
    path = np.maximum(tuning_path(load.confidence[rows], load.agrees[rows]), floor)
    return np.vstack([path, floor])


def raise_thresholds(
    load: RehearsalLoad, least: Mapping[int, float], allowed_errors: int
) -> tuple[ActiveExit, ...]:
    """Raise thresholds no further than precision asks for: the exits that still answer.

    At most ``allowed_errors`` samples of the load are answered unlike the source model, and no
    exit, in depth order, goes below its threshold as it is, ``least``.
    """
    if not least:
        return ()
    path = raising_path(load, _as_active(least))
    rows = list(least)
    errors = walk(path, load.confidence[rows], load.agrees[rows]).errors
    level = int(np.flatnonzero(errors <= allowed_errors)[-1])  # the first has no exits, no errors
    return _as_active(dict(zip(rows, path[level].tolist(), strict=True)))


def look_at(
    load: RehearsalLoad,
    times: StageTimes,
    active: Sequence[ActiveExit],
    settings: RehearsalSettings,
    *,
    allowed_errors: int,
) -> tuple[tuple[RehearsalStep, ...], Late | None]:
    """Both matrices at each exit in use, until one makes too many batches late.

    A step for each exit that does not, and the first one that does. Other candidates are configured
    as in a rehearsal.
    """
    at, steps = Position.start(load), list[RehearsalStep]()
    for used in active:
        if at.rows < 1:
            return tuple(steps), Late(exit=used.exit, violations=1.0, at=at)
        later = rehearsal.later_exits(times, at)
        thresholds = {e: rehearsal.configure(load, at, e, allowed_errors) for e in later}
        thresholds[used.exit] = used.threshold
        step = rehearsal.characterise(load, times, at, thresholds, settings)
        found = step.candidate(used.exit)
        if found.violations > settings.max_violations:
            return tuple(steps), Late(exit=used.exit, violations=found.violations, at=at)
        judged = [rehearsal.judge(c, math.inf, settings) for c in step.candidates]
        marked = (replace(c, verdict="chosen") if c.exit == used.exit else c for c in judged)
        steps.append(replace(step, candidates=tuple(marked), chosen=used.exit))
        at = at.behind(load, used.exit, used.threshold, found.allowed_rows)
    return tuple(steps), None


def _move(
    load: RehearsalLoad, late: Late, least: Mapping[int, float], *, exits: int, allowed_errors: int
) -> tuple[dict[int, float], Move]:
    """Put the next later candidate in the place of an exit, before the next one in use."""
    kept = {e: threshold for e, threshold in least.items() if e != late.exit}
    behind = min([e for e in kept if e > late.exit], default=exits)
    if late.at.rows >= 1:
        for candidate in range(late.exit + 1, behind):
            threshold = rehearsal.configure(load, late.at, candidate, allowed_errors)
            if threshold < NEVER:
                moved = dict(sorted({**kept, candidate: threshold}.items()))
                return moved, Move(exit=late.exit, to=candidate, violations=late.violations)
    return kept, Move(exit=late.exit, to=None, violations=late.violations)


def _as_active(thresholds: Mapping[int, float]) -> tuple[ActiveExit, ...]:
    return tuple(ActiveExit(exit=e, threshold=t) for e, t in thresholds.items() if t < NEVER)
