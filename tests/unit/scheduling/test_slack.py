"""Policies that look at slack: small tables by hand, and searches through all settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduling.helpers import points_of, scheduler, started, table

from offramp.engine.scheduling import DropCause, Dropped, Idle, Latencies, Submission
from offramp.engine.scheduling.policies import PolicyName, make_policy
from offramp.engine.scheduling.policies.slack import Setting, SlackPolicy

INFINITY = float("inf")


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
    outcome = s.update(0, run.requests < 0, 1.0)  # nobody is sure
    assert outcome.released.tolist() == [0, 1]
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
    """Return the setting found by exhaustive search."""
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


@pytest.mark.parametrize(
    ("going_on", "slack_s", "chosen"),
    [
        ([0.25, 1.0], 4.0, Setting(1, 1)),
        ([0.25, 1.0], 2.0, Setting(1, 1)),
        ([0.25, 1.0], 0.5, None),
        ([1.0, 1.0], 2.0, None),
    ],
)
def test_clockwork_tries_what_is_in_time_if_it_leaves_early(
    going_on: list[float], slack_s: float, chosen: Setting | None
) -> None:
    """Stages take 1 and 3 s: 4 s to the end."""
    latencies = Latencies([[0.0, 1.0, 2.0], [0.0, 3.0, 6.0]], going_on)
    policy = make_policy(PolicyName.parse("clockwork"), points_of(latencies), 2, 1)
    assert isinstance(policy, SlackPolicy)
    assert policy.setting(slack_s) == chosen
