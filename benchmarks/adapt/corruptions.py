"""Images made worse, step by step, within the range that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatImages: TypeAlias = NDArray[np.float32]
"""float32[n, channels, height, width] on a scale on which 0 to 1 is the model's range."""

WORST: Final = 5
"""The highest severity; 0 leaves images as they are."""
_MOST_CHANNELS: Final = 4
"""Largest number of channels: an axis of images of at most this length may hold the channels."""

_NOISE: Final = (0.0, 0.03, 0.045, 0.06, 0.08, 0.1)
"""Standard deviation, as a share of the range."""
_BLUR: Final = (0.0, 0.6, 0.8, 1.0, 1.2, 1.5)
"""Standard deviation, in pixels of an image 28 wide."""
_CONTRAST: Final = (1.0, 0.96, 0.92, 0.88, 0.82, 0.75)
"""Remaining contrast by severity: the factor on each pixel's distance to the image's mean."""
_BRIGHTNESS: Final = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06)
"""Added brightness as a share of the range, by severity."""
_OCCLUSION: Final = (0.0, 0.18, 0.25, 0.32, 0.38, 0.45)
"""Side of the hidden square by severity, as a share of the image's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRange:
    """The values that a model's image may have."""

    low: float
    high: float

    @classmethod
    def of(cls, images: NDArray[Any]) -> PixelRange:
        """Return the range of the data, 0 to 255 for bytes; ValueError if all pixels are equal."""
        if images.dtype == np.uint8:
            return cls(low=0.0, high=255.0)
        low, high = float(images.min()), float(images.max())
        if not low < high:
            raise ValueError(f"every pixel is {low:g}; images to be corrupted must show something")
        return cls(low=low, high=high)


def corrupt(
    images: NDArray[Any], kind: str, severity: int, *, range_: PixelRange, rng: np.random.Generator
) -> NDArray[Any]:
    """Return images that are corrupted at a severity, in the same shape and dtype.

    The shape is one that :func:`channel_axis` expects. Integers are rounded; values are clipped to
    ``range_``. Raise ValueError for an unknown kind or severity, and for data without images.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown corruption {kind!r}, expected one of {', '.join(KINDS)}")
    if not 0 <= severity <= WORST:
        raise ValueError(f"severity is {severity}, expected 0 (none) to {WORST}")
    if severity == 0:
        return images
    channels = channel_axis(images.shape)
    span = range_.high - range_.low
    scaled = (images.astype(np.float32) - np.float32(range_.low)) / np.float32(span)
    planes = scaled[:, None] if channels is None else np.moveaxis(scaled, channels, 1)
    worse = np.clip(KINDS[kind](planes, severity, rng), 0.0, 1.0)
    back = worse[:, 0] if channels is None else np.moveaxis(worse, 1, channels)
    values = back * np.float32(span) + np.float32(range_.low)
    if images.dtype.kind in "iu":
        values = np.rint(values)
    return values.astype(images.dtype)


def channel_axis(shape: tuple[int, ...]) -> int | None:
    """Return the axis of an image array that holds the channels; ``None`` without such an axis.

    Expects [n, channels, height, width], [n, height, width, channels] or [n, height, width]. Raise
    ValueError for other shapes.
    """
    if len(shape) == 3 and min(shape[1:]) > _MOST_CHANNELS:
        return None
    if len(shape) == 4 and shape[1] <= _MOST_CHANNELS < min(shape[2:]):
        return 1
    if len(shape) == 4 and shape[3] <= _MOST_CHANNELS < min(shape[1:3]):
        return 3
    raise ValueError(
        f"an array {list(shape)} holds no images that could be corrupted; expected "
        "[n, channels, height, width], [n, height, width, channels] or [n, height, width]"
    )


def _noise(images: FloatImages, severity: int, rng: np.random.Generator) -> FloatImages:
    noise = rng.standard_normal(images.shape, dtype=np.float32)
    return images + np.float32(_NOISE[severity]) * noise


def _blur(images: FloatImages, severity: int, _rng: np.random.Generator) -> FloatImages:
    sigma = _BLUR[severity] * images.shape[-1] / 28
    reach = max(1, round(3 * sigma))
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = (bell / bell.sum()).astype(np.float32)
    for axis in (2, 3):
        size = images.shape[axis]
        beyond = [(0, 0)] * 4
        beyond[axis] = (reach, reach)
        padded = np.pad(images, beyond, mode="edge")
        pieces = (padded.take(range(i, i + size), axis=axis) for i in range(len(weights)))
        blurred = np.zeros_like(images)
        for weight, piece in zip(weights, pieces, strict=True):
            blurred += weight * piece
        images = blurred
    return images


def _contrast(images: FloatImages, severity: int, _rng: np.random.Generator) -> FloatImages:
    mean: FloatImages = images.mean(axis=(1, 2, 3), keepdims=True)
    return mean + np.float32(_CONTRAST[severity]) * (images - mean)


def _brightness(images: FloatImages, severity: int, _rng: np.random.Generator) -> FloatImages:
    return images + np.float32(_BRIGHTNESS[severity])


def _occlusion(images: FloatImages, severity: int, rng: np.random.Generator) -> FloatImages:
    count, _, height, width = images.shape
    tall, wide = (max(1, round(_OCCLUSION[severity] * size)) for size in (height, width))
    top = rng.integers(0, height - tall + 1, count)[:, None]
    left = rng.integers(0, width - wide + 1, count)[:, None]
    rows, columns = np.arange(height), np.arange(width)
    hidden_rows = (rows >= top) & (rows < top + tall)
    hidden_columns = (columns >= left) & (columns < left + wide)
    hidden = hidden_rows[:, None, :, None] & hidden_columns[:, None, None, :]
    return np.where(hidden, np.float32(0.5), images)


_Corruption: TypeAlias = Callable[[FloatImages, int, np.random.Generator], FloatImages]

KINDS: Final[Mapping[str, _Corruption]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "occlusion": _occlusion,
}
"""Corruptions by name: Gaussian noise, Gaussian blur, less contrast, too bright, a grey square."""
