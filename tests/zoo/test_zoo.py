"""Every variant of every family is verified, or refused for the reason that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.variants import Variant, examine, variants

NOT_FREED = "cannot take another"
UNCUT: set[str] = set()
"""Families without a place where one tensor carries everything onward, batch first."""
FIXED = {("FT-Transformer", 2), ("DeBERTa", 1), ("DeBERTa", 2)}
"""Variants whose fixed batch cannot be freed yet; the message names the operator."""
UNEXPORTED = {("Swin (transformers)", "dynamo")}


def _refusal(variant: Variant) -> str | None:
    """What is known to be said of a variant that is not verified."""
    if variant.family in UNCUT:
        return "the model has no cut point"
    return NOT_FREED if (variant.family, variant.batch) in FIXED else None


def _quick(variant: Variant) -> bool:
    """Torch's older exporter takes a tenth of a second, the other several."""
    return variant.exporter == "torchscript" and variant.batch != 2


def _cases() -> list[object]:
    marks = {True: (), False: (pytest.mark.slow,)}
    quick = {v: _quick(v) and v.missing() != "transformers" for v in variants()}
    return [pytest.param(v, marks=marks[q], id=str(v)) for v, q in quick.items()]


@pytest.mark.parametrize("variant", _cases())
def test_a_variant_is_verified_or_refused_for_the_known_reason(variant: Variant, tmp_path: Path):
    if (missing := variant.missing()) is not None:
        pytest.skip(f"{missing} is not installed")

    if (variant.family, variant.exporter) in UNEXPORTED:
        pytest.skip("torch itself cannot export it")

    outcome = examine(variant, tmp_path)

    if (refusal := _refusal(variant)) is not None:
        assert refusal in outcome.remark
        return
    assert outcome.remark == ""
    assert outcome.cuts >= 1
    assert 0 < outcome.first <= outcome.last < 1
    assert outcome.worst <= 1e-5
