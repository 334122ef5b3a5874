"""A bundle that is compiled in seconds and served for chaos and fuzzing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from offramp.bundle import Bundle
from tests.bundles import compile_tiny
from tests.models import mlp


def compile_small(
    folder: Path, *, seed: int = 0, classes: int = 3, **options: Any
) -> tuple[Bundle, Path]:
    """Compile an MLP on slightly varied vectors of eight kinds; also return inputs to serve.

    The inputs have the same distribution, and are in an archive next to the bundle.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bundle = compile_tiny(
        mlp(layers=4, classes=classes), {"x": _vectors(1400, seed)}, folder, name="small", **options
    )
    inputs = folder / "inputs.npz"
    np.savez(inputs, x=_vectors(400, seed + 1))
    return bundle, inputs


def _vectors(samples: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(99).standard_normal((8, 16)) * 3
    noise = rng.standard_normal((samples, 16)) * 0.3
    return (kinds[rng.integers(0, 8, samples)] + noise).astype(np.float32)
