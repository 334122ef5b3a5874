"""Rehearsals on recorded answers: what compiling and adapting to new data share."""

from __future__ import annotations

import numpy as np

from offramp.bundle import ExitPolicy
from offramp.calibration.records import ExitRecords
from offramp.calibration.rehearsal.load import Forecast, Load, forecast
from offramp.calibration.rehearsal.rehearsal import rehearse
from offramp.calibration.rehearsal.result import Rehearsal, RehearsalSettings
from offramp.calibration.selection import certifiable_errors
from offramp.engine.control.published.two_stage import StageTimes


def draw_load(records: ExitRecords, settings: RehearsalSettings, *, seed: int) -> Load:
    """Draw batches of recorded samples."""
    return Load.of(
        records.confidence,
        records.agrees,
        batch_size=settings.batch_size,
        batches=settings.batches,
        rng=np.random.default_rng(seed),
    )


def rehearse_records(
    tune: ExitRecords,
    times: StageTimes,
    settings: RehearsalSettings,
    *,
    confidence_level: float,
    seed: int,
) -> Rehearsal:
    """Search the exits on the tuning split, with no more errors than may still be certified."""
    allowed = certifiable_errors(
        tune.confidence.shape[1], settings.max_disagreement, confidence_level
    )
    return rehearse(draw_load(tune, settings, seed=seed), times, settings, allowed_errors=allowed)


def forecast_policy(
    policy: ExitPolicy,
    records: ExitRecords,
    times: StageTimes,
    settings: RehearsalSettings,
    *,
    seed: int,
) -> Forecast:
    """Predict what a policy brings for batches of recorded samples."""
    return forecast(draw_load(records, settings, seed=seed), times, policy.active)
