"""Threshold search in rank space: a beam over how the exits share the allowed errors.

Where an earlier answer never costs more time than a later one, two facts make the search small:

* Given the thresholds before it, an exit's threshold only matters through how many wrong samples
  it lets exit. Lowering it to just above the next wrong sample that is still there lets only right
  ones exit, earlier than they would: time is saved, and later errors can only be avoided.
* So some best thresholds are an allocation (e_1, …, e_n) of at most the allowed errors, read off
  from first exit to last; each level lies just above a wrong sample that no earlier exit took.

A beam walks this tree, one exit per step. What a state's remaining samples will bring is estimated
by what a reference, the best common threshold, brings on them, minus a price per error (a Lagrange
multiplier). States compete first with states that spent about as many errors, so that a wrong price
does not empty the beam of conservative or aggressive ones.

Rejected: exact line searches under a multiplier from several starts with pairwise swaps (2 % off,
25 ms and more); the beam without quotas (up to 11 % off at 4,096 samples); the
greedy thresholds as reference (worse than the common one); a second beam from the first one's
result (no better than a wider one). For 10 exits, 512 samples and 5 errors the whole tree can be
walked in about 50 ms: that is what the tests compare with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from offramp.bundle.schema.policy import NEVER
from offramp.certify import BoolArray, Float32Array, FloatArray, IntArray, Records, evaluate, leaves
from offramp.certify.path import best_common_thresholds
from offramp.engine.control.published.greedy import greedy_thresholds

BEAM_WIDTH = 64
"""States kept per exit."""
QUOTAS = 8
"""Groups of states by errors spent; each keeps its best."""
PRICE = 0.012
"""An error's price is this times the reference's savings over the square root of the allowed
errors: the more are allowed, the nearer the last one's worth comes to the average one's. Between
a third and three times it, savings changed by less than 2.5 % (tried to 16,384 samples)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beam:
    """States after some exits; each row is one choice of the thresholds so far."""

    waiting: BoolArray
    """bool[states, samples]: no exit took the sample yet."""
    errors: IntArray
    """int64[states]: wrong samples that exited."""
    saved_ms: FloatArray
    """float64[states]: time saved by the samples that exited."""
    thresholds: FloatArray
    """float64[states, exits]: of the exits passed; NEVER from there on."""


def search_thresholds(records: Records, allowed: int) -> FloatArray:
    """Find thresholds with at most ``allowed`` errors: float64[exits].

    Never saves less than the greedy or the best common threshold: the best of the three is taken.
    """
    common = best_common_thresholds(records, allowed)
    found = [beam_search(records, allowed, common), greedy_thresholds(records, allowed), common]
    best = max(found, key=lambda thresholds: _saved_ms(records, thresholds))
    return raise_to_least_exiting(records, best)


def beam_search(
    records: Records, allowed: int, reference: FloatArray, *, width: int = BEAM_WIDTH
) -> FloatArray:
    """Walk the tree of allocations; exact once ``width`` holds all of it (monotone latency)."""
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
    """Raise each threshold to the least confidence that exits there; same exits, more caution."""
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
    """Give every state every useful level of the next exit; keep the best.

    ``later`` is float64[samples], from :func:`_later_values`, and ``price`` is the milliseconds
    that an error costs in the estimate.
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
    """Milliseconds that waiting samples bring if a prefix of them exits here, the rest later.

    float32[states, longest + 1] for bool[states, samples] and float64[samples] in falling
    confidence; float32 is precise enough to rank by, and half the traffic.
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
    """List the useful levels: the longest prefixes of the order for each number of errors.

    State, prefix length, and errors in that prefix, of every level. ``wrong``, bool[states,
    samples] in falling confidence, is waiting, and wrong at this exit; ``group_start``,
    int64[samples], the start of the run of equal confidences, which no threshold can divide.
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
    """Where the run of equal values that holds each position begins: int64[samples]."""
    starts = np.zeros(len(ordered), dtype=np.int64)
    changes = np.flatnonzero(np.diff(ordered)) + 1
    starts[changes] = changes
    return np.maximum.accumulate(starts)


def _best_by_quota(score: FloatArray, errors: IntArray, allowed: int, width: int) -> IntArray:
    """Take the best of each group of errors spent, then the second of each, until full."""
    if len(score) <= width:
        return np.arange(len(score))
    group = errors // ((allowed + QUOTAS) // QUOTAS)
    order = np.lexsort((-score, group))
    ordered = group[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return order[np.argsort(place, kind="stable")[:width]]


def _later_values(records: Records, reference: FloatArray, price: float) -> FloatArray:
    """What the reference brings on a sample that reaches exit i: float64[exits + 1, samples]."""
    values = np.zeros((records.exits + 1, records.samples))
    savings = records.latency_ms[-1] - records.latency_ms[:-1]
    for exit_ in reversed(range(records.exits)):
        here = savings[exit_] - price * ~records.agrees[exit_]
        leaving = leaves(records.confidence[exit_], reference[exit_])
        values[exit_] = np.where(leaving, here, values[exit_ + 1])
    return values


def _saved_ms(records: Records, thresholds: FloatArray) -> float:
    """Time saved on all samples against running every one of them to the end."""
    found = evaluate(records.confidence, records.agrees, records.latency_ms, thresholds)
    return found.savings * float(records.latency_ms[-1]) * records.samples
