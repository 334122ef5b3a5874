"""PAME's rehearsal: the best exits for a load that do not make its batches slower (section 6).

    exits are found one by one, from the model's start to its end:
        configure every later candidate: the threshold that lets most leave, precision kept   (6.2)
        characterise: inference time matrix, and batching pattern matrix of the load          (6.3)
        determine: none that makes too many batches late; of the others the one with the
            shortest average latency, and after the first exit the shortest tail latency      (6.4)
    until precision or latency allow no further exit, or no sample is left to go on

The time matrix belongs to the hardware, the pattern matrix to the load: if one of them changes, the
other matrix stays valid (:mod:`offramp.calibration.rehearsal.two_stage`, :mod:`.adaptation`).

Precision is agreement with the source model: the original model's is 1, so the paper's η is one
minus the largest tolerated disagreement. An exit has one threshold, on confidence.

Decisions made here, where the paper leaves them open or its rules do not suffice:

* Batches are drawn at random from the load, any number of them; the order in which samples arrived
  is not kept.
* In later steps a batch with more rows than the step before allows is late already, however many
  rows leave now; it is counted in the last column.
* "Tail latency" is the one that all batches but the tolerated share of late ones keep.
* A further exit must reduce the predicted mean latency by a share (``min_gain``). The tail alone
  favours every exit at which any sample leaves: if time is proportional to rows, as on a CPU, the
  published rules, which are ``min_gain`` 0, keep ten of the example's twelve exits instead of two,
  for gains too small to be measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from offramp.bundle import NEVER, ActiveExit, ExitPolicy
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import certifiable_errors
from offramp.calibration.rehearsal.load import (
    Candidate,
    Ending,
    Forecast,
    Position,
    Rehearsal,
    RehearsalLoad,
    RehearsalSettings,
    RehearsalStep,
    Verdict,
    forecast,
)
from offramp.calibration.rehearsal.two_stage import StageTimes, TimeMatrix
from offramp.certify import FloatArray, IntArray
from offramp.certify.binomial import count_allowed


def rehearse(
    load: RehearsalLoad,
    times: StageTimes,
    settings: RehearsalSettings,
    *,
    allowed_errors: int | None = None,
) -> Rehearsal:
    """Search the exits to use for a load, which has answers of all exits of the bundle.

    At most ``allowed_errors`` samples are answered unlike the source model; by default as many as
    ``max_disagreement`` allows for the load. A smaller number makes it easier to certify the
    policy.
    """
    check_load(load, times, settings)
    if allowed_errors is None:
        allowed_errors = count_allowed(settings.max_disagreement, load.samples)
    at, steps = Position.start(load), list[RehearsalStep]()
    ended: Ending | None = None
    while ended is None:
        thresholds = {e: configure(load, at, e, allowed_errors) for e in later_exits(times, at)}
        step = characterise(load, times, at, thresholds, settings)
        step = determine(step, settings, source_ms=times.source_ms(settings.batch_size))
        steps.append(step)
        if step.chosen is None:
            ended = _ending(step)
            continue
        found = step.candidate(step.chosen)
        at = at.advance(load, found.exit, found.threshold, found.allowed_rows)
        if not any(found.pattern[1:]) or found.allowed_rows < 1:
            ended = "all left"
        elif not later_exits(times, at):
            ended = "last exit"
    return Rehearsal(
        settings=settings,
        samples=load.samples,
        allowed_errors=allowed_errors,
        steps=tuple(steps),
        ended=ended,
        active=at.active,
        forecast=forecast(load, times, at.active),
    )


def configure(load: RehearsalLoad, at: Position, exit_: int, allowed_errors: int) -> float:
    """Return the threshold that lets the most samples leave: the candidate configuration of 6.2.

    Samples that no exit answers get the source model's answer, which counts as right (in equation
    1, the precision of queries that move on is 1). So the constraint is a number of errors. The
    threshold is the lowest confidence with which a sample leaves; ``NEVER`` if none may.
    """
    confidence = load.confidence[exit_][at.waiting]
    order = np.argsort(-confidence, kind="stable")
    ordered, wrong = confidence[order], ~load.agrees[exit_][at.waiting][order]
    # a threshold lets all samples of one confidence leave, or none
    last_of_run = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    within = last_of_run & (at.errors + np.cumsum(wrong) <= allowed_errors)
    return float(ordered[np.flatnonzero(within)[-1]]) if within.any() else NEVER


def characterise(
    load: RehearsalLoad,
    times: StageTimes,
    at: Position,
    thresholds: Mapping[int, float],
    settings: RehearsalSettings,
) -> RehearsalStep:
    """Compute both matrices for candidates after a position, and the results from them (6.3).

    ``thresholds`` are those of the candidates, by exit, in depth order; the step has no chosen exit
    yet.
    """
    matrix = times.matrix(
        after=at.after_exit, candidates=list(thresholds), rows=at.rows, interval=settings.interval
    )
    pattern, disagreement, moving_on = batching_pattern(load, at, thresholds, matrix)
    violations = (pattern * matrix.violated).sum(axis=1) / len(load.batches)
    tail = _tail_columns(pattern, settings.max_violations)
    average_ms = expected_average_ms(matrix, pattern)
    return RehearsalStep(
        after_exit=at.after_exit,
        rows=at.rows,
        columns=tuple(matrix.columns.tolist()),
        limit_ms=matrix.limit_ms,
        mean_ms=forecast(load, times, at.active).average_ms,
        candidates=tuple(
            Candidate(
                exit=exit_,
                threshold=threshold,
                moving_on=float(moving_on[row]),
                disagreement=float(disagreement[row]),
                violations=float(violations[row]),
                allowed_rows=int(matrix.allowed_rows[row]),
                average_ms=float(average_ms[row]),
                tail_ms=float(matrix.ms[row, tail[row]]),
                mean_ms=forecast(
                    load, times, (*at.active, ActiveExit(exit=exit_, threshold=threshold))
                ).average_ms,
                verdict="precision" if threshold >= NEVER else "possible",
                times_ms=tuple(matrix.ms[row].tolist()),
                pattern=tuple(pattern[row].tolist()),
            )
            for row, (exit_, threshold) in enumerate(thresholds.items())
        ),
        chosen=None,
    )


def batching_pattern(
    load: RehearsalLoad, at: Position, thresholds: Mapping[int, float], matrix: TimeMatrix
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return the batching pattern matrix (6.3.2), int64[candidates, columns], and two shares.

    The matrix counts batches by rows that go on after each candidate; every row sums to the number
    of batches. The two shares, float64[candidates], are the share of the load answered unlike the
    source model so far, and the share that goes on.
    """
    late = load.rows(at.waiting) > at.rows
    last = len(matrix.columns) - 1
    pattern: IntArray = np.zeros(matrix.ms.shape, dtype=np.int64)
    disagreement, moving_on = np.empty(len(thresholds)), np.empty(len(thresholds))
    for row, (exit_, threshold) in enumerate(thresholds.items()):
        behind = at.advance(load, exit_, threshold, rows=0)
        columns = matrix.column_of(load.rows(behind.waiting))
        columns = np.where(late, last, columns)
        pattern[row] = np.bincount(columns, minlength=last + 1)
        disagreement[row] = behind.errors / load.samples
        moving_on[row] = np.count_nonzero(behind.waiting) / load.samples
    return pattern, disagreement, moving_on


def expected_average_ms(matrix: TimeMatrix, pattern: IntArray) -> FloatArray:
    """Return the average two-stage latency of a row: float64[candidates] (equation 2)."""
    rows, going_on = int(matrix.columns[-1]), matrix.columns.astype(np.float64)
    batch_ms = (rows - going_on) * matrix.ms[:, :1] + going_on * matrix.ms
    return np.asarray((batch_ms * pattern).sum(axis=1) / (rows * pattern.sum(axis=1)))


def determine(
    step: RehearsalStep, settings: RehearsalSettings, *, source_ms: float
) -> RehearsalStep:
    """Choose the next exit, or none (6.4).

    Every batch reaches the first exit whole, so that the average is known. After the first exit
    only the maximum number of rows is known, so the tail latency decides.
    """
    first = step.after_exit is None
    most_ms = step.mean_ms - settings.min_gain * source_ms
    judged = [judge(c, most_ms, settings) for c in step.candidates]
    possible = [c for c in judged if c.verdict == "possible"]
    if not possible:
        return replace(step, candidates=tuple(judged))
    best = min(possible, key=lambda c: (c.average_ms if first else c.tail_ms, c.exit))
    marked = tuple(replace(c, verdict="chosen") if c is best else c for c in judged)
    return replace(step, candidates=marked, chosen=best.exit)


def judge(candidate: Candidate, most_ms: float, settings: RehearsalSettings) -> Candidate:
    """Set the verdict of a candidate that violates a limit on latency or gain."""
    verdict: Verdict = candidate.verdict
    if verdict == "possible" and candidate.violations > settings.max_violations:
        verdict = "latency"
    elif verdict == "possible" and candidate.mean_ms >= most_ms:
        verdict = "gain"
    return replace(candidate, verdict=verdict)


def later_exits(times: StageTimes, at: Position) -> range:
    """Return the candidates after a position."""
    return range(0 if at.after_exit is None else at.after_exit + 1, times.exits)


def _ending(step: RehearsalStep) -> Ending:
    """Return the limit that ended the search: the mildest that some last candidate violates."""
    verdicts = {candidate.verdict for candidate in step.candidates}
    if "gain" in verdicts:
        return "gain"
    return "latency" if "latency" in verdicts else "precision"


def _tail_columns(pattern: IntArray, max_violations: float) -> IntArray:
    """Return, per candidate, the first column that only the tolerated share of batches exceeds."""
    beyond = pattern.sum(axis=1, keepdims=True) - np.cumsum(pattern, axis=1)
    allowed = max_violations * pattern.sum(axis=1, keepdims=True)
    return np.asarray((beyond <= allowed).argmax(axis=1), dtype=np.int64)


def check_load(load: RehearsalLoad, times: StageTimes, settings: RehearsalSettings) -> None:
    """Raise ValueError if load, times and settings do not fit together."""
    if len(load.confidence) != times.exits:
        raise ValueError(
            f"the load has {len(load.confidence)} exits, but the times have {times.exits}"
        )
    expected = (settings.batches, settings.batch_size)
    if (shape := load.batches.shape) != expected:
        raise ValueError(f"the load's batches are {shape}, the settings say {expected}")


def draw_load(records: ExitRecords, settings: RehearsalSettings, *, seed: int) -> RehearsalLoad:
    """Draw batches of recorded samples."""
    return RehearsalLoad.of(
        records.confidence,
        records.agrees,
        batch_size=settings.batch_size,
        batches=settings.batches,
        rng=np.random.default_rng(seed),
    )


def rehearse_records(
    tune: ExitRecords,
    times: StageTimes,
    settings: RehearsalSettings,
    *,
    confidence_level: float,
    seed: int,
) -> Rehearsal:
    """Search the exits on the tuning split, with no more errors than may still be certified."""
    samples = tune.confidence.shape[1]
    allowed = certifiable_errors(samples, settings.max_disagreement, confidence_level)
    return rehearse(draw_load(tune, settings, seed=seed), times, settings, allowed_errors=allowed)


def forecast_policy(
    policy: ExitPolicy,
    records: ExitRecords,
    times: StageTimes,
    settings: RehearsalSettings,
    *,
    seed: int,
) -> Forecast:
    """Predict the outcome of a policy for batches of recorded samples."""
    return forecast(draw_load(records, settings, seed=seed), times, policy.active)
