"""The batch profile: windows by the clock that is given, shares, JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from offramp.engine.planning.batch_profile import (
    BatchProfile,
    BatchProfileError,
    BatchProfileRecorder,
    ProfileWindow,
    dump_batch_profile,
    parse_batch_profile,
)


def recorded() -> BatchProfile:
    """Exits 0 and 1 in the first window, exit 1 alone in the second."""
    recorder = BatchProfileRecorder(2, window_s=120.0)
    recorder.observe(0, 8, 4, 10.0)
    recorder.observe(1, 4, 1, 10.5)
    recorder.observe(0, 8, 8, 129.9)
    recorder.observe(1, 8, 5, 129.9)
    recorder.observe(1, 10, 3, 130.0)
    recorder.advance(250.0)
    return recorder.profile()


def test_windows_end_by_the_clock() -> None:
    assert recorded().windows == (
        ProfileWindow(start_s=10.0, decided=(16, 12), went_on=(12, 6)),
        ProfileWindow(start_s=130.0, decided=(0, 10), went_on=(0, 3)),
    )


def test_shares_are_of_the_rows_that_entered() -> None:
    np.testing.assert_allclose(recorded().going_on(), [[0.75, 0.375], [np.nan, 0.3]])


def test_a_pause_leaves_no_window_without_rows() -> None:
    recorder = BatchProfileRecorder(1, window_s=10.0)
    recorder.observe(0, 2, 1, 0.0)
    assert not recorder.advance(9.9)
    assert recorder.advance(55.0)
    assert not recorder.advance(99.0)
    recorder.observe(0, 3, 3, 100.0)
    assert recorder.advance(110.0)
    assert [w.start_s for w in recorder.profile().windows] == [0.0, 100.0]


def test_the_last_windows_are_kept_and_go_on_from_json() -> None:
    recorder = BatchProfileRecorder(1, window_s=1.0, kept=2)
    for second in range(4):
        recorder.observe(0, 10, second, float(second))
    recorder.advance(4.0)
    past = recorder.profile()
    assert [w.went_on for w in past.windows] == [(2,), (3,)]
    again = parse_batch_profile(dump_batch_profile(past))
    assert again == past
    resumed = BatchProfileRecorder(1, window_s=1.0, kept=3, past=again)
    resumed.observe(0, 5, 5, 0.0)  # another run, another clock
    resumed.advance(1.0)
    assert [w.went_on for w in resumed.profile().windows] == [(2,), (3,), (5,)]
    with pytest.raises(BatchProfileError, match="of 1 exits and 1 s, expected 2 and 1; start"):
        BatchProfileRecorder(2, window_s=1.0, past=again)


def test_more_rows_than_were_decided_cannot_go_on() -> None:
    with pytest.raises(ValueError, match="5 of 4 rows went on; expected 0 to 4"):
        BatchProfileRecorder(1).observe(0, 4, 5, 0.0)
    with pytest.raises(ValueError, match="must be at most decided"):
        ProfileWindow(start_s=0.0, decided=(1,), went_on=(2,))
    with pytest.raises(ValueError, match="went_on has -1, expected at least 0"):
        ProfileWindow(start_s=0.0, decided=(1,), went_on=(-1,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not JSON"),
        ('{"schema": 7}', "schema 7, expected 1; remove it"),
        ('{"schema": 1, "batch_profile": []}', r"expected an object, found \[\]; remove it"),
        (
            json.dumps({"schema": 1, "batch_profile": {"window_s": 1.0, "exits": 1}}),
            r"missing fields \['windows'\]; remove it",
        ),
    ],
)
def test_what_is_no_batch_profile_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(BatchProfileError, match=message) as caught:
        parse_batch_profile(text)
    assert "\n" not in str(caught.value)
