"""A tiny model for each task, with data for it, and what it is compiled with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from offramp.bundle import Bundle
from offramp.calibration.measure import profiling
from tests import models
from tests.bundles import compile_tiny
from tests.padded import Arrays, sentences

SAMPLES = 1200


def images(samples: int, *, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal((samples, 3, 16, 16)).astype(np.float32)}


def vectors(samples: int, *, seed: int = 0) -> Arrays:
    return {"x": np.random.default_rng(seed).standard_normal((samples, 16)).astype(np.float32)}


def tokens(samples: int, *, seed: int = 0) -> Arrays:
    return sentences(samples, 12, seed=seed)


Case = tuple[Callable[[], onnx.ModelProto], Callable[..., Arrays], dict[str, Any]]
CASES: dict[str, Case] = {
    "classification": (models.residual_cnn, images, {"heads": "bridges"}),
    "multi-label": (functools.partial(models.mlp, ending="Sigmoid"), vectors, {}),
    "regression": (models.mlp, vectors, {"task": "regression", "agree_within": 0.5}),
    "segmentation": (
        functools.partial(models.residual_cnn, dense="logits"), images, {"agree_share": 0.9}
    ),
    "classes of pixels": (
        functools.partial(models.residual_cnn, dense="ArgMax"), images, {"agree_share": 0.9}
    ),
    "a byte a pixel": (
        functools.partial(models.residual_cnn, dense="Softmax"),
        images,
        {"agree_share": 0.9, "class_map": True},
    ),
    "pose": (
        functools.partial(models.residual_cnn, dense="logits"),
        images,
        {"task": "pose", "agree_share": 0.6, "agree_within": 0.2},
    ),
    "token-classification": (
        functools.partial(models.bert_like, tags=4), tokens, {"agree_share": 0.8}
    ),
}  # fmt: skip


def compiled(
    build: Callable[[], onnx.ModelProto], data: Callable[..., Arrays], folder: Path, **options: Any
) -> Bundle:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 1.0)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.0)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        settings = {"max_disagreement": 0.3, "epochs": 2, "candidates": 2, **options}
        return Bundle.open(compile_tiny(build(), data(SAMPLES), folder, **settings).path)
