"""The exit policy of a dry run: exits that can be watched at work, without a promise."""

from __future__ import annotations

from typing import Final

import numpy as np

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.calibration.choose.records import ExitRecords
from offramp.certify.decision import NEVER

MOST_EXITS: Final = 3
"""Exits in use, spread over those that were built."""


def dry_run_policy(tune: ExitRecords, *, whole: bool) -> ExitPolicy:
    """Return a policy under which half of the samples that reach an exit leave there.

    Args:
        tune: Confidence of each exit on the tuning split.
        whole: Whether all exits have to run, as the criterion looks at earlier ones; exits without
            a threshold of their own then have ``NEVER``.
    """
    exits, samples = tune.confidence.shape
    chosen = np.unique(np.linspace(0, exits - 1, min(exits, MOST_EXITS)).round().astype(int))
    left = np.ones(samples, np.bool_)
    thresholds: dict[int, float] = {}
    for exit_ in chosen.tolist():
        if not left.any():
            break
        confidence = tune.confidence[exit_]
        median = np.quantile(confidence[left], 0.5, method="higher")
        thresholds[exit_] = float(median)
        left &= confidence < median
    used = range(exits) if whole and thresholds else sorted(thresholds)
    active = tuple(ActiveExit(exit=e, threshold=thresholds.get(e, NEVER)) for e in used)
    return ExitPolicy(version=1, active=active)
