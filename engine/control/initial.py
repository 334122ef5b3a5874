"""The policy that a controller starts with: the bundle's, cut down to a budget and constraint.

Where it is certified again (:func:`certified_on`), the certify split is asked a second time, and
its first answer had a say in which exits it is asked about. What makes that sound:

Compiling fixes exits A and their path P on the tuning split. The certify split then says how far P
holds, to level l*, and the exits that answer there, U(l*), are the bundle's. Thresholds only fall
along P, so that U(0) ⊂ U(1) ⊂ … grows by an exit at a time or by several: whatever the certify
split says, U(l*) is one of at most |A| sets that are not empty, and *these* are fixed by the tuning
split. So is what is left of each within a budget (:func:`within_budget`), and its path
(:func:`.agreement.tuning_path`). For each set, fixed sequence testing at δ/K passes a policy whose
disagreement is above ε with probability at most δ/K (:mod:`offramp.certify.learn_then_test`). The
K >= |A| exits of a bundle make at most K of these tests, so that with probability 1 − δ none of
them passes such a policy, and neither does the one that was chosen with the certify split in sight.

That holds for all exits of the bundle as for some of them, and however strict constraint and
confidence are: without the exits of A that made the walk stop at l*, it may go on past it, on a
path that was chosen by where it stopped. It also holds where ``eecompile rehearse`` raised the
thresholds of P, which it fixes without the certify split as well. Only what the bundle's own
promise covers needs no test: there its policy is taken as it is.
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
    """The exits of a policy to keep so that the model's end comes late by so much at most.

    ``max_overhead`` is a share of the source model's time. The exit whose absence costs least on
    the tuning split goes first, by thresholds that keep ``max_disagreement`` there (Apparate's ramp
    budget, 3.1; which exits go is left open there). Nothing of the certify split is looked at: what
    is chosen here is certified on it.
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
    """The most aggressive policy of these exits that the calibration data certifies, version 1.

    As ``eecompile`` found the bundle's policy, of whose exits these are some or all: a path fixed
    by the tuning split, walked on the certify split (:mod:`offramp.certify`), at a share of 1 − the
    confidence level that makes up for how these exits were found (see the top of this file). Exits
    that it does not need run in shadow mode, at ``NEVER``. ``max_class_disagreement`` bounds the
    classes of the ``answer`` that have enough samples.
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
    """The samples of the calibration data that curves may be fitted on; ValueError if none fit."""
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
    """Confidence and agreement, [exits, samples], of one split; default: of all exits."""
    chosen = records["split"] == which
    agrees = records["prediction"][:, chosen] == records["final_prediction"][chosen]
    return records["confidence"][:, chosen][exits], agrees[exits]
