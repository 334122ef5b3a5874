"""Which head at each cut point, which exits in use, and which policy ships.

All predictions come from profiled times and the records of the tuning split; the certify split
is looked at once, when the path of policies is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, ExitPolicy, Promise
from offramp.engine.control.agreement import tuning_path
from offramp.engine.control.certify import (
    allowed_errors,
    certify,
)
from offramp.engine.control.costs import CostModel
from offramp.engine.control.path import walk
from offramp.engine.control.records import evaluate, savings_of
from offramp.engine.control.thresholds import count_allowed

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_NO_EXITS = ExitPolicy(version=1, active=())


def net_savings_alone(
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    index: int,
    max_disagreement: float,
) -> float:
    """What an exit would save with no other beside it, its own cost taken off.

    Args:
        confidence: [samples] of the tuning split.
        agrees: [samples].
        cost: With the head's cost at ``index``.
        index: The exit.
        max_disagreement: Constraint on the tuning split.
    """
    order = np.argsort(-confidence, kind="stable")
    errors = np.cumsum(~agrees[order])
    # A threshold lets all samples of one confidence leave, or none; NaN never leaves.
    ordered = confidence[order]
    last_of_run = np.append(ordered[1:] != ordered[:-1], True) & ~np.isnan(ordered)
    within = errors <= count_allowed(max_disagreement, len(confidence))
    leaving = int(np.flatnonzero(last_of_run & within).max(initial=-1)) + 1
    times = cost.latency_ms([index])
    share = leaving / len(confidence)
    return float(1 - (share * times[0] + (1 - share) * times[1]) / cost.source_ms)


def certifiable_errors(samples: int, max_disagreement: float, confidence_level: float) -> int:
    """Errors on the tuning split of a policy that may pass on the certify split.

    What could still be certified on as many samples, or half the constraint where that is more,
    since a small split can certify little.
    """
    return max(
        allowed_errors(samples, max_disagreement, confidence_level),
        int(max_disagreement * samples / 2),
    )


def choose_active(
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    *,
    max_disagreement: float,
    confidence_level: float,
    max_overhead: float,
    everywhere: Sequence[CostModel] = (),
) -> tuple[int, ...]:
    """Drop exits while that raises the predicted savings, the most useful drop first.

    Then drop the least useful ones until the model's end comes at most ``max_overhead`` later
    than it would without exits (Apparate's ramp budget, 3.1), and exchange single exits while
    that helps: what was dropped early may suit a small set better.

    Sets are judged by :func:`_promised_savings`.

    Args:
        confidence: [exits, samples] of the tuning split.
        agrees: [exits, samples].
        cost: Of all exits.
        max_disagreement: The constraint.
        confidence_level: Of the certificate.
        max_overhead: Share of the source model's time that all exits together may cost.
        everywhere: Costs at other batch sizes, where ``max_overhead`` holds too.

    Returns:
        Indices of the exits to keep, in depth order; may be empty.
    """
    allowed = certifiable_errors(confidence.shape[1], max_disagreement, confidence_level)

    @cache
    def savings(active: tuple[int, ...]) -> float:
        return _promised_savings(active, confidence, agrees, cost, allowed=allowed)

    def fits(active: tuple[int, ...]) -> bool:
        return all(c.overhead(active) <= max_overhead for c in (cost, *everywhere))

    active = tuple(range(len(confidence)))
    best = savings(active)
    while active:
        fewer = max((active[:i] + active[i + 1 :] for i in range(len(active))), key=savings)
        if fits(active) and savings(fewer) < best:
            break
        active, best = fewer, savings(fewer)
    while swaps := [s for s in _swapped(active, len(confidence)) if fits(s)]:
        swap = max(swaps, key=savings)
        if savings(swap) <= best:
            break
        active, best = swap, savings(swap)
    return active if best > 0 else ()


def _promised_savings(
    active: tuple[int, ...],
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    *,
    allowed: int,
) -> float:
    """Most savings on the tuning split of a policy on the common path of some exits.

    Only levels with at most ``allowed`` errors count (:func:`certifiable_errors`).
    """
    if not active:
        return 0.0
    rows = list(active)
    walked = walk(tuning_path(confidence[rows], agrees[rows]), confidence[rows], agrees[rows])
    saved = savings_of(walked.counts, cost.latency_ms(rows), cost.source_ms)
    return float(saved[walked.errors <= allowed].max(initial=0.0))


def _swapped(active: tuple[int, ...], exits: int) -> list[tuple[int, ...]]:
    """Every set that has one exit of ``active`` replaced by one that is not in it."""
    others = [index for index in range(exits) if index not in active]
    return [tuple(sorted({*active, other} - {index})) for index in active for other in others]


def certified_policy(
    active: Sequence[int],
    path: FloatArray,
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    *,
    max_disagreement: float,
    confidence_level: float,
) -> ExitPolicy:
    """Find how far along the path the promise holds (Learn then Test).

    Args:
        active: Exits that the columns of ``path`` belong to.
        path: [levels, len(active)], fixed without the certify split.
        confidence: [exits, samples] of the certify split, all exits.
        agrees: [exits, samples].
        cost: For the predicted savings.
        max_disagreement: The constraint.
        confidence_level: Of the promise.

    Returns:
        The policy; without active exits if nothing passed or nothing was worth it.
    """
    if not active:
        return _NO_EXITS
    rows = list(active)
    certificate = certify(
        path,
        confidence[rows],
        agrees[rows],
        max_disagreement=max_disagreement,
        confidence_level=confidence_level,
    )
    if certificate is None:
        return _NO_EXITS
    used = certificate.thresholds < NEVER
    kept = [index for index, used_ in zip(rows, used, strict=True) if used_]
    if not kept:
        return _NO_EXITS
    thresholds = certificate.thresholds[used]
    outcome = evaluate(
        confidence[kept],
        agrees[kept],
        cost.latency_ms(kept),
        thresholds,
        vanilla_ms=cost.source_ms,
    )
    if outcome.savings <= 0:
        return _NO_EXITS
    return ExitPolicy(
        version=1,
        active=tuple(
            ActiveExit(exit=index, threshold=float(threshold))
            for index, threshold in zip(kept, thresholds, strict=True)
        ),
        promise=Promise(
            max_disagreement=max_disagreement,
            confidence=confidence_level,
            certify_samples=certificate.samples,
            certify_errors=certificate.errors,
            p_value=certificate.p_value,
            predicted_savings=float(outcome.savings),
        ),
    )
