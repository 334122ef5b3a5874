"""P(agree | confidence) of each exit, and the one-parameter path through all thresholds.

A head's softmax is not a probability of agreement: each early head is over- or underconfident to a
different degree. One logistic curve per exit puts them on one scale, so that a single level u means
the same at every exit. Isotonic curves were tried and need far more data.

Levels to test are chosen near the bound on risk (:func:`lay_path`). All of them are on this one
smooth path, since a path fitted closely to few samples is never certified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offramp.certify.decision import NEVER, BoolArray, ConfidenceArray, Float32Array, FloatArray
from offramp.certify.observations import Weighted
from offramp.certify.path import Outlook, outlook
from offramp.certify.records import check_confidence

_LEAST = 1e-7
"""Lower limit that confidences are clipped to, so that the logit is finite."""
_MOST = 1.0 - 2.0**-25
"""Upper limit that confidences are clipped to: halfway between 1 and the next smaller float32."""
_LEAST_SLOPE = 0.05
"""Smallest slope that is allowed: the curve rises even where confidence is unrelated to
agreement."""
_PATH_LEVELS = np.concatenate([[1.0], 1.0 - np.geomspace(1e-6, 0.5, 399)])
"""Levels u of a path, float64[400], falling from 1 (no exits). They are geometric in 1 − u, the
error that a level admits, so that levels of about 1 % disagreement or less are dense enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementCurve:
    """P(agree | confidence) = sigmoid(slope · logit(confidence) + intercept)."""

    slope: float
    """Slope, above 0: a higher confidence never lowers P(agree)."""
    intercept: float

    def __post_init__(self) -> None:
        if not (0 < self.slope < np.inf and np.isfinite(self.intercept)):
            raise ValueError(
                f"slope must be finite and above 0, intercept finite; "
                f"got {self.slope}, {self.intercept}"
            )

    def probability(self, confidence: ConfidenceArray) -> FloatArray:
        """Return P(agree) at float[...] confidences: float64[...]."""
        return _sigmoid(self.slope * _feature(confidence) + self.intercept)

    def threshold(self, probability: FloatArray) -> FloatArray:
        """Return the lowest float32 confidence with P(agree) >= ``probability``: float64[...].

        The result is NEVER where no confidence suffices.
        """
        with np.errstate(divide="ignore"):
            logit = np.log(probability) - np.log1p(-np.asarray(probability, dtype=np.float64))
        feature = (logit - self.intercept) / self.slope
        reached = np.where(feature <= _logit(_LEAST), 0.0, float32_at_least(_sigmoid(feature)))
        return np.where(feature <= _logit(_MOST), reached, NEVER)


def fit_agreement(confidence: ConfidenceArray, agrees: BoolArray) -> AgreementCurve:
    """Fit the logistic curve of one exit by Newton's method (Platt 1999, on the logit).

    ``confidence`` is float[samples] in [0, 1], with at least one sample; ``agrees`` is
    bool[samples]. The penalty ``((slope − 1)² + intercept²) / 2`` weighs about as much as one
    sample and draws the curve towards "confidence is the probability"; it keeps the fit finite
    where all samples agree.
    """
    check_confidence(np.atleast_2d(confidence), np.atleast_2d(agrees))
    feature = _feature(np.asarray(confidence).ravel())
    target = np.asarray(agrees).ravel().astype(np.float64)
    slope, intercept = _newton(feature, target, fixed_slope=None)
    if slope < _LEAST_SLOPE:
        slope, intercept = _newton(feature, target, fixed_slope=_LEAST_SLOPE)
    return AgreementCurve(slope=slope, intercept=intercept)


def fit_curves(confidence: ConfidenceArray, agrees: BoolArray) -> tuple[AgreementCurve, ...]:
    """Fit one curve for each exit, from float[exits, samples] confidences and ``agrees``."""
    confidence, agrees = check_confidence(confidence, agrees)
    return tuple(fit_agreement(c, a) for c, a in zip(confidence, agrees, strict=True))


def tuning_path(confidence: ConfidenceArray, agrees: BoolArray) -> FloatArray:
    """Return a path of thresholds, conservative to aggressive, fixed by the tuning split alone.

    The split is float[exits, samples] confidences and bool[exits, samples] ``agrees``. One number,
    the calibrated probability of agreement, moves all thresholds.
    """
    return common_path(fit_curves(confidence, agrees))


def common_path(curves: Sequence[AgreementCurve]) -> FloatArray:
    """Return thresholds of all exits for falling levels u: float64[levels, exits], never rising.

    A sample exits where P(agree | confidence) >= u. At the first level, 1, no exit answers. Every
    threshold is a float32 value, so that checks in float32 and in float64 decide alike.
    """
    path = np.stack([curve.threshold(_PATH_LEVELS) for curve in curves], axis=1)
    path[0] = NEVER
    return path


def float32_at_least(values: FloatArray) -> FloatArray:
    """Round up to the next float32, so that ``c >= value`` is unchanged for every float32 c."""
    values = np.asarray(values, dtype=np.float64)
    nearest = values.astype(np.float32)
    above = np.nextafter(nearest, np.float32(np.inf))
    return np.where(nearest >= values, nearest, above).astype(np.float64)


def _newton(
    feature: FloatArray, target: FloatArray, *, fixed_slope: float | None
) -> tuple[float, float]:
    """Minimise the penalised log loss by damped Newton steps; it is convex, with one minimum."""
    design = np.stack([feature, np.ones_like(feature)], axis=1)
    prior = np.array([1.0, 0.0])
    free = np.array([fixed_slope is None, True])
    weights = prior.copy() if fixed_slope is None else np.array([fixed_slope, 0.0])
    loss = _loss(design, target, weights, prior)
    for _ in range(100):
        probability = _sigmoid(design @ weights)
        gradient = design.T @ (probability - target) + (weights - prior)
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design
        hessian = curvature + np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        if np.abs(step).max() < 1e-10:
            break
        scale = 1.0
        while scale > 1e-6:
            tried = weights - scale * step
            tried_loss = _loss(design, target, tried, prior)
            if tried_loss <= loss:
                break
            scale /= 2
        else:
            break
        weights, loss = tried, tried_loss
    return float(weights[0]), float(weights[1])


def _loss(design: FloatArray, target: FloatArray, weights: FloatArray, prior: FloatArray) -> float:
    logit = design @ weights
    log_loss = np.logaddexp(0.0, logit) - target * logit
    return float(log_loss.sum() + ((weights - prior) ** 2).sum() / 2)


def _feature(confidence: ConfidenceArray) -> FloatArray:
    clipped = np.clip(np.asarray(confidence, dtype=np.float64), _LEAST, _MOST)
    return np.asarray(np.log(clipped) - np.log1p(-clipped), dtype=np.float64)


def _logit(probability: float) -> float:
    return float(np.log(probability) - np.log1p(-probability))


def _sigmoid(logit: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-np.logaddexp(0.0, -logit)), dtype=np.float64)


LEVELS: Final = 60
_CONSERVATIVE, _AGGRESSIVE = 0.02, 8.0
"""Expected disagreement of the first and last level, as multiples of the bound. The two are far
apart because curves may be wrong about data that drifted."""
_RIDGE: Final = 4.0
"""Weight of the previous curves when they are fitted again, in samples."""
_LEAST_FACTOR: Final = 0.05
"""Smallest slope that a new curve may have, as a multiple of the previous curve's slope."""
_NEWTON_STEPS: Final = 30
_IDENTITY: Final = AgreementCurve(slope=1.0, intercept=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A path of thresholds to test, with the outcome that its curves expect of every level."""

    curves: tuple[AgreementCurve, ...]
    """Curve of each exit of the path."""
    thresholds: FloatArray
    """float64[levels, exits]; no exit answers at the first level."""
    risk: FloatArray
    """float64[levels]: disagreement that the curves expect, rising."""
    shares: FloatArray
    """float64[levels, exits + 1]: share of samples answered at each exit, and last at the model's
    end."""


def refit(curves: Sequence[AgreementCurve], samples: Weighted, bound: float) -> Fitted:
    """Refit curves, one per exit, to recent samples (at least one), and build a path from them.

    A tuning job runs this; ``bound`` is ε.
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

    Without curves, the only level is the one at which no exit answers. Expectations are means over
    ``samples`` (at least one), by their weights. ``anchored_at``, float64[exits], is a policy that
    must be one of the levels: thresholds of more conservative levels are not below it, those of
    more aggressive levels not above it.
    """
    if not curves:
        nothing = np.zeros((1, 0))
        return Fitted(curves=(), thresholds=nothing, risk=np.zeros(1), shares=np.ones((1, 1)))
    path = common_path(curves)
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
    """Return the outcome that curves expect of every level of a path, float64[levels, exits]."""
    loss = np.array(
        [1 - c.probability(row) for c, row in zip(curves, samples.confidence, strict=True)]
    )
    return outlook(thresholds, samples.confidence, loss, samples.weight)


def _renew(
    curve: AgreementCurve, confidence: Float32Array, agrees: BoolArray, weight: FloatArray
) -> AgreementCurve:
    """Fit logit P = a · (logit of the previous curve) + b, drawn towards a = 1, b = 0.

    Weights are scaled so that they sum to the effective sample size (Kish), not to the number of
    samples that they represent.
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
    slope, intercept = max(float(found[0]), _LEAST_FACTOR), float(found[1])
    return AgreementCurve(slope=slope * curve.slope, intercept=slope * curve.intercept + intercept)


def _log_loss(
    weights: FloatArray, design: FloatArray, scaled: FloatArray, agrees: BoolArray
) -> float:
    logit = weights @ design
    penalty = _RIDGE / 2 * ((weights[0] - 1) ** 2 + weights[1] ** 2)
    return float(scaled @ (np.logaddexp(0.0, logit) - agrees * logit) + penalty)
