"""Scenes drawn from Fashion-MNIST's garments: for segmentation, sets of labels, key points, values.

The garments are real images (Debian's ``dataset-fashion-mnist``, MIT, Zalando SE); the scenes are
drawn in code: garments at random positions on a canvas, darker or brighter, with noise whose
strength varies by scene. So labels are exact, and scenes differ in difficulty.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offramp.tools.zoo.fashion_resnet import DATASET, read_idx

CANVAS, GARMENT = 56, 28
"""Side lengths of a canvas and of a garment, in pixels."""
KINDS = 10
KEY_POINTS = 5
"""Number of key points: left, right, top, bottom, centre."""
MEASURES = 3
"""Number of measured values: row and column of the centre, and size."""
_RECOGNISABLE = 60
"""A kind of garment is a label of a scene if at least this number of its pixels is visible."""
_VISIBLE = 24
"""Pixels of an image with at least this brightness are the garment; others are background."""
_EDGE = 2
"""An outermost point is the middle of this number of columns or rows; of only one, it would
jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garments:
    """Images uint8 [n, 28, 28], and their kinds uint8 [n], 0 to 9."""

    images: NDArray[np.uint8]
    kinds: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: NDArray[np.intp]) -> Garments:
        return Garments(images=self.images[index], kinds=self.kinds[index])


def read_garments(folder: Path = DATASET) -> Garments:
    """Read all images of the data set, including the official test set, without duplicates.

    SystemExit with the remedy if the data set is missing.
    """
    try:
        images = [read_idx(f"{part}-images-idx3-ubyte", folder)[:, 0] for part in ("train", "t10k")]
        kinds = [read_idx(f"{part}-labels-idx1-ubyte", folder) for part in ("train", "t10k")]
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing: install Debian's dataset-fashion-mnist, or unpack it "
            "and name the folder of its .gz files with --images"
        ) from error
    every = np.concatenate(images)
    first = {image.tobytes(): index for index, image in reversed(list(enumerate(every)))}
    return Garments(images=every, kinds=np.concatenate(kinds))[np.array(sorted(first.values()))]


def share_out(garments: Garments, *, seed: int) -> tuple[Garments, Garments, Garments]:
    """Split garments at random for training (70 %), calibration and test (15 % each)."""
    order = np.random.default_rng(seed).permutation(len(garments))
    ends = [len(order) * 70 // 100, len(order) * 85 // 100]
    train, calibration, test = np.split(order, ends)
    return garments[train], garments[calibration], garments[test]


def draw_scenes(
    garments: Garments, count: int, *, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw scenes of one to three garments, later ones in front of earlier ones.

    Return images uint8 [count, 1, 56, 56], and the class of each pixel, uint8 [count, 56, 56]: 0 is
    background, 1 to 10 are garments by kind.
    """
    random = np.random.default_rng(seed)
    images = np.zeros((count, 1, CANVAS, CANVAS), np.uint8)
    classes = np.zeros((count, CANVAS, CANVAS), np.uint8)
    for image, labels in zip(images[:, 0], classes, strict=True):
        canvas = np.zeros((CANVAS, CANVAS), np.float32)
        for _ in range(random.choice((1, 2, 3), p=(0.5, 0.3, 0.2))):
            _place(garments, canvas, labels, random)
        image[:] = _noisy(canvas, 5 + 25 * random.random() ** 2, random)
    return images, classes


def draw_poses(
    garments: Garments, count: int, *, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw scenes of one garment, with its outermost points and centre as labels.

    Return images uint8 [count, 1, 56, 56], and rows and columns int64 [count, 5, 2] of the points
    left, right, top, bottom and centre.
    """
    random = np.random.default_rng(seed)
    images = np.zeros((count, 1, CANVAS, CANVAS), np.uint8)
    points = np.zeros((count, KEY_POINTS, 2), np.int64)
    for image, found in zip(images[:, 0], points, strict=True):
        canvas = np.zeros((CANVAS, CANVAS), np.float32)
        labels = np.zeros((CANVAS, CANVAS), np.uint8)
        _place(garments, canvas, labels, random)
        found[:] = key_points(labels > 0)
        image[:] = _noisy(canvas, 5 + 55 * random.random() ** 2, random)
    return images, points


def draw_label_sets(
    garments: Garments, count: int, *, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw scenes as :func:`draw_scenes` does, with the kinds of their garments as labels.

    Return images uint8 [count, 1, 56, 56], and uint8 [count, 10]: 1 for each kind that is visible
    enough, 0 for the others.
    """
    images, classes = draw_scenes(garments, count, seed=seed)
    seen = np.stack([(classes == kind + 1).sum(axis=(1, 2)) for kind in range(KINDS)], axis=1)
    return images, (seen >= _RECOGNISABLE).astype(np.uint8)


def draw_measures(
    garments: Garments, count: int, *, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw scenes of one garment, with measures of it as labels.

    Return images uint8 [count, 1, 56, 56], and float32 [count, 3]: row and column of its centre, 0
    to 1, and the share of a garment's square that it covers.
    """
    random = np.random.default_rng(seed)
    images = np.zeros((count, 1, CANVAS, CANVAS), np.uint8)
    measures = np.zeros((count, MEASURES), np.float32)
    for image, found in zip(images[:, 0], measures, strict=True):
        canvas = np.zeros((CANVAS, CANVAS), np.float32)
        labels = np.zeros((CANVAS, CANVAS), np.uint8)
        _place(garments, canvas, labels, random)
        rows, columns = np.nonzero(labels)
        found[:2] = rows.mean() / CANVAS, columns.mean() / CANVAS
        found[2] = len(rows) / GARMENT**2
        image[:] = _noisy(canvas, 5 + 55 * random.random() ** 2, random)
    return images, measures


def key_points(visible: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Find rows and columns [5, 2] of the outermost points of a shape, and of its centre.

    An outermost point is in the middle of the two outermost columns, or rows, that the shape has.
    """
    rows, columns = np.nonzero(visible)

    def middle(places: NDArray[np.bool_]) -> tuple[int, int]:
        return round(float(rows[places].mean())), round(float(columns[places].mean()))

    left, right, top, bottom = columns.min(), columns.max(), rows.min(), rows.max()
    return np.array(
        [
            (middle(columns < left + _EDGE)[0], left),
            (middle(columns > right - _EDGE)[0], right),
            (top, middle(rows < top + _EDGE)[1]),
            (bottom, middle(rows > bottom - _EDGE)[1]),
            middle(np.ones(len(rows), np.bool_)),
        ],
        np.int64,
    )


def _place(
    garments: Garments,
    canvas: NDArray[np.float32],
    labels: NDArray[np.uint8],
    random: np.random.Generator,
) -> None:
    """Put a garment on a canvas, possibly mirrored, and the classes of its pixels on ``labels``."""
    index = random.integers(len(garments))
    garment = garments.images[index][:, :: random.choice((-1, 1))]
    top, left = random.integers(0, CANVAS - GARMENT + 1, 2)
    place = slice(top, top + GARMENT), slice(left, left + GARMENT)
    visible = garment >= _VISIBLE
    canvas[place] = np.where(visible, garment * random.uniform(0.5, 1), canvas[place])
    labels[place] = np.where(visible, garments.kinds[index] + 1, labels[place])


def _noisy(
    canvas: NDArray[np.float32], deviation: float, random: np.random.Generator
) -> NDArray[np.uint8]:
    noise = random.standard_normal(canvas.shape, np.float32) * np.float32(deviation)
    noisy: NDArray[np.uint8] = np.clip(np.rint(canvas + noise), 0, 255).astype(np.uint8)
    return noisy
