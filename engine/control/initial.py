"""The policy that a controller starts with: the bundle's, reduced to a budget and constraint.

Where the policy is certified again (:func:`certified_on`), the certify split is used a second time,
and its first result influenced which exits are tested. The argument why this is sound:

Compiling fixes exits A and their path P on the tuning split. The certify split then determines how
far P holds, to level l*, and the exits that answer there, U(l*), are the bundle's. Thresholds only
fall along P, so that U(0) ⊂ U(1) ⊂ … grows by one exit or by several at a time: for any
certify split, U(l*) is one of at most |A| sets that are not empty, and *these sets* are
fixed by the tuning split. So is the subset of each that fits a budget (:func:`within_budget`), and
its path (:func:`.agreement.tuning_path`). For each set, fixed sequence testing at δ/K passes a
policy whose disagreement is above ε with probability at most δ/K
(:mod:`offramp.certify.learn_then_test`). The K >= |A| exits of a bundle allow at most K of these
tests. So with probability 1 − δ no test passes such a policy, including the test that was chosen by
the certify split.

The argument holds for all exits of the bundle and for some of them, and for any constraint and
confidence: without the exits of A that made the walk stop at l*, another walk may go past l*, on a
path that was chosen by where the first walk stopped. The argument also holds where ``eecompile
rehearse`` raised the thresholds of P, because it fixes them without the certify split as well. Only
limits that the bundle's own promise covers need no test: there, the bundle's policy is used as it
is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Answer, ExitPolicy, Promise
from offramp.bundle.records import CERTIFY, TUNE, class_strata
from offramp.certify import Stratum, Weighted, certify, evaluate, tuning_path, walk
from offramp.certify.learn_then_test import level_of_each
from offramp.engine.control.costs import CostModel


def within_budget(
    policy: ExitPolicy,
    costs: CostModel,
    records: Mapping[str, NDArray[Any]],
    *,
    max_overhead: float,
    max_disagreement: float,
) -> tuple[int, ...]:
    """Return the exits of a policy to keep, so that the overhead is within a budget.

    ``max_overhead`` is the largest delay of the model's end, as a share of the source model's time.
    The exit whose removal costs least on the tuning split is removed first, with thresholds that
    keep ``max_disagreement`` there (Apparate's ramp budget, 3.1; the paper leaves open which exits
    to remove). The certify split is not used: the exits chosen here are certified on it.
    """
    exits = tuple(active.exit for active in policy.active)
    if not exits or costs.overhead(exits) <= max_overhead:
        return exits
    confidence, agrees = _split(records, TUNE)
    rows = list(exits)
    path = tuning_path(confidence[rows], agrees[rows])
    errors = walk(path, confidence[rows], agrees[rows]).errors
    fine = np.flatnonzero(errors <= max_disagreement * confidence.shape[1])
    thresholds = dict(zip(exits, path[fine[-1]].tolist(), strict=True))

    def savings(exits: Sequence[int]) -> float:
        rows = list(exits)
        data = confidence[rows], agrees[rows], costs.latency_ms(rows)
        at = np.array([thresholds[e] for e in rows])
        return evaluate(*data, at, vanilla_ms=costs.source_ms).savings if rows else 0.0

    while exits and costs.overhead(exits) > max_overhead:
        exits = max((tuple(e for e in exits if e != gone) for gone in exits), key=savings)
    return exits


def certified_on(
    exits: Sequence[int],
    costs: CostModel,
    records: Mapping[str, NDArray[Any]],
    *,
    max_disagreement: float,
    confidence_level: float,
    answer: Answer | None = None,
    max_class_disagreement: float | None = None,
) -> ExitPolicy:
    """Return the most aggressive policy of these exits that calibration data certify, version 1.

    ``exits`` are some or all exits of the bundle's policy. The method is that of ``eecompile``: a
    path fixed by the tuning split, walked on the certify split (:mod:`offramp.certify`), at a
    reduced share of 1 − the confidence level, to account for the choice of these exits (see the top
    of this file). Exits that the policy does not need run in shadow mode, at ``NEVER``.
    ``max_class_disagreement`` bounds the classes of the ``answer`` that have enough samples.
    """
    rows = list(exits)
    silent = tuple(ActiveExit(exit=e, threshold=NEVER) for e in exits)
    conservative = ExitPolicy(version=1, active=silent)
    if not rows:
        return conservative
    path = tuning_path(*_split(records, TUNE, rows))
    confidence, agrees = _split(records, CERTIFY, rows)
    copies = records["copies"][records["split"] == CERTIFY] if "copies" in records else None
    sets = costs.exits
    level = 1 - (1 - confidence_level) / sets
    strata: tuple[Stratum, ...] = ()
    if answer is not None:
        final = records["final_prediction"][records["split"] == CERTIFY]
        strata = class_strata(
            answer,
            final,
            max_disagreement=max_class_disagreement,
            confidence_level=level_of_each(level, copies=copies is not None),
        )
    found = certify(
        path,
        confidence,
        agrees,
        max_disagreement=max_disagreement,
        confidence_level=level,
        copies=copies,
        strata=strata,
    )
    if found is None:
        return conservative
    latency_ms, source_ms = costs.latency_ms(rows), costs.source_ms
    outcome = evaluate(confidence, agrees, latency_ms, found.thresholds, vanilla_ms=source_ms)
    pairs = zip(exits, found.thresholds.tolist(), strict=True)
    return replace(
        conservative,
        active=tuple(ActiveExit(exit=e, threshold=threshold) for e, threshold in pairs),
        promise=Promise(
            max_disagreement=max_disagreement,
            confidence_level=confidence_level,
            certify_samples=found.samples,
            certify_errors=found.errors,
            p_value=min(sets * found.p_value, 1.0),
            predicted_savings=outcome.savings,
            max_class_disagreement=max_class_disagreement,
        ),
    )


def tuning_split(records: Mapping[str, NDArray[Any]], exits: int) -> Weighted:
    """Return the calibration samples that curves may be fitted on; ValueError if there are none."""
    shape = records["confidence"].shape
    if len(shape) != 2 or shape[0] != exits:
        raise ValueError(f"records hold confidences of shape {shape}, expected [{exits}, samples]")
    if not (records["split"] == TUNE).any():
        raise ValueError("records hold no samples to tune on (split 1); compile the bundle again")
    confidence, agrees = _split(records, TUNE)
    weight = np.ones(confidence.shape[1])
    return Weighted(confidence=confidence.astype(np.float32), agrees=agrees, weight=weight)


def _split(
    records: Mapping[str, NDArray[Any]], which: int, exits: Sequence[int] | slice = slice(None)
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return confidence and agreement, [exits, samples], of one split; by default for all exits."""
    chosen = records["split"] == which
    agrees = records["prediction"][:, chosen] == records["final_prediction"][chosen]
    return records["confidence"][:, chosen][exits], agrees[exits]
