"""Augmented samples are between samples, of their kind, and the same in every run."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.bundle import TensorSpec
from offramp.calibration.data.augmentation import AugmentedSamples, makes_sense, method_for
from offramp.calibration.data.dataset import Dataset


def spec(dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name="x", dtype=dtype, shape=("batch", *shape))


def dataset(**inputs: np.ndarray) -> Dataset:
    return Dataset(inputs=inputs, labels=None, sha256="0")


@pytest.mark.parametrize(
    ("specs", "method"),
    [
        ([spec("uint8", 1, 28, 28)], "mixup"),
        ([spec("float32", 12)], "mixup"),
        ([spec("float16", 3, 224, 224), spec("float32", 4)], "mixup"),
        ([spec("int64", "tokens"), spec("int64", "tokens")], "splice"),
        ([spec("int32", 128)], "splice"),
        ([spec("int64", 128), spec("float32", 4)], None),
        ([spec("uint8", 12)], None),  # bytes in a row may be categories
        ([spec("int64")], None),
        ([spec("bool", 4)], None),
    ],
)
def test_what_suits_which_inputs(specs: list[TensorSpec], method: str | None) -> None:
    assert method_for(specs) == method


def test_mixed_samples_are_weighted_means_of_pairs() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((50, 3, 4)).astype(np.float32)
    data = dataset(x=values, y=values[:, 0] * 2)
    made = AugmentedSamples.draw(data, "mixup", seed=1)
    share = made.share[:, None, None]
    expected = values * share + values[made.partner] * (1 - share)
    taken = made.take(slice(None))
    np.testing.assert_array_equal(taken["x"], expected)
    # one weight for all inputs of a sample
    np.testing.assert_allclose(taken["y"], expected[:, 0] * 2, rtol=1e-5, atol=1e-6)
    assert taken["x"].dtype == np.float32
    assert sorted(made.partner) == list(range(50))
    assert (made.partner != np.arange(50)).all()


@pytest.mark.filterwarnings("error")
def test_what_is_missing_or_masked_is_so_in_the_first_of_a_pair() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((50, 6)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = np.nan
    mask = np.where(rng.random((50, 6)) < 0.5, -np.inf, 0).astype(np.float32)
    made = AugmentedSamples.draw(dataset(x=values, mask=mask), "mixup", seed=1).take(slice(None))
    np.testing.assert_array_equal(np.isnan(made["x"]), np.isnan(values))
    np.testing.assert_array_equal(made["mask"], mask)


def test_mixed_bytes_are_rounded_and_stay_in_range() -> None:
    data = dataset(x=np.array([[[0]], [[255]]], np.uint8))
    made = AugmentedSamples(
        base=data,
        method="mixup",
        first=np.arange(2),
        partner=np.array([1, 0]),
        share=np.float32([0.3, 1.0]),
    )
    taken = made.take(slice(None))["x"]
    assert taken.dtype == np.uint8
    assert taken.ravel().tolist() == [178, 255]  # 0.7 · 255 = 178.5, to even


def test_spliced_texts_begin_as_one_and_end_as_the_other() -> None:
    ids = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 9]])
    data = dataset(ids=ids, mask=(ids > 0).astype(np.int64))
    made = AugmentedSamples(
        base=data,
        method="splice",
        first=np.arange(2),
        partner=np.array([1, 0]),
        share=np.float32([0.5, 0.5]),
    )
    taken = made.take(slice(None))
    # cut after two of three tokens, and after three of six: padding is never cut into
    assert taken["ids"].tolist() == [[1, 2, 6, 7, 8, 9], [4, 5, 6, 0, 0, 0]]
    assert taken["mask"].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("method", ["mixup", "splice"])
def test_batches_are_parts_of_the_whole_and_seeds_matter(method: str) -> None:
    values = np.arange(1, 121).reshape(20, 6)
    data = dataset(x=values if method == "splice" else values.astype(np.float32))
    made, again, other = (AugmentedSamples.draw(data, method, seed=s) for s in (1, 1, 2))
    whole = made.take(slice(None))["x"]
    np.testing.assert_array_equal(whole, again.take(slice(None))["x"])
    assert (whole != other.take(slice(None))["x"]).any()
    np.testing.assert_array_equal(made.take(slice(7, 15))["x"], whole[7:15])
    np.testing.assert_array_equal(made.take(np.array([3, 11]))["x"], whole[[3, 11]])
    assert len(made) == 20
    assert made.rows.tolist() == list(range(20))


def test_texts_are_spliced_if_their_inputs_have_one_length() -> None:
    ids = np.ones((4, 6), np.int64)
    assert makes_sense("splice", dataset(ids=ids, mask=ids))
    assert not makes_sense("splice", dataset(ids=ids, facts=ids[:, :2]))
    assert makes_sense("mixup", dataset(a=ids[:, :2] * 0.5, b=ids * 0.5))
    assert not makes_sense("mixup", dataset(x=np.ones((1, 3))))
