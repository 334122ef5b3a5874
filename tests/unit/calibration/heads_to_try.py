"""Every kind of head on made-up features: recording, training and serving of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, AnswerForm, Head
from offramp.calibration.data.training_options import TrainingOptions
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.features import FULL_TENSOR, LAST, Projections, Recording
from offramp.calibration.heads.head_training import TrainedHead, train_heads
from offramp.calibration.heads.learners import Preconditioners
from offramp.calibration.heads.objectives import ClassObjective
from offramp.calibration.heads.preconditioning import Preconditioner

CLASSES = 3
CHANNELS, SIDE = 4, 14
TOKENS, WIDTH = 6, 8
COMPONENTS = 6

MAP_HEADS = tuple(
    Head(kind="grid", grid=grid, hidden=hidden) for grid in (1, 2, 4, 7, SIDE) for hidden in (0, 5)
)
SHAPES = {
    "map": (CHANNELS, SIDE, SIDE),
    "map with channels last": (SIDE, SIDE, CHANNELS),
    "signal": (CHANNELS, SIDE),
    "video": (CHANNELS, SIDE, SIDE, SIDE),
    "vector": (WIDTH,),
}
"""Shapes of one sample; others are tokens."""
TOKEN_HEADS = (
    Head(kind="first"),
    Head(kind="last"),
    Head(kind="mean"),
    Head(kind="attention", queries=1),
    Head(kind="attention", queries=4),
    Head(kind="first", hidden=5),
    Head(kind="last", hidden=16),
    Head(kind="mean", hidden=5),
    Head(kind="attention", queries=1, hidden=5),
    Head(kind="attention", queries=4, hidden=5),
)


def objective(answers: NDArray[np.float32]) -> ClassObjective:
    """Return the training target of heads for probabilities [n, classes]."""
    return ClassObjective(answer(), answers)


VECTOR_HEADS = (Head(kind="vector"), Head(kind="vector", hidden=5))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A cut tensor, its values, and the heads that fit."""

    cut: CutTensor
    heads: tuple[Head, ...]
    values: NDArray[Any]
    """[n, ...] of the cut tensor."""
    features: dict[int, NDArray[np.float16]]
    inputs: dict[str, NDArray[Any]]
    """The mask, where there is one."""
    answers: NDArray[np.float32]
    projections: Projections = field(default_factory=dict)

    def recording(self, rows: slice) -> Recording:
        return Recording(
            features=({key: value[rows] for key, value in self.features.items()},),
            masks={name: mask[rows] for name, mask in self.inputs.items()},
            answers=self.answers[rows],
            projections=self.projections,
        )

    def train(self, *, known: Preconditioners | None = None, **options: Any) -> list[TrainedHead]:
        """Train on the first two thirds, answer the others."""
        part = len(self.answers) * 2 // 3
        settings = {"epochs": 3, "batch_size": 32, **options}
        return train_heads(
            self.recording(slice(part)),
            self.recording(slice(part, None)),
            cuts=[self.cut],
            families=[self.heads],
            objective=objective(self.answers[:part]),
            options=TrainingOptions(**settings),
            known=known,
        )


def problem(kind: str, *, samples: int = 180, dtype: str = "float32", seed: int = 0) -> Problem:
    """Make a problem: one of SHAPES, or ``tokens``, ``masked`` and ``projected`` or not.

    The values are of float16's precision, so that what heads are trained on is what they see.
    """
    rng = np.random.default_rng(seed)
    shape = SHAPES.get(kind, (TOKENS, WIDTH))
    channels = {"map with channels last": 3, "signal": 1}.get(kind)
    symbols = ("sequence", WIDTH) if "tokens" in kind else shape
    masked = {"mask": "mask", "mask_dtype": "int64"} if "masked" in kind else {}
    cut = CutTensor(name="cut", dtype=dtype, shape=("batch", *symbols), channels=channels, **masked)
    classes = rng.integers(0, CLASSES, samples)
    centres = rng.standard_normal((CLASSES, *shape)) * 2
    values = (centres[classes] + rng.standard_normal((samples, *shape)) + 1).astype(np.float16)
    inputs = {}
    if masked:
        lengths = rng.integers(1, TOKENS + 1, samples)
        inputs["mask"] = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    features, projections = {FULL_TENSOR: values}, {}
    heads = VECTOR_HEADS if kind == "vector" else TOKEN_HEADS
    if cut.form == "map":
        heads = tuple(replace(head, axes=len(cut.sides)) for head in MAP_HEADS)
        features = _pooled(np.moveaxis(values, cut.channel_axis, 1))
    if "projected" in kind:
        made = Preconditioner.fit(values.reshape(-1, WIDTH), components=COMPONENTS)
        coordinates = made.apply(values.reshape(-1, WIDTH)).reshape(samples, TOKENS, -1)
        features, projections = {FULL_TENSOR: coordinates.astype(np.float16)}, {0: made}
    if "tokens" in kind:
        mask = inputs.get("mask", np.ones((samples, TOKENS), np.int64))
        last = [np.flatnonzero(row)[-1] for row in mask]
        features[LAST] = values[np.arange(samples), last]
    certain = np.eye(CLASSES, dtype=np.float32)[classes]
    return Problem(
        cut=cut,
        heads=heads,
        values=values.astype(dtype),
        features=features,
        projections=projections,
        inputs=inputs,
        answers=certain * np.float32(0.94) + np.float32(0.02),
    )


def _pooled(maps: NDArray[np.float16]) -> dict[int, NDArray[np.float16]]:
    """Grids of a map of 14 by 14, or more or fewer sides; its quarter overlaps (5 by 3)."""
    grids = {}
    for grid in (1, 2, 4, 7, SIDE):
        stride = SIDE // grid
        kernel = SIDE - (grid - 1) * stride
        pooled = maps.astype(np.float32)
        for axis in range(2, maps.ndim):
            windows = np.lib.stride_tricks.sliding_window_view(pooled, kernel, axis=axis)
            pooled = windows.mean(axis=-1).take(range(0, SIDE - kernel + 1, stride), axis=axis)
        grids[grid] = pooled.reshape(len(maps), -1).astype(np.float16)
    return grids


def answer(form: AnswerForm = "probabilities") -> Answer:
    return Answer(output="answer", classes=CLASSES, form=form)
