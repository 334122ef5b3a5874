"""What is whole but not of this version's schema is refused, naming the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.bundle.examples import replace_file, rewrite_manifest, sign, write

from offramp.bundle import Bundle, BundleSchemaError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=2), "schema version 2, but this Offramp reads 1"),
        (lambda m: m.pop("schema_version"), "schema version None"),
        (lambda m: m.update(surprise=1), r"unknown fields \['surprise'\]"),
        (lambda m: m.pop("answer"), r"missing fields \['answer'\]"),
        (lambda m: m["exits"][0].pop("accuracy"), r"exits\[0\].*missing fields \['accuracy'\]"),
        (lambda m: m["exits"][0].update(index=1), "exits: indices must count from 0"),
        (lambda m: m["exits"][0].update(after_segment=1), "must rise and stay before the last"),
        (lambda m: m["exits"][0]["head"].update(kind="round"), "expected one of 'grid'"),
        (lambda m: m["segments"][0].update(index="0"), r"segments\[0\].index: expected .* int"),
        (lambda m: m["segments"][0].update(index=True), r"segments\[0\].index: expected .* int"),
        (lambda m: m["segments"].clear(), "a bundle needs at least one"),
        (lambda m: m["segments"].reverse(), "segments: indices must count from 0"),
        (lambda m: m["answer"].update(output="cut"), "'cut' is not the last segment's output"),
        (lambda m: m["inputs"][0].update(dtype="object"), "dtype 'object' is not"),
        (lambda m: m["inputs"][0].update(dtype="f4,i4"), "dtype 'f4,i4' is not"),
        (lambda m: m["inputs"][0].update(dtype="florat32"), "florat32"),
        (lambda m: m["inputs"][0].update(shape=["batch", -1]), "negative size"),
        (lambda m: m["inputs"][0].update(shape=["batch", 1.5]), r"shape\[1\]"),
        (lambda m: m["tools"].update(onnx=1), r"tools\['onnx'\]"),
        (lambda m: m.update(verified_tolerance=10**400), "a finite number"),
        (lambda m: m.update(verified_tolerance=True), "verified_tolerance: expected .* float"),
        (lambda m: m.update(files={}), "files: expected a list"),
    ],
)
def test_the_manifest_follows_the_schema(tmp_path: Path, change, message: str) -> None:
    root = write(tmp_path).path
    rewrite_manifest(root, change)
    with pytest.raises(BundleSchemaError, match=f"manifest.json.*{message}"):
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
        ([{"exit": 1, "threshold": 0.5}], "names an exit beyond the bundle's 1"),
        ([{"exit": -1, "threshold": 0.5}], "exit -1 is not an index"),
        ([{"exit": 0, "threshold": float("nan")}], "expected a finite number, found nan"),
        ([{"exit": 0, "threshold": float("inf")}], "expected a finite number, found inf"),
        ([{"exit": 0, "threshold": -0.1}], r"threshold -0.1 of exit 0 is not in \[0, 2.0\]"),
        ([{"exit": 0, "threshold": 2.1}], r"threshold 2.1 of exit 0 is not in \[0, 2.0\]"),
        ([{"exit": 0, "threshold": 0.5}] * 2, r"active exits \[0, 0\] must rise"),
        ([{"exit": 0, "threshold": "0.5"}], "expected a value of type float"),
        ([{"exit": 0}], r"missing fields \['threshold'\]"),
    ],
)
def test_a_policy_that_would_do_something_else_is_refused(
    tmp_path: Path, active: list, message: str
) -> None:
    root = write(tmp_path).path
    plain = {"version": 1, "active": active, "promise": None}
    replace_file(root, "policy.json", json.dumps(plain).encode())
    with pytest.raises(BundleSchemaError, match=f"policy.json.*{message}"):
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
        ({"batch_sizes": [8, 1]}, "must rise"),
        ({"batch_sizes": []}, "must rise"),
        ({"source_ms": [1.0]}, "every row needs 2 columns"),
        ({"segments_ms": [[1.0, 5.0], [3.0]]}, "every row needs 2 columns"),
        ({"stages_ms": []}, "stages_ms has 0 rows, expected one for each of the 1 exits"),
    ],
)
def test_a_profile_with_ragged_tables_is_refused(tmp_path: Path, change, message: str) -> None:
    root = write(tmp_path).path
    plain = json.loads((root / "profiles/cpu.json").read_text())
    replace_file(root, "profiles/cpu.json", json.dumps({**plain, **change}).encode())
    with pytest.raises(BundleSchemaError, match=f"profiles/cpu.json.*{message}"):
        Bundle.open(root).profile()


def test_a_profile_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It had one row of borders for all exits, and no spread."""
    root = write(tmp_path).path
    plain = json.loads((root / "profiles/cpu.json").read_text())
    del plain["spread"], plain["disturbed"]
    plain["stages_ms"] = [0.5, 0.75]
    replace_file(root, "profiles/cpu.json", json.dumps(plain).encode())
    profile = Bundle.open(root).profile()
    assert profile.stages_ms == ((0.5, 0.75),)
    assert (profile.spread, profile.disturbed) == (None, ())
