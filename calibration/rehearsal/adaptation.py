"""Adaptation of a policy to a changed load (PAME 7.6).

    while an exit makes too many batches late:
        move it to the next later candidate
    raise thresholds until precision is kept

Exits move first, since letting more samples leave to save time "brings great risk of degrading the
task precision". Thresholds never fall, and exits never move towards the start: for a load that has
become easier, rehearse again.

The inference time matrix stays, as the hardware did not change; the batching pattern matrix is
that of the new load. Raised thresholds let more samples go on, so latencies are evaluated with the
raised thresholds, and both steps repeat until neither changes anything.
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
class ExitMove:
    """The replacement of an exit that made too many batches late by a later candidate."""

    exit: int
    to: int | None
    """Candidate that replaced the exit; ``None`` if no candidate before the next exit in use
    could."""
    violations: float
    """Share of late batches that caused the move."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LateExit:
    """An exit in use that makes too many batches late."""

    exit: int
    violations: float
    """Share of the rehearsed batches that this exit makes late."""
    at: Position
    """Position where the first stage of this exit begins; if ``rows`` of the position is below 1,
    no row may arrive there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """A policy that was adapted to a load, with all changes."""

    least: tuple[ActiveExit, ...]
    """Exits after all moves, with their thresholds before any threshold was raised."""
    moves: tuple[ExitMove, ...]
    """Moves of exits to other places, in the order in which they were made."""
    rehearsal: Rehearsal
    """Result with the raised thresholds; its steps are those of the exits in use."""


def adapt(
    load: RehearsalLoad,
    times: StageTimes,
    active: Sequence[ActiveExit],
    settings: RehearsalSettings,
    *,
    allowed_errors: int | None = None,
) -> Adaptation:
    """Adapt a policy to a new load.

    ``active`` are the exits of the policy, in depth order; ``load`` has answers of all exits of the
    bundle. ``min_gain`` of the settings is not used. At most ``allowed_errors`` samples are
    answered unlike the source model; by default as many as ``max_disagreement`` allows for the
    load.
    """
    rehearsal.check_load(load, times, settings)
    if allowed_errors is None:
        allowed_errors = count_allowed(settings.max_disagreement, load.samples)
    least = {a.exit: a.threshold for a in active if a.threshold < NEVER}
    moves: list[ExitMove] = []
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
    """Return levels of thresholds, strictest first: float64[levels, exits].

    At the first level no exit answers. From level to level, thresholds fall along the common path
    of the load's agreement curves (:func:`.tuning_path`), but no exit goes below its threshold in
    ``least``. The last level is ``least`` itself. So compared with ``least``, a level raises only
    thresholds of exits whose confidence has become less reliable.
    """
    rows = [a.exit for a in least]
    floor = np.array([a.threshold for a in least])
    path = np.maximum(tuning_path(load.confidence[rows], load.agrees[rows]), floor)
    return np.vstack([path, floor])


def raise_thresholds(
    load: RehearsalLoad, least: Mapping[int, float], allowed_errors: int
) -> tuple[ActiveExit, ...]:
    """Raise thresholds no further than precision requires; return the exits that still answer.

    At most ``allowed_errors`` samples of the load are answered unlike the source model, and no
    exit, in depth order, gets a threshold below its previous one, ``least``.
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
) -> tuple[tuple[RehearsalStep, ...], LateExit | None]:
    """Compute both matrices at each exit in use, until one makes too many batches late.

    Returns a step for each exit before the late one, then the late exit, or ``None``. Other
    candidates are configured as in a rehearsal.
    """
    at, steps = Position.start(load), list[RehearsalStep]()
    for used in active:
        if at.rows < 1:
            return tuple(steps), LateExit(exit=used.exit, violations=1.0, at=at)
        later = rehearsal.later_exits(times, at)
        thresholds = {e: rehearsal.configure(load, at, e, allowed_errors) for e in later}
        thresholds[used.exit] = used.threshold
        step = rehearsal.characterise(load, times, at, thresholds, settings)
        found = step.candidate(used.exit)
        if found.violations > settings.max_violations:
            return tuple(steps), LateExit(exit=used.exit, violations=found.violations, at=at)
        judged = [rehearsal.judge(c, math.inf, settings) for c in step.candidates]
        marked = (replace(c, verdict="chosen") if c.exit == used.exit else c for c in judged)
        steps.append(replace(step, candidates=tuple(marked), chosen=used.exit))
        at = at.advance(load, used.exit, used.threshold, found.allowed_rows)
    return tuple(steps), None


def _move(
    load: RehearsalLoad,
    late: LateExit,
    least: Mapping[int, float],
    *,
    exits: int,
    allowed_errors: int,
) -> tuple[dict[int, float], ExitMove]:
    """Replace an exit by the next later candidate before the next exit in use."""
    kept = {e: threshold for e, threshold in least.items() if e != late.exit}
    behind = min([e for e in kept if e > late.exit], default=exits)
    if late.at.rows >= 1:
        for candidate in range(late.exit + 1, behind):
            threshold = rehearsal.configure(load, late.at, candidate, allowed_errors)
            if threshold < NEVER:
                moved = dict(sorted({**kept, candidate: threshold}.items()))
                return moved, ExitMove(exit=late.exit, to=candidate, violations=late.violations)
    return kept, ExitMove(exit=late.exit, to=None, violations=late.violations)


def _as_active(thresholds: Mapping[int, float]) -> tuple[ActiveExit, ...]:
    return tuple(ActiveExit(exit=e, threshold=t) for e, t in thresholds.items() if t < NEVER)
