"""The precision of a bundle, and checks whether the hardware here may serve the bundle."""

from __future__ import annotations

import logging
from pathlib import Path

from offramp.bundle import CpuFeatures, Manifest
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)


def require_plain(manifest: Manifest, path: Path) -> None:
    """Raise BackendError for a cascade with a copy for CPUs, on a GPU.

    A cascade's int8 parts were chosen for CPUs; a GPU would compute them as float32, and slower. A
    copy that was trained with its exits was tested on CPUs only. A variant is an ordinary float32
    model.
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
    """Warn if int8 sums saturate on this CPU but not on the certifying CPU, or vice versa.

    x86 CPUs without VNNI add products of bytes in 16 bits; with 8-bit weights, such sums saturate.
    On other CPUs they do not. If the bundle does not name its CPU, it is assumed to have VNNI.
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
"""Largest relative difference that the compiler's check allows float32 segments."""


def is_rounded(manifest: Manifest) -> bool:
    """Return whether parts of the model are computed below float32 precision.

    Runtimes round such parts differently. True for a cascade, and for a model that is itself
    quantised or of half precision: its segments were verified with a larger tolerance.
    """
    verified = manifest.verified_tolerance
    return manifest.precision != "fp32" or manifest.batch_effect is not None or verified > _EXACT


def warn_of_other_kernels(name: str, manifest: Manifest, backend: str, mode: Mode) -> None:
    """Warn if another runtime than the certifying runtime computes below float32 precision."""
    if not is_rounded(manifest) or mode is Mode.OFF or backend != "openvino-cpu":
        return
    _log.warning(
        "%s: MAY ANSWER OTHERWISE HERE than was certified: not all of it is float32, and OpenVINO "
        "rounds differently from ONNX Runtime, which certified it. %s. Serve it with --backend "
        "onnxruntime, or compile the float32 model",
        name,
        _watched(mode),
    )


def _watched(mode: Mode) -> str:
    if mode.observed:
        return "Audits watch how far answers agree"
    return f"Nothing watches how far answers agree in mode {mode}; audits do in mode audit"
