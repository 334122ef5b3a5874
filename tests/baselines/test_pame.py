"""The published reactions, on periods that one can count by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.calibration.rehearsal.rehearsals import times

from offramp.baselines.pame import PameController, PameSettings
from offramp.bundle import NEVER, ActiveExit, ExitPolicy, Promise
from offramp.certify import MODEL_END, UNKNOWN, Observations, first_exit
from offramp.engine.control.controller import Controller, Evidence

PROMISE = Promise(
    max_disagreement=0.1,
    confidence_level=0.95,
    certify_samples=1000,
    certify_errors=50,
    p_value=0.01,
    predicted_savings=0.5,
)
SURE, UNSURE = 0.9, 0.1


def policy(*thresholds: tuple[int, float], version: int = 7) -> ExitPolicy:
    active = tuple(ActiveExit(exit=e, threshold=t) for e, t in thresholds)
    return ExitPolicy(version=version, active=active, promise=PROMISE)


def controller(*thresholds: tuple[int, float], **changes: Any) -> PameController:
    given = {"batch_size": 4, "period": 8, "max_disagreement": 0.1, **changes}
    return PameController(policy(*thresholds), times(), PameSettings(**given))


def served(
    confidence: list[list[float]], wrong: list[tuple[int, int]] = (), **changes: Any
) -> Observations:
    """Return observations of a policy with thresholds of 0.5 at all given exits.

    ``confidence`` [3, n], NaN for exits not in use; ``wrong`` are pairs of exit and sample. Every
    sample ran to the end unless ``final`` says otherwise.
    """
    table = np.array(confidence, np.float32)
    samples = table.shape[1]
    known = ~np.isnan(table)
    prediction = np.where(known, 1, UNKNOWN).astype(np.int32)
    for exit_, sample in wrong:
        prediction[exit_, sample] = 2
    given_thresholds = np.full(len(table), changes.pop("threshold", 0.5))
    given = {
        "answered_at": first_exit(table, given_thresholds),
        "final": np.ones(samples, np.int32),
        "audit_probability": np.ones(samples),
        "policy_version": np.full(samples, 7),
        "forced": np.zeros(samples, bool),
        **changes,
    }
    return Observations(confidence=table, prediction=prediction, **given)


def first_exit_knows(known: list[int], **changes: Any) -> Observations:
    row = [SURE if k else UNSURE for k in known]
    nothing = [np.nan] * len(known)
    return served([row, nothing, nothing], **changes)


def thresholds_of(watched: PameController) -> dict[int, float]:
    return {a.exit: a.threshold for a in watched.policy.active}


def test_it_is_a_controller() -> None:
    watched: Controller = controller((0, 0.5))
    assert (watched.name, watched.audit_probability) == ("pame", 1.0)
    assert watched.take_job() is None


def test_a_load_that_fits_changes_nothing() -> None:
    """One row and three rows go on: 3 are allowed."""
    watched = controller((0, 0.5))
    watched.observe(first_exit_knows([1, 1, 1, 0, 1, 0, 0, 0]))
    assert watched.policy == policy((0, 0.5))
    assert watched.take_events() == []
    assert watched.status().evidence is Evidence.CALIBRATED


def test_late_batches_move_the_exit_to_the_next_candidate() -> None:
    """All four rows of the second batch go on: 25 ms, more than 24."""
    watched = controller((0, 0.5))
    watched.observe(first_exit_knows([1, 1, 1, 0, 0, 0, 0, 0]))
    assert thresholds_of(watched) == {1: 0.5}
    assert (watched.policy.version, watched.policy.promise) == (8, None)
    (event,) = watched.take_events()
    assert (event.kind, event.text) == (
        "exits",
        "50.0% of the batches late by exit 0; exit 1 takes its place",
    )
    status = watched.status()
    assert (status.adjustments, status.tunings, status.evidence) == (1, 0, Evidence.NONE)


def test_late_batches_are_tolerated_up_to_a_share() -> None:
    watched = controller((0, 0.5), max_violations=0.5)
    watched.observe(first_exit_knows([1, 1, 1, 0, 0, 0, 0, 0]))
    assert watched.policy.version == 7


def test_the_check_waits_for_a_full_period_of_the_active_policy() -> None:
    watched = controller((0, 0.5))
    watched.observe(first_exit_knows([0] * 7))
    old = first_exit_knows([0] * 8, policy_version=np.full(8, 6))
    watched.observe(old)
    assert watched.policy.version == 7
    watched.observe(first_exit_knows([0]))
    assert watched.policy.version == 8
    watched.observe(first_exit_knows([0] * 8))  # started before the new policy
    assert watched.policy.version == 8


def test_batches_are_of_samples_in_the_order_of_their_start() -> None:
    """The same samples in chunks of any size, and another order that fits."""
    known = [1, 1, 1, 0, 0, 0, 0, 0]
    watched = controller((0, 0.5))
    for sample in known:
        watched.observe(first_exit_knows([sample]))
    assert watched.policy.version == 8
    mixed = controller((0, 0.5))
    mixed.observe(first_exit_knows([1, 0, 0, 0, 0, 1, 0, 1]))
    assert mixed.policy.version == 7


def test_the_later_exit_is_judged_by_what_the_first_allows() -> None:
    """Three rows may pass exit 0, two may pass exit 1."""
    rows = [[SURE, UNSURE, UNSURE, UNSURE] * 2, [UNSURE] * 8, [np.nan] * 8]
    watched = controller((0, 0.5), (1, 0.5))
    watched.observe(served(rows))
    assert thresholds_of(watched) == {0: 0.5, 2: 0.5}
    rows[1] = [UNSURE, SURE, UNSURE, UNSURE] * 2
    fits = controller((0, 0.5), (1, 0.5))
    fits.observe(served(rows))
    assert fits.policy.version == 7


def test_a_batch_that_was_late_already_is_late_at_later_exits_too() -> None:
    """Batch 0 is late by exit 0, which is tolerated, and batch 1 by exit 1: three go on there."""
    rows = [[UNSURE] * 4 + [SURE] + [UNSURE] * 3, [SURE] * 4 + [UNSURE] * 4, [np.nan] * 8]
    watched = controller((0, 0.5), (1, 0.5), max_violations=0.5)
    watched.observe(served(rows))
    assert watched.take_events()[0].text.startswith("100.0% of the batches late by exit 1")
    assert thresholds_of(watched) == {0: 0.5, 2: 0.5}


def test_an_exit_gives_way_to_the_next_one_in_use() -> None:
    rows = [[UNSURE] * 8, [SURE] * 8, [np.nan] * 8]
    watched = controller((0, 0.5), (1, 0.5))
    watched.observe(served(rows))
    assert thresholds_of(watched) == {1: 0.5}
    assert watched.take_events()[0].text.endswith("it is no longer in use")


def test_the_last_exit_that_makes_batches_late_leaves_none() -> None:
    watched = controller((2, 0.5))
    watched.observe(served([[np.nan] * 8, [np.nan] * 8, [UNSURE] * 8]))
    assert watched.policy.active == ()
    status = watched.status()
    assert (status.evidence, status.state) == (Evidence.CONSERVATIVE, "no exit answers")
    watched.observe(served([[np.nan] * 8] * 3, policy_version=np.full(8, 8)))
    assert watched.policy.version == 8


def test_lost_precision_raises_the_threshold_until_the_period_is_answered_well() -> None:
    """Two of eight are wrong, at 0.57 and 0.62: with 10 % allowed neither may stay."""
    row = [0.57, 0.62, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    watched = controller((0, 0.5))
    watched.observe(served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 0), (0, 1)]))
    assert thresholds_of(watched) == {0: pytest.approx(0.65)}
    (event,) = watched.take_events()
    assert (event.kind, event.text) == (
        "tuning",
        "25.00% of a period answered otherwise; thresholds raised: exit 0 to 0.65",
    )
    assert (watched.status().tunings, watched.status().adjustments) == (1, 0)


def test_it_stops_as_soon_as_few_enough_are_wrong() -> None:
    """One of eight may be wrong: a single step is enough for the one at 0.52."""
    row = [0.52, 0.62, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    watched = controller((0, 0.5), max_disagreement=1 / 8)
    watched.observe(served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 0), (0, 1)]))
    assert thresholds_of(watched) == {0: pytest.approx(0.55)}


def test_who_no_longer_leaves_is_answered_by_the_next_exit() -> None:
    """Exit 1 answers the sample wrongly too, so it is raised as well, and exit 2 never was."""
    rows = [[0.52] + [0.9] * 7, [0.72] + [0.9] * 7, [np.nan] * 8]
    watched = controller((0, 0.5), (1, 0.5))
    watched.observe(served(rows, wrong=[(0, 0), (1, 0)]))
    assert thresholds_of(watched) == {0: pytest.approx(0.55), 1: pytest.approx(0.75)}


def test_an_exit_that_is_wrong_at_full_confidence_is_no_longer_in_use() -> None:
    watched = controller((0, 0.93))
    row = [1.0] * 8
    watched.observe(served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 0)]))
    assert watched.policy.active == ()
    assert "exit 0 off" in watched.take_events()[0].text


def test_what_left_for_good_counts_through_those_that_were_audited() -> None:
    """One of two audited samples is wrong, each weighs two: half of a fourth of the eight
    samples.
    """
    row = [0.52, 0.9, 0.9, 0.9, UNSURE, UNSURE, UNSURE, 0.9]
    final = np.array([1, UNKNOWN, 1, UNKNOWN, 1, 1, 1, UNKNOWN], np.int32)
    halves = np.full(8, 0.5)
    seen = {"final": final, "audit_probability": halves}
    for bound, version in ((0.25, 7), (0.24, 8)):
        watched = controller((0, 0.5), max_disagreement=bound, audit_probability=0.5)
        watched.observe(served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 0)], **seen))
        assert watched.policy.version == version


def test_forced_answers_are_no_errors_and_would_have_gone_on() -> None:
    forced = np.array([0, 0, 0, 0, 1, 0, 0, 0], bool)
    row = [0.9, 0.9, 0.9, 0.9, UNSURE, UNSURE, UNSURE, UNSURE]
    at = np.array([0, 0, 0, 0, 0, *[MODEL_END] * 3])
    watched = controller((0, 0.5))
    watched.observe(
        served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 4)], forced=forced, answered_at=at)
    )
    assert thresholds_of(watched) == {1: 0.5}  # moved: four rows of batch 1; and not raised


def test_what_was_forced_at_an_exit_is_not_held_against_the_next() -> None:
    rows = [[0.9, 0.9, 0.9, 0.9, UNSURE, 0.9, 0.9, 0.9], [0.52] * 8, [np.nan] * 8]
    forced = np.array([0, 0, 0, 0, 1, 0, 0, 0], bool)
    watched = controller((0, 0.5), (1, 0.5))
    watched.observe(served(rows, wrong=[(1, 4)], forced=forced, answered_at=np.zeros(8, np.int64)))
    assert watched.policy.version == 7


def test_both_at_once() -> None:
    row = [0.52, 0.52, 0.9, 0.9, UNSURE, UNSURE, UNSURE, UNSURE]
    watched = controller((0, 0.5))
    watched.observe(served([row, [np.nan] * 8, [np.nan] * 8], wrong=[(0, 0), (0, 1)]))
    assert thresholds_of(watched) == {1: pytest.approx(0.55)}
    assert watched.policy.version == 8


def test_exits_that_look_on_stay_until_something_changes() -> None:
    watched = controller((0, 0.5), (2, NEVER))
    watched.observe(first_exit_knows([1] * 8))
    assert thresholds_of(watched) == {0: 0.5, 2: NEVER}


def test_it_goes_on_from_a_kept_state() -> None:
    watched = controller((0, 0.5))
    watched.observe(first_exit_knows([0] * 8))
    state = watched.state()
    assert state is not None
    again = controller((0, 0.5))
    again.restore(state)
    assert again.policy == watched.policy
    assert again.status() == watched.status()

    same = controller((0, 0.5))
    state = same.state()
    assert state is not None
    again = controller((0, 0.5))
    again.restore(state)
    assert again.policy.promise == PROMISE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": np.array([3])}, ("exit 3", "3 exits")),
        ({"exits": np.array([0, 1])}, ("zip",)),
        ({"moves": None}, ("pame controller",)),
        ({"counters": {}}, ("expected a count",)),
    ],
)
def test_a_state_that_does_not_fit(change: dict[str, Any], message: Told) -> None:
    watched = controller((0, 0.5))
    state = watched.state()
    assert state is not None
    with pytest.raises(ValueError, match=facts(*message)):
        watched.restore({**state, **change})
    assert watched.policy == policy((0, 0.5))
    with pytest.raises(ValueError, match="no state of the pame controller"):
        watched.restore({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_disagreement": -0.1}, ("max_disagreement must be in",)),
        ({"max_violations": 2.0}, ("max_violations must be in",)),
        ({"batch_size": 9}, ("batch_size 9", "8", "samples")),
        ({"batch_size": 0}, ("batch_size 0", "at least 1")),
        ({"threshold_step": 0.0}, ("threshold_step must be in",)),
        ({"audit_probability": 0.0}, ("audit_probability must be in",)),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], message: Told) -> None:
    with pytest.raises(ValueError, match=facts(*message)):
        controller((0, 0.5), **changes)
