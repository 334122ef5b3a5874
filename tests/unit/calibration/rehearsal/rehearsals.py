"""A model of four segments and three exits, small enough to rehearse by hand.

A segment takes 2 ms and 1 ms per row; exits take 1, 1 and 3 ms for any rows; borders nothing.
Eight samples make two batches of four:

    batch 0: exit 0 knows samples 0, 1, 2; exits 1 and 2 all of them
    batch 1: exit 0 knows sample 4; exit 1 samples 4, 5; exit 2 samples 4, 5, 6
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offramp.bundle import Profile
from offramp.calibration.rehearsal import RehearsalSettings
from offramp.calibration.rehearsal.load import RehearsalLoad
from offramp.calibration.rehearsal.two_stage import StageTimes

SIZES = (1, 2, 3, 4)
KNOWN = np.array(
    [[1, 1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]], dtype=bool
)
"""[exits, samples]: sure (0.9) and right; else unsure (0.1) and wrong."""
BATCHES = np.arange(8).reshape(2, 4)


def times(exits_ms: tuple[float, ...] = (1.0, 1.0, 3.0)) -> StageTimes:
    segment = tuple(2.0 + rows for rows in SIZES)
    return StageTimes(
        profile=Profile(
            device="paper",
            threads=1,
            batch_sizes=SIZES,
            source_ms=tuple(4 * ms for ms in segment),
            segments_ms=(segment,) * 4,
            exits_ms=tuple((ms,) * 4 for ms in exits_ms),
            stages_ms=((0.0,) * 4,) * len(exits_ms),
        ),
        after_segment=(0, 1, 2),
    )


def load(known: np.ndarray = KNOWN) -> RehearsalLoad:
    return RehearsalLoad(
        confidence=np.where(known, 0.9, 0.1).astype(np.float32), agrees=known, batches=BATCHES
    )


def settings(**changes: Any) -> RehearsalSettings:
    given = {"batch_size": 4, "batches": 2, "max_disagreement": 0.0, **changes}
    return RehearsalSettings(**given)
