"""Dry runs: compiling on random inputs shows exits and times, and certifies nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, ExitPolicy
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.certify.decision import NEVER
from offramp.compiler.data.made import RandomSource
from offramp.compiler.graphs.runtime import random_inputs
from offramp.compiler.graphs.source_model import SourceModel

MOST_EXITS: Final = 3
"""Largest number of exits in use; they are spread evenly over the exits that were built."""


def dry_run_policy(tune: ExitRecords, *, whole: bool) -> ExitPolicy:
    """Return a policy under which half of the samples that reach an exit leave there.

    Args:
        tune: Confidence of each exit on the tuning split.
        whole: Whether all exits have to run, because the criterion depends on earlier exits; exits
            that are not chosen then have the threshold ``NEVER``.
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


_log = logging.getLogger(__name__)
WARNING = (
    "DRY RUN ON RANDOM INPUTS: nothing is certified. Times are real; shares of answers and "
    "agreement do not describe your data."
)

DRY_RUN_DISAGREEMENT = 0.5
"""Bound on disagreement in a dry run. It is high, because few heads imitate answers to noise
well."""


def made_for(model: SourceModel, source: RandomSource, *, seed: int) -> RandomSource:
    """Return a source of random inputs for a model, and warn that they certify nothing."""
    _log.warning(WARNING)

    def draw(size: int, batch: int) -> Mapping[str, NDArray[Any]]:
        return random_inputs(model.proto, size, seed=1_000_003 * seed + batch, whole=True)

    return source.drawn_by(draw)
