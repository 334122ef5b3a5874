"""The binomial tail, exact bounds on an error rate, and sizes of splits that can certify."""

from __future__ import annotations

import itertools
import math
from typing import Final


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Return P(Binomial(n, p) <= k), summed from log-space terms (lgamma) to avoid underflow."""
    if n < 0 or not 0 <= p <= 1:
        raise ValueError(f"expected n >= 0 and p in [0, 1], got n={n}, p={p}")
    if k < 0:
        return 0.0
    if k >= n or p == 0:
        return 1.0
    if p == 1:
        return 0.0
    if k > n * p:  # the upper tail is the shorter and smaller sum
        return 1.0 - _sum_terms(range(k + 1, n + 1), n, p)
    return _sum_terms(range(k, -1, -1), n, p)


def samples_needed(max_disagreement: float, confidence_level: float = 0.95) -> int:
    """Return how many samples certify the bound if all agree: 299 for 1 % at 95 %.

    It is the smallest n with (1 − max_disagreement)^n <= 1 − confidence_level.
    """
    check_promise(max_disagreement, confidence_level)
    alpha = 1 - confidence_level
    n = max(1, math.floor(math.log(alpha) / math.log1p(-max_disagreement)) - 1)
    while binomial_cdf(0, n, max_disagreement) > alpha:
        n += 1
    return n


def allowed_errors(samples: int, max_disagreement: float, confidence_level: float = 0.95) -> int:
    """Return the largest number of errors that certifies the bound; −1 if none does."""
    check_promise(max_disagreement, confidence_level)
    alpha = 1 - confidence_level
    low, high = -1, samples
    while high - low > 1:  # the tail rises with k: passes at low, fails at high
        middle = (low + high) // 2
        if binomial_cdf(middle, samples, max_disagreement) <= alpha:
            low = middle
        else:
            high = middle
    return low


def count_allowed(max_disagreement: float, samples: int) -> int:
    """Return the largest number of errors that, divided by ``samples``, is within the bound."""
    if not 0 <= max_disagreement <= 1:
        raise ValueError(f"max_disagreement must be in [0, 1], got {max_disagreement}")
    allowed = int(max_disagreement * samples) + 1
    while allowed / samples > max_disagreement:
        allowed -= 1
    return allowed


def upper_bound(errors: int, samples: int, confidence_level: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson upper bound of an error rate.

    It is the largest p with P(Binomial(samples, p) <= errors) >= 1 − confidence_level, found by
    bisection and rounded upwards (to about 1e-16).
    """
    if samples < 1 or not 0 <= errors <= samples:
        raise ValueError(f"expected 0 <= errors <= samples >= 1, got {errors} of {samples}")
    if not 0 < confidence_level < 1:
        raise ValueError(f"confidence_level must be in (0, 1), got {confidence_level}")
    low, high = errors / samples, 1.0
    while low < (middle := (low + high) / 2) < high:
        if binomial_cdf(errors, samples, middle) > 1 - confidence_level:
            low = middle
        else:
            high = middle
    return high


def check_promise(max_disagreement: float, confidence_level: float) -> None:
    """Check that a bound and a confidence level are in (0, 1); ValueError otherwise."""
    if not 0 < max_disagreement < 1:
        raise ValueError(f"max_disagreement must be in (0, 1), got {max_disagreement}")
    if not 0 < confidence_level < 1:
        raise ValueError(f"confidence_level must be in (0, 1), got {confidence_level}")


def _sum_terms(ks: range, n: int, p: float) -> float:
    """Sum P(Binomial(n, p) = k) over ks from the mode outwards, until terms are negligible."""
    log_p, log_q, log_n = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    terms: list[float] = []
    for k in ks:
        log_choose = log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        terms.append(math.exp(log_choose + k * log_p + (n - k) * log_q))
        if terms[-1] < 1e-25 * terms[0]:
            break
    return min(1.0, math.fsum(terms))


TUNE_SHARE: Final = 0.15
CERTIFY_SHARE: Final = 0.25
"""Share of the data that tunes, and share that certifies; the rest trains, as heads gain most from
more data. Certification improves little beyond some 5,000 samples."""


def split_sizes(samples: int, certify_at_least: int) -> tuple[int, int] | None:
    """Return how many samples train and how many tune; the rest certify. ``None`` if too few."""
    certify = max(round(samples * CERTIFY_SHARE), certify_at_least)
    tune = round(samples * TUNE_SHARE)
    train = samples - certify - tune
    return (train, tune) if train >= max(certify, 2) and tune >= 1 else None


def least_to_split(certify_at_least: int) -> int:
    """Return the smallest number of samples that leaves ``certify_at_least`` to certify."""
    begin = math.floor(2 * certify_at_least)  # as many train as certify
    return next(n for n in itertools.count(begin) if split_sizes(n, certify_at_least))


def half_risk(confidence_level: float) -> float:
    """Return the level for each of two statements such that both hold at ``confidence_level``."""
    return 1 - (1 - confidence_level) / 2


def both_hold(confidence_level: float) -> float:
    """Return the level at which two statements hold together: the inverse of ``half_risk``."""
    return 1 - 2 * (1 - confidence_level)
