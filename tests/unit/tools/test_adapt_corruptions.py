"""Corruptions: in range, of the same shape and dtype, worse with every step."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.adapt.corruptions import KINDS, WORST, PixelRange, channel_axis, corrupt
from hypothesis import given
from hypothesis import strategies as st

BYTES = PixelRange(low=0.0, high=255.0)


def pictures(count: int = 20, channels: int = 3, size: int = 16) -> np.ndarray:
    """Coarse patterns, so that blurring them changes them."""
    rng = np.random.default_rng(1)
    coarse = rng.integers(40, 216, (count, channels, size // 4, size // 4))
    return np.kron(coarse, np.ones((1, 1, 4, 4), np.int64)).astype(np.uint8)


def change(images: np.ndarray, kind: str, severity: int) -> float:
    worse = corrupt(images, kind, severity, range_=BYTES, rng=np.random.default_rng(0))
    return float(np.abs(worse.astype(float) - images).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_worse(kind: str) -> None:
    changes = [change(pictures(), kind, severity) for severity in range(WORST + 1)]
    assert changes[0] == 0
    assert changes == sorted(set(changes))


@pytest.mark.parametrize("kind", KINDS)
@given(severity=st.integers(0, WORST), low=st.floats(-5, 5), span=st.floats(0.01, 10))
def test_shape_dtype_and_range_stay(kind: str, severity: int, low: float, span: float) -> None:
    images = (low + span * np.random.default_rng(0).random((3, 1, 8, 8))).astype(np.float32)
    range_ = PixelRange.of(images)
    worse = corrupt(images, kind, severity, range_=range_, rng=np.random.default_rng(0))
    assert worse.shape == images.shape
    assert worse.dtype == images.dtype
    # A float32 is scaled to 0..1 and back.
    slack = 1e-5 * (abs(low) + span)
    assert worse.min() >= range_.low - slack
    assert worse.max() <= range_.high + slack


@pytest.mark.parametrize("kind", ["blur", "contrast", "brightness"])
def test_the_layout_does_not_matter(kind: str) -> None:
    first = pictures()
    last = np.moveaxis(first, 1, 3)
    rng = np.random.default_rng(0)
    worse = corrupt(last, kind, 3, range_=BYTES, rng=rng)
    np.testing.assert_array_equal(
        np.moveaxis(worse, 3, 1), corrupt(first, kind, 3, range_=BYTES, rng=rng)
    )
    flat = corrupt(first[:, 0], kind, 3, range_=BYTES, rng=rng)
    single = corrupt(first[:, :1], kind, 3, range_=BYTES, rng=rng)
    np.testing.assert_array_equal(flat, single[:, 0])


def test_known_values() -> None:
    rng = np.random.default_rng(0)
    halves = np.zeros((1, 1, 6, 6), np.uint8)
    halves[..., 3:] = 200
    bright = corrupt(halves, "brightness", 2, range_=BYTES, rng=rng)
    assert set(bright.ravel()) == {5, 205}  # 2 % of 255 more
    pale = corrupt(halves, "contrast", 5, range_=BYTES, rng=rng)
    assert set(pale.ravel()) == {25, 175}  # 75 % of the way from the mean, 100
    even = np.full((2, 1, 8, 8), 77, np.uint8)
    np.testing.assert_array_equal(corrupt(even, "blur", 5, range_=BYTES, rng=rng), even)
    hidden = corrupt(np.zeros((9, 2, 20, 20), np.uint8), "occlusion", 5, range_=BYTES, rng=rng)
    assert ((hidden == 128).sum(axis=(2, 3)) == 9 * 9).all()  # 45 % of 20, squared


def test_the_generator_decides() -> None:
    def noisy(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return corrupt(pictures(), "noise", 1, range_=BYTES, rng=rng)

    np.testing.assert_array_equal(noisy(3), noisy(3))
    assert (noisy(3) != noisy(4)).any()


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 3, 9, 9), 1), ((5, 9, 8, 3), 3), ((5, 9, 9), None), ((5, 4, 9, 9), 1)]
)
def test_channels_are_found(shape: tuple[int, ...], axis: int | None) -> None:
    assert channel_axis(shape) == axis


@pytest.mark.parametrize("shape", [(5, 9), (5, 3, 9), (5, 9, 9, 9), (5, 3, 3, 3), (5,)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="holds no images"):
        channel_axis(shape)


def test_mistakes_are_explained() -> None:
    images, rng = pictures(), np.random.default_rng(0)
    with pytest.raises(ValueError, match="unknown corruption 'fog', expected one of noise"):
        corrupt(images, "fog", 1, range_=BYTES, rng=rng)
    with pytest.raises(ValueError, match="severity is 6"):
        corrupt(images, "noise", 6, range_=BYTES, rng=rng)
    with pytest.raises(ValueError, match="every pixel is 0"):
        PixelRange.of(np.zeros((2, 1, 8, 8), np.float32))
