"""Status and promise of a model whose engines differ in precision from the float32 source model.

Its exits are certified, and monitored while serving, against the model's end in that precision. The
disagreement of the end with the float32 model was bounded once, when the engines were built
(:class:`~offramp.bundle.engines.PrecisionEvidence`). The same applies where a dynamically quantised
model answers some samples differently in other batches
(:class:`~.schema.batch_effect.BatchEffect`): exits are compared with the end of the same batch.
Users see the sum of both disagreements. The sum holds with a lower confidence: the risks (1 -
confidence) of both bounds are added.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from offramp.bundle import Bundle, ExitPolicy
from offramp.bundle.engines import PrecisionEvidence
from offramp.bundle.schema.compilation import BatchEffect
from offramp.certify.binomial import both_hold
from offramp.engine.control.controller import ControlStatus

EndEvidence: TypeAlias = PrecisionEvidence | BatchEffect
"""Counts of the disagreement of the model's end alone."""


def end_evidence(bundle: Bundle) -> EndEvidence | None:
    """Return the evidence that the model's end disagrees with the source model, if there is any."""
    return bundle.evidence or bundle.manifest.batch_effect


def whole_status(status: ControlStatus, evidence: EndEvidence | None) -> ControlStatus:
    """Return a status relative to the float32 model; it adds two shares that may overlap."""
    if evidence is None:
        return status
    level = both_hold(status.confidence_level)
    spent, seen = evidence.spent(level), status.disagreement
    return replace(
        status,
        max_disagreement=status.max_disagreement + spent,
        confidence_level=level,
        disagreement=None if seen is None else seen + evidence.end_differs / evidence.samples,
        disagreement_upper_bound=min(status.disagreement_upper_bound + spent, 1.0),
    )


def whole_policy(policy: ExitPolicy, evidence: EndEvidence | None) -> ExitPolicy:
    """Return a policy whose promise is relative to the float32 model."""
    promise = policy.promise
    if evidence is None or promise is None:
        return policy
    level = both_hold(promise.confidence_level)
    differs = math.ceil(evidence.end_differs * promise.certify_samples / evidence.samples)
    return replace(
        policy,
        promise=replace(
            promise,
            max_disagreement=promise.max_disagreement + evidence.spent(level),
            confidence_level=level,
            certify_errors=min(promise.certify_errors + differs, promise.certify_samples),
        ),
    )
