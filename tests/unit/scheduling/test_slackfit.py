"""SlackFit: the published table by hand, keeping up, and how deep a queue lets it go."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.scheduling.helpers import points_of, scheduler, started
from tests.unit.scheduling.test_slack import INFINITY, SIZE, SLACKS, SPEEDS, TABLES

from offramp.engine.scheduling import Latencies, Submission
from offramp.engine.scheduling.policies.slack import Setting
from offramp.engine.scheduling.policies.slackfit import BareSlackFit, SlackFit

HAND = Latencies([[0.0, 1.0, 1.5, 1.75, 2.0], [0.0, 1.0, 2.0, 2.5, 3.0]])
"""To stage 0: 1, 1.5 and 2 s for 1, 2 and 4 rows; to the end 2, 3.5 and 5 s."""


@pytest.mark.parametrize(
    ("slack_s", "chosen"),
    [
        (0.999, None),
        (1.0, (1, 0)),  # below the first bucket's upper end: the fastest
        (1.999, (1, 0)),
        (2.0, (2, 0)),  # 1 to 2: of 1 and 2 rows to stage 0 the larger batch
        (2.999, (2, 0)),
        (3.0, (4, 0)),  # 2 to 3: 4 rows to stage 0, one to the end
        (4.0, (2, 1)),  # 3 to 4
        (5.0, (4, 1)),  # 4 to 5
        (INFINITY, (4, 1)),
    ],
)
def test_slackfit_with_four_buckets_of_a_second(
    slack_s: float, chosen: tuple[int, int] | None
) -> None:
    bare = BareSlackFit(points_of(HAND), 4, buckets=4).setting(slack_s)
    ours = SlackFit(points_of(HAND), 4, buckets=4).setting(slack_s)
    if chosen is None:
        assert bare is ours is None
    else:
        assert bare == Setting(*chosen)
        most = HAND.largest_batch(chosen[1], slack_s)
        assert ours == Setting(most, chosen[1]), "rows left behind"


@pytest.mark.parametrize(
    ("slack_s", "chosen"),
    [(1.5, (1, 0)), (2.5, (4, 0)), (3.49, (4, 0)), (4.0, (2, 1)), (4.99, (2, 1)), (5.0, (4, 1))],
)
def test_an_empty_bucket_of_slackfit_falls_to_the_next_lower(
    slack_s: float, chosen: tuple[int, int]
) -> None:
    """Three of eight buckets are empty: 2.5 to 3, 3 to 3.5 and 4 to 4.5."""
    assert BareSlackFit(points_of(HAND), 4, buckets=8).setting(slack_s) == Setting(*chosen)


@pytest.mark.parametrize(("agreements", "deepest"), [([0.5, 1.0], 1), ([1.0, 0.5], 0)])
def test_among_equal_batches_of_a_bucket_slackfit_takes_the_higher_agreement(
    agreements: list[float], deepest: int
) -> None:
    points = points_of(Latencies([[0.0, 1.0], [0.0, 0.25]]), agreements)
    assert SlackFit(points, 1, buckets=1).setting(1.25) == Setting(1, deepest)


def test_slackfit_corrects_the_profile_by_the_speed() -> None:
    latencies = Latencies([[0.0, 1.0, 1.5, 1.75, 2.0], [0.0, 1.0, 2.0, 2.5, 3.0]])
    policy = SlackFit(points_of(latencies), 4, buckets=4)
    latencies.calibrate(2.0)
    assert policy.setting(1.999) is None
    assert policy.setting(2.999) == Setting(1, 0)
    assert policy.setting(8.0) == Setting(2, 1)


@pytest.mark.parametrize(
    ("wanted_rate", "streams", "chosen"),
    [
        (0.5, 1, (2, 1)),  # 2 rows in 3.5 s are enough
        (1.0, 1, (4, 0)),  # they are not, 4 in 2 s are
        (9.0, 1, (4, 0)),  # nothing is; they come closest
        (1.0, 2, (2, 1)),  # each stream has half of it
    ],
)
def test_slackfit_takes_a_lower_bucket_to_keep_up(
    wanted_rate: float, streams: int, chosen: tuple[int, int]
) -> None:
    points = points_of(HAND)
    ours = SlackFit(points, 4, streams, buckets=4)
    bare = BareSlackFit(points, 4, streams, buckets=4)
    assert ours.setting(4.0, wanted_rate) == Setting(*chosen)
    assert bare.setting(4.0, wanted_rate) == Setting(2, 1)


@pytest.mark.parametrize("kind", [SlackFit, BareSlackFit])
@given(
    rows=TABLES,
    slack_s=SLACKS,
    speed=SPEEDS,
    buckets=st.integers(1, 80),
    wanted_rate=st.floats(0, 50),
)
def test_slackfit_never_takes_longer_than_the_slack(
    kind: type[SlackFit],
    rows: list[list[float]],
    slack_s: float,
    speed: float,
    buckets: int,
    wanted_rate: float,
) -> None:
    latencies = Latencies(rows)
    policy = kind(points_of(latencies), SIZE, buckets=buckets)
    latencies.calibrate(speed)
    setting = policy.setting(slack_s, wanted_rate)
    fastest_s = latencies.span_s(0, 0, 1)
    assert (setting is None) == (slack_s < fastest_s)
    if setting is not None:
        needed_s = latencies.span_s(0, setting.deepest, setting.batch_size)
        assert needed_s <= slack_s * (1 + 1e-12)  # the bounds of buckets are rounded
    if slack_s == INFINITY and (not wanted_rate or kind is BareSlackFit):
        assert setting == Setting(SIZE, latencies.stages - 1), "not of the top bucket"


COSTLY = [[0.0, *(0.25 * n for n in range(1, 9))], [0.0, *(0.75 * n for n in range(1, 9))]]
"""A row takes 0.25 s to stage 0 and 1 s to the end; batches of up to 8 bring nothing."""


def queued(policy: str, *submissions: Submission, now_s: float = 0.0) -> tuple[int, int]:
    """Rows and depth of the batch that is started of what waits."""
    s = scheduler(policy, latencies=Latencies(COSTLY))
    for submission in submissions:
        s.submit(submission, 0.0)
    run = started(s.next(0, now_s))
    return len(run.requests), run.deepest


@pytest.mark.parametrize(
    ("rows", "deepest"),
    [
        (1, 1),  # the published rule: 8 rows to stage 0, whatever is there
        (2, 1),
        (3, 0),  # 3 s to the end are too long
    ],
)
def test_an_idle_server_goes_as_deep_as_the_rows_that_are_there(rows: int, deepest: int) -> None:
    """Until 2.9 s; nothing else waits, nothing came before."""
    assert queued("slackfit", Submission(1, rows, 2.9)) == (rows, deepest)
    assert queued("slackfit-bare", Submission(1, rows, 2.9)) == (rows, 0)


def test_it_goes_no_deeper_than_leaves_time_for_other_buckets() -> None:
    """One row to the end takes 1 s; four others need 1 s after it."""
    for others, deepest in ((4, 1), (5, 0)):
        rest = Submission(2, others, 2.5, batch_key="other")
        first = Submission(1, 1, 2.0)
        assert queued("slackfit", first, rest) == (1, deepest)


def test_it_goes_no_deeper_than_leaves_time_for_lower_priorities() -> None:
    """The first may wait for long, the other must be served until 1.25 s."""
    for deadline_s, deepest in ((1.25, 1), (1.2, 0)):
        urgent = Submission(1, 1, 2.0, priority=1)
        other = Submission(2, 1, deadline_s, batch_key="other")
        assert queued("slackfit", urgent, other) == (1, deepest)
    beside = Submission(2, 1, 1.9)  # both to the end take 2 s; one after the other they have time
    assert queued("slackfit", Submission(1, 1, 2.0, priority=1), beside) == (1, 1)


def test_fewer_rows_go_deep_where_that_keeps_up() -> None:
    """Nine rows until 100 s: a batch of eight to the end, for there is time for the last one."""
    assert queued("slackfit", Submission(1, 9, 100.0)) == (8, 1)
    # Four rows until 3.5 s: of the 4 s that all would take to the end there is no time, and two
    # in 2 s are slower than 4 in 3.5 s have to be.
    assert queued("slackfit", Submission(1, 4, 3.5))[0] == 4


def test_it_goes_less_deep_the_more_arrives() -> None:
    """With 3 of at most 4 rows per second, a row has 0.25 of its patience, and needs 1 s."""
    for rate, deepest in ((0.5, 1), (3.0, 0)):
        s = scheduler("slackfit", latencies=Latencies(COSTLY))
        for request in range(8):
            now_s = request / rate
            s.submit(Submission(request, 1, now_s + 2.0), now_s)
            run = started(s.next(0, now_s))
            s.update(0, run.requests >= 0, now_s)
        assert run.deepest == deepest


@given(
    rows=TABLES,
    waiting=st.integers(1, SIZE),
    slack_s=st.integers(1, 400).map(lambda n: n / 8),
    speed=SPEEDS,
)
def test_on_an_idle_server_the_depth_is_what_a_search_finds(
    rows: list[list[float]], waiting: int, slack_s: float, speed: float
) -> None:
    """All that wait go together as deep as they are in time, or deeper where hindsight allows."""
    latencies = Latencies(rows)
    latencies.calibrate(speed)
    depths = range(latencies.stages)
    in_time = [d for d in depths if latencies.span_s(0, d, waiting) <= slack_s]
    assume(in_time)
    s = scheduler("slackfit", latencies=latencies)
    s.submit(Submission(1, waiting, slack_s), 0.0)
    run = started(s.next(0, 0.0))
    if run.deepest < in_time[-1]:
        pytest.fail(f"{run.deepest} is less deep than {in_time[-1]}")
    assert latencies.span_s(0, run.deepest, len(run.requests)) <= slack_s * (1 + 1e-12)
