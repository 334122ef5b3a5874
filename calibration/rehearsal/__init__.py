"""PAME's rehearsal: which exits serve a load best, tried on recorded answers (section 6).

May import :mod:`offramp.certify`, bundles, the rest of calibration and the engine's cost models.
"""

from offramp.calibration.rehearsal.adaptation import Move, adapt, raising_path
from offramp.calibration.rehearsal.load import Forecast
from offramp.calibration.rehearsal.rehearsal import (
    draw_load,
    forecast_policy,
    rehearse,
    rehearse_records,
)
from offramp.calibration.rehearsal.result import (
    REHEARSAL,
    Candidate,
    Rehearsal,
    RehearsalSettings,
    RehearsalStep,
    Rehearsed,
)

__all__ = [
    "REHEARSAL",
    "Candidate",
    "Forecast",
    "Move",
    "Rehearsal",
    "RehearsalSettings",
    "RehearsalStep",
    "Rehearsed",
    "adapt",
    "draw_load",
    "forecast_policy",
    "raising_path",
    "rehearse",
    "rehearse_records",
]
