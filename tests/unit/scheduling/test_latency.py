"""Predicted times: from a profile, and corrected by what is observed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle import Profile
from offramp.certify.decision import MODEL_END
from offramp.engine.scheduling import Latencies, stage_seconds


def span(first: int, last: int, exit_: int = MODEL_END) -> tuple[int, int, int]:
    return first, last, exit_


PROFILE = Profile(
    device="d",
    threads=1,
    batch_sizes=(1, 3),
    source_ms=(10.0, 30.0),
    segments_ms=((4.0, 8.0), (6.0, 22.0)),
    exits_ms=((1.0, 2.0),),
    stages_ms=((0.5, 1.5),),
)


def test_a_stage_costs_its_segments_its_exit_and_a_border() -> None:
    """4 + 1 + 0.5 ms at one row, 8 + 2 + 1.5 at three, the middle between them, then the slope."""
    exit_, rest = stage_seconds(PROFILE, [span(0, 0, 0), span(1, 1)], 5)
    assert exit_ == pytest.approx((0.0, 5.5e-3, 8.5e-3, 11.5e-3, 14.5e-3, 17.5e-3))
    assert rest == pytest.approx((0.0, 6e-3, 14e-3, 22e-3, 30e-3, 38e-3))


def test_the_whole_model_costs_what_the_source_does() -> None:
    (whole,) = stage_seconds(PROFILE, [span(0, 1)], 3)
    assert whole == pytest.approx((0.0, 10e-3, 20e-3, 30e-3))


def test_below_the_smallest_size_that_was_profiled_the_line_goes_to_nothing() -> None:
    profile = Profile(
        device="d",
        threads=1,
        batch_sizes=(4,),
        source_ms=(8.0,),
        segments_ms=((8.0,),),
        exits_ms=(),
        stages_ms=(),
    )
    (row,) = stage_seconds(profile, [span(0, 0)], 6)
    assert row == pytest.approx((0.0, 2e-3, 4e-3, 6e-3, 8e-3, 10e-3, 12e-3))


def test_a_profile_that_falls_is_taken_as_level() -> None:
    profile = Profile(
        device="d",
        threads=1,
        batch_sizes=(1, 2, 4),
        source_ms=(5.0, 4.0, 6.0),
        segments_ms=((5.0, 4.0, 6.0),),
        exits_ms=(),
        stages_ms=(),
    )
    (row,) = stage_seconds(profile, [span(0, 0)], 5)
    assert row == pytest.approx((0.0, 5e-3, 5e-3, 5.5e-3, 6e-3, 6.5e-3))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a row per stage"),
        ([[0.0]], "a column per batch size"),
        ([[0.0, 2.0, 1.0]], "cannot be faster on a larger batch"),
        ([[-1.0, 2.0, 3.0]], "cannot be faster on a larger batch"),
        ([[0.0, 1.0], [0.0, 1.0, 2.0]], "inhomogeneous"),
    ],
)
def test_tables_that_make_no_sense_are_refused(rows: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Latencies(rows)


def test_spans_add_up_and_are_corrected_by_the_speed() -> None:
    latencies = Latencies([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0], [0.0, 5.0, 7.0]])
    assert (latencies.stages, latencies.max_batch_size) == (3, 2)
    latencies.calibrate(2.0)
    assert latencies.stage_s(1, 2) == 8.0
    assert latencies.span_s(0, 2, 1) == 18.0
    assert latencies.span_s(1, 2, 2) == 22.0
    assert latencies.span_s(2, 2, 1) == 10.0
    assert list(latencies.until_s(1)) == [0.0, 4.0, 6.0]


def test_the_largest_batch_in_time_is_exact_at_its_bounds() -> None:
    latencies = Latencies([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]])
    assert [latencies.largest_batch(1, s) for s in (-1.0, 0.0, 3.9, 4.0, 5.9, 6.0, 99.0)] == [
        *(0, 0, 0, 1, 1, 2, 2)
    ]
    assert latencies.largest_batch(1, float("inf")) == 2
    latencies.calibrate(2.0)
    assert [latencies.largest_batch(1, s) for s in (7.9, 8.0, 12.0)] == [0, 1, 2]


TABLES = st.lists(
    st.lists(st.integers(1, 20), min_size=5, max_size=5).map(
        lambda steps: [0.0, *(sum(steps[: i + 1]) / 8 for i in range(5))]
    ),
    min_size=1,
    max_size=4,
)


@given(TABLES, st.integers(0, 3), st.integers(0, 400), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_largest_batch_is_what_a_search_finds(
    rows: list[list[float]], last: int, eighths: int, speed: float
) -> None:
    latencies, slack_s = Latencies(rows), eighths / 8
    last = min(last, latencies.stages - 1)
    latencies.calibrate(speed)
    fitting = [n for n in range(1, 6) if latencies.span_s(0, last, n) <= slack_s]
    assert latencies.largest_batch(last, slack_s) == max(fitting, default=0)


def test_observations_move_the_speed_by_a_thirty_second() -> None:
    latencies = Latencies([[0.0, 1.0]])
    latencies.observe(0, 1, 3.0)
    assert latencies.speed == 1.0 + 2.0 / 32
    latencies.observe(0, 1, 1000.0)  # counted as 16 times
    assert latencies.speed == 1.0625 + (16.0 - 1.0625) / 32
    for _ in range(1000):
        latencies.observe(0, 1, 0.0)  # counted as a sixteenth
    assert latencies.speed == pytest.approx(1 / 16)


def test_a_cost_of_every_stage_makes_no_long_one_look_slow() -> None:
    """Exits end batches early, so short stages are observed more often than long ones."""
    latencies = Latencies([[0.0, 0.125], [0.0, 8.0]])
    for _ in range(200):
        for _ in range(3):
            latencies.observe(0, 1, 0.125 + 0.25)
        latencies.observe(0, 1, 0.125 + 0.25)
        latencies.observe(1, 1, 8.0 + 0.25)
    usual_s = 4 * 0.125 + 8.0
    assert latencies.speed == pytest.approx((usual_s + 5 * 0.25) / usual_s, rel=0.05)


def test_invalidation_leads_back_to_the_usual_speed() -> None:
    latencies = Latencies([[0.0, 1.0]])
    latencies.calibrate(2.0)
    latencies.observe(0, 1, 10.0)
    assert latencies.speed == 2.25
    for _ in range(256):
        latencies.invalidate()
    assert latencies.speed == 2.25, "as long as stages may be running, nothing is invalidated"
    latencies.invalidate()
    assert latencies.speed == 2.25 - 0.25 / 32
    latencies.observe(0, 1, 2.25)
    spoken_for = latencies.speed
    latencies.invalidate()
    assert latencies.speed == spoken_for, "an observation ends that"
    for _ in range(256):
        latencies.invalidate()
    for _ in range(1000):
        latencies.invalidate()
    assert latencies.speed == pytest.approx(2.0)


def test_calibration_is_bounded() -> None:
    latencies = Latencies([[0.0, 1.0]])
    latencies.calibrate(1000.0)
    assert latencies.speed == 16.0
    latencies.calibrate(0.0)
    assert latencies.speed == 1 / 16


def test_what_merging_costs_is_what_goes_beyond_the_stage_itself() -> None:
    latencies = Latencies([[0.0, 1.0]])
    latencies.observe_merged(0, 1, 4.2)
    assert latencies.merging_s == pytest.approx(3.2 / 32)
    latencies.observe_merged(0, 1, 0.5)
    assert latencies.merging_s == pytest.approx(0.1 * 31 / 32)
    assert latencies.speed == 1.0


def test_what_a_batch_costs_that_shrinks_on_its_way() -> None:
    """Two stages of n seconds; half of the rows go on to the second one."""
    rows = [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    whole = Latencies(rows).shrinking
    assert list(whole.answer_s) == list(whole.busy_s[1]) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert whole.earliest_s == 2.0
    latencies = Latencies(rows, [0.5, 1.0])
    shrinking = latencies.shrinking
    assert [list(row) for row in shrinking.busy_s] == [
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [0.0, 1.5, 3.0, 4.5, 6.0],
    ]
    # Half are answered after n seconds, half after n and those of the n/2 rows, at least one.
    assert list(shrinking.answer_s) == [0.0, 1.5, 2.5, 3.75, 5.0]
    assert shrinking.earliest_s == 1.0
    slacks = (-1.0, 0.9, 1.0, 2.4, 2.5, 5.0, float("inf"))
    assert [latencies.largest_shrinking_batch(s) for s in slacks] == [0, 0, 1, 1, 2, 4, 4]
    latencies.calibrate(0.5)
    assert latencies.largest_shrinking_batch(2.5) == 4


def test_the_shares_that_go_on_follow_what_is_observed() -> None:
    latencies = Latencies([[0.0, 1.0, 2.0, 3.0, 4.0]] * 2)
    for _ in range(10_000):
        latencies.observe_shrinking(0, 4, 2)
    np.testing.assert_allclose(latencies.shrinking.answer_s, [0.0, 1.5, 2.5, 3.75, 5.0])


def test_latency_margin_is_two_mean_deviations_above_the_mean() -> None:
    """Deviations are from the stage's own mean, which moves by a thirty-second as well."""
    latencies = Latencies([[0.0, 1.0]])
    latencies.observe(0, 1, 1.0)
    assert (latencies.spread, latencies.latency_margin) == (0.0, 1.0)
    latencies.observe(0, 1, 3.0)
    assert latencies.spread == 2.0 / 32
    latencies.observe(0, 1, 3.0)
    assert latencies.spread == 0.0625 + (3.0 - 1.0625 - 0.0625) / 32
    assert latencies.latency_margin == latencies.speed + 2 * latencies.spread


def test_stages_that_differ_steadily_are_no_deviation() -> None:
    """One stage takes twice, the other half of what was predicted, whenever they run."""
    latencies = Latencies([[0.0, 1.0], [0.0, 1.0]])
    for _ in range(100):
        latencies.observe(0, 1, 2.0)
        latencies.observe(1, 1, 0.5)
    assert latencies.spread == 0.0
