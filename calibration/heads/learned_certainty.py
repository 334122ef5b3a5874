"""The criterion ``learned``: a logistic regression that predicts whether an answer agrees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offramp.engine.answers.certainty import log_odds

_STEPS = 50
_PRIOR = np.array([1.0, 0.0, 0.0, 0.0])
"""The largest probability as it is."""


def fit_certainty(
    statistics: NDArray[np.float32], agrees: NDArray[np.bool_], *, ridge: float = 1.0
) -> tuple[float, ...]:
    """Fit the weights of an exit by Newton's method: of the statistics' log-odds, and a constant.

    Of ``statistics`` [samples, 3] (:func:`offramp.engine.answers.certainty.statistics_of`) and bool
    ``agrees`` [samples], of samples that trained no head. The penalty ``ridge / 2 · |w − w0|²``
    draws towards the largest probability alone, and keeps the fit finite where all agree
    (:func:`offramp.certify.agreement.fit_agreement` has the same of one feature).
    """
    design = np.column_stack([log_odds(statistics), np.ones(len(statistics))]).astype(np.float64)
    weights = _PRIOR.copy()
    loss = _loss(design, agrees, weights, ridge)
    for _ in range(_STEPS):
        probability = np.exp(-np.logaddexp(0.0, -(design @ weights)))
        gradient = design.T @ (probability - agrees) + ridge * (weights - _PRIOR)
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design
        step = np.linalg.solve(curvature + ridge * np.eye(len(weights)), gradient)
        scale = 1.0
        while (tried := _loss(design, agrees, weights - scale * step, ridge)) > loss:
            scale /= 2
            if scale < 1e-6:
                return tuple(weights.tolist())
        weights, loss = weights - scale * step, tried
        if np.abs(step).max() < 1e-9:
            break
    return tuple(weights.tolist())


def _loss(
    design: NDArray[np.float64],
    agrees: NDArray[np.bool_],
    weights: NDArray[np.float64],
    ridge: float,
) -> float:
    logit = design @ weights
    data = (np.logaddexp(0.0, logit) - agrees * logit).sum()
    return float(data + ridge / 2 * ((weights - _PRIOR) ** 2).sum())
