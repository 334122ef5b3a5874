"""The precision of a bundle, where it matters to who may serve it."""

from __future__ import annotations

import logging
from pathlib import Path

from offramp.bundle import CpuFeatures, Manifest
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)


def require_plain(manifest: Manifest, path: Path) -> None:
    """Refuse a cascade whose copy is for CPUs, on a GPU: a BackendError.

    What is int8 in it was chosen for CPUs; a GPU would compute it as float32, and slower. A copy
    that was trained with its exits was tried on CPUs alone. A variant is a float32 model like any.
    """
    if manifest.precision != "fp32":
        raise BackendError(
            f"{path} is of precision {manifest.precision}, which is for CPUs; serve it with "
            "--backend onnxruntime, or compile it with --precision fp32"
        )
    if manifest.training is not None:
        raise BackendError(
            f"{path} has a copy of the model that was trained with its exits, which is for CPUs; "
            "serve it with --backend onnxruntime, or compile it with --train frozen"
        )


def warn_of_saturation(name: str, manifest: Manifest, here: CpuFeatures, mode: Mode) -> None:
    """Warn where int8 of this CPU saturates and the one that certified did not, or otherwise.

    CPUs of x86 without VNNI add products of bytes in 16 bits, and saturate where weights are of 8
    bits; others do not. A CPU that the bundle does not name is taken for one with VNNI.
    """
    there = manifest.cpu
    saturated = bool(there and there.saturates)
    if manifest.precision == "fp32" or manifest.weights_of_7_bits or mode is Mode.OFF:
        return
    if here.saturates in (None, saturated):
        return
    _log.warning(
        "%s: INT8 MAY ANSWER OTHERWISE HERE than was certified: sums of int8 products saturate in "
        "16 bits on CPUs without VNNI; %s, the bundle was certified on %s. %s. "
        "Compile it on the kind of CPU that serves, or with --precision fp32",
        name,
        f"this one ({here.describe()}) has {'none' if here.saturates else 'it'}",
        "one that it does not name" if there is None else there.describe(),
        _watched(mode),
    )


_EXACT = 1e-4
"""Relative difference that float32 segments are verified to, at most."""


def is_rounded(manifest: Manifest) -> bool:
    """Whether anything is computed in less than float32, so that runtimes round it otherwise.

    That is a cascade, and a model that is quantised itself, or of half precision: its segments
    were verified to what rounding allows.
    """
    verified = manifest.verified_tolerance
    return manifest.precision != "fp32" or manifest.batch_effect is not None or verified > _EXACT


def warn_of_other_kernels(name: str, manifest: Manifest, backend: str, mode: Mode) -> None:
    """Warn where less than float32 is computed by another runtime than the one that certified."""
    if not is_rounded(manifest) or mode is Mode.OFF or backend != "openvino-cpu":
        return
    _log.warning(
        "%s: MAY ANSWER OTHERWISE HERE than was certified: it is not all of float32, and OpenVINO "
        "rounds otherwise than ONNX Runtime, which certified it. %s. Serve it with --backend "
        "onnxruntime, or compile the float32 model",
        name,
        _watched(mode),
    )


def _watched(mode: Mode) -> str:
    if mode.observed:
        return "Audits watch how far answers agree"
    return f"Nothing watches how far answers agree in mode {mode}; audits do in mode audit"
