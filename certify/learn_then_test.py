"""Thresholds that keep their promise on unseen data: Learn then Test along a fixed path.

Theorem (Angelopoulos, Bates, Candès, Jordan, Lei: "Learn then Test: Calibrating Predictive
Algorithms to Achieve Risk Control", 2021; fixed sequence testing, section 3.1 there). Let the
policies of a path be fixed before the n certify samples are looked at. Policy j's null hypothesis
is "its disagreement exceeds ε". With k_j errors in n, p_j = P(Binomial(n, ε) <= k_j) is a valid
p-value of it. Test in the order of the path, each at level δ, and stop at the first p_j > δ: with
probability at least 1 − δ, every policy that passed has a true disagreement of at most ε.

Why: let j be the first policy whose null hypothesis is true. A policy with a true null hypothesis
can pass only if j's own test passed, and that happens with probability at most δ. So no correction
for the number of levels is needed, however many there are.

Several bounds together need no correction either: a policy's null hypothesis is then "one of its
risks exceeds its bound", which is rejected where each risk's own p-value is at most δ (an
intersection-union test, Berger 1982).

Assumptions: the certify samples and those served are drawn independently from one distribution (or
sampled at random from one population), and neither path nor curves were fitted on them. Under drift
nothing is promised; monitoring while serving is for that case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offramp.certify.binomial import allowed_errors, binomial_cdf, half_risk
from offramp.certify.decision import BoolArray, ConfidenceArray, FloatArray, IntArray
from offramp.certify.path import outlook, walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificate:
    """The most aggressive level of the path that passed."""

    index: int
    """Index of the level in the path."""
    thresholds: FloatArray
    """Thresholds of that level, float64[exits]."""
    errors: int
    """Certify samples whose answer differs from the source model's."""
    samples: int
    """Number of samples in the certify split."""
    p_value: float
    """P(Binomial(samples, max_disagreement) <= errors). With ``copies``: twice the larger of the
    p-values by samples and by rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stratum:
    """Samples with a separate bound, such as those that the model puts in one class."""

    name: str
    rows: IntArray
    """int64: indices of the samples."""
    max_disagreement: float


def certify(
    path_thresholds: FloatArray,
    confidence: ConfidenceArray,
    agrees: BoolArray,
    *,
    max_disagreement: float,
    confidence_level: float = 0.95,
    copies: IntArray | None = None,
    strata: Sequence[Stratum] = (),
) -> Certificate | None:
    """Test levels along the path until one fails; return the last that passed.

    With probability at least ``confidence_level`` (1 − δ) over the certify samples, the policy
    returned disagrees with the source model on at most ``max_disagreement`` (ε) of unseen data from
    their distribution (theorem and assumptions: see the module). The path, float64[levels, exits],
    goes from conservative to aggressive, no threshold rising (:func:`.agreement.common_path`). It
    was fixed without the float[exits, samples] confidences and bool[exits, samples] ``agrees``.

    Data may contain a sample in several equal rows: ``copies``, int64[samples], is the number of
    rows of each sample, by default 1. Copies are not independent evidence, so samples count once.
    But if inputs recur in service as often as in the data, the disagreement is a share of rows. The
    data do not show which case holds, so a level has to pass twice, counted by samples and counted
    by rows, each at half of the risk δ: both hold together with probability ``confidence_level``.

    ``strata`` have separate bounds, which all hold with the same ``confidence_level``.

    Returns ``None`` if not even the first level passed: too few samples
    (:func:`.binomial.samples_needed`), or a path that starts too aggressively. Then serve without
    exits.
    """
    path = np.asarray(path_thresholds, dtype=np.float64)
    level = level_of_each(confidence_level, copies=copies is not None)
    counted = count_errors(path, confidence, agrees, copies, max_disagreement=max_disagreement)
    within = count_strata(path, confidence, agrees, copies, strata)
    failed = np.any([c.errors > c.allowed(level) for c in [*counted, *within]], axis=0)
    index = (int(failed.argmax()) if failed.any() else len(failed)) - 1
    if index < 0:
        return None
    p_values = [binomial_cdf(int(c.errors[index]), c.of, max_disagreement) for c in counted]
    return Certificate(
        index=index,
        thresholds=path[index].copy(),
        errors=int(counted[0].errors[index]),
        samples=counted[0].of,
        p_value=min(len(counted) * max(p_values), 1.0),
    )


def level_of_each(confidence_level: float, *, copies: bool) -> float:
    """Return the confidence level of each test of a path level: with ``copies`` there are two."""
    return half_risk(confidence_level) if copies else confidence_level


class ErrorCount(NamedTuple):
    """Errors at every level of a path, among a number of samples or rows."""

    errors: IntArray
    """Number of errors, int64[levels]."""
    of: int
    """Number of samples; of rows, if errors are counted by ``copies``."""
    unit: str
    """Name of the things that ``of`` counts, for messages."""
    max_disagreement: float
    """Largest share of errors that the promise allows."""

    def allowed(self, confidence_level: float) -> int:
        """Return the largest number of errors with which a level passes; −1 if it cannot pass."""
        return allowed_errors(self.of, self.max_disagreement, confidence_level)


def count_errors(
    path: FloatArray,
    confidence: ConfidenceArray,
    agrees: BoolArray,
    copies: IntArray | None = None,
    *,
    max_disagreement: float,
    of: str = "",
) -> list[ErrorCount]:
    """Count errors by samples and, where samples have ``copies``, by rows.

    ``of`` is appended to the unit of the counts.
    """
    samples, errors = int(np.shape(confidence)[1]), walk(path, confidence, agrees).errors
    counted = [ErrorCount(errors, samples, f"certify samples{of}", max_disagreement)]
    if copies is not None:
        loss = (~np.asarray(agrees)).astype(np.float64)
        shares = outlook(path, np.asarray(confidence), loss, copies.astype(np.float64)).risk
        rows = int(copies.sum())
        errors = np.rint(shares * rows).astype(np.int64)
        unit = f"rows that certify samples{of} represent"
        counted.append(ErrorCount(errors, rows, unit, max_disagreement))
    return counted


def count_strata(
    path: FloatArray,
    confidence: ConfidenceArray,
    agrees: BoolArray,
    copies: IntArray | None,
    strata: Sequence[Stratum],
) -> list[ErrorCount]:
    """Count errors within each stratum, as :func:`count_errors` does."""
    return [
        count
        for stratum in strata
        for count in count_errors(
            path,
            np.asarray(confidence)[:, stratum.rows],
            np.asarray(agrees)[:, stratum.rows],
            None if copies is None else copies[stratum.rows],
            max_disagreement=stratum.max_disagreement,
            of=f" of {stratum.name}",
        )
    ]
