"""Legal values in a bundle: read back, and refused where they misfit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts, tells
from tests.unit.bundle.examples import MANIFEST, rewrite_manifest, write

from offramp.bundle import Bundle, BundleSchemaError, Manifest, TensorSpec, ValueBound

BOUND = ValueBound(
    input="image", lowest=-9.0, highest=8.0, axis=1, places=(0, 2), operator="Gather 'words'"
)


def bounded(bound: ValueBound = BOUND) -> Manifest:
    spec = TensorSpec(name="image", dtype="float32", shape=("batch", 3, "time"))
    calibration = replace(MANIFEST.calibration, sample_shapes={"image": (3, 5)})
    return replace(MANIFEST, inputs=(spec,), calibration=calibration, value_bounds=(bound,))


def test_they_come_back(tmp_path: Path) -> None:
    written = write(tmp_path, manifest=bounded())
    assert Bundle.open(written.path).manifest.value_bounds == (BOUND,)


def test_where_there_are_none_nothing_is_said(tmp_path: Path) -> None:
    plain = json.loads((write(tmp_path).path / "manifest.json").read_text())
    assert "value_bounds" not in plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": "sound"}, ("'sound'",)),
        ({"lowest": 9}, ("9.0", "above", "8.0")),
        ({"axis": 0}, ("from 1, or neither",)),
        ({"places": [-1]}, ("from 1, or neither",)),
        ({"places": [3]}, ("places [3] of dimension 1", "image: float32 [batch, 3, time]")),
        ({"axis": 2}, ("dimension 2",)),
        ({"axis": 3}, ("dimension 3",)),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: Any, said: Told) -> None:
    root = write(tmp_path, manifest=bounded()).path
    rewrite_manifest(root, lambda plain: plain["value_bounds"][0].update(changes))
    with pytest.raises(BundleSchemaError, match=facts(*said)):
        Bundle.open(root)


def test_they_are_described_in_one_sentence() -> None:
    tells(BOUND.describe(), "'image'", "[0, 2] of dimension 1", "-9 to 8", "Gather 'words'")
    assert replace(BOUND, lowest=None).legal() == "at most 8"
    assert replace(BOUND, highest=None).legal() == "at least -9"
