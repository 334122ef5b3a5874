"""Models that were trained together with their exits, against the models as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests import models
from tests.bundles import compile_tiny
from tests.facts import Told, facts
from tests.integration.test_compile_tiny import Arrays, answers, images, sentences, vectors
from tests.marks import slow_but

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy, write_bundle
from offramp.calibration.data.dataset import DataError
from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.measure import profiling
from offramp.compiler.blueprints import joint
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import (
    CompileError,
    EngineOptionsError,
    ModelError,
    OptionsConflictError,
)
from offramp.compiler.engines.build import BuildOptions, build_bundle
from offramp.compiler.engines.build_options import EngineBuildOptions
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.common.errors import BackendError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.self_check import CheckVerdict, run_self_check
from offramp.engine.stages.plan import Mode, make_plan
from offramp.engine.stages.precision import require_plain

ROWS = 90


def rows(samples: int = 600, *, seed: int = 0) -> Arrays:
    words = vectors(samples, seed=seed)["x"][:, :6]
    return {"input_ids": np.abs(words * 5).astype(np.int64) % 50}


def pairs(samples: int = 600, *, seed: int = 0) -> Arrays:
    return {"left": vectors(samples, seed=seed)["x"], "right": vectors(samples, seed=seed + 7)["x"]}


Case = tuple[Callable[[], onnx.ModelProto], Callable[..., Arrays], dict[str, Any]]


def maps(samples: int = 600, *, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal((samples, 3, 16, 16)).astype(np.float32)}


CASES: dict[str, Case] = {
    "pooled": (models.residual_cnn, images, {}),
    "bert": (models.bert_like, sentences, {}),
    "bridges": (models.residual_cnn, images, {"heads": "bridges"}),
    "towers": (models.two_tower, pairs, {}),
    "sets": (models.hidden_states, rows, {}),
    "segmentation": (
        functools.partial(models.residual_cnn, dense="logits"),
        maps,
        {"agree_share": 0.1, "max_disagreement": 0.4},
    ),
}


class Compiled(NamedTuple):
    bundle: Bundle
    unseen: Arrays
    folder: Path


@pytest.fixture(scope="module")
def always_joint() -> Iterator[None]:
    """Every part takes a quarter of the model's time, and what was trained is used."""

    def time_ms(timed: profiling.TimedGraph, _tensors: object) -> float:
        outputs = [output.name for output in timed.session.get_outputs()]
        return 1.0 if outputs in (["logits"], ["probabilities"], ["pixels"]) else 0.25

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", time_ms)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.25)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        patched.setattr(joint, "LEAST_GAIN", -10.0)
        yield


@pytest.fixture(scope="module", params=slow_but(["pooled"], CASES))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, always_joint: None
) -> Compiled:
    build, data, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("joint")
    settings = {"candidates": 2, "epochs": 2, "max_overhead": None, **options}
    bundle = compile_tiny(
        build(), data(), folder, train="joint", selection="savings", own_times=True, **settings
    )
    unseen = data(ROWS, seed=1)
    unseen.pop("label", None)
    return Compiled(Bundle.open(bundle.path), unseen, folder)


def of_source(found: Compiled) -> NDArray[Any]:
    session = make_session(found.bundle.read("source.onnx"), 1)
    read = [tensor.name for tensor in session.get_inputs()]
    starts = range(0, ROWS, 30)
    rows = ({name: found.unseen[name][start : start + 30] for name in read} for start in starts)
    return np.concatenate([session.run(None, batch)[0] for batch in rows])


def policy(*active: tuple[int, float]) -> ExitPolicy:
    exits = tuple(ActiveExit(exit=exit_, threshold=threshold) for exit_, threshold in active)
    return ExitPolicy(version=2, active=exits)


def test_the_bundle_says_what_it_is(compiled: Compiled) -> None:
    manifest = compiled.bundle.manifest
    assert manifest.precision == "fp32"
    assert manifest.is_cascade
    assert manifest.cpu is None
    assert manifest.training is not None
    assert len(manifest.training.epochs[0].losses) == len(manifest.exits)
    assert manifest.exits[-1].head.kind == "own"
    assert manifest.segments[-1].file == manifest.source.file
    report = (compiled.bundle.path / "report.html").read_text()
    assert "a copy that was trained together with them (by the unmodified model" in report
    assert "agreement with the unmodified model by epoch" in report
    assert not (compiled.folder / "tiny.ee.training").exists()


def test_the_copy_has_other_weights_and_the_source_its_own(compiled: Compiled) -> None:
    bundle = compiled.bundle
    if bundle.manifest.training is not None and not bundle.manifest.training.kept:
        pytest.skip("nothing was learned")
    source = models_weights(bundle.read("source.onnx"))
    front = models_weights(bundle.read(bundle.manifest.segments[0].file))
    shared = [name for name in front if name.removeprefix("offramp_front/") in source]
    assert any((front[n] != source[n.removeprefix("offramp_front/")]).any() for n in shared)


def models_weights(graph: bytes) -> dict[str, NDArray[Any]]:
    tensors = onnx.ModelProto.FromString(graph).graph.initializer
    floats = [t for t in tensors if t.data_type == onnx.TensorProto.FLOAT]
    return {t.name: onnx.numpy_helper.to_array(t) for t in floats}


def test_who_takes_no_exit_has_the_unmodified_models_answer_to_the_bit(compiled: Compiled) -> None:
    """All exits run in shadow mode, so that all of the copy has run before."""
    in_shadow_mode = policy(*((e.index, NEVER) for e in compiled.bundle.manifest.exits))
    plan = make_plan(compiled.bundle, in_shadow_mode, Mode.AUDIT)
    assert len(plan.stages) == len(compiled.bundle.manifest.exits) + 1
    np.testing.assert_array_equal(answers(plan, compiled.unseen), of_source(compiled))


def test_records_are_about_the_unmodified_model(compiled: Compiled) -> None:
    """Agreement that the manifest states is that of the certify split with its answers."""
    records, manifest = compiled.bundle.records(), compiled.bundle.manifest
    certify = records["split"] == 2
    agrees = (records["prediction"] == records["final_prediction"])[:, certify].mean(axis=1)
    assert [e.agreement for e in manifest.exits] == pytest.approx(agrees.tolist())


def test_verify_finds_no_fault(compiled: Compiled) -> None:
    found = verify_bundle(
        VerifyOptions(bundle=compiled.bundle.path, data=compiled.folder / "data.npz")
    )
    assert found.verdict != "contradicted"


def test_the_self_check_passes(compiled: Compiled, tmp_path: Path) -> None:
    medians = np.median(compiled.bundle.records()["confidence"], axis=1)
    active = policy(*((i, float(c)) for i, c in enumerate(medians)))
    kept = {e.path: compiled.bundle.read(e.path) for e in compiled.bundle.manifest.files}
    kept.pop("policy.json")
    bundle = write_bundle(tmp_path / "all.ee", compiled.bundle.manifest, active, kept)
    options = EngineOptions(mode=Mode.AUDIT, defaults=ModelOptions(max_batch_size=8))
    report = run_self_check({"m": bundle.path}, options, seconds=1.0)
    assert [r for r in report.results if r.verdict is CheckVerdict.FAILED] == []


def test_it_is_not_for_gpus(compiled: Compiled) -> None:
    options = BuildOptions(bundle=compiled.bundle.path, engines=EngineBuildOptions(), dry_run=True)
    with pytest.raises(EngineOptionsError, match=r"trained with its exits.*--train frozen"):
        build_bundle(options)
    with pytest.raises(BackendError, match=r"trained with its exits.*--backend onnxruntime"):
        require_plain(compiled.bundle.manifest, compiled.bundle.path)


def small(folder: Path, **options: Any) -> Bundle:
    settings = {"candidates": 1, "epochs": 1, "max_overhead": None, "train": "joint", **options}
    build = settings.pop("build", models.mlp)
    data = settings.pop("data", vectors())
    return Bundle.open(compile_tiny(build(), data, folder, own_times=True, **settings).path)


def test_where_it_saves_no_more_the_frozen_models_exits_stay(
    tmp_path: Path, always_joint: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(joint, "LEAST_GAIN", 10.0)
    bundle = small(tmp_path)
    assert not bundle.manifest.is_cascade
    assert "JOINT TRAINING BRINGS NOTHING HERE" in caplog.text
    assert "weights of epoch" in bundle.manifest.precision_reason
    assert not (tmp_path / "tiny.ee.training").exists()


def test_what_the_certificate_does_not_cover_is_not_shipped(
    tmp_path: Path, always_joint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offramp.compiler.exits.policy_choice import PolicyChoice

    certified: list[int] = []

    def certify(_choice: PolicyChoice, path: Any, _records: Any) -> ExitPolicy:
        certified.append(len(path.active))
        return ExitPolicy(version=1, active=())

    monkeypatch.setattr(PolicyChoice, "certify", certify)
    bundle = small(tmp_path)
    assert certified[0] > 0
    assert certified[1:] == [0], "the samples may be asked about one path alone"
    assert not bundle.manifest.is_cascade
    assert not bundle.policy.active
    assert "not covered by the certificate" in bundle.manifest.precision_reason


def test_a_run_that_was_cut_off_goes_on_with_the_same_exits(
    tmp_path: Path, always_joint: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def cut_off(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(joint, "slice_twin", cut_off)
        with pytest.raises(KeyboardInterrupt):
            small(tmp_path)
    folder = tmp_path / "tiny.ee.training"
    assert (folder / "weights.pt").exists()
    searched: list[int] = []
    real = "offramp.compiler.steps.compile.find_exits"
    monkeypatch.setattr(real, lambda *_, **__: searched.append(1))
    bundle = small(tmp_path)
    assert not searched, "exits are those of the run before"
    assert "going on from" in caplog.text
    assert bundle.manifest.is_cascade
    assert not folder.exists()


def test_a_folder_of_another_run_or_a_broken_one_is_replaced(
    tmp_path: Path, always_joint: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "tiny.ee.training"
    folder.mkdir()
    (folder / "exits.json").write_text("{")
    assert small(tmp_path).manifest.is_cascade
    assert "cannot be read" in caplog.text
    folder.mkdir()
    (folder / "exits.json").write_text('{"digest": "another", "built": [], "best": []}')
    assert small(tmp_path, overwrite=True).manifest.is_cascade
    assert "belongs to another compilation: it is replaced" in caplog.text


def test_labels_may_teach(tmp_path: Path, always_joint: None) -> None:
    data = vectors()
    data["labels"] = (data["x"][:, 0] > 0).astype(np.int64)
    bundle = small(tmp_path, data=data, teach="labels")
    assert bundle.manifest.training is not None
    assert bundle.manifest.training.teacher == "labels"
    assert bundle.manifest.exits[-1].accuracy is not None


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"precision": "int8"}, OptionsConflictError, ("--train joint with --precision int8",)),
        ({"task": "regression"}, ModelError, ("values", "confidence")),
        ({"criterion": "patience"}, OptionsConflictError, ("--criterion", "--train joint")),
        ({"teach": "labels"}, DataError, ("no labels", "'labels'")),
        (
            {"teach": "labels", "data": {**vectors(), "labels": np.full(1400, 3)}},
            DataError,
            ("sample 0", "label 3", "0 to 2"),
        ),
        (
            {"teach": "labels", "train": "frozen"},
            OptionsConflictError,
            ("--teach labels", "--train joint", "add"),
        ),
        (
            {"teach": "labels", "task": "multi-label"},
            ModelError,
            ("--teach labels", "classification", "multi-label"),
        ),
        (
            {"build": functools.partial(models.residual_cnn, dense="ArgMax"), "data": maps()},
            ModelError,
            ("classes alone", "--class-map"),
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], told: Told
) -> None:
    with pytest.raises(error, match=facts(*told)):
        small(tmp_path, **options)


def test_the_command_line_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    always_joint: None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp(), "model.onnx")
    np.savez("data.npz", **vectors())
    command = ["model.onnx", "--data", "data.npz", "--epochs", "1", "--max-disagreement", "0.05"]
    assert main([*command, "--train", "joint"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a copy that was trained together with them" in said


def test_a_folder_that_is_none_of_ours_is_left_alone(tmp_path: Path, always_joint: None) -> None:
    folder = tmp_path / "tiny.ee.training"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(CompileError, match=facts("not the folder", "interrupted")):
        small(tmp_path)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_what_cannot_be_trained_is_named_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(UntrainableError, match="no gradients are known through If"):
        small(tmp_path, build=models.conditional, data={"x": vectors()["x"][:, :8]})


def test_weights_that_are_constant_nodes_are_trained_too(
    tmp_path: Path, always_joint: None
) -> None:
    proto = models.mlp()
    kept = [t for t in proto.graph.initializer if list(t.dims) != [16, 16]]
    held = [t for t in proto.graph.initializer if list(t.dims) == [16, 16]]
    constants = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in held]
    nodes = [*constants, *proto.graph.node]
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(kept)
    bundle = small(tmp_path, build=lambda: proto, simplify=False)
    front = models_weights(bundle.read(bundle.manifest.segments[0].file))
    before = {t.name: onnx.numpy_helper.to_array(t) for t in held}
    found = [n for n in front if n.removeprefix("offramp_front/") in before]
    assert found
    assert all((front[n] != before[n.removeprefix("offramp_front/")]).any() for n in found)
