"""Every kind of head on made-up features: recording, training and serving of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, AnswerForm, Head
from offramp.calibration.families import CutTensor
from offramp.calibration.features import WHOLE, Projections, Recording
from offramp.calibration.learners import Preconditioners
from offramp.calibration.preconditioning import Preconditioner
from offramp.calibration.training import (
    TrainedHead,
    train_heads,
)
from offramp.calibration.training_options import TrainingOptions

CLASSES = 3
CHANNELS, SIDE = 4, 14
TOKENS, WIDTH = 6, 8
COMPONENTS = 6

MAP_HEADS = tuple(
    Head(kind="grid", grid=grid, hidden=hidden) for grid in (1, 2, 4, 7, SIDE) for hidden in (0, 5)
)
TOKEN_HEADS = (
    Head(kind="first"),
    Head(kind="mean"),
    Head(kind="mean_max"),
    Head(kind="attention", queries=1),
    Head(kind="attention", queries=4),
    Head(kind="first", hidden=5),
    Head(kind="mean", hidden=5),
    Head(kind="mean_max", hidden=5),
    Head(kind="attention", queries=1, hidden=5),
    Head(kind="attention", queries=4, hidden=5),
)
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
            probabilities=self.answers[:part],
            options=TrainingOptions(**settings),
            known=known,
        )


def problem(kind: str, *, samples: int = 180, dtype: str = "float32", seed: int = 0) -> Problem:
    """Make a problem: ``map``, ``vector`` or ``tokens``, ``masked`` and ``projected`` or not.

    The values are of float16's precision, so that what heads are trained on is what they see.
    """
    rng = np.random.default_rng(seed)
    shape = {"map": (CHANNELS, SIDE, SIDE), "vector": (WIDTH,)}.get(kind, (TOKENS, WIDTH))
    symbols = ("sequence", WIDTH) if "tokens" in kind else shape
    masked = {"mask": "mask", "mask_dtype": "int64"} if "masked" in kind else {}
    cut = CutTensor(name="cut", dtype=dtype, shape=("batch", *symbols), **masked)
    classes = rng.integers(0, CLASSES, samples)
    centres = rng.standard_normal((CLASSES, *shape)) * 2
    values = (centres[classes] + rng.standard_normal((samples, *shape)) + 1).astype(np.float16)
    inputs = {}
    if masked:
        lengths = rng.integers(1, TOKENS + 1, samples)
        inputs["mask"] = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    features, projections = _pooled(values) if kind == "map" else {WHOLE: values}, {}
    heads = {"map": MAP_HEADS, "vector": VECTOR_HEADS}.get(kind, TOKEN_HEADS)
    if "projected" in kind:
        made = Preconditioner.fit(values.reshape(-1, WIDTH), components=COMPONENTS)
        coordinates = made.apply(values.reshape(-1, WIDTH)).reshape(samples, TOKENS, -1)
        features, projections = {WHOLE: coordinates.astype(np.float16)}, {0: made}
        heads = tuple(head for head in heads if head.kind != "mean_max")
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
    """Grids of a map of 14 × 14; its quarter overlaps (kernel 5, stride 3)."""
    exact = maps.astype(np.float32)
    grids = {}
    for grid in (1, 2, 4, 7, SIDE):
        stride = SIDE // grid
        kernel = SIDE - (grid - 1) * stride
        windows = np.lib.stride_tricks.sliding_window_view(exact, (kernel, kernel), axis=(2, 3))
        pooled = windows[:, :, ::stride, ::stride].mean(axis=(-2, -1))
        grids[grid] = pooled.reshape(len(maps), -1).astype(np.float16)
    return grids


def answer(form: AnswerForm = "probabilities") -> Answer:
    return Answer(output="answer", classes=CLASSES, form=form)
