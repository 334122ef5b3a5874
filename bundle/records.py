"""The records of a bundle: what its exits said on the calibration data."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.npz import ArrayForm, read_npz
from offramp.bundle.schema.manifest import Manifest

TUNE, CERTIFY = 1, 2
"""The values of ``split`` in the records: samples that thresholds are tuned on, and samples that
neither trained nor tuned anything."""

_RECORD_FORMS: Final = {
    "confidence": ArrayForm(dtype="float32", ndim=2),
    "prediction": ArrayForm(dtype="int32", ndim=2),
    "final_prediction": ArrayForm(dtype="int32", ndim=1),
    "final_confidence": ArrayForm(dtype="float32", ndim=1),
    "split": ArrayForm(dtype="uint8", ndim=1),
    "label": ArrayForm(dtype="int64", ndim=1, optional=True),
    "copies": ArrayForm(dtype="int64", ndim=1, optional=True),
}
_MOST_RECORDS_BYTES: Final = 2**32


def parse_records(content: bytes, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Read records as :meth:`.Bundle.records` gives them; ValueError if they are of others."""
    records = read_npz(io.BytesIO(content), max_bytes=_MOST_RECORDS_BYTES, expected=_RECORD_FORMS)
    _check_records(records, manifest)
    return records


def no_records() -> dict[str, NDArray[Any]]:
    """Return the records of a bundle without exits that was made without data: of no sample."""
    forms = {name: form for name, form in _RECORD_FORMS.items() if not form.optional}
    return {name: np.zeros((0,) * form.ndim, form.dtype) for name, form in forms.items()}


def _check_records(records: Mapping[str, NDArray[Any]], manifest: Manifest) -> None:
    """Refuse records that are not of this model's exits and classes: ValueError."""
    exits, samples, answer = len(manifest.exits), len(records["split"]), manifest.answer
    bound = answer.task.code_bound(answer.classes)
    for name, array in records.items():
        shape = (exits, samples) if _RECORD_FORMS[name].ndim == 2 else (samples,)
        if array.shape != shape:
            raise ValueError(f"{name!r} is of shape {list(array.shape)}, expected {list(shape)}")
    for name in ("confidence", "final_confidence"):
        if not ((records[name] >= 0) & (records[name] <= 1)).all():
            raise ValueError(f"{name!r} has values that are not in [0, 1]")
    for name in ("prediction", "final_prediction"):
        if not ((records[name] >= 0) & (records[name] < bound)).all():
            raise ValueError(f"{name!r} has values that are none of the {bound} codes of answers")
    if "copies" in records and not (records["copies"] >= 1).all():
        raise ValueError("'copies' has values below 1, expected the rows that a sample stands for")
    if not np.isin(records["split"], (TUNE, CERTIFY)).all():
        raise ValueError(f"'split' has values besides {TUNE} (tune) and {CERTIFY} (certify)")
    for which, purpose in ((TUNE, "tune"), (CERTIFY, "certify")):
        if not (records["split"] == which).any():
            raise ValueError(f"'split' has no sample to {purpose} on ({which}), expected some")
