"""A changed load moves exits towards the end and raises thresholds; never the other way round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.unit.calibration.rehearsal.rehearsals import KNOWN, load, settings, times
from tests.unit.calibration.rehearsal.test_rehearsal import random_times
from tests.unit.certify.problems import realistic

from offramp.bundle import NEVER, ActiveExit
from offramp.calibration.rehearsal import RehearsalSettings
from offramp.calibration.rehearsal.adaptation import ExitMove, adapt, raise_thresholds, raising_path
from offramp.calibration.rehearsal.load import RehearsalLoad
from offramp.certify import evaluate

IN_USE = (ActiveExit(exit=0, threshold=0.5), ActiveExit(exit=1, threshold=0.75))


def test_a_load_that_fits_changes_nothing() -> None:
    found = adapt(load(), times(), IN_USE, settings())
    assert found.least == found.rehearsal.active == IN_USE
    assert found.moves == ()
    assert [(s.after_exit, s.rows, s.chosen) for s in found.rehearsal.steps] == [
        (None, 4, 0),
        (0, 3, 1),
    ]
    assert found.rehearsal.ended == "kept"
    assert found.rehearsal.forecast.average_ms == pytest.approx(94 / 8)  # as rehearsed


def test_an_exit_that_makes_batches_late_moves_to_the_next_candidate() -> None:
    """More go on than expected (the paper's case 1)."""
    known = KNOWN.copy()
    known[0, 4:] = False  # all of batch 1 goes on behind exit 0
    found = adapt(load(known), times(), IN_USE[:1], settings())
    assert found.moves == (ExitMove(exit=0, to=1, violations=0.5),)
    # its threshold is that of its configuration: the least at which all answers agree
    assert found.least == (ActiveExit(exit=1, threshold=float(np.float32(0.9))),)
    assert [s.chosen for s in found.rehearsal.steps] == [1]
    assert found.rehearsal.steps[0].candidate(0).verdict == "latency"
    assert found.rehearsal.forecast.violations == 0


def test_it_stays_where_that_is_tolerated() -> None:
    known = KNOWN.copy()
    known[0, 4:] = False
    found = adapt(load(known), times(), IN_USE[:1], settings(max_violations=0.5))
    assert (found.moves, found.least) == ((), IN_USE[:1])


def test_it_moves_on_until_it_is_bearable() -> None:
    known = KNOWN.copy()
    known[:2, 4:] = False
    found = adapt(load(known), times((1.0, 1.0, 1.0)), IN_USE[:1], settings())
    assert [(m.exit, m.to) for m in found.moves] == [(0, 1), (1, 2)]
    assert [a.exit for a in found.least] == [2]


def test_it_gives_way_where_the_next_candidate_is_in_use() -> None:
    known = KNOWN.copy()
    known[0, 4:] = False
    found = adapt(load(known), times(), IN_USE, settings())
    assert found.moves == (ExitMove(exit=0, to=None, violations=0.5),)
    assert found.least == IN_USE[1:]


def test_nothing_is_left_where_no_exit_is_bearable() -> None:
    found = adapt(load(np.zeros((3, 8), bool)), times(), IN_USE, settings())
    assert found.rehearsal.active == ()
    assert found.rehearsal.steps == ()
    assert found.rehearsal.forecast.average_ms == pytest.approx(24)


def test_an_exit_that_is_late_even_if_all_leave_there_gives_way() -> None:
    """Exit 2 alone takes longer than the rest of the model."""
    active = (ActiveExit(exit=1, threshold=0.5), ActiveExit(exit=2, threshold=0.5))
    found = adapt(load(), times((1.0, 1.0, 7.0)), active, settings())
    assert found.moves == (ExitMove(exit=2, to=None, violations=1.0),)
    assert found.least == active[:1]


def test_no_exit_follows_one_behind_which_nothing_may_go_on() -> None:
    """No row may go on after exit 1 at 9.5 ms (21.5 of 24); half of the batches do."""
    active = (ActiveExit(exit=1, threshold=0.5), ActiveExit(exit=2, threshold=0.5))
    found = adapt(load(), times((1.0, 9.5, 1.0)), active, settings(max_violations=0.5))
    assert found.rehearsal.steps[0].candidate(1).allowed_rows == 0
    assert found.moves == (ExitMove(exit=2, to=None, violations=1.0),)
    assert found.least == active[:1]


def test_after_such_an_exit_no_later_candidate_is_tried() -> None:
    """Exit 0 with 16 ms (22 of 24) lets not one row on; half of the batches are late by it."""
    known = KNOWN.copy()
    known[0, :4] = True
    active = (ActiveExit(exit=0, threshold=0.5), ActiveExit(exit=1, threshold=0.5))
    found = adapt(load(known), times((16.0, 1.0, 1.0)), active, settings(max_violations=0.5))
    assert found.moves == (ExitMove(exit=1, to=None, violations=1.0),)
    assert found.least == active[:1]


def test_thresholds_are_raised_where_precision_was_lost() -> None:
    """Fewer go on than expected, and some are answered otherwise (the paper's case 2)."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.4, 1, (3, 400)).astype(np.float32)
    agrees = confidence > 0.7
    batches = np.arange(400).reshape(100, 4)
    confused = RehearsalLoad(confidence=confidence, agrees=agrees, batches=batches)
    raised = raise_thresholds(confused, {1: 0.5}, allowed_errors=0)
    (exit_,) = raised
    # the curve is fitted, so its path has steps: not below 0.7, and not far above
    assert 0.7 <= exit_.threshold <= 0.72
    assert raise_thresholds(confused, {1: 0.8}, allowed_errors=0) == (
        ActiveExit(exit=1, threshold=0.8),
    )


def test_only_the_exit_that_errs_is_raised() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.4, 1, (2, 2000)).astype(np.float32)
    agrees = np.stack([rng.random(2000) < confidence[0] ** 3, np.ones(2000, bool)])
    some = RehearsalLoad(
        confidence=confidence, agrees=agrees, batches=np.arange(2000).reshape(500, 4)
    )
    first, second = raise_thresholds(some, {0: 0.6, 1: 0.6}, allowed_errors=100)
    assert first.threshold > 0.8
    assert second == ActiveExit(exit=1, threshold=0.6)


def test_the_path_ends_at_the_thresholds_in_use() -> None:
    path = raising_path(load(), IN_USE)
    assert (path[0] == NEVER).all()
    assert path[-1].tolist() == [0.5, 0.75]
    assert (np.diff(path, axis=0) <= 0).all()


def test_exits_that_looked_on_only_are_left_out() -> None:
    shadow = ActiveExit(exit=2, threshold=NEVER)
    assert adapt(load(), times(), (*IN_USE, shadow), settings()).least == IN_USE


def test_no_exit_in_use() -> None:
    found = adapt(load(), times(), (), settings())
    assert (found.least, found.moves, found.rehearsal.steps) == ((), (), ())


@given(
    st.integers(0, 10_000),
    st.lists(st.floats(0.25, 1.0, width=32), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.02, 0.2]),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_both_bounds_hold_on_the_load(
    seed: int, thresholds: list[float], max_violations: float
) -> None:
    confidence, agrees, _ = realistic(seed, exits=4, samples=300)
    wanted = RehearsalSettings(
        batch_size=8, batches=40, max_disagreement=0.03, max_violations=max_violations
    )
    drawn = RehearsalLoad.of(
        confidence, agrees, batch_size=8, batches=40, rng=np.random.default_rng(seed)
    )
    before = {e: t for e, t in enumerate(thresholds) if e % 2 == 0}
    active = tuple(ActiveExit(exit=e, threshold=t) for e, t in before.items())
    found = adapt(drawn, random_times(seed, 4, 8), active, wanted)
    assert all(move.to is None or move.to > move.exit for move in found.moves)
    assert len(found.least) <= len(active)
    least = {a.exit: a.threshold for a in found.least}
    assert all(least[e] == before[e] for e in least if e in before)
    assert all(a.threshold >= least[a.exit] for a in found.rehearsal.active)
    for step in found.rehearsal.steps:
        assert step.chosen is not None
        assert step.candidate(step.chosen).violations <= max_violations
    rows = [a.exit for a in found.rehearsal.active]
    if rows:
        used = np.array([a.threshold for a in found.rehearsal.active])
        latency = np.arange(1.0, len(rows) + 2)
        assert evaluate(confidence[rows], agrees[rows], latency, used).errors <= 9
