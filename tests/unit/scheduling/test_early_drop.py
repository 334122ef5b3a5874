"""When the first of a queue is given up for those behind it."""

from __future__ import annotations

import pytest

from offramp.engine.scheduling.early_drop import EarlyDrop

PAYS = [(1.0, 1.0), (2.0, 2.0)]
"""One row a second after a second, or two a second after two."""


@pytest.mark.parametrize(
    ("slack_s", "waiting", "longest_slack_s", "given_up"),
    [
        (1.5, 10, 10.0, False),  # one row a second is enough
        (1.5, 11, 10.0, True),  # it is not, and the larger batch is
        (1.5, 99, 10.0, True),  # nothing is enough, but the larger batch is much faster
        (2.0, 99, 10.0, False),  # the first sample can wait for the larger batch
        (1.5, 99, 1.9, False),  # the last cannot either
        (1.5, 99, 1.5, False),  # all are as urgent
        (0.5, 1, 10.0, True),  # it allows nothing
    ],
)
def test_who_slows_the_others_down_is_given_up(
    slack_s: float, waiting: int, longest_slack_s: float, given_up: bool
) -> None:
    rule = EarlyDrop(PAYS, streams=1)
    assert rule.gives_up(slack_s, waiting=waiting, longest_slack_s=longest_slack_s) is given_up


def test_two_streams_keep_up_with_twice_as_much() -> None:
    assert not EarlyDrop(PAYS, streams=2).gives_up(1.5, waiting=20, longest_slack_s=10.0)
    assert EarlyDrop(PAYS, streams=2).gives_up(1.5, waiting=21, longest_slack_s=10.0)


def test_where_batches_bring_nothing_nobody_is_given_up() -> None:
    linear = EarlyDrop([(0.5 * n, 2.0) for n in (1, 2, 4, 8)], streams=1)
    assert not linear.gives_up(0.5, waiting=1000, longest_slack_s=10.0)
