"""Dry runs on generated inputs: exits and times to see, and nothing that looks like a promise."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import equal_times
from tests.facts import Told, facts, tells
from tests.unit.bundle.examples import MANIFEST, POLICY, write

from offramp.bundle import Bundle, BundleSchemaError
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.certify.decision import NEVER
from offramp.compiler.commands.cli import main
from offramp.compiler.data.find_source import find_source
from offramp.compiler.data.made import SAMPLES, RandomSource
from offramp.compiler.data.reading_options import PreprocessingSpec
from offramp.compiler.frontend.model import read_model
from offramp.compiler.steps.dry_run import WARNING, dry_run_policy, made_for
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.stages.plan import Mode


def records(confidence: list[list[float]]) -> ExitRecords:
    array = np.array(confidence, np.float32)
    samples = array.shape[1]
    return ExitRecords(
        confidence=array,
        prediction=np.zeros(array.shape, np.int32),
        final_prediction=np.zeros(samples, np.int32),
        final_confidence=np.zeros(samples, np.float32),
        labels=None,
    )


def test_half_of_the_samples_that_reach_an_exit_leave_there() -> None:
    confidence = np.random.default_rng(0).random((12, 512)).astype(np.float32)
    policy = dry_run_policy(records(confidence.tolist()), whole=False)
    assert policy.promise is None
    assert [active.exit for active in policy.active] == [0, 6, 11]
    reached = np.ones(512, np.bool_)
    for active in policy.active:
        leave = reached & (confidence[active.exit] >= active.threshold)
        assert leave.sum() / reached.sum() == pytest.approx(0.5, abs=0.01)
        reached &= ~leave


def test_exits_behind_one_where_all_leave_are_not_in_use() -> None:
    policy = dry_run_policy(records([[0.5, 0.5], [0.1, 0.9]]), whole=False)
    assert [(active.exit, active.threshold) for active in policy.active] == [(0, 0.5)]
    whole = dry_run_policy(records([[0.5, 0.5], [0.1, 0.9]]), whole=True)
    assert [(active.exit, active.threshold) for active in whole.active] == [(0, 0.5), (1, NEVER)]


def test_without_exits_there_is_no_policy() -> None:
    empty = replace(records([[0.5]]), confidence=np.empty((0, 1), np.float32))
    assert dry_run_policy(empty, whole=True).active == ()


def test_the_command_line_asks_for_so_many(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_source("random", PreprocessingSpec()) == RandomSource(SAMPLES)
    assert find_source("random", PreprocessingSpec(max_samples=50)) == RandomSource(50)
    with pytest.raises(DataError, match=facts("--mean", "images", "not used")):
        find_source("random", PreprocessingSpec(mean=(0.5,)))
    np.savez("random", x=np.zeros(3))
    Path("random.npz").rename("random")  # a file goes before the word
    assert not isinstance(find_source("random", PreprocessingSpec()), RandomSource)


def test_samples_are_what_the_model_accepts(tmp_path: Path, caplog) -> None:
    onnx.save(models.bert_like(token_types=True), tmp_path / "m.onnx")
    model = read_model(tmp_path / "m.onnx")
    source = made_for(model, RandomSource(70), seed=3)
    assert WARNING in caplog.messages
    arrays, digest = source.load(model.inputs, ScratchSpace(tmp_path))
    assert {len(array) for array in arrays.values()} == {70}
    assert arrays["input_ids"].min() >= 0
    assert arrays["input_ids"].max() < 50  # the vocabulary
    assert len(np.unique(arrays["input_ids"])) > 25
    assert (arrays["attention_mask"] == 1).all()
    assert len(np.unique(arrays["input_ids"], axis=0)) == 70, "no sample twice"
    again = made_for(model, RandomSource(70), seed=3).load(model.inputs, ScratchSpace(tmp_path))
    other = made_for(model, RandomSource(70), seed=4).load(model.inputs, ScratchSpace(tmp_path))
    assert (again[1] == digest, other[1] == digest) == (True, False)


def test_random_is_no_data_for_other_commands(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data random is for compiling a model"):
        RandomSource().load(MANIFEST.inputs, ScratchSpace(tmp_path))


def test_a_bundle_with_a_promise_on_random_inputs_is_refused(tmp_path: Path) -> None:
    made = replace(MANIFEST, calibration=replace(MANIFEST.calibration, random_inputs=True))
    write(tmp_path, manifest=made, policy=replace(POLICY, promise=None))
    with pytest.raises(BundleSchemaError, match="compiled on random inputs, which cannot certify"):
        write(tmp_path / "promising", manifest=made)
        Bundle.open(tmp_path / "promising" / "small.ee")


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a dry run."""
    folder = tmp_path_factory.mktemp("dry")
    onnx.save(models.mlp(), folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patched, equal_times():
        patched.chdir(folder)
        assert main(["model.onnx", "--data", "random", "--epochs", "1", "--candidates", "3"]) == 0
    return folder / "model.ee"


def test_the_bundle_says_what_it_is(dry: Path) -> None:
    bundle = Bundle.open(dry)
    assert bundle.manifest.calibration.random_inputs
    assert json.loads((dry / "manifest.json").read_text())["calibration"]["random_inputs"] is True
    assert bundle.policy.promise is None
    assert bundle.policy.active
    report = (dry / "report.html").read_text()
    assert "Compiled on random inputs: nothing is certified." in report
    assert "certified with" not in report


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["rehearse"], ("random inputs", "compile")),
        (["export", "--output", "e.onnx"], ("random inputs", "exits")),
    ],
    ids=["rehearse", "export"],
)
def test_nothing_is_made_of_it(
    dry: Path, tmp_path: Path, command: list[str], told: Told,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.zeros((800, 16), np.float32))
    assert main([command[0], str(dry), "--data", "data.npz", *command[1:]]) == 1
    line = capfd.readouterr().err
    tells(line, *told)
    assert "eecompile model.onnx --data DATA" in line
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]


def test_what_is_printed_is_labelled(
    dry: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.chdir(dry.parent)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", "model.ee"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "DRY RUN: compiled on random inputs, nothing is certified."
    assert lines[-1] == "Serve:  eeserve model.ee --uncertified-exits --mode leave"
    assert any(line.startswith("Thresholds let half leave at each exit.") for line in lines)
    assert not any("Disagreement" in line for line in lines)


@pytest.mark.parametrize("allowed", [False, True])
def test_exits_answer_only_if_that_is_asked_for(dry: Path, allowed: bool, caplog) -> None:
    options = EngineOptions(
        mode=Mode.LEAVE, backend="onnxruntime", threads=1, uncertified_exits=allowed
    )
    x = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)

    async def serve() -> tuple[set[int], tuple[str, ...], str]:
        async with await Engine.open({"dry": dry}, options) as engine:
            result = await engine.infer("dry", {"x": x})
            (model,) = engine.models()
            mode = engine.statistics()["dry"].mode
            return set(result.exits.tolist()), model.notes, mode

    exits, (note,), mode = asyncio.run(serve())
    assert note.startswith("compiled on random inputs: nothing is certified; ")
    assert mode == ("leave" if allowed else "off")
    assert (exits == {-1}) is not allowed
    assert ("exits answer, as --uncertified-exits asks" in note) is allowed
    assert ("--uncertified-exits lets exits answer" in note) is not allowed
    assert [r.levelname for r in caplog.records if note in r.getMessage()] == ["WARNING"]
