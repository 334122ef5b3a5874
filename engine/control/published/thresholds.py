"""Threshold tuning on a window of records, within a hard bound on disagreement."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from offramp.bundle.schema.policy import NEVER, ExitPolicy
from offramp.certify import BoolArray, ConfidenceArray, Evaluation, FloatArray, Records, evaluate
from offramp.certify.path import best_common_thresholds
from offramp.engine.control.published.greedy import greedy_thresholds
from offramp.engine.control.published.search import search_thresholds
from offramp.engine.control.static import policy_of

METHODS = ("search", "greedy", "path")
"""What ``tune`` knows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuning(Evaluation):
    """Thresholds, and what they bring on the records that they were tuned on."""

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

    The bound, in [0, 1], holds on the records given, always: no exits at all is within any. It says
    little about unseen data; what is to hold there comes from
    :func:`offramp.certify.learn_then_test`. Records and ``vanilla_ms``, the model's time without
    ramps, are those of :func:`offramp.certify.evaluate`. The ``method`` is ``search``
    (:mod:`.search`, never worse than greedy), ``greedy`` (Apparate 3.2, :mod:`.greedy`) or ``path``
    (best threshold common to all exits, :mod:`offramp.certify.path`).
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
    # Once more, from the thresholds alone; without exits if those cost time.
    found = evaluate(*data, thresholds, vanilla_ms=vanilla_ms)
    if found.errors > allowed:  # no assert: python -O would serve what it found
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


def count_allowed(max_disagreement: float, samples: int) -> int:
    """Most errors with ``errors / samples <= max_disagreement``, as that division rounds."""
    if not 0 <= max_disagreement <= 1:
        raise ValueError(f"max_disagreement must be in [0, 1], got {max_disagreement}")
    allowed = int(max_disagreement * samples) + 1
    while allowed / samples > max_disagreement:
        allowed -= 1
    return allowed


def tune_shared(records: Records, max_disagreement: float) -> Tuning:
    """Find the one threshold for all exits that saves the most within the bound on the records.

    On raw confidence. As fine as a grid search can be: every confidence that occurs is tried. About
    unseen data it says little.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "path")


def tune_separate(records: Records, max_disagreement: float) -> Tuning:
    """Find a threshold for each exit ("+") such that they save the most within the bound.

    The paper searches a grid of all combinations; with steps of 0.1 and 13 exits that would be
    11^13 of them. The beam search stands in: exact or within a percent of it where that can be
    checked (:mod:`.search`), and never worse than :func:`tune_shared` on the same records.
    """
    return tune(records.confidence, records.agrees, records.latency_ms, max_disagreement, "search")


def always_active(thresholds: FloatArray, *, version: int = 1) -> ExitPolicy:
    """Put every exit to use, float64[K] thresholds; those at NEVER cost time and answer nothing."""
    return policy_of(version, range(len(thresholds)), thresholds.tolist())
