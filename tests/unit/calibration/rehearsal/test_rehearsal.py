"""The rehearsal chooses what one finds by hand, and never what makes batches late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.facts import facts
from tests.unit.calibration.rehearsal.rehearsals import KNOWN, load, settings, times
from tests.unit.certify.problems import realistic

from offramp.bundle import NEVER, ActiveExit, BundleSchemaError, Profile
from offramp.calibration.rehearsal import Rehearsal, RehearsalSettings, Rehearsed
from offramp.calibration.rehearsal.load import Position, RehearsalLoad, forecast
from offramp.calibration.rehearsal.rehearsal import (
    batching_pattern,
    characterise,
    configure,
    expected_average_ms,
    rehearse,
)
from offramp.calibration.rehearsal.two_stage import StageTimes, TimeMatrix
from offramp.certify import evaluate

POINT_NINE = float(np.float32(0.9))


def test_inference_times_by_hand() -> None:
    matrix = times().matrix(after=None, candidates=[0, 1, 2], rows=4)
    assert matrix.columns.tolist() == [0, 1, 2, 3, 4]
    # one segment on 4 rows and the head; then three, two, one segments on the rows that go on
    np.testing.assert_allclose(
        matrix.ms, [[7, 16, 19, 22, 25], [13, 19, 21, 23, 25], [21, 24, 25, 26, 27]], rtol=1e-12
    )
    assert matrix.limit_ms == pytest.approx(24, rel=1e-12)
    assert matrix.allowed_rows.tolist() == [3, 3, 1]
    assert matrix.violated.sum(axis=1).tolist() == [1, 1, 3]


def test_a_threshold_that_is_no_float32_is_rounded_as_in_serving() -> None:
    assert float(load().confidence[0, 0]) < 0.9  # the float32 nearest to 0.9 lies below it
    behind = Position.start(load()).advance(load(), 0, 0.9, rows=4)
    np.testing.assert_array_equal(behind.waiting, ~KNOWN[0])


def test_inference_times_behind_an_exit_by_hand() -> None:
    matrix = times().matrix(after=0, candidates=[1, 2], rows=3)
    np.testing.assert_allclose(matrix.ms, [[6, 12, 14, 16], [13, 16, 17, 18]], rtol=1e-12)
    assert matrix.limit_ms == pytest.approx(15, rel=1e-12)
    assert matrix.allowed_rows.tolist() == [2, 0]


def test_an_exit_that_is_late_even_if_all_leave_allows_nothing() -> None:
    matrix = times((1.0, 1.0, 30.0)).matrix(after=None, candidates=[2], rows=4)
    assert matrix.allowed_rows.tolist() == [-1]


def test_columns_are_an_interval_apart_and_end_with_all_rows() -> None:
    matrix = times().matrix(after=None, candidates=[0], rows=4, interval=3)
    assert matrix.columns.tolist() == [0, 3, 4]
    np.testing.assert_allclose(matrix.ms, [[7, 22, 25]], rtol=1e-12)
    # counts between columns take the larger one; more rows than there are, the last
    assert matrix.column_of(np.array([0, 1, 3, 4, 9])).tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("rows", "interval"), [(0, 1), (4, 0)])
def test_a_matrix_needs_rows(rows: int, interval: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        times().matrix(after=None, candidates=[0], rows=rows, interval=interval)


def test_batching_pattern_and_average_by_hand() -> None:
    matrix = times().matrix(after=None, candidates=[0, 1, 2], rows=4)
    thresholds = dict.fromkeys(range(3), 0.9 - 1e-6)
    pattern, disagreement, moving_on = batching_pattern(
        load(), Position.start(load()), thresholds, matrix
    )
    assert pattern.tolist() == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert disagreement.tolist() == [0, 0, 0]
    assert moving_on.tolist() == [4 / 8, 2 / 8, 1 / 8]
    # exit 0: 3 rows after 7 ms, 1 after 16; then 1 after 7, 3 after 22; the others likewise
    by_hand = [110 / 8, 120 / 8, 171 / 8]
    np.testing.assert_allclose(expected_average_ms(matrix, pattern), by_hand, rtol=1e-12)


def test_equation_2_counts_in_intervals() -> None:
    matrix = TimeMatrix(columns=np.array([0, 2, 4]), ms=np.array([[1.0, 3.0, 6.0]]), limit_ms=5.0)
    pattern = np.array([[1, 2, 1]])
    by_hand = (4 * 1 + 2 * (2 * 1 + 2 * 3) + 4 * 6) / (4 * 4)
    assert expected_average_ms(matrix, pattern).tolist() == [by_hand]


def test_candidate_configuration_lets_most_leave_within_the_errors_left() -> None:
    confidence = np.array([[0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.2, 0.2]], np.float32)
    agrees = np.array([[1, 1, 0, 1, 0, 1, 0, 1]], bool)
    some = RehearsalLoad(confidence=confidence, agrees=agrees, batches=np.arange(8).reshape(2, 4))
    start = Position.start(some)
    found = [configure(some, start, 0, allowed) for allowed in range(4)]
    # with 0.8 both leave, the wrong one too; the two at 0.2 leave together
    np.testing.assert_array_equal(found, np.array([0.9, 0.7, 0.5, 0.2], np.float32))
    spent = Position(active=(), rows=4, waiting=np.arange(8) > 0, errors=2)
    assert configure(some, spent, 0, 2) == NEVER  # 0.9 is gone, and an error cannot be afforded
    assert configure(some, spent, 0, 3) == pytest.approx(0.7)


def test_search_by_hand() -> None:
    found = rehearse(load(), times(), settings())
    first, second, third = found.steps
    assert (first.after_exit, first.rows, first.limit_ms) == (None, 4, pytest.approx(24))
    assert [c.average_ms for c in first.candidates] == pytest.approx([13.75, 15.0, 21.375])
    assert [c.tail_ms for c in first.candidates] == pytest.approx([22, 21, 24])
    assert [c.verdict for c in first.candidates] == ["chosen", "possible", "possible"]
    assert first.mean_ms == pytest.approx(24)

    assert (second.after_exit, second.rows, second.limit_ms) == (0, 3, pytest.approx(15))
    assert [c.pattern for c in second.candidates] == [(1, 0, 1, 0), (1, 1, 0, 0)]
    assert [c.tail_ms for c in second.candidates] == pytest.approx([14, 16])
    assert [c.violations for c in second.candidates] == [0, 0.5]
    assert [c.verdict for c in second.candidates] == ["chosen", "latency"]
    assert second.mean_ms == pytest.approx(110 / 8)

    assert (third.after_exit, third.rows, third.limit_ms) == (1, 2, pytest.approx(8))
    assert third.candidates[0].times_ms == pytest.approx((7, 10, 11))
    assert third.candidates[0].pattern == (1, 1, 0)
    assert (third.candidates[0].verdict, third.chosen) == ("latency", None)

    assert found.ended == "latency"
    assert found.active == (
        ActiveExit(exit=0, threshold=POINT_NINE),
        ActiveExit(exit=1, threshold=POINT_NINE),
    )
    # batch 0: 3 rows after 7 ms, 1 after 7 + 4; batch 1: 1 after 7, 1 after 7 + 6, 2 after 13 + 8
    assert found.forecast.average_ms == pytest.approx((21 + 11 + 7 + 13 + 42) / 8)
    assert found.forecast.tail_ms == pytest.approx((11 + 21) / 2)
    assert found.forecast.source_ms == pytest.approx(24)
    assert (found.forecast.violations, found.forecast.disagreement) == (0, 0)


def test_average_decides_at_first_and_tail_later() -> None:
    """Exit 1 has the shorter tail in the first step, and is not taken."""
    step = rehearse(load(), times(), settings()).steps[0]
    by_tail = min(step.candidates, key=lambda c: c.tail_ms)
    assert (by_tail.exit, step.chosen) == (1, 0)


def test_tolerated_violations_make_room() -> None:
    found = rehearse(load(), times(), settings(max_violations=0.5))
    # half of the batches may be late: exit 2 is judged by the other one, which nothing leaves
    assert found.steps[1].candidate(2).verdict == "possible"
    assert found.steps[1].candidate(2).tail_ms == pytest.approx(13)
    assert found.steps[1].candidate(1).tail_ms == pytest.approx(6)
    assert found.steps[1].chosen == 1


def test_a_violated_exit_is_not_chosen_though_its_average_is_shortest() -> None:
    known = KNOWN.copy()
    known[0, 4:] = False  # all of batch 1 goes on behind exit 0: 25 ms, more than 24
    found = rehearse(load(known), times(), settings(max_violations=0.49))
    first = found.steps[0]
    assert first.candidate(0).violations == 0.5
    assert first.candidate(0).verdict == "latency"
    assert first.chosen == 1


def test_a_batch_that_was_late_already_stands_in_the_last_column() -> None:
    known = KNOWN.copy()
    known[0, 4:] = False
    at = Position.start(load(known)).advance(load(known), 0, 0.5, rows=3)
    step = characterise(load(known), times(), at, {1: 0.5, 2: 0.5}, settings())
    assert [c.pattern for c in step.candidates] == [(1, 0, 0, 1), (1, 0, 0, 1)]


def test_ends_when_no_exit_is_precise_enough() -> None:
    known = KNOWN.copy()
    known[1:] = False
    found = rehearse(load(known), times(), settings())
    assert [a.exit for a in found.active] == [0]
    assert [c.verdict for c in found.steps[1].candidates] == ["precision", "precision"]
    assert [c.threshold for c in found.steps[1].candidates] == [NEVER, NEVER]
    assert found.ended == "precision"


def test_ends_when_all_left() -> None:
    found = rehearse(load(np.ones((3, 8), bool)), times(), settings())
    assert [a.exit for a in found.active] == [0]
    assert found.ended == "all left"
    assert found.forecast.average_ms == found.forecast.tail_ms == pytest.approx(7)


def test_ends_at_the_last_exit() -> None:
    found = rehearse(load(), times((0.01,) * 3), settings(min_gain=0))
    assert [a.exit for a in found.active] == [0, 1, 2]
    assert found.ended == "last exit"


def test_an_exit_must_shorten_the_average() -> None:
    # exit 1 takes (13.75 − 11.75) / 24 = 8.3 % of the source model's time off
    assert len(rehearse(load(), times(), settings(min_gain=0.08)).active) == 2
    found = rehearse(load(), times(), settings(min_gain=0.09))
    assert (len(found.active), found.ended) == (1, "gain")
    assert found.steps[1].candidate(1).verdict == "gain"


def test_errors_that_the_first_exit_made_are_not_there_for_the_second() -> None:
    confidence = np.array([[0.9, 0.9, 0.6, 0.1], [0.1, 0.1, 0.1, 0.8]], np.float32)
    agrees = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)
    two = RehearsalLoad(confidence=confidence, agrees=agrees, batches=np.arange(4).reshape(1, 4))
    profile = times().profile
    both = StageTimes(
        profile=Profile(
            device="paper",
            threads=1,
            batch_sizes=profile.batch_sizes,
            source_ms=profile.source_ms,
            segments_ms=profile.segments_ms,
            exits_ms=profile.exits_ms[:2],
            stages_ms=profile.stages_ms[:2],
        ),
        after_segment=(0, 1),
    )
    wanted = settings(batches=1, min_gain=0)
    found = rehearse(two, both, wanted, allowed_errors=1)
    assert found.steps[0].candidate(0).disagreement == 0.25
    assert (found.ended, found.forecast.disagreement) == ("all left", 0.25)
    agrees[0, 3] = False  # now a second error would be needed for the last sample
    found = rehearse(two, both, wanted, allowed_errors=1)
    assert (found.ended, found.forecast.disagreement) == ("precision", 0.25)


def random_times(seed: int, exits: int, rows: int) -> StageTimes:
    """Times that rise with rows, flat at first as on a GPU, heads from cheap to dear."""
    rng = np.random.default_rng(seed)
    sizes = np.unique(np.geomspace(1, rows, 5).astype(int))
    shape = np.maximum(1, sizes / rng.integers(1, rows + 1))
    segments = rng.uniform(0.5, 1.5, (exits + 1, 1)) * shape
    heads = rng.uniform(0, 0.6, (exits, 1)) * shape
    return StageTimes(
        profile=Profile(
            device="random",
            threads=1,
            batch_sizes=tuple(sizes.tolist()),
            source_ms=tuple(segments.sum(axis=0).tolist()),
            segments_ms=tuple(map(tuple, segments.tolist())),
            exits_ms=tuple(map(tuple, heads.tolist())),
            stages_ms=(tuple((0.02 * shape).tolist()),) * len(heads),
        ),
        after_segment=tuple(range(exits)),
    )


def random_rehearsal(
    seed: int, max_violations: float, interval: int
) -> tuple[RehearsalLoad, Rehearsal]:
    confidence, agrees, _ = realistic(seed, exits=4, samples=300)
    wanted = RehearsalSettings(
        batch_size=8,
        interval=interval,
        batches=40,
        max_disagreement=0.03,
        max_violations=max_violations,
    )
    drawn = RehearsalLoad.of(
        confidence, agrees, batch_size=8, batches=40, rng=np.random.default_rng(seed)
    )
    return drawn, rehearse(drawn, random_times(seed, 4, 8), wanted)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.02, 0.2]), st.integers(1, 5))
@hypothesis_settings(max_examples=60, deadline=None)
def test_whatever_is_chosen_keeps_both_bounds(
    seed: int, max_violations: float, interval: int
) -> None:
    drawn, found = random_rehearsal(seed, max_violations, interval)
    for step in found.steps:
        assert all(sum(c.pattern) == 40 for c in step.candidates)
        assert all(np.diff(c.times_ms).min(initial=0) >= 0 for c in step.candidates)
        if step.chosen is not None:
            chosen = step.candidate(step.chosen)
            assert chosen.violations <= max_violations
            assert chosen.tail_ms <= step.limit_ms
            assert chosen.disagreement <= 0.03
            assert chosen.mean_ms <= step.mean_ms - 0.01 * found.forecast.source_ms
    # by another way of counting
    rows = [a.exit for a in found.active]
    if rows:
        thresholds = np.array([a.threshold for a in found.active])
        latency = np.arange(1.0, len(rows) + 2)
        other = evaluate(drawn.confidence[rows], drawn.agrees[rows], latency, thresholds)
        assert other.errors <= found.allowed_errors == 9
        assert found.forecast.disagreement == other.errors / 300
    if max_violations == 0:
        assert found.forecast.violations == 0  # equation 3
    assert random_rehearsal(seed, max_violations, interval)[1] == found


def test_batches_hold_every_sample_as_often_as_any_other() -> None:
    confidence, agrees, _ = realistic(0, exits=2, samples=50)
    drawn = RehearsalLoad.of(
        confidence, agrees, batch_size=8, batches=25, rng=np.random.default_rng(0)
    )
    assert drawn.batches.shape == (25, 8)
    assert np.bincount(drawn.batches.ravel()).tolist() == [4] * 50


def test_forecast_follows_a_batch_to_its_end() -> None:
    found = forecast(load(), times(), [ActiveExit(exit=1, threshold=0.5)])
    # batch 0 leaves whole after 13 ms; two of batch 1 after 13 ms, two after 21
    assert found.average_ms == pytest.approx((4 * 13 + 2 * 13 + 2 * 21) / 8)
    assert found.tail_ms == pytest.approx((13 + 21) / 2)
    late = forecast(load(np.zeros((3, 8), bool)), times(), [ActiveExit(exit=1, threshold=0.5)])
    assert late.tail_ms == pytest.approx(25)
    assert late.violations == 1.0
    off = forecast(load(), times(), [ActiveExit(exit=1, threshold=NEVER)])
    assert (off.average_ms, off.tail_ms, off.violations) == pytest.approx((24, 24, 0))


def test_kept_as_json() -> None:
    found = rehearse(load(), times(), settings())
    kept = Rehearsed(rehearsal=found, shipped=found.forecast, data_sha256="ab" * 32)
    assert Rehearsed.parse(kept.dump()) == kept
    with pytest.raises(BundleSchemaError, match=r"rehearsal\.json: not JSON"):
        Rehearsed.parse(b"{")
    with pytest.raises(BundleSchemaError, match=r"rehearsal\.json: unknown fields"):
        Rehearsed.parse(b"{}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("interval", 0), ("batches", 0), ("max_disagreement", 1.5),
     ("max_violations", -0.1), ("min_gain", float("nan"))],
)  # fmt: skip
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        settings(**{name: value})


def test_parts_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match=facts("2 exits", "3")):
        rehearse(load(KNOWN[:2]), times(), settings())
    with pytest.raises(ValueError, match=facts("(2, 4)", "(2, 8)")):
        rehearse(load(), times(), settings(batch_size=8))
    with pytest.raises(ValueError, match=facts("3 exits", "after_segment names 1")):
        StageTimes(profile=times().profile, after_segment=(0,))
