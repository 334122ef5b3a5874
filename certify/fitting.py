"""Fitting a path of thresholds to test: agreement curves, and levels near the bound on risk.

The levels lie on one smooth path, thresholds at which every exit agrees equally surely, since a
path fitted closely to few samples is never certified. They are dense where the disagreement is
near the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify.agreement import AgreementCurve, common_path, path_levels
from offramp.certify.decision import BoolArray, Float32Array, FloatArray
from offramp.certify.path import Outlook, outlook
from offramp.certify.window import Weighted

LEVELS: Final = 60
_CONSERVATIVE, _AGGRESSIVE = 0.02, 8.0
"""Expected disagreement of the first and last level, as multiples of the bound. Curves may be
wrong about data that drifted; so they are wide apart."""
_RIDGE: Final = 4.0
"""Samples that the curves known so far count for."""
_LEAST_SLOPE: Final = 0.05
"""Least slope of a new curve, relative to the one known so far."""
_NEWTON_STEPS: Final = 30
_IDENTITY: Final = AgreementCurve(slope=1.0, intercept=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A path of thresholds to test, with what its curves expect of every level."""

    curves: tuple[AgreementCurve, ...]
    """Per exit of the path."""
    thresholds: FloatArray
    """float64[levels, exits], the first answers nothing."""
    risk: FloatArray
    """float64[levels]: disagreement that the curves expect, rising."""
    shares: FloatArray
    """float64[levels, exits + 1]: of samples answered at each exit, the last at the end."""


def refit(curves: Sequence[AgreementCurve], samples: Weighted, bound: float) -> Fitted:
    """Renew curves, one per exit, from recent samples (at least one), and lay a path on them.

    What a tuning job runs; ``bound`` is ε.
    """
    rows = zip(curves, samples.confidence, samples.agrees, strict=True)
    renewed = [_renew(curve, row, agrees, samples.weight) for curve, row, agrees in rows]
    return lay_path(renewed, samples, bound=bound)


def lay_path(
    curves: Sequence[AgreementCurve],
    samples: Weighted,
    *,
    bound: float,
    anchored_at: FloatArray | None = None,
) -> Fitted:
    """Choose levels where the disagreement that curves expect is near the bound, ε.

    Without curves the path has only the level that answers nothing. Expectations are weighed by
    ``samples``, at least one. ``anchored_at``, float64[exits], is one policy that shall be a level:
    more conservative levels are then nowhere below it, and more aggressive ones nowhere above.
    """
    if not curves:
        nothing = np.zeros((1, 0))
        return Fitted(curves=(), thresholds=nothing, risk=np.zeros(1), shares=np.ones((1, 1)))
    path = common_path(curves, path_levels())
    if anchored_at is not None:
        path = np.concatenate(
            [np.maximum(path, anchored_at), anchored_at[None, :], np.minimum(path, anchored_at)]
        )
    found = expect(path, curves, samples)
    risk = np.maximum.accumulate(found.risk)
    targets = np.geomspace(_CONSERVATIVE, _AGGRESSIVE, LEVELS - 1) * bound
    chosen = {0, *np.minimum(np.searchsorted(risk, targets), len(path) - 1).tolist()}
    if anchored_at is not None:
        chosen.add(len(path) // 2)
    rows = np.array(sorted(chosen))
    rows = rows[np.append(True, (path[rows[1:]] != path[rows[:-1]]).any(axis=1))]
    return Fitted(
        curves=tuple(curves), thresholds=path[rows], risk=risk[rows], shares=found.shares[rows]
    )


def expect(thresholds: FloatArray, curves: Sequence[AgreementCurve], samples: Weighted) -> Outlook:
    """What curves say of every level of a path, float64[levels, exits], on some samples."""
    loss = np.array(
        [1 - c.probability(row) for c, row in zip(curves, samples.confidence, strict=True)]
    )
    return outlook(thresholds, samples.confidence, loss, samples.weight)


def _renew(
    curve: AgreementCurve, confidence: Float32Array, agrees: BoolArray, weight: FloatArray
) -> AgreementCurve:
    """Fit logit P = a · (what the curve says) + b, drawn towards a = 1, b = 0.

    Weighted samples count for as many as they are worth (Kish), not for as many as they stand for.
    """
    clipped = _IDENTITY.probability(confidence)
    known = curve.slope * (np.log(clipped) - np.log1p(-clipped)) + curve.intercept
    scaled = weight * (float(weight.sum()) / float((weight**2).sum()))
    design = np.stack([known, np.ones_like(known)])
    prior = np.array([1.0, 0.0])
    found = prior.copy()
    loss = _log_loss(found, design, scaled, agrees)
    for _ in range(_NEWTON_STEPS):
        probability = np.exp(-np.logaddexp(0.0, -(found @ design)))
        gradient = design @ (scaled * (probability - agrees)) + _RIDGE * (found - prior)
        curvature = (design * (scaled * probability * (1 - probability))) @ design.T
        step = np.linalg.solve(curvature + _RIDGE * np.eye(2), gradient)
        while (tried := _log_loss(found - step, design, scaled, agrees)) > loss:
            step = step / 2  # convex: some fraction of a Newton step always helps
            if np.abs(step).max() < 1e-9:
                break
        if np.abs(step).max() < 1e-8:
            break
        found, loss = found - step, tried
    slope, intercept = max(float(found[0]), _LEAST_SLOPE), float(found[1])
    return AgreementCurve(slope=slope * curve.slope, intercept=slope * curve.intercept + intercept)


def _log_loss(
    weights: FloatArray, design: FloatArray, scaled: FloatArray, agrees: BoolArray
) -> float:
    logit = weights @ design
    penalty = _RIDGE / 2 * ((weights[0] - 1) ** 2 + weights[1] ** 2)
    return float(scaled @ (np.logaddexp(0.0, logit) - agrees * logit) + penalty)
