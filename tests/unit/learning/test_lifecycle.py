"""Every transition of learning, under virtual time."""

from __future__ import annotations

import pytest

from offramp.engine.learning.lifecycle import (
    FIRST_RETRY_S,
    ExitWatch,
    LearnAction,
    LifeCycle,
    Phase,
    RecordingProgress,
    retry_delay_s,
)

FULL = RecordingProgress(recorded=100, wanted=100)
HALF = RecordingProgress(recorded=50, wanted=100)


def compiling(now_s: float = 0.0) -> LifeCycle:
    life = LifeCycle()
    assert life.step(now_s, FULL) is LearnAction.COMPILE
    return life


def serving() -> LifeCycle:
    life = compiling()
    assert life.compiled(pays=True) is LearnAction.SWITCH
    assert life.phase is Phase.SWITCHING
    life.switched()
    life.exits.update(alarms=0, answered=0, early=0)
    return life


def relearning() -> LifeCycle:
    life = serving()
    life.exits.update(alarms=1, answered=500, early=400)
    assert life.step(1.0, HALF) is LearnAction.RECORD
    assert life.phase is Phase.RELEARNING
    return life


def test_it_compiles_once_there_are_enough_samples() -> None:
    life = LifeCycle()
    assert life.step(0.0, HALF) is None
    assert life.phase is Phase.RECORDING
    assert life.step(0.0, FULL, may_compile=False) is None
    assert life.step(0.0, FULL) is LearnAction.COMPILE
    assert life.phase is Phase.COMPILING
    assert life.step(1.0, FULL) is None


def test_a_bundle_with_exits_is_switched_to() -> None:
    assert serving().phase is Phase.SERVING


def test_a_bundle_without_exits_in_use_is_not() -> None:
    life = compiling()
    assert life.compiled(pays=False, reason="exits take too long") is LearnAction.FORGET
    assert (life.phase, life.reason) == (Phase.NOTHING_PAYS, "exits take too long")
    life.exits.update(alarms=0, answered=0, early=0)
    life.exits.update(alarms=0, answered=5000, early=0)
    assert life.step(1e6, FULL) is None, "exits that answer nothing are no news"
    life.exits.update(alarms=1, answered=5000, early=0)
    assert life.step(1e6, FULL) is LearnAction.RECORD


def test_failures_are_tried_again_ever_later() -> None:
    delays = [10, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert [retry_delay_s(failures) for failures in range(1, 10)] == delays
    assert retry_delay_s(10**9) == 3600
    life, now_s = compiling(), 0.0
    for failures, delay_s in enumerate(delays, 1):
        life.failed("killed", now_s)
        assert (life.phase, life.failures, life.reason) == (Phase.WAITING, failures, "killed")
        assert life.step(now_s + delay_s - 0.001, FULL) is None
        now_s += delay_s
        assert life.step(now_s, FULL, may_compile=False) is None
        assert life.step(now_s, FULL) is LearnAction.COMPILE
    assert life.compiled(pays=True) is LearnAction.SWITCH
    assert (life.failures, life.reason) == (0, "")


def test_a_switch_that_fails_is_a_failed_attempt() -> None:
    life = compiling()
    life.compiled(pays=True)
    life.failed("no memory", 5.0)
    assert life.step(5.0 + FIRST_RETRY_S, FULL) is LearnAction.COMPILE


def test_a_retry_waits_for_samples_that_were_lost() -> None:
    life = compiling()
    life.failed("killed", 0.0)
    assert life.step(100.0, HALF) is None
    assert life.step(100.0, FULL) is LearnAction.COMPILE


def test_an_alarm_begins_a_recording_and_exits_that_come_back_end_it() -> None:
    life = relearning()
    life.exits.update(alarms=1, answered=1499, early=900)
    assert life.step(2.0, FULL) is None, "too few answers to tell"
    life.exits.update(alarms=1, answered=1500, early=900)
    assert life.step(3.0, HALF) is LearnAction.FORGET
    assert life.phase is Phase.SERVING
    assert life.step(4.0, HALF) is None


def test_exits_that_stay_away_are_learned_anew() -> None:
    life = relearning()
    life.exits.update(alarms=1, answered=1500, early=409)
    assert life.step(2.0, HALF) is None
    assert life.step(3.0, FULL, may_compile=False) is None
    assert life.step(3.0, FULL) is LearnAction.COMPILE


def test_a_further_alarm_starts_the_judgement_again() -> None:
    life = relearning()
    life.exits.update(alarms=1, answered=1500, early=400)
    life.exits.update(alarms=2, answered=1600, early=450)
    assert life.step(2.0, FULL) is None
    life.exits.update(alarms=2, answered=2600, early=1000)
    assert life.step(3.0, FULL) is LearnAction.FORGET


def test_exits_that_answer_nothing_are_noticed_without_an_alarm() -> None:
    life = serving()
    life.exits.update(alarms=0, answered=1000, early=10)
    assert life.step(1.0, HALF) is None, "one of a hundred is something"
    life.exits.update(alarms=0, answered=2000, early=19)
    assert life.step(2.0, HALF) is LearnAction.RECORD


def test_alarms_before_the_start_are_no_news() -> None:
    watch = ExitWatch()
    watch.update(alarms=7, answered=100, early=50)
    assert (watch.alarmed, watch.withheld) == (False, None)
    watch.update(alarms=8, answered=100, early=50)
    assert watch.alarmed
    watch.begin()
    assert not watch.alarmed


def test_it_stops_when_samples_cannot_be_recorded() -> None:
    life = LifeCycle()
    assert life.stop("too large") is LearnAction.FORGET
    assert (life.phase, life.reason) == (Phase.STOPPED, "too large")
    assert life.step(1e9, FULL) is None


@pytest.mark.parametrize(
    ("kept", "after"),
    [
        (Phase.RECORDING, Phase.RECORDING),
        (Phase.COMPILING, Phase.RECORDING),
        (Phase.WAITING, Phase.RECORDING),
        (Phase.SWITCHING, Phase.RECORDING),
        (Phase.STOPPED, Phase.RECORDING),
        (Phase.SERVING, Phase.SERVING),
        (Phase.RELEARNING, Phase.RELEARNING),
        (Phase.NOTHING_PAYS, Phase.NOTHING_PAYS),
    ],
)
def test_a_restart_goes_on_from_what_was_kept(kept: Phase, after: Phase) -> None:
    life = LifeCycle(kept, failures=3)
    assert (life.phase, life.failures) == (after, 3)


def test_inputs_are_recorded_until_there_is_a_bundle() -> None:
    recorded = {phase for phase in Phase if phase.records}
    assert recorded == {Phase.RECORDING, Phase.COMPILING, Phase.WAITING, Phase.RELEARNING}
