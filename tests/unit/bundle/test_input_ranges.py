"""Input ranges in a bundle: read back, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts
from tests.unit.bundle.examples import FILES, write

from offramp.bundle import Bundle, BundleSchemaError, InputRange, InputRanges
from offramp.bundle.files import dump
from offramp.bundle.schema.inputs import INPUT_RANGES

RANGES = InputRanges(inputs=(InputRange(name="image", lowest=0.0, highest=255.0),))


def with_ranges(folder: Path, content: bytes) -> Bundle:
    return write(folder, files={**FILES, INPUT_RANGES: content})


def test_they_come_back(tmp_path: Path) -> None:
    assert with_ranges(tmp_path, dump(RANGES)).input_ranges() == RANGES


def test_a_bundle_may_have_none(tmp_path: Path) -> None:
    assert write(tmp_path).input_ranges() is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "sound"}, ("['sound']", "inputs")),
        ({"lowest": 300.0}, ("highest has 255.0", "at least 300")),
        ({"highest": "much"}, ("type float",)),
        ({"highest": float("nan")}, ("input_ranges.json",)),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: Any, said: Told) -> None:
    plain = json.loads(dump(RANGES))
    plain["inputs"][0] |= changes
    bundle = with_ranges(tmp_path, json.dumps(plain).encode())
    with pytest.raises(BundleSchemaError, match=facts(*said)):
        bundle.input_ranges()
