"""A small BERT with two exits whose confidences come with the samples; made without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.tools.gpu.berts import BertSize
from offramp.tools.gpu.models import bert_model
from offramp.tools.gpu.staged import REPLAY
from tests.serving_checks import Truth

SIZE = BertSize(layers=3, width=16, heads=2, inner=32, vocabulary=50, tokens=8, classes=3)
MODEL = bert_model("bert-small", SIZE, ("layer0.out", "layer1.out"))


def small_bert(folder: Path, *, seed: int = 0) -> Bundle:
    """Return the bundle; its exits' thresholds are one half."""
    return MODEL.bundle(folder, seed=seed)


def inputs(samples: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Samples that are sure to any degree."""
    made = MODEL.samples(samples, 0.5, seed=seed, pool=samples).take(slice(None))
    replay = np.random.default_rng(seed).random(made[REPLAY].shape, np.float32)
    return {**made, REPLAY: replay}


def truth(bundle: Bundle, *, samples: int, tolerance: float) -> Truth:
    """Return the CPU's results for some samples."""
    return Truth.of(bundle, inputs(samples), tolerance)


def sentences(samples: int, *, tokens: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs of the bundle ``bert`` of tests/engines.py, whose sequences may have any length."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50, (samples, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
