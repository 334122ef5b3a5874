"""Policies that look at slack: small tables by hand, and searches through all settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduling.helpers import points_of, scheduler, started, table

from offramp.engine.scheduling import (
    DropCause,
    Dropped,
    Idle,
    Latencies,
    PolicyName,
    Submission,
    make_policy,
)
from offramp.engine.scheduling.policies.slack import (
    BareSlackFit,
    Setting,
    SlackFit,
    SlackPolicy,
)

INFINITY = float("inf")

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
    for kind in (SlackFit, BareSlackFit):
        assert kind(points_of(HAND), 4, buckets=4).setting(slack_s) == chosen


@pytest.mark.parametrize(
    ("slack_s", "chosen"),
    [(1.5, (1, 0)), (2.5, (4, 0)), (3.49, (4, 0)), (4.0, (2, 1)), (4.99, (2, 1)), (5.0, (4, 1))],
)
def test_an_empty_bucket_of_slackfit_falls_to_the_next_lower(
    slack_s: float, chosen: tuple[int, int]
) -> None:
    """Of eight: 2.5 to 3, 3 to 3.5 and 4 to 4.5 are empty."""
    assert SlackFit(points_of(HAND), 4, buckets=8).setting(slack_s) == chosen


@pytest.mark.parametrize(("agreements", "deepest"), [([0.5, 1.0], 1), ([1.0, 0.5], 0)])
def test_among_equal_batches_of_a_bucket_slackfit_takes_the_higher_agreement(
    agreements: list[float], deepest: int
) -> None:
    points = points_of(Latencies([[0.0, 1.0], [0.0, 0.25]]), agreements)
    assert SlackFit(points, 1, buckets=1).setting(1.25) == (1, deepest)


def test_slackfit_corrects_the_profile_by_the_speed() -> None:
    latencies = Latencies([[0.0, 1.0, 1.5, 1.75, 2.0], [0.0, 1.0, 2.0, 2.5, 3.0]])
    policy = SlackFit(points_of(latencies), 4, buckets=4)
    latencies.calibrate(2.0)
    assert policy.setting(1.999) is None
    assert policy.setting(3.999) == (1, 0)
    assert policy.setting(8.0) == (2, 1)


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
    assert SlackFit(points, 4, streams, buckets=4).setting(4.0, wanted_rate) == chosen
    assert BareSlackFit(points, 4, streams, buckets=4).setting(4.0, wanted_rate) == (2, 1)


@pytest.mark.parametrize("policy", ["slackfit", "clockwork", "max-batch", "cheapest", "fixed:1"])
def test_without_time_a_request_is_given_up_and_the_next_one_served(policy: str) -> None:
    """A stage takes 1 s."""
    s = scheduler(policy, latencies=table(first_s=1.0, more_s=0.0))
    s.submit(Submission(1, 3, 0.9), 0.0)
    s.submit(Submission(2, 1), 0.0)
    assert started(s.next(0, 0.0)).requests.tolist() == [2]
    assert s.take_dropped() == [Dropped(1, 3, DropCause.INFEASIBLE)]


def test_clockwork_gives_up_exactly_what_cannot_be_through() -> None:
    for deadline_s, cause in ((2.999, DropCause.INFEASIBLE), (3.0, None)):
        s = scheduler("clockwork", latencies=table(first_s=1.0, more_s=0.0))
        s.submit(Submission(1, 1, deadline_s), 0.0)
        assert isinstance(s.next(0, 0.0), Idle) == (cause is not None)
        assert [dropped.cause for dropped in s.take_dropped()] == ([cause] if cause else [])


def test_giving_up_leads_back_to_the_usual_speed() -> None:
    latencies = table(first_s=1.0, more_s=0.0)
    s = scheduler("cheapest", latencies=latencies)
    latencies.speed = 2.0
    for request in range(257):
        s.submit(Submission(request, 1, 1.5), 0.0)
        assert isinstance(s.next(0, 0.0), Idle)
    assert latencies.speed == 2.0 - 1 / 32


def test_nothing_runs_beyond_the_depth_that_was_chosen() -> None:
    s = scheduler("cheapest", latencies=table(first_s=1.0, more_s=0.0))
    s.submit(Submission(1, 2), 0.0)
    run = started(s.next(0, 0.0))
    assert run.deepest == 0
    transition = s.done(0, run.requests < 0, 1.0)  # nobody is sure
    assert transition.released.tolist() == [0, 1]
    assert isinstance(s.next(0, 1.0), Idle)


SIZE = 6
TABLES = st.lists(
    st.lists(st.integers(1, 12), min_size=SIZE, max_size=SIZE).map(
        lambda steps: [0.0, *(sum(steps[: i + 1]) / 8 for i in range(SIZE))]
    ),
    min_size=1,
    max_size=4,
)
SLACKS = st.one_of(st.integers(0, 400).map(lambda n: n / 8), st.just(INFINITY))
SPEEDS = st.sampled_from([0.5, 1.0, 2.0])


def expected(name: str, latencies: Latencies, slack_s: float) -> Setting | None:
    """By search through everything that fits."""
    last = latencies.stages - 1
    fits = [
        Setting(size, deepest)
        for size in range(1, SIZE + 1)
        for deepest in range(latencies.stages)
        if latencies.span_s(0, deepest, size) <= slack_s
    ]
    depth = {"fixed:0": 0, "cheapest": 0, "fixed:final": last, "clockwork": last}.get(name)
    if depth is not None:
        fits = [setting for setting in fits if setting.deepest == depth]
    if name == "max-accuracy":
        return max(fits, key=lambda s: (s.deepest, s.batch_size), default=None)
    return max(fits, key=lambda s: (s.batch_size, s.deepest), default=None)


@pytest.mark.parametrize(
    "name", ["max-batch", "max-accuracy", "fixed:0", "fixed:final", "cheapest", "clockwork"]
)
@given(rows=TABLES, slack_s=SLACKS, speed=SPEEDS)
def test_every_choice_is_what_a_search_finds(
    name: str, rows: list[list[float]], slack_s: float, speed: float
) -> None:
    if name == "fixed:0" and len(rows) == 1:
        rows = rows * 2
    latencies = Latencies(rows)
    latencies.calibrate(speed)
    policy = make_policy(PolicyName.parse(name), points_of(latencies), SIZE)
    assert isinstance(policy, SlackPolicy)
    assert policy.setting(slack_s) == expected(name, latencies, slack_s)


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
        assert setting == (SIZE, latencies.stages - 1), "not of the top bucket"
