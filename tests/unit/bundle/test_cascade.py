"""Bundles of precision int8: what their manifest must say, and what those of fp32 do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts
from tests.unit.bundle.cascades import CASCADE_FILES, OWN, SEGMENTS, cascade_manifest, write_cascade
from tests.unit.bundle.examples import MANIFEST, rewrite_manifest, write

from offramp.bundle import Bundle, BundleSchemaError, CpuFeatures, Head
from offramp.bundle.bundle import read_manifest
from offramp.bundle.files import dump
from offramp.bundle.schema.compilation import JointEpoch, JointTraining


def test_a_cascade_is_read_as_it_was_written(tmp_path: Path) -> None:
    bundle = Bundle.open(write_cascade(tmp_path).path)
    assert (bundle.manifest.precision, bundle.manifest.source_begins) == ("int8", 2)
    assert bundle.manifest.exits[1].head.describe() == "the copy's own answer"
    assert read_manifest(bundle.path) == bundle.manifest
    assert bundle.profile().segments_ms[2] == bundle.profile().source_ms


def test_a_float32_bundle_prints_no_precision(tmp_path: Path) -> None:
    assert "precision" not in json.loads(dump(MANIFEST))
    assert json.loads(dump(cascade_manifest()))["precision"] == "int8"
    bundle = Bundle.open(write(tmp_path).path)
    assert (bundle.manifest.precision, bundle.manifest.source_begins) == ("fp32", 0)


def test_a_cascade_names_the_cpu_that_certified_it(tmp_path: Path) -> None:
    cpu = CpuFeatures(machine="x86_64", names=("AVX2", "AVX512_VNNI"))
    for number, known in enumerate((cpu, replace(cpu, names=None), None)):
        folder = tmp_path / str(number)
        bundle = write(folder, manifest=cascade_manifest(cpu=known), files=CASCADE_FILES)
        assert Bundle.open(bundle.path).manifest.cpu == known
        plain = json.loads((bundle.path / "manifest.json").read_text())
        assert ("cpu" in plain) == (known is not None)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("x86_64", ("manifest.json.cpu", "object", "'x86_64'")),
        ({"machine": "x86_64"}, ("missing fields ['names']",)),
        ({"machine": "m", "names": ["N"] * 64}, ("64", "32 letters")),
        ({"machine": "m", "names": ["N" * 33]}, ("64", "32 letters")),
        ({"machine": "m" * 33, "names": None}, ("64", "32 letters")),
        ({"machine": "m", "names": ["a\nb"]}, ("control characters",)),
    ],
)
def test_a_cpu_that_is_none_is_refused(tmp_path: Path, said: Any, told: Told) -> None:
    path = write_cascade(tmp_path).path
    rewrite_manifest(path, lambda plain: plain.update(cpu=said))
    with pytest.raises(BundleSchemaError, match=facts(*told)):
        Bundle.open(path)


@pytest.mark.parametrize("said", ["int4", "", 8, None])
def test_a_precision_that_is_not_known_is_refused(tmp_path: Path, said: Any) -> None:
    path = write_cascade(tmp_path).path
    rewrite_manifest(path, lambda plain: plain.update(precision=said))
    with pytest.raises(BundleSchemaError, match="precision: expected one of 'fp32', 'int8'"):
        Bundle.open(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"precision": "fp32"}, ("head 'own'", "int8")),
        (
            {"precision": "fp32", "exits": cascade_manifest().exits[:1]},
            ("segments[2]", "['image']", "expected 'q/logits'"),
        ),
        ({"exits": cascade_manifest().exits[:1]}, ("head 'own'", "last exit")),
        (
            {"exits": (cascade_manifest().exits[0], replace(OWN, head=Head(kind="vector")))},
            ("head 'own'", "last exit", "segment 1", "[] of 2"),
        ),
        (
            {"exits": (replace(OWN, index=0, after_segment=0, inputs=("q/cut",)),)},
            ("last exit", "segment 1"),
        ),
        (
            {"segments": (*SEGMENTS[:2], replace(SEGMENTS[2], file="segments/02.onnx"))},
            ("segments[2]", "'segments/02.onnx'", "'source.onnx'"),
        ),
        (
            {"segments": (*SEGMENTS[:2], replace(SEGMENTS[2], inputs=("image", "q/logits")))},
            ("segments[2]", "['image', 'q/logits']", "graph inputs"),
        ),
        (
            {"segments": (SEGMENTS[0], replace(SEGMENTS[1], inputs=("image",)), SEGMENTS[2])},
            ("segments[1]", "['image']", "'q/cut'"),
        ),
        ({"segments": (replace(SEGMENTS[2], index=0),), "exits": ()}, ("precision int8", "copy")),
    ],
)
def test_a_cascade_that_is_none_is_refused(changes: dict[str, Any], told: Told) -> None:
    with pytest.raises(ValueError, match=facts(*told)):
        cascade_manifest(**changes)


TRAINED = JointTraining(
    teacher="model",
    learning_rate=1e-4,
    epochs=(
        JointEpoch(losses=(0.5, 0.2), agreement=(0.8, 1.0)),
        JointEpoch(losses=(0.4, 0.2), agreement=(0.9, 0.99)),
    ),
    kept=1,
)


def test_a_copy_that_was_trained_is_a_cascade_of_fp32(tmp_path: Path) -> None:
    manifest = cascade_manifest(precision="fp32", training=TRAINED)
    bundle = write(tmp_path, manifest=manifest, files=CASCADE_FILES)
    found = Bundle.open(bundle.path).manifest
    assert found == bundle.manifest
    assert found.training == TRAINED
    assert found.is_cascade
    assert "training" not in json.loads(dump(MANIFEST))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"precision": "int8", "training": TRAINED}, ("training", "fp32")),
        (
            {"precision": "fp32", "training": TRAINED, "exits": cascade_manifest().exits[:1]},
            ("joint training", "own answer"),
        ),
        (
            {
                "precision": "fp32",
                "training": replace(
                    TRAINED, epochs=(JointEpoch(losses=(1.0,), agreement=(1.0,)),), kept=0
                ),
            },
            ("training", "1 answers", "2 exits"),
        ),
    ],
)
def test_a_training_that_does_not_fit_is_refused(changes: dict[str, Any], told: Told) -> None:
    with pytest.raises(ValueError, match=facts(*told)):
        cascade_manifest(**changes)


def test_what_no_training_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="kept is 2, expected one of 2 epochs"):
        replace(TRAINED, kept=2)
    with pytest.raises(ValueError, match="losses: 1 for 2 answers"):
        JointEpoch(losses=(1.0,), agreement=(1.0, 0.5))
    with pytest.raises(ValueError, match="is not within 0 and 1"):
        JointEpoch(losses=(1.0,), agreement=(1.5,))
