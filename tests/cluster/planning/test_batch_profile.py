"""The batch profile: windows by the clock that is given, shares, JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.facts import facts

from offramp.cluster.planning.batch_profile import (
    BatchProfile,
    BatchProfileError,
    BatchProfileRecorder,
    ProfileWindow,
    dump_batch_profile,
    parse_recorded,
)
from offramp.engine.requests.departures import Departures


def departures(*left: int, exits: tuple[int, ...] = (0, 1)) -> Departures:
    return Departures(exits=exits, left=left, forced=(0,) * len(left))


def recorded() -> BatchProfile:
    """Exits 0 and 1 in the first window and for some of the second, exit 1 alone in the third."""
    recorder = BatchProfileRecorder(2, window_s=120.0)
    assert recorder.add(10.0, [departures(4, 6, 6)])
    assert recorder.add(130.0, [departures(1, 0, 3), departures(7, 3, exits=(1,))])
    assert recorder.add(250.0, [departures(0, 0, 0), departures(7, 3, exits=(1,))])
    return recorder.profile()


def test_windows_sum_over_the_exits_in_use() -> None:
    assert recorded().windows == (
        ProfileWindow(start_s=10.0, decided=(16, 12), went_on=(12, 6)),
        ProfileWindow(start_s=130.0, decided=(4, 13), went_on=(3, 6)),
        ProfileWindow(start_s=250.0, decided=(0, 10), went_on=(0, 3)),
    )


def test_shares_are_of_the_rows_that_entered() -> None:
    shares = [[0.75, 0.375], [0.75, 0.75 * 6 / 13], [np.nan, 0.3]]
    np.testing.assert_allclose(recorded().going_on(), shares)


def test_a_window_without_rows_is_left_out() -> None:
    recorder = BatchProfileRecorder(1, window_s=10.0)
    assert not recorder.add(0.0, [])
    assert not recorder.add(0.0, [departures(0, 0, exits=(0,))])
    assert not recorder.add(0.0, [departures(5, exits=())])  # no exit was on
    assert recorder.add(10.0, [departures(1, 0, exits=(0,))])
    assert [w.start_s for w in recorder.profile().windows] == [10.0]


def test_the_last_windows_are_kept_and_go_on_from_json() -> None:
    recorder = BatchProfileRecorder(1, window_s=1.0, kept=2)
    for second in range(4):
        recorder.add(float(second), [departures(10 - second, second, exits=(0,))])
    past = recorder.profile()
    assert [w.went_on for w in past.windows] == [(2,), (3,)]
    again = parse_recorded(dump_batch_profile(past)).profile
    assert again == past
    resumed = BatchProfileRecorder(1, window_s=1.0, kept=3, past=again)
    resumed.add(0.0, [departures(0, 5, exits=(0,))])  # another run, another clock
    assert [w.went_on for w in resumed.profile().windows] == [(2,), (3,), (5,)]
    with pytest.raises(
        BatchProfileError, match=facts("1 exits and last 1 s", "expected 2 and 1", "start")
    ):
        BatchProfileRecorder(2, window_s=1.0, past=again)


def test_more_rows_than_were_decided_cannot_go_on() -> None:
    with pytest.raises(ValueError, match="must be at most decided"):
        ProfileWindow(start_s=0.0, decided=(1,), went_on=(2,))
    with pytest.raises(ValueError, match="went_on has -1, expected at least 0"):
        ProfileWindow(start_s=0.0, decided=(1,), went_on=(-1,))


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ((), "0 windows of 120 s"),
        ((0.0,), "1 window of 120 s, 1970-01-01 00:00 to 00:02 UTC"),
        ((86_280.0, 86_400.0), "2 windows of 120 s, 1970-01-01 23:58 to 1970-01-02 00:02 UTC"),
        ((-1e300,), "1 window of 120 s, second -1e+300 to -1e+300"),
    ],
)
def test_a_profile_says_what_it_has(starts: tuple[float, ...], text: str) -> None:
    windows = tuple(ProfileWindow(start_s=s, decided=(1,), went_on=(1,)) for s in starts)
    assert BatchProfile(window_s=120.0, exits=1, windows=windows).describe() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not JSON"),
        ('{"schema": 7}', "schema 7, expected 1; remove it"),
        ('{"schema": 1, "bundle": 3}', "bundle 3, expected a hash; remove it"),
        ('{"schema": 1, "batch_profile": []}', r"expected an object, found \[\]; remove it"),
        (
            json.dumps({"schema": 1, "batch_profile": {"window_s": 1.0, "exits": 1}}),
            r"missing fields \['windows'\]; remove it",
        ),
    ],
)
def test_what_is_no_batch_profile_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(BatchProfileError, match=message) as caught:
        parse_recorded(text)
    assert "\n" not in str(caught.value)
