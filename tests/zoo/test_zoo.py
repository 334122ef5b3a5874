"""Variants of every family pass their trial, or are refused for the reason that is known.

All variants there are take an hour, and are what ``docs/models.md`` is made of; here are a handful
for ``make test``, and one or more of each family for ``make test-all``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offramp.certify.decision import MODEL_END
from tests.bundles import brief_measurements
from tests.zoo.families import FAMILIES
from tests.zoo.ready import FOLDER, LIGHT
from tests.zoo.serving import served
from tests.zoo.trial import examine
from tests.zoo.variants import Variant

QUICK = (
    Variant("VGG", "torchscript", 1),
    Variant("BERT", "torchscript", "dynamic", length=True),
    Variant("LSTM", "torchscript", 2),
    Variant("FT-Transformer", "torchscript", 2),
    Variant("ResNet", "torchscript", "dynamic", changed="QDQ int8"),
    Variant("Keras CNN, channels last", "file", "dynamic"),
)
NEWER = ("ResNet", "MobileNetV3", "Swin", "BERT", "Llama", "LSTM", "TCN")
"""Families that are tried as torch's newer exporter writes them: each takes some seconds."""
CHANGED = {
    "ResNet": ("opset 11", "opset 26", "fp16", "external data"),
    "BERT": ("opset 11", "opset 26", "QDQ int8", "fp16 inside"),
    "LSTM": ("opset 11", "opset 26"),
}
REFUSED = {
    Variant("ResNet", "torchscript", "dynamic", changed="QOperator int8"): "no cut point",
    Variant("ResNet", "torchscript", "dynamic", changed="bf16"): "ONNX Runtime itself refuses",
}
"""Known refusals, with their messages."""


def _slow() -> Iterator[Variant]:
    for name, family in FAMILIES.items():
        yield Variant(name, "torchscript", "dynamic", length=bool(family.dynamic))
    for name in NEWER:
        yield Variant(name, "dynamo", "dynamic", length=bool(FAMILIES[name].dynamic))
    for name, done in CHANGED.items():
        for changed in done:
            newer = changed in {"opset 26", "external data"}
            exporter = "dynamo" if newer else "torchscript"
            yield Variant(name, exporter, "dynamic", changed=changed)
    yield Variant("Keras CNN, transposed at each layer", "file", "dynamic")
    yield Variant("SqueezeNet (onnx)", "file", 1)
    yield Variant("ShuffleNet (onnx)", "file", 1)
    yield from REFUSED


def _cases() -> list[object]:
    slow = [variant for variant in _slow() if variant not in QUICK]
    quick = [pytest.param(variant, id=str(variant)) for variant in QUICK]
    return quick + [pytest.param(v, id=str(v), marks=pytest.mark.slow) for v in slow]


@pytest.mark.parametrize("variant", _cases())
def test_a_variant_passes_its_trial_or_is_refused_for_the_known_reason(
    variant: Variant, tmp_path: Path
):
    _skip_where_missing(variant)

    outcome = examine(variant, tmp_path)

    if variant in REFUSED:
        assert REFUSED[variant] in outcome.remark
        return
    assert outcome.remark == ""
    assert outcome.cuts >= 1
    assert 0 < outcome.first <= outcome.last < 1
    assert outcome.left > 0, "with nobody leaving a comparison shows nothing"
    assert outcome.ended > 0


@pytest.mark.parametrize(
    "variant",
    [
        Variant("ResNet", "torchscript", "dynamic"),
        pytest.param(Variant("BERT", "torchscript", 1), marks=pytest.mark.slow),
        pytest.param(
            Variant("ResNet", "torchscript", "dynamic", changed="QDQ int8"), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_variant_is_answered_the_same_over_grpc(variant: Variant, tmp_path: Path):
    with brief_measurements():
        exits, worst = served(variant, tmp_path)

    assert len(set(exits.tolist()) - {MODEL_END}) >= 2
    assert worst <= (0.05 if variant.changed else 1e-4)  # a step of int8; float32 in another order


def _skip_where_missing(variant: Variant) -> None:
    if (missing := variant.missing()) is not None:
        pytest.skip(f"{missing} is not installed")
    if variant.family in LIGHT and not (FOLDER / f"light_{LIGHT[variant.family]}.onnx").exists():
        pytest.skip("this version of the onnx package has no such model")
