"""``eecompile export`` from a compiled bundle to a file, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests import models
from tests.bundles import compile_tiny
from tests.exports import run_bundle, run_file, stock_session
from tests.facts import Told, tells
from tests.integration.test_compile_tiny import images, vectors

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, write_bundle
from offramp.bundle.graph_weights import external_locations
from offramp.compiler.commands.cli import main
from offramp.compiler.export import export, nesting
from offramp.compiler.plain.wrap import WrapOptions, wrap_model


def answering(model: onnx.ModelProto, elem_type: int, *, opset: int = 17) -> onnx.ModelProto:
    """A model whose answers are of another type."""
    model.opset_import[0].version = opset
    (answer,) = model.graph.output
    model.graph.node[-1].output[0] = "single"
    model.graph.node.append(onnx.helper.make_node("Cast", ["single"], [answer.name], to=elem_type))
    answer.type.tensor_type.elem_type = elem_type
    return model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of opset 18 with float64 answers; samples leave at both exits, and at none."""
    folder = tmp_path_factory.mktemp("export")
    model = answering(models.residual_cnn(), TensorProto.DOUBLE, opset=18)
    bundle = compile_tiny(model, images(), folder, candidates=2, epochs=2)
    with_policy(bundle, [], folder / "none.ee")
    return with_policy(bundle, half_leave(bundle), folder / "two.ee")


def half_leave(bundle: Bundle) -> list[ActiveExit]:
    """Every exit, at thresholds that half of the recorded samples reach."""
    confidence = np.median(bundle.records()["confidence"], axis=1)
    return [ActiveExit(exit=i, threshold=float(c)) for i, c in enumerate(confidence)]


def with_policy(bundle: Bundle, active: list[ActiveExit], path: Path) -> Bundle:
    names = [e.path for e in bundle.manifest.files if e.path != "policy.json"]
    files = {name: b"".join(bundle.stored(name)) for name in names}
    policy = ExitPolicy(version=7, active=tuple(active), promise=bundle.policy.promise)
    return write_bundle(path, replace(bundle.manifest, files=()), policy, files)


@pytest.fixture
def bundle(compiled: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.chdir(tmp_path)
    for name in ("two.ee", "none.ee"):
        shutil.copytree(compiled.path.parent / name, name)
    shutil.copy(compiled.path.parent / "data.npz", "data.npz")
    return Bundle.open("two.ee")


def run(*arguments: str) -> int:
    return main(["export", *arguments])


def test_an_exported_file_that_is_served_says_what_is_lost(bundle: Bundle) -> None:
    assert run("two.ee", "--data", "data.npz", "--output", "fast.onnx") == 0
    notes = list[str]()
    wrap_model(WrapOptions(model=Path("fast.onnx"), output=Path("fast.ee")), note=notes.append)
    assert notes[0].startswith("the file was exported from a bundle, with its exits inside: their")


def test_a_compiled_bundle_becomes_one_file(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("two.ee", "--data", "data.npz", "--output", "out/fast.onnx", "--with-exits") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Verified on 1400 samples of data.npz: the bundle's exits, its answers" in said
    assert "not the data that" not in said
    assert "offramp_threshold_0" in said
    unseen = images(60, seed=5)
    unseen.pop("label")
    given = run_file(Path("out/fast.onnx"), unseen)
    wanted = run_bundle(bundle, unseen)
    assert given.answer.dtype == np.float64
    assert set(given.exit) == {0, 1, -1}
    assert given.exit.tolist() == wanted.exit.tolist()
    np.testing.assert_allclose(given.answer, wanted.answer, rtol=0, atol=1e-5)
    np.testing.assert_allclose(given.confidence, wanted.confidence, rtol=1e-6)
    metadata = {p.key: p.value for p in onnx.load("out/fast.onnx").metadata_props}
    assert metadata["offramp.policy_version"] == "7"
    assert metadata["offramp.source_sha256"] == bundle.manifest.source.original_sha256
    assert [p.name for p in Path("out").iterdir()] == ["fast.onnx"]


def test_a_bundle_above_the_protobuf_limit_exports_weights_to_a_separate_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data, unseen = ({**v, "x": np.tile(v["x"], 4)} for v in (vectors(), vectors(60, seed=5)))
    bundle = compile_tiny(models.mlp(width=64), data, tmp_path, candidates=2, epochs=2)
    bundle = with_policy(bundle, half_leave(bundle), tmp_path / "large.ee")
    weights = (bundle.path / "weights.bin").read_bytes()
    command = ("large.ee", "--data", "data.npz", "--output", "out/fast.onnx", "--with-exits")
    monkeypatch.setattr(export, "MOST_BYTES", len(weights) // 2)
    assert run(*command, "--triton", "models") == 0
    wanted = run_bundle(bundle, unseen)
    assert set(wanted.exit) == {0, 1, -1}
    Path("large.ee").rename("away.ee")  # nothing of the bundle is needed any more
    for place in (Path("out/fast.onnx"), Path("models/large/1/model.onnx")):
        data = place.with_name(f"{place.name}.data")
        assert data.read_bytes() == weights
        assert external_locations(place.read_bytes()) == {data.name}
        given = run_file(place, unseen)
        assert given.exit.tolist() == wanted.exit.tolist()
        np.testing.assert_allclose(given.answer, wanted.answer, rtol=0, atol=1e-5)
    capsys.readouterr()
    Path("away.ee").rename("large.ee")
    Path("out/fast.onnx").unlink()
    assert run(*command) == 1
    tells(capsys.readouterr().err, "out/fast.onnx.data exists", "--output")


def test_half_precision_answers_and_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = answering(models.mlp(), TensorProto.FLOAT16)
    bundle = compile_tiny(model, vectors(), tmp_path, candidates=2, epochs=2)
    bundle = with_policy(bundle, half_leave(bundle), tmp_path / "half.ee")
    assert run("half.ee", "--data", "data.npz", "--output", "half.onnx", "--with-exits") == 0
    unseen = vectors(60, seed=5)
    given, wanted = run_file(Path("half.onnx"), unseen), run_bundle(bundle, unseen)
    assert given.answer.dtype == np.float16
    assert set(given.exit) == {0, 1, -1}
    assert given.exit.tolist() == wanted.exit.tolist()
    np.testing.assert_array_equal(given.answer, wanted.answer)


def test_other_data_verify_too_and_it_is_said(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("other.npz", **images(50, seed=6))
    assert run("two.ee", "--data", "other.npz", "--output", "fast.onnx") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Verified on 50 samples" in said
    tells(said, "not the data")
    assert [o.name for o in stock_session(Path("fast.onnx")).get_outputs()] == ["probabilities"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("two.ee", "--output", "f.onnx"), ("--data DATA", "two.ee")),
        (("none.ee", "--data", "data.npz", "--output", "f.onnx"), ("none.ee", "no active exit")),
        (("gone.ee", "--data", "data.npz", "--output", "f.onnx"), ("gone.ee", "bundle")),
        (("two.ee", "--data", "gone.npz", "--output", "f.onnx"), ("gone.npz", "no such file")),
        (("two.ee", "--data", "wrong.npz", "--output", "f.onnx"), ("wrong.npz: ",)),
        (
            ("two.ee", "--data", "empty.npz", "--output", "f.onnx"),
            ("dimension 0 (batch) is empty",),
        ),
        (("two.ee", "--data", "data.npz", "--output", "there.onnx"), ("add --overwrite",)),
        (("two.ee", "--data", "data.npz", "--output", "two.ee/f.onnx"), ("inside the bundle",)),
        (("two.ee", "--data", "data.npz", "--output", "none.ee"), ("none.ee is a folder",)),
        (("two.ee", "--data", "data.npz", "--output", "there.onnx/f.onnx"), ("is not a folder",)),
    ],
)
def test_what_cannot_be_exported_is_told_in_one_line(
    bundle: Bundle,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: Told,
) -> None:
    Path("there.onnx").write_text("mine")
    np.savez("wrong.npz", x=np.zeros((4, 16), np.float32))
    np.savez("empty.npz", **images(0))
    before = sorted(Path().rglob("*"))
    assert run(*arguments) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eecompile:")]
    assert len(said) == 1
    tells(said[0], *message)
    assert sorted(Path().rglob("*")) == before
    assert Path("there.onnx").read_text() == "mine"


def test_a_file_that_cannot_be_written_leaves_nothing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_self: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run("two.ee", "--data", "data.npz", "--output", "out/fast.onnx") == 1
    assert "fast.onnx cannot be written: [Errno 28]" in capsys.readouterr().err
    assert list(Path("out").iterdir()) == []


def test_a_file_is_replaced_if_asked(bundle: Bundle) -> None:
    Path("fast.onnx").write_text("old")
    assert run("two.ee", "--data", "data.npz", "--output", "fast.onnx", "--overwrite") == 0
    assert stock_session(Path("fast.onnx")).get_inputs()[0].name == "image"


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    Path("fast.onnx").write_text("old")
    assert run("two.ee", "--data", "data.npz", "--output", "fast.onnx", "--overwrite") == 1
    assert Path("fast.onnx").read_text() == "old"
    return capsys.readouterr().err


def test_other_exits_are_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def more_aggressive(plan: Any, *arguments: Any, **options: Any) -> onnx.ModelProto:
        first, *rest = plan.stages
        first = replace(first, threshold=first.threshold * 0.99)
        return nesting.nest(replace(plan, stages=(first, *rest)), *arguments, **options)

    monkeypatch.setattr(export, "nest", more_aggressive)
    said = refused(capsys)
    assert "it leaves at exit 0 with confidence" in said
    assert "nothing was written" in said


def test_other_answers_are_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_graph = nesting.stage_graph

    def damaged(stage: Any) -> bytes:
        model = onnx.load_model_from_string(stage_graph(stage))
        if stage.final:
            (node,) = [n for n in model.graph.node if n.op_type == "Gemm"]
            node.attribute.append(onnx.helper.make_attribute("alpha", 1.01))
        return model.SerializeToString()

    monkeypatch.setattr(nesting, "stage_graph", damaged)
    said = refused(capsys)
    assert "answers differ from the bundle's by" in said
    assert "nothing was written" in said
