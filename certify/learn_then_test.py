"""Thresholds that keep their promise on unseen data: Learn then Test along a fixed path.

Theorem (Angelopoulos, Bates, Candès, Jordan, Lei: "Learn then Test: Calibrating Predictive
Algorithms to Achieve Risk Control", 2021; fixed sequence testing, section 3.1 there). Let the
policies of a path be fixed before the n certify samples are looked at. Policy j's null hypothesis
is "its disagreement exceeds ε". With k_j errors in n, p_j = P(Binomial(n, ε) <= k_j) is a valid
p-value of it. Test in the order of the path, each at level δ, and stop at the first p_j > δ: with
probability at least 1 − δ, every policy that passed has a true disagreement of at most ε.

Why: let j be the first policy whose null hypothesis is true. A wrong one can pass only if j's own
test passed, and that happens with probability at most δ. So no correction for the number of levels
is paid, however many there are.

Assumptions: the certify samples and those served are drawn independently from one distribution (or
sampled at random from one population), and neither path nor curves were fitted on them. Under drift
nothing is promised; that is what monitoring while serving is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offramp.certify.binomial import allowed_errors, binomial_cdf
from offramp.certify.decision import BoolArray, ConfidenceArray, FloatArray
from offramp.certify.path import walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificate:
    """The most aggressive level of the path that passed."""

    index: int
    """Level of the path."""
    thresholds: FloatArray
    """float64[exits]."""
    errors: int
    """Certify samples answered unlike the source model."""
    samples: int
    """Certify samples."""
    p_value: float
    """P(Binomial(samples, max_disagreement) <= errors)."""


def certify(
    path_thresholds: FloatArray,
    confidence: ConfidenceArray,
    agrees: BoolArray,
    *,
    max_disagreement: float,
    confidence_level: float = 0.95,
) -> Certificate | None:
    """Walk the path while the bound is certified; keep the last level that passed.

    With probability at least ``confidence_level`` (1 − δ) over the certify samples, the policy
    returned disagrees with the source model on at most ``max_disagreement`` (ε) of unseen data like
    them (the theorem and its assumptions are above). The path, float64[levels, exits], goes from
    conservative to aggressive, no threshold rising (:func:`.agreement.common_path`), fixed without
    the float[exits, samples] confidences and bool[exits, samples] given here.

    ``None`` if not even the first level passed: too few samples (:func:`.binomial.samples_needed`),
    or a path that starts too aggressively. Serve without exits then.
    """
    path = np.asarray(path_thresholds, dtype=np.float64)
    errors = walk(path, confidence, agrees).errors
    samples = int(np.shape(confidence)[1])
    failed = errors > allowed_errors(samples, max_disagreement, confidence_level)
    index = (int(failed.argmax()) if failed.any() else len(failed)) - 1
    if index < 0:
        return None
    return Certificate(
        index=index,
        thresholds=path[index].copy(),
        errors=int(errors[index]),
        samples=samples,
        p_value=binomial_cdf(int(errors[index]), samples, max_disagreement),
    )
