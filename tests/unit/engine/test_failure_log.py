"""Failures are logged once in some seconds, with how many there were."""

from __future__ import annotations

from offramp.engine.failure_log import INTERVAL_S, FailureLog


def test_one_line_of_a_kind_in_each_interval_says_how_many_were_silent() -> None:
    log = FailureLog()
    assert log.since_last(("bert", 0), 0.0) == 0
    assert log.since_last(("bert", 1), 0.0) == 0
    for tenth in range(1, 100):
        assert log.since_last(("bert", 0), tenth * INTERVAL_S / 100) is None
    assert log.since_last(("bert", 0), INTERVAL_S) == 99
    assert log.since_last(("bert", 0), 1.5 * INTERVAL_S) is None
    assert log.since_last(("bert", 1), 5 * INTERVAL_S) == 0
