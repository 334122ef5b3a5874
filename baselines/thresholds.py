"""Threshold tuning on a window of records, within a hard bound on disagreement.

Three searches: Apparate's greedy one, the best threshold common to all exits, and a beam search
developed here. Other early-exit systems tune thresholds once (BranchyNet, DeeBERT). Apparate
compares with them (5.3, table 2) as follows: every exit is always in use, and thresholds are tuned
once on data sampled from the workload. Either all exits share one threshold (:func:`tune_shared`),
or, in the variants marked "+", each has a separate one (:func:`tune_separate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from offramp.bundle.schema.policy import NEVER, ExitPolicy
from offramp.certify import (
    BoolArray,
    ConfidenceArray,
    Evaluation,
    Float32Array,
    FloatArray,
    IntArray,
    Records,
    evaluate,
    leaves,
)
from offramp.certify.binomial import count_allowed
from offramp.certify.path import best_common_thresholds
from offramp.certify.records import final_agrees
from offramp.engine.control.static import policy_of

METHODS = ("search", "greedy", "path")
"""Search methods of :func:`tune`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuning(Evaluation):
    """Thresholds, and their outcome on the records that were used to tune them."""

    thresholds: FloatArray
    """float64[exits], float32 values; ``NEVER`` switches an exit off."""


def tune(
    confidence: ConfidenceArray,
    agrees: BoolArray,
    latency_ms: FloatArray,
    max_disagreement: float,
    method: str = "search",
    *,
    vanilla_ms: float | None = None,
) -> Tuning:
    """Find thresholds that save the most time while disagreement stays within the bound.

    The bound, in [0, 1], is always met on the given records, if necessary without exits. It says
    little about unseen data; for a statement about these use
    :func:`offramp.certify.learn_then_test`. Records and ``vanilla_ms``, the model's time without
    ramps, are those of :func:`offramp.certify.evaluate`. The ``method`` is ``search``
    (:func:`search_thresholds`, never worse than greedy), ``greedy`` (Apparate 3.2,
    :func:`greedy_thresholds`) or ``path`` (best threshold that all exits share).
    """
    records = Records.of(confidence, agrees, latency_ms)
    allowed = count_allowed(max_disagreement, records.samples)
    if method == "search":
        thresholds = search_thresholds(records, allowed)
    elif method == "greedy":
        thresholds = greedy_thresholds(records, allowed)
    elif method == "path":
        thresholds = best_common_thresholds(records, allowed, vanilla_ms=vanilla_ms)
    else:
        raise ValueError(f"unknown method {method!r}, expected one of {', '.join(METHODS)}")
    data = (records.confidence, records.agrees, records.latency_ms)
    # Evaluate again from the thresholds alone; use no exits if exits cost time.
    found = evaluate(*data, thresholds, vanilla_ms=vanilla_ms)
    if found.errors > allowed:  # not an assert: with python -O, the thresholds would be served
        raise RuntimeError(
            f"method {method!r} found thresholds that disagree on {found.errors} of "
            f"{records.samples} samples, {allowed} are allowed; this is a defect, report it"
        )
    off = np.full(records.exits, NEVER)
    without = evaluate(*data, off, vanilla_ms=vanilla_ms)
    if found.savings < without.savings:
        thresholds, found = off, without
    facts = {field.name: getattr(found, field.name) for field in fields(found)}
    return Tuning(thresholds=thresholds, **facts)


def tune_shared(records: Records, max_disagreement: float) -> Tuning:
    """Return the one threshold for all exits that saves the most within the bound on the records.

    It applies to raw confidence. Every confidence that occurs is tried, which is finer than any
    grid search. The bound says little about unseen data.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "path")


def tune_separate(records: Records, max_disagreement: float) -> Tuning:
    """Return a threshold for each exit ("+") such that they save the most within the bound.

    The paper searches a grid of all combinations; with steps of 0.1 and 13 exits these would be
    11^13 combinations. The beam search replaces it: exact or within 1 % where that can be checked,
    and never worse than :func:`tune_shared` on the same records.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "search")


def always_active(thresholds: FloatArray) -> ExitPolicy:
    """Return a policy with every exit in use; exits at NEVER cost time but do not answer."""
    return policy_of(1, range(len(thresholds)), thresholds.tolist())


FIRST_STEP = 0.1
"""Initial step of a threshold (Apparate 3.2)."""
LEAST_STEP = 0.01
"""Smallest step of a threshold; the search does not halve steps below this (Apparate 3.2)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Position:
    """Current state of the search; each round changes it in place."""

    thresholds: list[float]
    """Threshold of each exit on the error 1 − confidence."""
    steps: list[float]
    first: IntArray
    """int64[samples]: exit at which each sample leaves."""
    counts: IntArray
    """int64[exits + 1]: number of samples answered at each exit, then at the model's end."""
    right: int
    """Number of samples answered like the source model."""


def greedy_thresholds(records: Records, allowed: int) -> FloatArray:
    """Find thresholds with at most ``allowed`` errors: float64[exits], as confidences.

    Algorithm 1 of Apparate, as its section 3.2 describes it. Thresholds start where nothing exits,
    steps at 0.1. Each round tries one step of each exit alone, and takes the one that saves the
    most time per accuracy lost. That exit doubles its step; exits that exceeded the bound halve
    theirs, down to 0.01. The search ends when every exit exceeds the bound even with the smallest
    step.

    Apparate's thresholds are upper bounds of the error 1 − confidence; only the functions of this
    search use such thresholds. Details that the section leaves open follow the authors' artifact
    (github.com/dywsjtu/apparate, utils.py):

    * a sample exits when error < threshold, strictly;
    * thresholds are rounded to 4 decimals, accuracies to 7;
    * the score is |change of accuracy| / |change of savings|; the smallest score wins; with
      equal scores, the earlier exit wins;
    * a step that does not change latency has no score; it is taken only if no step has a score;
    * an exit is not raised any more once its threshold is above 1.

    Differences from the artifact: a bound that is reached exactly counts as met (the artifact
    requires less than the bound), exit 0 can be the best exit (the artifact tests ``not
    best_direction``), steps are the paper's (the artifact starts at 0.01 and ends at 0.001), and
    only exits that exceeded the bound halve their steps.
    """
    return np.array([confidence_threshold(t) for t in greedy_error_thresholds(records, allowed)])


def greedy_error_thresholds(records: Records, allowed: int) -> list[float]:
    """Run the search; return thresholds on the error 1 − confidence, as in Apparate."""
    exits, samples = records.exits, records.samples
    error = 1.0 - records.confidence.astype(np.float64)
    agrees = final_agrees(records.agrees)
    at = _Position(
        thresholds=[0.0] * exits,
        steps=[FIRST_STEP] * exits,
        first=np.full(samples, exits),
        counts=np.array([0] * exits + [samples]),
        right=samples,
    )
    while True:
        raised, counts, right = _try_steps(at, error, agrees)
        raisable = [e for e in range(exits) if at.thresholds[e] <= 1]
        overstepped = [e for e in raisable if samples - right[e] > allowed]
        fits = [e for e in raisable if e not in overstepped]
        chosen = _choose(at, counts, right, fits, records)
        if chosen is None and all(at.steps[e] <= LEAST_STEP for e in overstepped):
            return at.thresholds
        for e in overstepped:
            at.steps[e] = max(at.steps[e] / 2, LEAST_STEP)
        if chosen is not None:
            at.thresholds[chosen] = raised[chosen]
            at.steps[chosen] *= 2
            at.counts, at.right = counts[chosen], right[chosen]
            at.first[(error[chosen] < raised[chosen]) & (at.first > chosen)] = chosen


def confidence_threshold(error_threshold: float) -> float:
    """Return the smallest float32 confidence c with 1 − c < ``error_threshold``, or ``NEVER``.

    The search bisects the bit patterns of the floats in [0, 1], which have the order of the floats.
    It begins near 1 − ``error_threshold``, where the result nearly always is.
    """
    if not error_threshold > 0.0:
        return NEVER
    one = int(np.float32(1.0).view(np.int32))
    guess = int(np.float32(max(0.0, 1.0 - error_threshold)).view(np.int32))
    low, high = guess - 4, guess + 4
    if low < 0 or 1.0 - _from_bits(low) < error_threshold:
        low = -1
    if high > one or 1.0 - _from_bits(high) >= error_threshold:
        high = one
    while high - low > 1:
        middle = (low + high) // 2
        if 1.0 - _from_bits(middle) < error_threshold:
            high = middle
        else:
            low = middle
    return _from_bits(high)


def _from_bits(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def _try_steps(
    at: _Position, error: FloatArray, agrees: BoolArray
) -> tuple[list[float], IntArray, list[int]]:
    """Evaluate, for each exit, one step of that exit alone.

    Only samples that move to the raised exit are counted again. Returns three values for each exit,
    as they are after its step: its threshold; the number of samples answered at each exit and at
    the end, int64[exits, exits + 1]; and the number of samples answered like the source model.
    """
    exits = len(at.steps)
    raised = [round(t + step, 4) for t, step in zip(at.thresholds, at.steps, strict=True)]
    moves = error < np.array(raised)[:, None]
    moves &= at.first > np.arange(exits)[:, None]
    target, sample = np.nonzero(moves)
    origin = at.first[sample]
    moved = np.bincount(target * (exits + 1) + origin, minlength=exits * (exits + 1))
    counts = at.counts - moved.reshape(exits, exits + 1)
    counts[np.arange(exits), np.arange(exits)] += np.bincount(target, minlength=exits)
    gained = np.bincount(target[agrees[target, sample]], minlength=exits)
    lost = np.bincount(target[agrees[origin, sample]], minlength=exits)
    return raised, counts, (at.right + gained - lost).tolist()


def _choose(
    at: _Position, counts: IntArray, right: list[int], fits: list[int], records: Records
) -> int | None:
    """Return the exit whose step loses the least accuracy per saved time.

    If no step changes the time, the first exit is returned; ``None`` if ``fits`` is empty.
    """
    samples = records.samples
    accuracy = round(at.right / samples, 7)
    savings = float(_savings(at.counts, records.latency_ms))
    savings_after = _savings(counts, records.latency_ms).tolist()
    best, best_score, plateau = None, float("inf"), None
    for e in fits:
        change = abs(savings_after[e] - savings)
        if change == 0:
            plateau = e if plateau is None else plateau
            continue
        score = abs(round(right[e] / samples, 7) - accuracy) / change
        if score < best_score:
            best, best_score = e, score
    return plateau if best is None else best


def _savings(counts: IntArray, latency_ms: FloatArray) -> FloatArray:
    """Return the saved time in percent, float64[...].

    ``counts``, int64[..., exits + 1], are the numbers of samples answered at each exit and at the
    end.
    """
    terms = counts / counts.sum(axis=-1, keepdims=True) * latency_ms
    mean_ms = np.add.accumulate(terms, axis=-1)[..., -1]
    return np.asarray((latency_ms[-1] - mean_ms) / latency_ms[-1] * 100)


BEAM_WIDTH = 64
"""Number of states that the search keeps at each exit."""
QUOTAS = 8
"""Number of groups of states, by number of errors so far; the best of each group are kept."""
PRICE = 0.012
"""Factor of the price of an error in the beam search. The price is this factor · the time that the
reference thresholds save / √(allowed errors): the more errors are allowed, the closer is the value
of the last error to that of the average error. With a third of this factor, or three times as much,
savings changed by less than 2.5 % (tried with up to 16,384 samples)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beam:
    """States of the beam search; each is one choice of the thresholds of the first exits."""

    waiting: BoolArray
    """bool[states, samples]: the sample has not exited yet."""
    errors: IntArray
    """int64[states]: number of wrong samples that exited."""
    saved_ms: FloatArray
    """float64[states]: time saved by the samples that exited."""
    thresholds: FloatArray
    """float64[states, exits]: thresholds of the exits passed; NEVER for later ones."""


def search_thresholds(records: Records, allowed: int) -> FloatArray:
    """Find thresholds with at most ``allowed`` errors: float64[exits].

    The result never saves less than the greedy thresholds or the best common threshold: the best of
    the three results is returned.

    Where an earlier answer never costs more time than a later one, two facts make the search small:

    * Given the thresholds before it, an exit's threshold matters only through the number of wrong
      samples that exit there. Lowering it to just above the next wrong sample that is still waiting
      lets only right samples exit, earlier than otherwise: this saves time, and can only avoid
      later errors.
    * So one best solution is an allocation (e_1, …, e_n) of errors to exits, whose sum is at most
      ``allowed``; each threshold is just above a wrong sample that did not leave at an earlier
      exit.

    A beam search walks the tree of these allocations, one exit per step. The savings of a state's
    remaining samples are estimated: they are what the best common threshold (the reference) saves,
    minus a price per error (a Lagrange multiplier). States compete first with states that have a
    similar number of errors, so that a wrong price does not remove all conservative or all
    aggressive states.

    Rejected: exact line searches under a multiplier from several starts with pairwise swaps (2 %
    off, 25 ms and more); the beam without quotas (up to 11 % off at 4,096 samples); the greedy
    thresholds as reference (worse than the common one); a second beam from the first one's result
    (no better than a wider one). For 10 exits, 512 samples and 5 errors the whole tree can be
    walked in about 50 ms; the tests compare with that.
    """
    common = best_common_thresholds(records, allowed)
    found = [beam_search(records, allowed, common), greedy_thresholds(records, allowed), common]
    best = max(found, key=lambda thresholds: _saved_ms(records, thresholds))
    return raise_to_least_exiting(records, best)


def beam_search(
    records: Records, allowed: int, reference: FloatArray, *, width: int = BEAM_WIDTH
) -> FloatArray:
    """Search the tree of allocations that :func:`search_thresholds` describes.

    The result is exact if ``width`` states hold the whole tree, and later exits cost more time.
    """
    price = PRICE * _saved_ms(records, reference) / math.sqrt(max(allowed, 1))
    later = _later_values(records, reference, price)
    beam = _Beam(
        waiting=np.ones((1, records.samples), dtype=np.bool_),
        errors=np.zeros(1, dtype=np.int64),
        saved_ms=np.zeros(1),
        thresholds=np.full((1, records.exits), NEVER),
    )
    for exit_ in range(records.exits):
        beam = _extend(beam, exit_, records, allowed, later[exit_ + 1], price=price, width=width)
    return np.asarray(beam.thresholds[int(beam.saved_ms.argmax())])


def raise_to_least_exiting(records: Records, thresholds: FloatArray) -> FloatArray:
    """Raise each threshold to the lowest confidence that leaves there; the same samples leave."""
    waiting = np.ones(records.samples, dtype=np.bool_)
    raised = np.full(records.exits, NEVER)
    for exit_, confidence in enumerate(records.confidence):
        leaving = waiting & leaves(confidence, thresholds[exit_])
        if leaving.any():
            raised[exit_] = confidence[leaving].min()
        waiting &= ~leaving
    return raised


def _extend(
    beam: _Beam,
    exit_: int,
    records: Records,
    allowed: int,
    later: FloatArray,
    *,
    price: float,
    width: int,
) -> _Beam:
    """Extend every state by every useful threshold of the next exit; keep the best states.

    :func:`_levels` lists the useful thresholds. ``later`` is float64[samples], from
    :func:`_later_values`, and ``price`` is the cost of an error in the estimate, in milliseconds.
    """
    confidence = records.confidence[exit_]
    order = np.argsort(-confidence, kind="stable")
    waiting = beam.waiting.take(order, axis=1)
    wrong = waiting & ~records.agrees[exit_, order]
    parent, cut, extra = _levels(wrong, _tie_starts(confidence[order]))
    errors = beam.errors[parent] + extra
    fits = errors <= allowed
    parent, cut, errors = parent[fits], cut[fits], errors[fits]

    saving = float(records.latency_ms[-1] - records.latency_ms[exit_])
    estimate = _estimate(waiting, later[order], saving, int(cut.max()))
    score = beam.saved_ms[parent] + estimate[parent, cut] - price * errors
    keep = _best_by_quota(score, errors, allowed, width)
    parent, cut, errors = parent[keep], cut[keep], errors[keep]

    thresholds = beam.thresholds[parent]
    thresholds[:, exit_] = np.where(cut > 0, confidence[order[cut - 1]], NEVER)
    still = beam.waiting[parent] & ~leaves(confidence, thresholds[:, exit_, None])
    left = beam.waiting.sum(axis=1)[parent] - still.sum(axis=1)
    return _Beam(
        waiting=still,
        errors=errors,
        saved_ms=beam.saved_ms[parent] + saving * left,
        thresholds=thresholds,
    )


def _estimate(waiting: BoolArray, later: FloatArray, saving: float, longest: int) -> Float32Array:
    """Return the milliseconds that each state is estimated to save on its waiting samples.

    Element [s, k] of the result, float32[states, longest + 1], assumes that waiting samples among
    the first k exit here, and all others later. ``waiting``, bool[states, samples], and ``later``,
    float64[samples], are in order of falling confidence. float32 is precise enough for ranking, and
    needs half the memory traffic.
    """
    brings = later.astype(np.float32)
    present = waiting.astype(np.float32)
    estimate = np.empty((len(waiting), longest + 1), dtype=np.float32)
    estimate[:, 0] = 0.0
    change = np.float32(saving) - brings[:longest]
    np.cumsum(present[:, :longest] * change, axis=1, out=estimate[:, 1:])
    estimate += (present @ brings)[:, None]
    return estimate


def _levels(wrong: BoolArray, group_start: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """List the useful thresholds: for each number of errors, the one that lets most samples exit.

    A threshold (level) is described by the number of samples at or above it. Returns, for every
    level, its state, this number, and the number of errors. ``wrong``, bool[states, samples] in
    falling confidence, marks waiting samples that are wrong at this exit. ``group_start``,
    int64[samples], is the start of each sample's run of equal confidences, which a threshold cannot
    divide.
    """
    states, samples = wrong.shape
    state, position = np.nonzero(wrong)
    totals = np.bincount(state, minlength=states)
    before = np.arange(len(state)) - (np.cumsum(totals) - totals)[state]
    cut = group_start[position]
    new = np.ones(len(state), dtype=np.bool_)
    new[1:] = (np.diff(state) != 0) | (np.diff(cut) != 0)
    return (
        np.concatenate([state[new], np.arange(states)]),
        np.concatenate([cut[new], np.full(states, samples)]),
        np.concatenate([before[new], totals]),
    )


def _tie_starts(ordered: Float32Array) -> IntArray:
    """Return, for each position, the start of its run of equal values: int64[samples]."""
    starts = np.zeros(len(ordered), dtype=np.int64)
    changes = np.flatnonzero(np.diff(ordered)) + 1
    starts[changes] = changes
    return np.maximum.accumulate(starts)


def _best_by_quota(score: FloatArray, errors: IntArray, allowed: int, width: int) -> IntArray:
    """Return the indices of the best ``width`` states, int64, taken evenly from all groups.

    States with a similar number of errors form a group.
    """
    if len(score) <= width:
        return np.arange(len(score))
    group = errors // ((allowed + QUOTAS) // QUOTAS)
    order = np.lexsort((-score, group))
    ordered = group[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return order[np.argsort(place, kind="stable")[:width]]


def _later_values(records: Records, reference: FloatArray, price: float) -> FloatArray:
    """Return the milliseconds that the reference thresholds save, less the price of errors.

    float64[exits + 1, samples]: row i is for samples that reach exit i; the last row is 0.
    """
    values = np.zeros((records.exits + 1, records.samples))
    savings = records.latency_ms[-1] - records.latency_ms[:-1]
    for exit_ in reversed(range(records.exits)):
        here = savings[exit_] - price * ~records.agrees[exit_]
        leaving = leaves(records.confidence[exit_], reference[exit_])
        values[exit_] = np.where(leaving, here, values[exit_ + 1])
    return values


def _saved_ms(records: Records, thresholds: FloatArray) -> float:
    """Return the time saved on all samples, compared with running each of them to the end."""
    found = evaluate(records.confidence, records.agrees, records.latency_ms, thresholds)
    return found.savings * float(records.latency_ms[-1]) * records.samples
