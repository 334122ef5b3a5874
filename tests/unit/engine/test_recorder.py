"""The ring of samples: read in the order of starting, whole, and never beyond who is under way."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import facts

from offramp.certify import MODEL_END, UNKNOWN
from offramp.engine.requests.recorder import Recorder


def sample_ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def none(count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.zeros(count, np.bool_)


def test_a_sample_is_reported_with_its_path() -> None:
    recorder = Recorder(3, seed=0)
    recorder.audit_probability = 0.5
    three = sample_ids(0, 1, 2)
    recorder.start(three, 9)
    recorder.passed(three, 1, np.array([0.9, 0.4, 0.3], np.float32), np.array([4, 5, 6]))
    recorder.answered(sample_ids(0), 1, np.array([True]))
    recorder.finish(sample_ids(0))
    recorder.passed(sample_ids(1, 2), 2, np.array([0.8, 0.2], np.float32), np.array([5, 7]))
    recorder.answered(sample_ids(1), 2, none(1))
    recorder.final(sample_ids(1, 2), np.array([3, 7]))
    recorder.finish(sample_ids(1, 2))
    seen = recorder.take()
    assert seen is not None
    nan = np.nan
    np.testing.assert_array_equal(
        seen.confidence,
        np.array([[nan, nan, nan], [0.9, 0.4, 0.3], [nan, 0.8, 0.2]], np.float32),
    )
    assert seen.prediction.tolist() == [[UNKNOWN] * 3, [4, 5, 6], [UNKNOWN, 5, 7]]
    assert seen.answered_at.tolist() == [1, 2, MODEL_END]
    assert seen.final.tolist() == [UNKNOWN, 3, 7]
    assert seen.forced.tolist() == [True, False, False]
    assert seen.audit_probability.tolist() == [0.5] * 3
    assert seen.policy_version.tolist() == [9] * 3
    assert seen.loss.tolist() == [0.0, 2.0, 0.0]
    assert seen.weight.tolist() == [0.0, 2.0, 1.0]
    assert recorder.take() is None


def test_what_started_later_waits_for_what_started_before_it() -> None:
    recorder = Recorder(1)
    recorder.start(sample_ids(0, 1, 2, 3), 1)
    recorder.finish(sample_ids(1, 3))
    assert recorder.take() is None
    recorder.finish(sample_ids(0))
    seen = recorder.take()
    assert seen is not None
    assert len(seen) == 2
    recorder.lose(sample_ids(2))
    seen = recorder.take()
    assert seen is not None
    assert (len(seen), recorder.lost) == (1, 1)


def test_a_sample_that_is_tried_again_starts_from_nothing() -> None:
    recorder = Recorder(1)
    recorder.start(sample_ids(0), 1)
    recorder.passed(sample_ids(0), 0, np.array([0.9], np.float32), np.array([4]))
    recorder.start(sample_ids(0), 2)
    recorder.final(sample_ids(0), np.array([1]))
    recorder.finish(sample_ids(0))
    seen = recorder.take()
    assert seen is not None
    assert np.isnan(seen.confidence).all()
    assert (seen.policy_version.tolist(), seen.answered_at.tolist()) == ([2], [MODEL_END])


def test_a_copy_is_no_evidence_unless_it_is_the_same_sample_tried_again() -> None:
    recorder, three = Recorder(1), sample_ids(0, 1, 2)
    for _ in range(2):
        recorder.start(three, 1)
        recorder.admit(three, [(7, "a"), (7, "b"), (8, "a")])
        assert recorder.runs_on(three).tolist() == [True, False, True]
    recorder.finish(three)
    seen = recorder.take()
    assert seen is not None
    assert (len(seen), recorder.discounted, recorder.lost) == (2, 1, 0)


def test_in_release_mode_copies_run_on_too() -> None:
    recorder, two = Recorder(1, release=True), sample_ids(0, 1)
    recorder.start(two, 1)
    recorder.admit(two, [(7, "a"), (7, "a")])
    assert recorder.runs_on(two).all()


def test_what_nobody_reads_in_time_is_lost_and_counted() -> None:
    recorder = Recorder(1, capacity=8)
    for first in range(0, 20, 2):
        pair = sample_ids(first, first + 1)
        recorder.start(pair, first)
        recorder.finish(pair)
    seen = recorder.take()
    assert seen is not None
    # 12 to 19 are there; half of the ring is left to whoever writes meanwhile
    assert seen.policy_version.tolist() == [16, 16, 18, 18]
    assert recorder.lost == 16


def test_a_sample_that_never_ends_is_given_up_once_the_ring_comes_round() -> None:
    recorder = Recorder(1, capacity=8)
    recorder.start(sample_ids(0), 0)
    for number in range(1, 9):
        recorder.start(sample_ids(number), number)
        recorder.finish(sample_ids(number))
    seen = recorder.take()
    assert seen is not None
    assert seen.policy_version.tolist() == [5, 6, 7, 8]


def test_coins_fall_as_often_as_asked_for() -> None:
    recorder = Recorder(1, seed=1)
    recorder.audit_probability = 0.2
    many = np.arange(10_000)
    recorder.start(many, 1)
    heads = int(recorder.runs_on(many).sum())
    assert abs(heads - 2000) < 5 * 40  # five standard deviations
    recorder.audit_probability = 1.0
    recorder.start(many + 10_000, 1)
    assert recorder.runs_on(many + 10_000).all()


@pytest.mark.parametrize("capacity", [0, 3, 100])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=facts(f"capacity is {capacity}", "power of two")):
        Recorder(1, capacity=capacity)


@given(st.lists(st.sampled_from(["start", "finish", "lose", "take"]), max_size=80), st.randoms())
def test_everything_is_told_once_in_order(steps: list[str], random: object) -> None:
    recorder = Recorder(1, capacity=128)
    running: list[int] = []
    fate: dict[int, str] = {}
    told: list[int] = []
    for step in steps:
        if step == "start":
            running.append(len(fate))
            recorder.start(sample_ids(len(fate)), len(fate))
            fate[len(fate)] = "running"
        elif step in ("finish", "lose") and running:
            number = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
            fate[number] = step
            (recorder.finish if step == "finish" else recorder.lose)(sample_ids(number))
        elif step == "take" and (seen := recorder.take()) is not None:
            told += seen.policy_version.tolist()
    while (seen := recorder.take()) is not None:
        told += seen.policy_version.tolist()
    first = min((n for n, f in fate.items() if f == "running"), default=len(fate))
    assert told == [n for n in range(first) if fate[n] == "finish"]


def test_threads_write_while_one_reads() -> None:
    recorder, count = Recorder(2, capacity=1 << 16), 20_000
    told: list[int] = []

    def write(offset: int) -> None:
        for first in range(offset * 10, count, 20):
            some = np.arange(first, first + 10)
            recorder.start(some, 0)
            recorder.passed(some, 0, some.astype(np.float32), some)
            recorder.final(some, some)
            recorder.finish(some)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for writer in writers:
        writer.start()
    alive = True
    while alive:
        alive = any(writer.is_alive() for writer in writers)
        while (seen := recorder.take()) is not None:
            assert np.array_equal(seen.prediction[0], seen.final)
            assert np.array_equal(seen.confidence[0], seen.final.astype(np.float32))
            told += seen.final.tolist()
    assert told == list(range(count))
    assert recorder.lost == 0


def test_who_comes_after_the_ring_came_round_writes_into_nobodys_slot() -> None:
    recorder = Recorder(1, capacity=8)
    recorder.start(sample_ids(0), 1)
    for number in range(1, 9):  # 8 has the slot of 0 now
        recorder.start(sample_ids(number), 2)
    recorder.passed(sample_ids(0, 8), 0, np.array([0.1, 0.9], np.float32), np.array([5, 6]))
    recorder.answered(sample_ids(0), 0, none(1))
    recorder.final(sample_ids(0, 8), np.array([7, 6]))
    recorder.finish(sample_ids(0))
    recorder.finish(np.arange(1, 8))
    seen = recorder.take()
    assert seen is not None
    assert len(seen) == 3  # 5 to 7; 8 is still under way
    recorder.start(sample_ids(0), 1)  # tried again: too late as well
    recorder.finish(sample_ids(8))
    seen = recorder.take()
    assert seen is not None
    assert (seen.policy_version.tolist(), seen.final.tolist()) == ([2], [6])
    assert (seen.prediction.tolist(), seen.answered_at.tolist()) == ([[6]], [MODEL_END])
