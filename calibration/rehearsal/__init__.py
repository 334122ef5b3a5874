"""PAME's rehearsal: the best exits for a load, found on recorded answers (section 6).

The package may import :mod:`offramp.certify`, bundles, the rest of calibration and the engine's
cost models.
"""

from offramp.calibration.rehearsal.adaptation import ExitMove, adapt, raising_path
from offramp.calibration.rehearsal.load import (
    REHEARSAL,
    Candidate,
    Forecast,
    Rehearsal,
    RehearsalSettings,
    RehearsalStep,
    Rehearsed,
)
from offramp.calibration.rehearsal.rehearsal import (
    draw_load,
    forecast_policy,
    rehearse,
    rehearse_records,
)

__all__ = [
    "REHEARSAL",
    "Candidate",
    "ExitMove",
    "Forecast",
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
