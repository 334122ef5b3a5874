"""P(agree | confidence) of each exit, and the one-parameter path through all thresholds.

A head's softmax is no probability of agreement: early heads are over- or underconfident in their
own way. One logistic curve per exit puts them on one scale, so that a single level u means the
same at every exit. Isotonic curves were tried and need far more data.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np

from offramp.certify.decision import NEVER, BoolArray, ConfidenceArray, FloatArray
from offramp.certify.records import check_confidence

_LEAST = 1e-7
"""Confidences below count as this, so that the logit is finite."""
_MOST = 1.0 - 2.0**-25
"""What a confidence of 1 counts as: halfway between 1 and the float32 below it."""
_LEAST_SLOPE = 0.05
"""Keeps the curve rising where confidence says nothing about agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementCurve:
    """P(agree | confidence) = sigmoid(slope · logit(confidence) + intercept)."""

    slope: float
    """Above 0: more confidence is never less agreement."""
    intercept: float

    def __post_init__(self) -> None:
        if not (0 < self.slope < np.inf and np.isfinite(self.intercept)):
            raise ValueError(
                f"slope must be finite and above 0, intercept finite; "
                f"got {self.slope}, {self.intercept}"
            )

    def probability(self, confidence: ConfidenceArray) -> FloatArray:
        """P(agree) at float[...] confidences: float64[...]."""
        return _sigmoid(self.slope * _feature(confidence) + self.intercept)

    def threshold(self, probability: FloatArray) -> FloatArray:
        """Least float32 confidence with at least that P(agree), float64[...]; NEVER if none."""
        with np.errstate(divide="ignore"):
            logit = np.log(probability) - np.log1p(-np.asarray(probability, dtype=np.float64))
        feature = (logit - self.intercept) / self.slope
        reached = np.where(feature <= _logit(_LEAST), 0.0, float32_at_least(_sigmoid(feature)))
        return np.where(feature <= _logit(_MOST), reached, NEVER)


def fit_agreement(
    confidence: ConfidenceArray, agrees: BoolArray, *, ridge: float = 1.0
) -> AgreementCurve:
    """Fit the logistic curve of one exit by Newton's method (Platt 1999, on the logit).

    Of float[samples] confidences in [0, 1], at least one, and bool[samples]. The penalty
    ``ridge / 2 · ((slope − 1)² + intercept²)``, worth about one sample, draws towards "confidence
    is the probability"; it keeps the fit finite where all samples agree.
    """
    check_confidence(np.atleast_2d(confidence), np.atleast_2d(agrees))
    if not ridge > 0:
        raise ValueError(f"ridge must be above 0, got {ridge}")
    feature = _feature(np.asarray(confidence).ravel())
    target = np.asarray(agrees).ravel().astype(np.float64)
    slope, intercept = _newton(feature, target, ridge, fixed_slope=None)
    if slope < _LEAST_SLOPE:
        slope, intercept = _newton(feature, target, ridge, fixed_slope=_LEAST_SLOPE)
    return AgreementCurve(slope=slope, intercept=intercept)


def fit_curves(confidence: ConfidenceArray, agrees: BoolArray) -> tuple[AgreementCurve, ...]:
    """Curves of some exits: one per row of float[exits, samples] confidences."""
    return tuple(fit_agreement(c, a) for c, a in zip(confidence, agrees, strict=True))


def tuning_path(confidence: ConfidenceArray, agrees: BoolArray) -> FloatArray:
    """The path of thresholds from conservative to aggressive, fixed by the tuning split alone.

    Of float[exits, samples] confidences and bool[exits, samples]. One number, the calibrated
    probability of agreement, moves all thresholds.
    """
    return common_path(fit_curves(confidence, agrees))


def path_levels(
    count: int = 400, *, conservative: float = 1e-6, aggressive: float = 0.5
) -> FloatArray:
    """Levels u of the path, float64[count], falling from 1 (no exits).

    Geometric in 1 − u from ``conservative`` to ``aggressive``: even steps in the error that a level
    admits, which is where thresholds of a percent or less of disagreement lie.
    """
    if count < 2 or not 0 < conservative < aggressive < 1:
        raise ValueError(
            "expected count >= 2 and 0 < conservative < aggressive < 1, "
            f"got {count}, {conservative}, {aggressive}"
        )
    return np.concatenate([[1.0], 1.0 - np.geomspace(conservative, aggressive, count - 1)])


def common_path(
    curves: Sequence[AgreementCurve] | None,
    levels: FloatArray | None = None,
    *,
    exits: int | None = None,
    enabled: Sequence[bool] | BoolArray | None = None,
) -> FloatArray:
    """Thresholds of all exits along one number u: float64[levels, exits].

    With ``curves``, a sample exits where P(agree | confidence) >= u; without, where its raw
    confidence >= u (``exits`` must be given then). A level of 1 switches every exit off. Every
    threshold is a float32 value, so a check in float32 decides like one in float64. ``levels``,
    float64[levels], fall, in (0, 1]; an exit that is not ``enabled`` stays at NEVER.
    """
    levels = path_levels() if levels is None else np.asarray(levels, dtype=np.float64)
    if levels.ndim != 1 or not ((levels > 0) & (levels <= 1)).all() or (np.diff(levels) > 0).any():
        raise ValueError("levels must be a falling row of numbers in (0, 1]")
    count = _count_exits(curves, exits, enabled)
    if curves is None:
        path = np.repeat(float32_at_least(levels)[:, None], count, axis=1)
    else:
        path = np.stack([curve.threshold(levels) for curve in curves], axis=1)
    path[levels >= 1.0] = NEVER
    if enabled is not None:
        path[:, ~np.asarray(enabled, dtype=np.bool_)] = NEVER
    return path


def float32_at_least(values: FloatArray) -> FloatArray:
    """Round up to the next float32: ``c >= value`` stays the same for every float32 c."""
    values = np.asarray(values, dtype=np.float64)
    nearest = values.astype(np.float32)
    above = np.nextafter(nearest, np.float32(np.inf))
    return np.where(nearest >= values, nearest, above).astype(np.float64)


def _count_exits(
    curves: Sequence[AgreementCurve] | None,
    exits: int | None,
    enabled: Sequence[bool] | BoolArray | None,
) -> int:
    given: dict[str, Sized | None] = {"curves": curves, "enabled": enabled}
    counts = {name: len(known) for name, known in given.items() if known is not None}
    counts |= {} if exits is None else {"exits": exits}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"the number of exits must be given once or alike, above 0; got {counts}")
    return next(iter(counts.values()))


def _newton(
    feature: FloatArray, target: FloatArray, ridge: float, fixed_slope: float | None
) -> tuple[float, float]:
    """Minimise the penalised log loss; convex, so damped Newton steps find the one minimum."""
    design = np.stack([feature, np.ones_like(feature)], axis=1)
    prior = np.array([1.0, 0.0])
    free = np.array([fixed_slope is None, True])
    weights = prior.copy() if fixed_slope is None else np.array([fixed_slope, 0.0])
    loss = _loss(design, target, weights, prior, ridge)
    for _ in range(100):
        probability = _sigmoid(design @ weights)
        gradient = design.T @ (probability - target) + ridge * (weights - prior)
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design
        hessian = curvature + ridge * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        if np.abs(step).max() < 1e-10:
            break
        scale = 1.0
        while scale > 1e-6:
            tried = weights - scale * step
            tried_loss = _loss(design, target, tried, prior, ridge)
            if tried_loss <= loss:
                break
            scale /= 2
        else:
            break
        weights, loss = tried, tried_loss
    return float(weights[0]), float(weights[1])


def _loss(
    design: FloatArray, target: FloatArray, weights: FloatArray, prior: FloatArray, ridge: float
) -> float:
    logit = design @ weights
    log_loss = np.logaddexp(0.0, logit) - target * logit
    return float(log_loss.sum() + ridge / 2 * ((weights - prior) ** 2).sum())


def _feature(confidence: ConfidenceArray) -> FloatArray:
    clipped = np.clip(np.asarray(confidence, dtype=np.float64), _LEAST, _MOST)
    return np.asarray(np.log(clipped) - np.log1p(-clipped), dtype=np.float64)


def _logit(probability: float) -> float:
    return float(np.log(probability) - np.log1p(-probability))


def _sigmoid(logit: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-np.logaddexp(0.0, -logit)), dtype=np.float64)
