"""Samples as a policy would serve them, for tests of controllers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.certify import MODEL_END, UNKNOWN, Observations

RIGHT, WRONG = 1, 2
"""Predictions; the source model always answers RIGHT."""


def policy_of(version: int, thresholds: dict[int, float]) -> ExitPolicy:
    return ExitPolicy(
        version=version,
        active=tuple(ActiveExit(exit=e, threshold=t) for e, t in sorted(thresholds.items())),
    )


def serve(
    policy: ExitPolicy,
    confidence: NDArray[Any],
    agrees: NDArray[np.bool_],
    *,
    forced: NDArray[np.bool_] | None = None,
) -> Observations:
    """Serve float[K, n] in release mode: every exit in use sees every sample, which runs on."""
    exits, samples = confidence.shape
    shown = np.full((exits, samples), np.nan, dtype=np.float32)
    answered_at = np.full(samples, MODEL_END)
    for active in reversed(policy.active):
        shown[active.exit] = confidence[active.exit]
        answered_at[shown[active.exit] >= active.threshold] = active.exit
    return Observations(
        confidence=shown,
        prediction=np.where(np.isnan(shown), UNKNOWN, np.where(agrees, RIGHT, WRONG)).astype(
            np.int32
        ),
        answered_at=answered_at,
        final=np.full(samples, RIGHT, dtype=np.int32),
        audit_probability=np.ones(samples),
        policy_version=np.full(samples, policy.version),
        forced=np.zeros(samples, dtype=np.bool_) if forced is None else forced,
    )
