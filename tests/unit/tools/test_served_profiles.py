"""Simulated serving is counted into windows as a server counts it."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.adapt.replay import ComparedController, ReplaySettings, replay
from benchmarks.served_profiles import departures_of, profile_of
from tests.facts import facts
from tests.unit.tools.adapt_cases import COSTS, FOUR, Scripted, in_order, policy_of, repeated

from offramp.bundle import NEVER
from offramp.certify import MODEL_END
from offramp.cluster.planning.batch_profile import ProfileWindow
from offramp.engine.stages.plan import Mode


@pytest.mark.parametrize(("mode", "decided"), [(Mode.RELEASE, (4, 4)), (Mode.LEAVE, (4, 0))])
def test_windows_are_of_the_exits_in_use(mode: Mode, decided: tuple[int, ...]) -> None:
    """Exits in shadow mode run if answers are observed; otherwise they are off."""
    controller = Scripted(policy_of(1, {0: 0.95, 1: NEVER}))
    contender = ComparedController(label="x", description="", controller=controller, mode=mode)
    pace = ReplaySettings(chunk=4, delay_chunks=0, tuning_delay=0)
    trace = replay(in_order(("all", repeated(FOUR, 2))), contender, COSTS, pace)
    profile = profile_of(trace, contender, np.array([4, 4]), 120.0, exits=2)
    assert profile.windows == tuple(
        ProfileWindow(start_s=start_s, decided=decided, went_on=decided) for start_s in (0.0, 120.0)
    )


def test_rows_that_no_exit_in_use_answered_are_a_mistake() -> None:
    answered_at = np.array([0, MODEL_END, 0])
    assert departures_of(answered_at, (0,)).left == (2, 1)
    with pytest.raises(ValueError, match=facts("exits", "(1,)")):
        departures_of(answered_at, (1,))
