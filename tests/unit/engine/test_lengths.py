"""Requests of different length: their buckets, what is added to them, and what is new."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import tells

from offramp.bundle import InputRange, InputRanges, LengthRange, Padding, TensorSpec
from offramp.engine.requests.input_guard import InputGuard
from offramp.engine.requests.lengths import STEP, Arrays, LengthRules

LONGEST, LIMIT, FILL = 44, 60, 5
SPECS = (
    TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence")),
    TensorSpec(name="mask", dtype="int32", shape=("batch", "sequence")),
    TensorSpec(name="pairs", dtype="float32", shape=("batch", 2, "sequence", "sequence")),
    TensorSpec(name="image", dtype="uint8", shape=("batch", 3)),
)
PADDING = Padding(
    size="sequence",
    mask="mask",
    fills={"ids": float(FILL), "mask": 0.0, "pairs": 0.5},
    longest=LONGEST,
    limit=LIMIT,
    difference=0.0,
)
SEEN = LengthRange(size="sequence", mask="mask", shortest=3, longest=20)


def request(length: int, rows: int = 1, *, counting: int | None = None) -> Arrays:
    mask = np.zeros((rows, length), np.int32)
    mask[:, : length if counting is None else counting] = 1
    return {
        "ids": np.full((rows, length), length),
        "mask": mask,
        "pairs": np.full((rows, 2, length, length), length, np.float32),
        "image": np.full((rows, 3), length, np.uint8),
    }


def key_length(rules: LengthRules, inputs: Arrays) -> int:
    """Return the length in a batch key, which is the same at all places of the size."""
    ids, image, mask, pairs = rules.batch_key(inputs)
    assert image == (3,)
    assert ids == mask
    assert pairs == (2, *ids, *ids)
    return ids[0]


RULES = LengthRules(SPECS, (PADDING,))
WHOLE = LengthRules(SPECS, (PADDING,), whole_buckets=True)


@pytest.mark.parametrize("rules", [RULES, WHOLE])
def test_eight_lengths_share_a_bucket_up_to_the_longest_that_was_tried(rules: LengthRules) -> None:
    found = [key_length(rules, request(length)) for length in range(1, 48)]
    assert found == [8] * 8 + [16] * 8 + [24] * 8 + [32] * 8 + [40] * 8 + [44] * 4 + [45, 46, 47]


def test_without_paddings_a_bucket_has_one_length() -> None:
    for rules in (LengthRules(), LengthRules(SPECS), LengthRules(SPECS, (PADDING,), pads=False)):
        assert [key_length(rules, request(length)) for length in (1, 7, 9)] == [1, 7, 9]
        assert not rules.pads


@pytest.mark.parametrize("rules", [RULES, WHOLE])
def test_what_is_masked_wholly_is_not_padded(rules: LengthRules) -> None:
    """Every position of it counts as much as any other, so one more would change its answer."""
    hidden = request(12, rows=2)
    hidden["mask"][1] = 0
    key = rules.batch_key(hidden)
    assert key_length(rules, hidden) == 12
    assert rules.join([hidden, hidden], key)["ids"].shape == (4, 12)
    full = request(16, counting=0)
    assert rules.batch_key(full) == rules.batch_key(request(9))
    assert rules.join([request(9), full], rules.batch_key(full))["ids"].shape == (2, 16)


@given(
    st.lists(st.tuples(st.integers(9, 16), st.integers(1, 3)), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_batch_holds_its_requests_and_fills(parts: list[tuple[int, int]], whole: bool) -> None:
    rules = WHOLE if whole else RULES
    inputs = [request(length, rows) for length, rows in parts]
    key = rules.batch_key(inputs[0])
    joined = rules.join(inputs, key)
    longest = 2 * STEP if whole else max(length for length, _ in parts)
    rows = sum(count for _, count in parts)
    assert {name: array.shape for name, array in joined.items()} == {
        "ids": (rows, longest),
        "mask": (rows, longest),
        "pairs": (rows, 2, longest, longest),
        "image": (rows, 3),
    }
    start = 0
    for (length, count), part in zip(parts, inputs, strict=True):
        mine = {name: array[start : start + count] for name, array in joined.items()}
        start += count
        for name, array in part.items():
            assert mine[name].dtype == array.dtype
            held = tuple(map(slice, array.shape))
            np.testing.assert_array_equal(mine[name][held], array)
        assert (mine["ids"][:, length:] == FILL).all()
        assert (mine["mask"][:, length:] == 0).all()
        assert (mine["pairs"][:, :, length:] == 0.5).all()
        assert (mine["pairs"][:, :, :, length:] == 0.5).all()
    added = rules.added(inputs, [count for _, count in parts], key)
    assert added.positions == sum((longest - length) * count for length, count in parts)
    assert added.samples == sum(count for length, count in parts if length < longest)
    assert added.positions <= (STEP - 1) * rows


def test_a_request_alone_is_not_copied() -> None:
    alone = request(9)
    joined = RULES.join([alone], RULES.batch_key(alone))
    assert all(joined[name] is alone[name] for name in alone)


def test_each_of_two_sizes_is_padded_by_its_own_mask() -> None:
    specs = tuple(
        TensorSpec(name=name, dtype="int64", shape=("batch", size))
        for name, size in (("a", "first"), ("am", "first"), ("b", "second"), ("bm", "second"))
    )
    paddings = tuple(
        Padding(size=size, mask=f"{n}m", fills={n: 9.0, f"{n}m": 0.0}, longest=40, difference=0.0)
        for n, size in (("a", "first"), ("b", "second"))
    )
    rules = LengthRules(specs, paddings)

    def pair(first: int, second: int) -> Arrays:
        a, b = np.ones((1, first), np.int64), np.ones((1, second), np.int64)
        return {"a": a, "am": a, "b": b, "bm": b}

    parts = [pair(9, 3), pair(12, 2)]
    key = rules.batch_key(parts[0])
    assert key == ((16,), (16,), (8,), (8,)) == rules.batch_key(parts[1])
    assert rules.batch_key(pair(9, 9)) == ((16,), (16,), (16,), (16,))
    joined = rules.join(parts, key)
    assert joined["a"].tolist() == [[1] * 9 + [9] * 3, [1] * 12]
    assert joined["bm"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert rules.added(parts, [1, 1], key) == (2, 4)
    hidden = {**pair(9, 3), "bm": np.zeros((1, 3), np.int64)}
    assert rules.batch_key(hidden) == ((16,), (16,), (3,), (3,))


def test_beyond_the_positions_of_a_model_a_request_is_refused() -> None:
    for rules in (RULES, LengthRules(SPECS, (PADDING,), pads=False)):
        assert rules.wrong(request(LIMIT)) is None
        tells(rules.wrong(request(LIMIT + 1)), "sequence is 61", "'mask'", "60", "shorten")
    assert LengthRules(SPECS, (replace(PADDING, limit=None),)).wrong(request(99)) is None


def test_lengths_that_calibration_never_had_are_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = LengthRules(SPECS, (), (SEEN,))
    both = request(30, rows=4, counting=10)
    both["mask"][1, 2:] = 0
    both["mask"][3] = 1
    with caplog.at_level(logging.WARNING):
        assert rules.unseen(request(30, counting=20)) == 0
        assert not caplog.records
        assert rules.unseen(both) == 2
        assert rules.unseen(request(2, rows=3)) == 3
    (record,) = caplog.records
    tells(record.getMessage(), "size 2 in `sequence`", "3 to 20")


def test_without_a_mask_the_size_is_the_length() -> None:
    rules = LengthRules(SPECS, (), (LengthRange(size="sequence", shortest=12, longest=12),))
    assert [rules.unseen(request(length, 2)) for length in (11, 12, 13)] == [2, 0, 2]
    assert LengthRules().unseen(request(3)) == 0


def guard(length: LengthRange) -> InputGuard:
    ranges = (InputRange(name="image", lowest=0.0, highest=255.0),)
    return InputGuard(InputRanges(inputs=ranges, lengths=(length,)))


def test_no_exit_answers_a_sample_that_is_shorter_or_longer_than_all_before() -> None:
    inputs = request(30, rows=4)
    inputs["mask"][:] = np.arange(30) < np.array([[2], [3], [20], [21]])
    assert guard(SEEN).in_range(inputs).tolist() == [False, True, True, False]
    same = replace(SEEN, shortest=20, longest=20)
    assert guard(same).in_range(inputs).all()
    assert guard(replace(SEEN, mask="")).in_range(inputs).all()
