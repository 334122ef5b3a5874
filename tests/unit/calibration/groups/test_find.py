"""Rows that are no independent samples are found, and no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.calibration.groups.making import copied, dataset_of, film, series, windows

from offramp.bundle.schema.compilation import COPIES_WITHIN
from offramp.calibration.data.dataset import Dataset, DataSplit, split
from offramp.calibration.data.groups import Groups
from offramp.calibration.groups.find_groups import find_groups

Rng = np.random.Generator


def groups_of(data: Dataset, within: float = COPIES_WITHIN) -> Groups:
    return find_groups(data, within=within)


def parts_of(data: Dataset, seed: int = 0) -> DataSplit:
    return split(data, certify_at_least=20, seed=seed, groups=groups_of(data))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(120, 400),
    most=st.integers(2, 12),
    width=st.sampled_from([12, 60, 300]),
    noise=st.sampled_from([0.0, 1e-4, 1e-3, 1e-2, 3e-2]),
)
def test_no_copies_are_on_two_sides_of_a_split_and_each_counts_once(
    seed: int, samples: int, most: int, width: int, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    made = copied(rng, rng.integers(1, most + 1, samples), width, noise)
    parts = parts_of(dataset_of(x=made.x), seed)
    train, tune, certify = (made.origin[p.rows] for p in (parts.train, parts.tune, parts.certify))
    assert not set(train) & set(tune)
    assert not {*train, *tune} & set(certify)
    for origins, part in ((tune, parts.tune), (certify, parts.certify)):
        assert len(set(origins)) == len(origins)  # a sample once, however often it was copied
        assert part.copies is not None
        assert part.copies.tolist() == np.bincount(made.origin)[origins].tolist()
    assert len(parts.groups) == samples
    assert len(certify) == max(round(samples * 0.25), 20)
    assert set(train) | set(tune) | set(certify) == set(range(samples))


def clusters(rng: Rng, spread: float) -> NDArray[np.float32]:
    centres = 3 * rng.standard_normal((10, 20))
    of = np.sort(rng.integers(0, 10, 3000))
    return (centres[of] + spread * rng.standard_normal((3000, 20))).astype(np.float32)


def shades(rng: Rng, rows: int) -> NDArray[np.float32]:
    """Return pictures whose pixels have 256 possible values, half of which occur in each."""
    allowed = np.argsort(rng.random((rows, 256)), axis=1)[:, :128]
    picked = np.take_along_axis(allowed, rng.integers(0, 128, (rows, 28 * 28)), axis=1)
    return (picked.reshape(rows, 1, 28, 28) / 255).astype(np.float32)


INDEPENDENT: dict[str, Callable[[Rng], NDArray]] = {
    "many dimensions": lambda rng: rng.standard_normal((3000, 60)).astype(np.float32),
    "two dimensions": lambda rng: rng.standard_normal((5000, 2)),
    "one dimension": lambda rng: rng.random((5000, 1)),
    "one dimension, sorted": lambda rng: np.sort(rng.random((3000, 1)), axis=0),
    "sorted by a column": lambda rng: (x := rng.random((3000, 4)))[np.argsort(x[:, 0])],
    "sorted by class": lambda rng: clusters(rng, 1.0),
    "sorted by class, tight": lambda rng: clusters(rng, 0.3),
    "few values": lambda rng: rng.integers(0, 3, (3000, 40)).astype(np.float32),
    "pictures": lambda rng: rng.integers(0, 256, (600, 1, 16, 16), np.uint8),
    "pictures as floats": lambda rng: shades(rng, 1200),
    "few pictures as floats": lambda rng: shades(rng, 400),
    "smooth pictures": lambda rng: np.cumsum(rng.standard_normal((600, 1, 16, 16)), axis=3),
    "columns of all scales": lambda rng: rng.standard_normal((3000, 6)) * [1e6, 1e3, 9, 1, 0.1, 1],
    "an outlier": lambda rng: np.where(
        np.arange(3000)[:, None] == 7, 1e9, rng.standard_normal((3000, 20))
    ),
    "missing values": lambda rng: np.where(
        rng.random((1000, 20)) < 0.2, np.nan, rng.standard_normal((1000, 20))
    ),
    "token ids": lambda rng: rng.integers(0, 30_000, (2000, 32)),
    "a single row": lambda rng: rng.random((1, 4)),
    "two rows": lambda rng: rng.random((2, 4)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_independent_rows_stay_by_themselves(name: str, seed: int) -> None:
    x = INDEPENDENT[name](np.random.default_rng(seed))
    assert groups_of(dataset_of(x=x)).found == ()


def test_without_copies_the_split_is_a_plain_permutation() -> None:
    data = dataset_of(x=np.random.default_rng(0).standard_normal((1000, 8)))
    order = np.random.default_rng(5).permutation(1000)
    parts = parts_of(data, seed=5)
    expected = [np.sort(rows).tolist() for rows in np.split(order, [600, 750])]
    found = [part.rows.tolist() for part in (parts.train, parts.tune, parts.certify)]
    assert found == expected
    assert parts.certify.copies is None


def test_equal_rows_of_few_values_count_once() -> None:
    x = np.random.default_rng(0).integers(0, 4, (5000, 5)).astype(np.float32)
    found = groups_of(dataset_of(x=x))
    unique, number = np.unique(x, axis=0, return_inverse=True)
    pairs = set(zip(found.number.tolist(), number.tolist(), strict=True))
    assert len(found) == len(unique) == len(pairs), "the groups are the equal rows"


def test_inputs_are_compared_together() -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(600)
    x, ids = np.repeat(rng.standard_normal((300, 8)), 2, axis=0)[order], order
    assert len(groups_of(dataset_of(x=x, ids=ids))) == 600  # ids are not nearly equal, ever
    assert len(groups_of(dataset_of(x=x, ids=ids // 2))) == 300


@pytest.mark.parametrize("levels", [1, 3])
def test_pictures_that_were_stored_with_loss_are_nearly_the_same(levels: int) -> None:
    rng = np.random.default_rng(levels)
    x = np.repeat(np.cumsum(rng.integers(-20, 21, (500, 1, 16, 16)), axis=3), 2, axis=0)
    x = np.clip(128 + x + rng.integers(-levels, levels + 1, x.shape), 0, 255).astype(np.uint8)
    assert len(groups_of(dataset_of(x=rng.permutation(x)))) == 500


def test_copies_are_found_where_data_are_dense() -> None:
    rng = np.random.default_rng(0)
    made = copied(rng, np.full(600, 10), 2, 1e-4)
    assert 560 <= len(groups_of(dataset_of(x=made.x))) <= 600  # some lie on each other by chance


def test_rare_copies_are_found() -> None:
    rng = np.random.default_rng(0)
    made = copied(rng, np.where(np.arange(3000) < 30, 2, 1), 60, 1e-3)
    groups = groups_of(dataset_of(x=made.x))
    assert len(groups) == 3000
    assert groups.found == ("30 are nearly the same as another",)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([32, 100]),
    overlap=st.sampled_from([0.5, 0.75, 0.9]),
    memory=st.sampled_from([0.0, 0.9]),
    shuffled=st.booleans(),
)
def test_windows_of_training_do_not_overlap_with_those_that_certify(
    seed: int, width: int, overlap: float, memory: float, shuffled: bool
) -> None:
    rng = np.random.default_rng(seed)
    stride = round(width * (1 - overlap))
    x = windows(series(rng, 1500 * stride, memory), width, stride)
    order = rng.permutation(len(x)) if shuffled else np.arange(len(x))
    parts = parts_of(dataset_of(x=x[order]), seed)
    train, certify = (np.sort(order[part.rows]) for part in (parts.train, parts.certify))
    apart = np.abs(train[:, None] - certify[None]).min(axis=0) * stride
    assert (1 - apart / width).max() < 0.5
    assert (1 - np.diff(certify) * stride / width).mean() < 0.3
    assert len(parts.groups) < 0.75 * len(x)
    assert len(train) > 0.1 * len(x)


def test_windows_of_ids_are_found() -> None:
    rng = np.random.default_rng(0)
    x = windows(rng.integers(0, 30_000, 20_000), 64, 32)
    groups = groups_of(dataset_of(ids=rng.permutation(x)))
    assert len(groups) < 0.8 * len(x)
    assert "overlap" in groups.found[0]


def test_each_clip_of_a_film_counts_once() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([film(rng, 20, 50, 0.97) for _ in range(100)])
    groups = groups_of(dataset_of(x=x))
    assert 95 <= len(groups) <= 110
    clip = np.arange(2000) // 20
    assert np.mean([len(set(groups.number[clip == c])) == 1 for c in range(100)]) > 0.9


@pytest.mark.parametrize("memory", [0.9, 0.98])
def test_a_long_film_is_split_by_blocks_that_no_longer_resemble_each_other(memory: float) -> None:
    x = film(np.random.default_rng(1), 4000, 50, memory)
    parts = parts_of(dataset_of(x=x)) if memory < 0.95 else None
    groups = groups_of(dataset_of(x=x))
    lag = np.log(0.2) / np.log(memory)  # at which correlation is a fifth
    assert lag <= 4000 / len(groups) <= 6 * lag
    assert (np.diff(groups.number) >= 0).all()  # blocks follow the file
    if parts is not None:
        apart = np.abs(parts.train.rows[:, None] - parts.certify.rows[None]).min(axis=0)
        assert np.median(apart) >= lag / 2


def test_frames_among_independent_rows_are_found() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([film(rng, 1000, 50, 0.98), rng.standard_normal((3000, 50))])
    groups = groups_of(dataset_of(x=x))
    assert len(np.unique(groups.number[1100:])) > 2800
    assert len(np.unique(groups.number[:1000])) < 60


def test_what_the_user_names_belongs_together_and_joins_with_what_is_found() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 8))
    x[1] = x[300]  # two persons have a row in common
    groups = groups_of(dataset_of(np.arange(600) // 3, x=x))
    assert len(groups) == 199
    assert groups.number[0] == groups.number[302]
    assert groups.representative[groups.number[3]] == 4  # the row in the middle


def test_only_equal_rows_are_joined_where_the_user_says_so() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([film(rng, 1000, 20, 0.99), np.ones((10, 20), np.float32)])
    groups = groups_of(dataset_of(x=x), within=0)
    assert groups.found == ("9 are duplicates of another",)


def test_the_same_data_give_the_same_groups() -> None:
    made = copied(np.random.default_rng(3), np.full(300, 4), 10, 1e-3)
    first, again = (groups_of(dataset_of(x=made.x)) for _ in range(2))
    assert first.number.tolist() == again.number.tolist()
    assert first.representative.tolist() == again.representative.tolist()
