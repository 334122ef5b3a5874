"""Answers, policies and simulations equal the recorded ones.

After an intended change of behaviour, record again (``python -m tests.golden.cases record``) and
read the difference. Whether two checkouts agree to the last bit is for ``tests.golden.compare``.
"""

from __future__ import annotations

import json

import pytest

from offramp.bundle import Bundle
from tests.golden.cases import BUNDLE, RECORDED, cases, readable

CASES = cases()


def test_every_case_is_recorded_and_nothing_else() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(CASES)


def test_the_recorded_bundle_opens() -> None:
    bundle = Bundle.open(BUNDLE)
    assert [active.exit for active in bundle.policy.active] == [0, 1, 3, 4]
    assert len(bundle.manifest.exits) == 5
    assert bundle.profile().batch_sizes == (1, 2, 4, 8, 16, 32)
    assert bundle.records()["confidence"].shape == (5, 1700)


@pytest.mark.parametrize("name", CASES)
def test_nothing_changed(name: str) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    assert json.loads(json.dumps(readable(CASES[name]()))) == recorded
