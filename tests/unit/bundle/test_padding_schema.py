"""Paddings and lengths in a bundle: read back, and refused where they misfit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts
from tests.unit.bundle.examples import FILES, MANIFEST, rewrite_manifest, write

from offramp.bundle import (
    Bundle,
    BundleSchemaError,
    InputRange,
    InputRanges,
    LengthRange,
    Manifest,
    Padding,
    TensorSpec,
)
from offramp.bundle.files import dump
from offramp.bundle.schema.inputs import INPUT_RANGES

PADDING = Padding(
    size="sequence",
    mask="attention_mask",
    fills={"image": 3.0, "attention_mask": 0.0},
    longest=48,
    limit=64,
    difference=1e-7,
)


def of_sequences(*paddings: Padding) -> Manifest:
    specs = {"image": "uint8", "attention_mask": "bool"}
    return replace(
        MANIFEST,
        inputs=tuple(
            TensorSpec(name=name, dtype=dtype, shape=("batch", "sequence"))
            for name, dtype in specs.items()
        ),
        calibration=replace(MANIFEST.calibration, sample_shapes=dict.fromkeys(specs, (12,))),
        paddings=paddings,
    )


def test_they_come_back(tmp_path: Path) -> None:
    written = write(tmp_path, manifest=of_sequences(PADDING))
    assert Bundle.open(written.path).manifest.paddings == (PADDING,)


def test_where_there_are_none_nothing_is_said(tmp_path: Path) -> None:
    plain = json.loads((write(tmp_path).path / "manifest.json").read_text())
    assert "paddings" not in plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"longest": 0}, ("longest has 0", "at least 1")),
        ({"limit": 47}, ("limit is 47", "longest 48")),
        ({"difference": -1.0}, ("difference has -1.0",)),
        ({"size": "context"}, ("inputs", "'context'", "[]")),
        ({"fills": {"attention_mask": 0.0}}, ("['attention_mask']", "expected")),
        ({"fills": {"image": 256.0, "attention_mask": 0.0}}, ("'image' is uint8", "256")),
        ({"fills": {"image": 0.5, "attention_mask": 0.0}}, ("'image' is uint8", "0.5")),
        ({"fills": {"image": 0.0, "attention_mask": 1.0}}, ("filled with 0",)),
        ({"mask": "image"}, ("filled with 0",)),
        ({"mask": "nothing"}, ("'nothing'", "[batch, sequence]")),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: Any, said: Told) -> None:
    root = write(tmp_path, manifest=of_sequences(PADDING)).path
    rewrite_manifest(root, lambda plain: plain["paddings"][0].update(changes))
    with pytest.raises(BundleSchemaError, match=facts(*said)):
        Bundle.open(root)


def test_a_size_is_padded_in_one_way() -> None:
    with pytest.raises(ValueError, match="has the same size twice"):
        of_sequences(PADDING, PADDING)


def with_length(folder: Path, length: LengthRange) -> Bundle:
    ranges = InputRanges(
        inputs=(InputRange(name="image", lowest=0.0, highest=9.0),), lengths=(length,)
    )
    return write(folder, manifest=of_sequences(), files={**FILES, INPUT_RANGES: dump(ranges)})


def test_lengths_come_back(tmp_path: Path) -> None:
    length = LengthRange(size="sequence", mask="attention_mask", shortest=3, longest=12)
    found = with_length(tmp_path, length).input_ranges()
    assert found is not None
    assert found.lengths == (length,)


@pytest.mark.parametrize(
    "length",
    [
        LengthRange(size="context", shortest=3, longest=12),
        LengthRange(size="batch", shortest=3, longest=12),
        LengthRange(size="sequence", mask="nothing", shortest=3, longest=12),
    ],
)
def test_lengths_of_nothing_are_refused(tmp_path: Path, length: LengthRange) -> None:
    with pytest.raises(BundleSchemaError, match=facts("lengths of", "inputs")):
        with_length(tmp_path, length).input_ranges()


def test_a_range_of_lengths_has_an_order() -> None:
    with pytest.raises(ValueError, match="longest has 2, expected at least 3"):
        LengthRange(size="sequence", shortest=3, longest=2)
