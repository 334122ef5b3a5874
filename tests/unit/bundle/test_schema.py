"""Intact bundles of another schema are refused, with the field's name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.unit.bundle.examples import replace_file, rewrite_manifest, sign, write

from offramp.bundle import Bundle, BundleSchemaError, Head, Promise
from offramp.bundle.schema.serde import to_plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=1), ("schema version 1", "2", "compile")),
        (lambda m: m.update(schema_version=3), ("schema version 3", "2", "compile")),
        (lambda m: m.pop("schema_version"), ("schema version None",)),
        (lambda m: m.update(surprise=1), ("unknown fields ['surprise']",)),
        (lambda m: m.pop("answer"), ("missing fields ['answer']",)),
        (lambda m: m["exits"][0].pop("accuracy"), ("exits[0]", "missing fields ['accuracy']")),
        (lambda m: m["exits"][0].update(index=1), ("exits: indices must count from 0",)),
        (
            lambda m: m["exits"][0].update(after_segment=1),
            ("must increase and be below the last segment",),
        ),
        (lambda m: m["exits"][0]["head"].update(kind="round"), ("expected one of 'grid'",)),
        (lambda m: m["segments"][0].update(index="0"), ("segments[0].index", "int")),
        (lambda m: m["segments"][0].update(index=True), ("segments[0].index", "int")),
        (lambda m: m["segments"].clear(), ("a bundle needs at least one",)),
        (lambda m: m["segments"].reverse(), ("segments: indices must count from 0",)),
        (lambda m: m["segments"][0].update(row_bytes=-1), ("row_bytes has -1", "at least 0")),
        (lambda m: m["segments"][0].update(weight_bytes=1.5), ("weight_bytes", "int")),
        (
            lambda m: m["segments"][0].pop("row_bytes"),
            ("missing fields ['row_bytes']; the bundle",),
        ),
        (
            lambda m: [s.update(row_bytes=4, weight_bytes=8) for s in m["segments"]],
            ("segments", "row_bytes", "4", "expected 0"),
        ),
        (lambda m: m["answer"].update(output="cut"), ("'cut'", "last segment")),
        (lambda m: m["inputs"][0].update(dtype="object"), ("dtype 'object' is not",)),
        (lambda m: m["inputs"][0].update(dtype="f4,i4"), ("dtype 'f4,i4' is not",)),
        (lambda m: m["inputs"][0].update(dtype="florat32"), ("florat32",)),
        (lambda m: m["inputs"][0].update(shape=["batch", -1]), ("negative size",)),
        (lambda m: m["inputs"][0].update(shape=["batch", 1.5]), ("shape[1]",)),
        (lambda m: m["tools"].update(onnx=1), ("tools['onnx']",)),
        (lambda m: m.update(verified_tolerance=10**400), ("a finite number",)),
        (lambda m: m.update(verified_tolerance=True), ("verified_tolerance", "float")),
        (lambda m: m.update(files={}), ("files: expected a list",)),
    ],
)
def test_the_manifest_follows_the_schema(tmp_path: Path, change, message: Told) -> None:
    root = write(tmp_path).path
    rewrite_manifest(root, change)
    with pytest.raises(BundleSchemaError, match=facts("manifest.json", *message)):
        Bundle.open(root)


@pytest.mark.parametrize("document", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_a_manifest_that_is_no_json(tmp_path: Path, document: bytes) -> None:
    root = write(tmp_path).path
    sign(root, document)
    with pytest.raises(BundleSchemaError, match=r"manifest.json: not JSON"):
        Bundle.open(root)


@pytest.mark.parametrize("document", [b"[]", b"null", b"1"])
def test_a_manifest_that_is_no_object(tmp_path: Path, document: bytes) -> None:
    root = write(tmp_path).path
    sign(root, document)
    with pytest.raises(BundleSchemaError, match="schema version None"):
        Bundle.open(root)


@pytest.mark.parametrize(
    ("active", "message"),
    [
        ([{"exit": 1, "threshold": 0.5}], ("exit", "1")),
        ([{"exit": -1, "threshold": 0.5}], ("exit -1 is not an index",)),
        ([{"exit": 0, "threshold": float("nan")}], ("finite number", "nan")),
        ([{"exit": 0, "threshold": float("inf")}], ("finite number", "inf")),
        ([{"exit": 0, "threshold": -0.1}], ("threshold -0.1", "exit 0", "[0, 2.0]")),
        ([{"exit": 0, "threshold": 2.1}], ("threshold 2.1", "exit 0", "[0, 2.0]")),
        ([{"exit": 0, "threshold": 0.5}] * 2, ("active exits [0, 0] must increase",)),
        ([{"exit": 0, "threshold": "0.5"}], ("expected a value of type float",)),
        ([{"exit": 0}], ("missing fields ['threshold']",)),
    ],
)
def test_a_policy_that_would_do_something_else_is_refused(
    tmp_path: Path, active: list, message: Told
) -> None:
    root = write(tmp_path).path
    plain = {"version": 1, "active": active, "promise": None}
    replace_file(root, "policy.json", json.dumps(plain).encode())
    with pytest.raises(BundleSchemaError, match=facts("policy.json", *message)):
        Bundle.open(root)


def test_a_whole_number_is_a_fine_threshold(tmp_path: Path) -> None:
    root = write(tmp_path).path
    plain = {"version": 3, "active": [{"exit": 0, "threshold": 1}], "promise": None}
    replace_file(root, "policy.json", json.dumps(plain).encode())
    (active,) = Bundle.open(root).policy.active
    assert type(active.threshold) is float
    assert active.threshold == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": [8, 1]}, ("must increase",)),
        ({"batch_sizes": []}, ("must increase",)),
        ({"source_ms": [1.0]}, ("every row needs 2 columns",)),
        ({"segments_ms": [[1.0, 5.0], [3.0]]}, ("every row needs 2 columns",)),
        ({"stages_ms": []}, ("stages_ms has 0 rows", "1 exits")),
    ],
)
def test_a_profile_with_ragged_tables_is_refused(tmp_path: Path, change, message: Told) -> None:
    root = write(tmp_path).path
    plain = json.loads((root / "profiles/cpu.json").read_text())
    replace_file(root, "profiles/cpu.json", json.dumps({**plain, **change}).encode())
    with pytest.raises(BundleSchemaError, match=facts("profiles/cpu.json", *message)):
        Bundle.open(root).profile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["exits"][0].update(agreement=1.5), ("agreement has 1.5", "at least 0")),
        (
            lambda m: m["exits"][0].update(after_segment=-1),
            ("must increase and be below the last segment",),
        ),
        (
            lambda m: m["segments"][0].update(flops_share=-0.1),
            ("flops_share has -0.1, expected at",),
        ),
        (lambda m: m["segments"][1].update(inputs=["image"]), ("segments[1]", "['image']")),
        (lambda m: m["segments"][0].update(inputs=["cut"]), ("segments[0]: reads ['cut']",)),
        (lambda m: m["segments"][0].update(inputs=[]), ("segments[0]: reads []",)),
        (lambda m: m["segments"][0].update(output="image"), ("segments[1]: reads",)),
        (lambda m: m["exits"][0].update(inputs=["logits"]), ("exits[0]", "['logits']")),
        (lambda m: m["exits"][0].update(output="cut"), ("tensors: 'cut' occurs twice",)),
        (lambda m: m["outputs"].clear(), ("outputs: [], expected only the answer 'logits'",)),
        (lambda m: m["outputs"][0].update(dtype="int64"), ("floating-point", "batch, 10")),
        (lambda m: m["answer"].update(classes=11), ("floating-point", "batch, 11")),
        (lambda m: m["answer"].update(task={"kind": "pose"}), ("form 'logits' is none of pose",)),
        (
            lambda m: m["answer"].update(task={"kind": "segmentation", "share": 0.9}),
            ("floating-point", "batch, 10, …, …"),
        ),
        (
            lambda m: (
                m["answer"].update(task={"kind": "token-classification", "mask": "m"}),
                m["outputs"][0].update(shape=["batch", "t", 10]),
            ),
            ("answer.task.mask", "'m'", "batch, t"),
        ),
        (
            lambda m: m["answer"].update(task={"kind": "classification", "share": 0.5}),
            ("share is 0.5 for classification",),
        ),
        (lambda m: m["inputs"].append(m["inputs"][0]), ("inputs: 'image' occurs twice",)),
        (
            lambda m: m["inputs"][0].update(shape=["batch", 2**31]),
            ("takes more than 1 GiB per sample",),
        ),
        (lambda m: m["inputs"][0].update(shape=[1, 1, 28, 28]), ("is not a sample of the input",)),
        (lambda m: m["calibration"]["sample_shapes"].clear(), ("has [], expected the inputs",)),
        (
            lambda m: m["calibration"]["sample_shapes"].update(image=[1, 28]),
            ("is not a sample of the",),
        ),
        (
            lambda m: m["calibration"].update(reference_batch_size=0),
            ("reference_batch_size has 0",),
        ),
        (
            lambda m: m["calibration"].update(tune_samples=2**60),
            ("an integer within ±9007199254740992",),
        ),
        (lambda m: m["files"].append(m["files"][0]), ("files: 'exits/00.onnx' occurs twice",)),
        (lambda m: m["files"][0].update(size_bytes=-1), ("size_bytes has -1", "at least 0")),
        (lambda m: m["files"][0].update(sha256="x"), ("'x'", "64 hexadecimal")),
        (lambda m: m.update(name="a\nb"), ("text without control characters",)),
        (lambda m: m.update(name="\ud800"), ("text without control characters",)),
        (lambda m: m["tools"].update({"a\nb": ""}), ("text without control characters",)),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change, message) -> None:
    root = write(tmp_path).path
    rewrite_manifest(root, change)
    with pytest.raises(BundleSchemaError, match=facts("manifest.json", *message)) as caught:
        Bundle.open(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_disagreement": -1}, ("max_disagreement has -1.0", "more than 0", "less than")),
        ({"max_disagreement": 1}, ("max_disagreement has 1.0",)),
        ({"confidence": 0}, ("confidence_level has 0.0", "more than 0", "less than 1")),
        ({"certify_samples": 0}, ("certify_samples has 0", "at least 1")),
        ({"certify_errors": 251}, ("certify_errors has 251", "at least 0", "at most 250")),
        ({"p_value": 1.1}, ("p_value has 1.1",)),
        ({"predicted_savings": 2}, ("predicted_savings has 2.0", "at most 1")),
    ],
)
def test_an_impossible_promise_is_refused(tmp_path: Path, change, message: Told) -> None:
    root = write(tmp_path).path
    plain = json.loads((root / "policy.json").read_text())
    plain["promise"].update(change)
    replace_file(root, "policy.json", json.dumps(plain).encode())
    with pytest.raises(BundleSchemaError, match=facts("policy.json.promise:", *message)):
        Bundle.open(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": [0, 8]}, ("batch_sizes has 0", "at least 1")),
        ({"batch_sizes": [1, 2**40]}, ("batch_sizes has 1099511627776",)),
        ({"threads": 0}, ("threads has 0", "at least 1")),
        ({"source_ms": [0.0, 20.0]}, ("source_ms has 0.0", "more than 0")),
        ({"source_ms": [1.0, 1e300]}, ("source_ms has 1e", "300")),
        ({"segments_ms": [[0.0, 5.0], [0.0, 15.0]]}, ("segments_ms: a column adds up to 0",)),
        ({"exits_ms": [[-0.25, 0.5]]}, ("exits_ms has -0.25", "at least 0")),
        ({"segments_ms": [[1.0, 5.0]]}, ("1 segments and 1 exits", "manifest.json has 2")),
        ({"exits_ms": [], "stages_ms": []}, ("rows for 2 segments and 0 exits",)),
        (
            {"spread": {"rounds": [1], "source": [0.1], "segments": [0.1], "added": [0.1]}},
            ("spread: every row needs 2 columns",),
        ),
    ],
)
def test_a_profile_of_another_model_or_no_times_is_refused(
    tmp_path: Path, change, message: Told
) -> None:
    root = write(tmp_path).path
    plain = json.loads((root / "profiles/cpu.json").read_text())
    replace_file(root, "profiles/cpu.json", json.dumps({**plain, **change}).encode())
    with pytest.raises(BundleSchemaError, match=facts("profiles/cpu.json", *message)):
        Bundle.open(root).profile()


def records(**changes: Any) -> bytes:
    arrays = {
        "confidence": np.full((1, 4), 0.5, np.float32),
        "prediction": np.zeros((1, 4), np.int32),
        "final_prediction": np.zeros(4, np.int32),
        "final_confidence": np.ones(4, np.float32),
        "split": np.array([1, 1, 2, 2], np.uint8),
        **changes,
    }
    stream = io.BytesIO()
    np.savez(stream, **{name: array for name, array in arrays.items() if array is not None})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"records", ("BadZipFile",)),
        (records(split=None), ("missing arrays ['split']",)),
        (records(more=np.zeros(1)), ("unknown arrays ['more']",)),
        (records(confidence=np.zeros((1, 4))), ("'confidence' is float64", "1, 4", "float32")),
        (records(confidence=np.zeros((2, 4), "f4")), ("[2, 4]", "[1, 4]")),
        (records(prediction=np.zeros((1, 3), "i4")), ("[1, 3]", "[1, 4]")),
        (
            records(confidence=np.full((1, 4), np.nan, "f4")),
            ("'confidence' has values that are not",),
        ),
        (
            records(final_confidence=np.full(4, 2, "f4")),
            ("'final_confidence' has values that are n",),
        ),
        (records(prediction=np.full((1, 4), 10, "i4")), ("10 codes",)),
        (records(final_prediction=np.full(4, -1, "i4")), ("10 codes",)),
        (records(split=np.array([0, 1, 2, 3], "u1")), ("'split'", "1", "tune", "2")),
        (records(split=np.ones(4, "u1")), ("'split'", "certify", "(2)")),
        (records(split=np.full(4, 2, "u1")), ("'split'", "tune", "(1)")),
        (records(label=np.zeros(3, "i8")), ("'label'", "[3]", "[4]")),
    ],
)
def test_records_of_another_model_are_refused(
    tmp_path: Path, content: bytes, message: Told
) -> None:
    root = write(tmp_path).path
    replace_file(root, "records.npz", content)
    bundle = Bundle.open(root)
    with pytest.raises(BundleSchemaError, match=facts("records.npz:", *message)) as caught:
        bundle.records()
    assert "\n" not in str(caught.value)


def test_records_with_and_without_labels_are_read(tmp_path: Path) -> None:
    for label in (None, np.arange(4)):
        root = write(tmp_path / str(label)).path
        replace_file(root, "records.npz", records(label=label))
        assert ("label" in Bundle.open(root).records()) == (label is not None)


def test_sides_of_a_map_are_said_where_they_are_not_those_of_an_image() -> None:
    image, video = Head(kind="grid", grid=4), Head(kind="grid", grid=2, axes=3)

    assert "axes" not in to_plain(image)
    assert to_plain(video)["axes"] == 3
    with pytest.raises(ValueError, match="axes"):
        Head(kind="grid", grid=2, axes=4)


@pytest.mark.parametrize(
    ("max_disagreement", "confidence_level", "expected"),
    [(0.01, 0.95, True), (0.02, 0.9, True), (0.009, 0.95, False), (0.01, 0.96, False)],
)
def test_a_promise_covers_what_is_no_stricter(
    max_disagreement: float, confidence_level: float, expected: bool
) -> None:
    promise = Promise(
        max_disagreement=0.01,
        confidence_level=0.95,
        certify_samples=1000,
        certify_errors=3,
        p_value=0.01,
        predicted_savings=0.5,
    )
    assert promise.covers(max_disagreement, confidence_level) is expected


def test_heads_describe_their_grid_by_its_axes() -> None:
    signal, image = Head(kind="grid", grid=4, axes=1), Head(kind="grid", grid=4, hidden=64)
    assert signal.describe() == "grid of 4, linear"
    assert image.describe() == "4×4 grid, hidden 64"
