"""The precision of a bundle, where it matters to who may serve it."""

from __future__ import annotations

from pathlib import Path

from offramp.bundle import Manifest
from offramp.engine.errors import BackendError


def require_fp32(manifest: Manifest, path: Path) -> None:
    """Refuse a bundle of another precision, on a GPU: a BackendError.

    What is int8 in it was chosen for CPUs; a GPU would compute it as float32, and slower.
    """
    if manifest.precision != "fp32":
        raise BackendError(
            f"{path} is of precision {manifest.precision}, which is for CPUs; serve it with "
            "--backend onnxruntime, or compile it with --precision fp32"
        )
