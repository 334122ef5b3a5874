"""Choice of the exits in use on the tuning split, and certification of their exit policy.

All predictions use profiled times and the records of the tuning split. The certify split is used
once, when the path of policies is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, ExitPolicy, Promise
from offramp.certify import (
    Stratum,
    allowed_errors,
    certify,
    evaluate,
    savings_of,
    tuning_path,
    walk,
)
from offramp.certify.binomial import count_allowed
from offramp.engine.control.costs import CostModel

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

MIN_GAIN = 0.003
"""Share of the source model's time that every further exit must save, so that noise in a profile
does not add or drop an exit. A larger value was tried: with 0.01 the Fashion-MNIST example keeps
three exits instead of four, and saves 1.2 points less time at batch 16, and 0.9 at batch 1."""
_NO_EXITS = ExitPolicy(version=1, active=())


def net_savings_alone(
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    index: int,
    max_disagreement: float,
) -> float:
    """Predict the net savings of an exit without any other, with its cost subtracted.

    ``confidence`` and ``agrees`` are [samples] of the tuning split; at most a share
    ``max_disagreement`` of them may disagree; ``cost`` has the head's cost at ``index``.
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
    """Return the errors on the tuning split with which a policy may pass on the certify split.

    This is the number of errors that can be certified on ``samples`` samples. But it is at least
    half of the share ``max_disagreement`` of the samples, since a small split can certify little.
    """
    allowed = allowed_errors(samples, max_disagreement, confidence_level)
    return max(allowed, int(max_disagreement * samples / 2))


class Candidates:
    """Sets of exits that may be chosen, and the outcome of each on the tuning split.

    Counts of answers do not depend on costs, and are cached.
    """

    def __init__(
        self,
        confidence: NDArray[np.float32],
        agrees: BoolArray,
        *,
        max_disagreement: float,
        confidence_level: float,
        strata: Sequence[Stratum] = (),
    ) -> None:
        """Take confidence and agreement [exits, samples] of the tuning split, and its strata."""
        self.exits, samples = confidence.shape
        self._confidence, self._agrees = confidence, agrees
        self._allowed = certifiable_errors(samples, max_disagreement, confidence_level)
        self._strata = [
            (s.rows, certifiable_errors(len(s.rows), s.max_disagreement, confidence_level))
            for s in strata
        ]
        # an exit's column of the common path does not depend on the other exits
        self._path = tuning_path(confidence, agrees) if self.exits else np.empty((0, 0))
        self._counts: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def counts(self, active: tuple[int, ...]) -> NDArray[np.int64]:
        """Count the answers at each exit and at the model's end: int64[levels, active + 1].

        There is one row for each level of the threshold path of ``active`` that may pass.
        """
        if active not in self._counts:
            rows = list(active)
            path, confidence = self._path[:, rows], self._confidence[rows]
            agrees = self._agrees[rows]
            walked = walk(path, confidence, agrees)
            may_pass = walked.errors <= self._allowed
            for samples, allowed in self._strata:
                errors = walk(path, confidence[:, samples], agrees[:, samples]).errors
                may_pass &= errors <= allowed
            self._counts[active] = walked.counts[may_pass]
        return self._counts[active]

    def savings(self, active: tuple[int, ...], cost: CostModel) -> float:
        """Predict the largest savings on the common path of exits, as a share of the time."""
        if not active:
            return 0.0
        saved = savings_of(self.counts(active), cost.latency_ms(list(active)), cost.source_ms)
        return float(saved.max(initial=0.0))

    def choose(self, cost: CostModel, *, max_overhead: float | None = None) -> tuple[int, ...]:
        """Return the exits that are expected to save most time together, in depth order.

        Exits also cost time for samples that leave at no exit. This cost is part of the predicted
        time. It is not a limit, so noise in measurements can only move the choice to a set that
        saves nearly as much. Each exit must add :data:`MIN_GAIN` to the savings; the result may be
        empty.

        The search drops, adds and exchanges single exits while that helps. The search runs twice:
        first from no exit, then from the set that remains after the least useful of all exits has
        been dropped repeatedly while that helps. The better result is returned; if both are equally
        good, the smaller set is returned.

        ``cost`` is that of all exits at the reference batch size. ``max_overhead`` limits the share
        of the source model's time that exits certainly add where no sample exits (Apparate's ramp
        budget, 3.1); ``None`` is no limit.
        """

        @cache
        def worth(active: tuple[int, ...]) -> float:
            return self.savings(active, cost) - MIN_GAIN * len(active)

        def fits(active: tuple[int, ...]) -> bool:
            return max_overhead is None or cost.sure_overhead(active) <= max_overhead

        def improved(active: tuple[int, ...]) -> tuple[int, ...]:
            while neighbours := [s for s in _neighbours(active, self.exits) if fits(s)]:
                best = max(neighbours, key=worth)
                if worth(best) <= worth(active):
                    break
                active = best
            return active

        fewest, active = improved(()), tuple(range(self.exits))
        while active:
            fewer = max((active[:i] + active[i + 1 :] for i in range(len(active))), key=worth)
            if fits(active) and worth(fewer) < worth(active):
                break
            active = fewer
        active = max(fewest, improved(active), key=worth)
        return active if worth(active) > 0 else ()


def _neighbours(active: tuple[int, ...], exits: int) -> list[tuple[int, ...]]:
    """Return every set with one exit less, one exchanged, or one more, in this order."""
    others = [index for index in range(exits) if index not in active]
    fewer = [tuple(e for e in active if e != index) for index in active]
    more = [tuple(sorted({*active, other})) for other in others]
    swaps = [tuple(sorted({*active, other} - {index})) for index in active for other in others]
    return [*fewer, *swaps, *more]


def certified_policy(
    active: Sequence[int],
    path: FloatArray,
    confidence: NDArray[np.float32],
    agrees: BoolArray,
    cost: CostModel,
    *,
    max_disagreement: float,
    confidence_level: float,
    whole: bool = False,
    copies: NDArray[np.int64] | None = None,
    strata: Sequence[Stratum] = (),
    max_class_disagreement: float | None = None,
) -> ExitPolicy:
    """Return the policy of the most aggressive level that is certified (Learn then Test).

    ``path`` [levels, active] has the thresholds of the ``active`` exits, fixed without the certify
    split. ``confidence`` and ``agrees`` are [exits, samples] of that split, for all exits.
    ``copies`` [samples] is the number of rows that each sample represents, if not one. ``strata``
    are the classes of the certify split, if ``max_class_disagreement`` bounds them. The certificate
    holds with probability ``confidence_level``, 1 − α; ``cost`` predicts the savings.

    The policy has no active exits if no level passed or nothing is saved. With ``whole`` it has all
    exits of ``active``; those that the certificate leaves unused are at ``NEVER``.
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
        copies=copies,
        strata=strata,
    )
    if certificate is None or not (used := certificate.thresholds < NEVER).any():
        return _NO_EXITS
    if whole:
        used = np.ones_like(used)
    kept, thresholds = np.array(rows)[used].tolist(), certificate.thresholds[used]
    outcome = evaluate(
        confidence[kept], agrees[kept], cost.latency_ms(kept), thresholds, vanilla_ms=cost.source_ms
    )
    if outcome.savings <= 0:
        return _NO_EXITS
    promise = Promise(
        max_disagreement=max_disagreement,
        confidence_level=confidence_level,
        certify_samples=certificate.samples,
        certify_errors=certificate.errors,
        p_value=certificate.p_value,
        predicted_savings=float(outcome.savings),
        max_class_disagreement=max_class_disagreement,
    )
    chosen = zip(kept, thresholds.tolist(), strict=True)
    active_exits = tuple(ActiveExit(exit=index, threshold=level) for index, level in chosen)
    return ExitPolicy(version=1, active=active_exits, promise=promise)
