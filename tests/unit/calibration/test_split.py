"""Splits are disjoint, of the stated sizes, and big enough for the promise."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import facts

from offramp.calibration.data.dataset import DataError, Dataset, DataSplit, split
from offramp.calibration.groups.find_groups import find_groups


def dataset(samples: int) -> Dataset:
    numbers = np.arange(samples)
    return Dataset(inputs={"x": numbers[:, None]}, labels=numbers, sha256="0")


def rows(parts: DataSplit) -> list[list[int]]:
    return [part.inputs["x"][:, 0].tolist() for part in (parts.train, parts.tune, parts.certify)]


@given(samples=st.integers(4, 3000), least=st.integers(1, 700), seed=st.integers(0, 9))
def test_every_sample_is_in_exactly_one_part(samples: int, least: int, seed: int) -> None:
    try:
        parts = split(dataset(samples), certify_at_least=least, seed=seed)
    except DataError:
        return
    train, tune, certify = rows(parts)
    assert sorted(train + tune + certify) == list(range(samples))
    assert len(certify) == max(round(samples * 0.25), least)
    assert len(tune) == round(samples * 0.15) >= 1
    assert len(train) >= len(certify)
    for part, chosen in zip(
        (parts.train, parts.tune, parts.certify), (train, tune, certify), strict=True
    ):
        assert part.labels is not None
        assert part.labels.tolist() == chosen  # labels stay with their samples


def test_sizes_of_a_usual_set() -> None:
    assert list(map(len, rows(split(dataset(10_000), certify_at_least=299, seed=0)))) == [
        6000,
        1500,
        2500,
    ]


def test_the_seed_decides() -> None:
    first, again, other = (
        rows(split(dataset(1000), certify_at_least=50, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[0] != sorted(range(len(first[0])))  # at random, not by position


@given(samples=st.integers(0, 900), least=st.integers(1, 700))
def test_the_number_asked_for_is_enough_and_no_more_than_needed(samples: int, least: int) -> None:
    try:
        split(dataset(samples), certify_at_least=least, seed=0)
    except DataError as error:
        found = re.search(r"give at least (\d+)", str(error))
        assert found is not None
        needed = int(found[1])
        assert needed > samples
        split(dataset(needed), certify_at_least=least, seed=0)
        with pytest.raises(DataError, match=f"{needed - 1} calibration samples are too few"):
            split(dataset(needed - 1), certify_at_least=least, seed=0)


def test_the_message_says_how_many_are_there_and_needed() -> None:
    # 703 = 299 to certify + 105 to tune + 299 to train
    with pytest.raises(DataError, match=facts("500", "299", "703")):
        split(dataset(500), certify_at_least=299, seed=0)


def test_too_few_distinct_samples_are_counted_and_the_reason_is_named() -> None:
    numbers = np.arange(4000) // 10
    data = Dataset(inputs={"x": numbers[:, None]}, labels=None, sha256="0")
    told = facts("400 distinct", "4000 rows", "3,600", "299", "703", "--copies-within 0")
    with pytest.raises(DataError, match=told):
        split(data, certify_at_least=299, seed=0, groups=find_groups(data, within=0))


def test_training_keeps_all_copies_of_its_samples() -> None:
    numbers = np.arange(3000) // 3
    data = Dataset(inputs={"x": numbers[:, None]}, labels=None, sha256="0")
    parts = split(data, certify_at_least=20, seed=0, groups=find_groups(data, within=0))
    assert list(map(len, (parts.train, parts.tune, parts.certify))) == [1800, 150, 250]
    assert len(parts.distinct_train()) == 600


@pytest.mark.parametrize(("copies", "counted"), [(8, False), (20, True)])
def test_few_coincidences_do_not_make_a_certificate_dearer(copies: int, counted: bool) -> None:
    numbers = np.minimum(np.arange(1000), 999 - copies)
    data = Dataset(inputs={"x": numbers[:, None]}, labels=None, sha256="0")
    parts = split(data, certify_at_least=20, seed=0, groups=find_groups(data, within=0))
    assert len(parts.groups) == 1000 - copies
    assert (parts.certify.copies is not None) == counted
