"""Bundles held against their models, on data of one's choice."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests.engines import engine_bundle
from tests.facts import facts
from tests.sliced import inputs_of, sliced

from offramp.bundle import ActiveExit, Bundle, Promise, write_bundle
from offramp.bundle.records import ClassLoss
from offramp.calibration.data.dataset import DataError
from offramp.certify import MODEL_END, upper_bound
from offramp.compiler.commands.cli import main
from offramp.compiler.commands.printing import print_check
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.steps import bundle_check
from offramp.compiler.steps.bundle_check import BundleCheck, VerifyOptions, verify_bundle
from offramp.engine.backends.host import HostSlot

SAMPLES = 300
PROMISE = Promise(
    max_disagreement=0.01,
    confidence_level=0.95,
    certify_samples=1000,
    certify_errors=3,
    p_value=0.01,
    predicted_savings=0.5,
)


def changed(bundle: Bundle, path: Path, **changes: Any) -> Bundle:
    """The bundle with another policy, written to ``path``."""
    files = {entry.path: bundle.read(entry.path) for entry in bundle.manifest.files}
    return write_bundle(path, bundle.manifest, replace(bundle.policy, **changes), files)


def write_data(path: Path, **more: NDArray[Any]) -> Path:
    np.savez(path, **inputs_of(sliced("mlp"), SAMPLES, seed=3), **more)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.npz")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Return a bundle with random exits: samples that leave agree only by chance."""
    return engine_bundle("mlp", tmp_path / "a.ee")


def check(bundle: Bundle, data: Path) -> BundleCheck:
    return verify_bundle(VerifyOptions(bundle=bundle.path, data=data))


def test_without_early_answers_all_agree(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    surely = (ActiveExit(exit=0, threshold=1.0), ActiveExit(exit=1, threshold=1.0))
    found = check(changed(bundle, tmp_path / "b.ee", active=surely, promise=PROMISE), data)
    assert (found.samples, found.disagreements, found.shares) == (SAMPLES, 0, {MODEL_END: 1.0})
    assert found.end_difference <= 1e-6
    assert found.verdict == "kept"
    assert found.at_most == pytest.approx(upper_bound(0, SAMPLES))
    assert (found.accuracy, found.source_accuracy) == (None, None)


def test_exits_that_guess_contradict_a_promise(bundle: Bundle, data: Path, tmp_path: Path) -> None:
    everybody = (ActiveExit(exit=0, threshold=0.0),)
    broken = changed(bundle, tmp_path / "b.ee", active=everybody, promise=PROMISE)
    found = check(broken, data)
    assert found.shares == {0: 1.0}
    assert found.disagreements > 0.1 * SAMPLES
    assert found.verdict == "contradicted"
    unpromised = check(changed(bundle, tmp_path / "c.ee", active=everybody, promise=None), data)
    assert unpromised == replace(found, verdict="nothing promised", max_disagreement=None)


@pytest.mark.parametrize(
    ("wrong", "verdict"), [(3, "kept"), (6, "kept"), (7, "contradicted"), (30, "contradicted")]
)
def test_the_verdict_is_an_exact_test(
    monkeypatch: pytest.MonkeyPatch,
    bundle: Bundle,
    data: Path,
    tmp_path: Path,
    wrong: int,
    verdict: str,
) -> None:
    """For 300 samples at 1 %: P(X ≥ 7) = 0.033, P(X ≥ 6) = 0.083."""
    everybody = (ActiveExit(exit=0, threshold=0.0),)
    promised = changed(bundle, tmp_path / "b.ee", active=everybody, promise=PROMISE)
    run, left = HostSlot.run, [wrong]

    def right_but_some(self: HostSlot, stage: Any, batch: Any, threshold: Any = None) -> Any:
        result = run(self, stage, batch, threshold)
        source = sliced_answers(batch.tensors)
        for row in range(len(source)):
            if left[0]:
                source[row] = np.roll(source[row], 1)
                left[0] -= 1
        return result._replace(answer=source)

    monkeypatch.setattr(HostSlot, "run", right_but_some)
    found = check(promised, data)
    assert (found.disagreements, found.verdict) == (wrong, verdict)


@pytest.mark.parametrize(("certify_samples", "verdict"), [(5000, "contradicted"), (10, "kept")])
def test_the_bounds_of_classes_are_tested_where_they_were_certified(
    monkeypatch: pytest.MonkeyPatch,
    bundle: Bundle,
    data: Path,
    tmp_path: Path,
    certify_samples: int,
    verdict: str,
) -> None:
    """Exits that guess keep a bound of 99 % on all, and not one of 2 % on each class."""
    promise = replace(PROMISE, max_disagreement=0.99, max_class_disagreement=0.02)
    everybody = (ActiveExit(exit=0, threshold=0.0),)
    promised = changed(bundle, tmp_path / "b.ee", active=everybody, promise=promise)
    certified = [
        ClassLoss(number=number, samples=certify_samples, lost=0)
        for number in range(bundle.manifest.answer.classes)
    ]
    monkeypatch.setattr(bundle_check, "losses_on_records", lambda *_: certified)
    assert check(promised, data).verdict == verdict


def sliced_answers(tensors: Any) -> NDArray[Any]:
    import onnxruntime as ort

    session = ort.InferenceSession(sliced("mlp").model.proto.SerializeToString())
    (name,) = (tensor.name for tensor in session.get_inputs())
    return np.array(session.run(None, {name: tensors[name]})[0])


@pytest.mark.parametrize("wrong", [1.01, np.nan])
def test_another_answer_at_the_models_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle, data: Path, tmp_path: Path, wrong: float
) -> None:
    nobody = changed(bundle, tmp_path / "b.ee", active=(), promise=None)
    run, times = HostSlot.run, np.float32(wrong)

    def off(self: HostSlot, stage: Any, batch: Any, threshold: Any = None) -> Any:
        result = run(self, stage, batch, threshold)
        return result._replace(answer=result.answer * times)

    monkeypatch.setattr(HostSlot, "run", off)
    with pytest.raises(VerificationError, match=facts("sample 0", "batch mates", "1e-04")):
        check(nobody, data)


def test_data_that_do_not_fit_are_told(bundle: Bundle, tmp_path: Path) -> None:
    np.savez(tmp_path / "no.npz", other=np.zeros((4, 3), np.float32))
    with pytest.raises(DataError):
        check(bundle, tmp_path / "no.npz")


def test_accuracy_is_told_where_there_are_labels(bundle: Bundle, tmp_path: Path) -> None:
    inputs = inputs_of(sliced("mlp"), SAMPLES, seed=3)
    truth = sliced_answers(inputs).argmax(axis=1)
    found = check(bundle, write_data(tmp_path / "labelled.npz", label=truth))
    assert found.source_accuracy == 1.0
    assert found.accuracy == pytest.approx(1 - found.disagreements / SAMPLES)


def test_it_is_printed_in_words(bundle: Bundle) -> None:
    check = BundleCheck(
        samples=2000,
        distinct_samples=2000,
        disagreements=41,
        max_disagreement=0.01,
        by_class=(ClassLoss(number=1, samples=60, lost=40), ClassLoss(number=0, samples=9, lost=1)),
        by_label=(),
        shares={MODEL_END: 0.25, 0: 0.75},
        end_difference=3e-7,
        accuracy=0.9,
        source_accuracy=0.91,
        on_calibration_data=True,
        verdict="contradicted",
        at_most=0.0264,
    )
    out = io.StringIO()
    print_check(check, Path("a[b].ee"), Console(file=out, width=300))
    lines = out.getvalue().splitlines()
    assert lines[0] == "a[b].ee: 2,000 samples that it was made with, which prove little"
    assert lines[1:3] == ["  the model's end answered 25.0%", "  exit 0 answered 75.0%"]
    assert lines[4].startswith("41 answers (2.05%) do not agree with the unmodified")
    assert lines[4].endswith("on data like these at most 2.64%.")
    assert lines[5:7] == [
        "  of 60 samples that the model gives class 1, 40 (66.67%) do not agree",
        "  of 9 samples that the model gives class 0, 1 (11.11%) do not agree",
    ]
    assert lines[7].startswith("HARM: of the 60 samples that the model gives class 1, 40 (66.7%)")
    assert lines[8] == "Accuracy 90.00%, of the unmodified model 91.00%."
    assert lines[9].startswith("THE PROMISE DOES NOT HOLD")


def test_the_command_tells_by_its_exit_status(
    capfd: pytest.CaptureFixture[str], bundle: Bundle, data: Path, tmp_path: Path
) -> None:
    surely, everybody = (ActiveExit(exit=1, threshold=1.0),), (ActiveExit(exit=1, threshold=0.0),)
    kept = changed(bundle, tmp_path / "b.ee", active=surely, promise=PROMISE)
    broken = changed(bundle, tmp_path / "c.ee", active=everybody, promise=PROMISE)
    written = tmp_path / "found.json"
    command = ["--data", str(data), "--json", str(written)]
    assert main(["verify", str(kept.path), *command]) == 0
    assert "contradicts nothing that was promised" in capfd.readouterr().out
    assert json.loads(written.read_text())["verdict"] == "kept"
    assert main(["verify", str(broken.path), *command]) == 1
    assert json.loads(written.read_text())["disagreements"] > 0
    assert main(["verify", str(tmp_path / "none.ee"), "--data", str(data)]) == 1
    assert "none.ee" in capfd.readouterr().err


def test_a_bundle_is_inspected(
    capfd: pytest.CaptureFixture[str], bundle: Bundle, tmp_path: Path
) -> None:
    written = tmp_path / "found.json"
    assert main(["inspect", str(bundle.path), "--json", str(written)]) == 0
    assert "2 exits built, 1 active" in capfd.readouterr().out.replace("none active", "")
    told = json.loads(written.read_text())
    assert told["policy"]["active"] == [{"exit": 1, "threshold": 0.5}]
    assert [s["index"] for s in told["manifest"]["segments"]] == [0, 1, 2, 3]
    assert "files" not in told["manifest"]
    assert told["profile"]["source_ms"]
    assert told["engines"] == []
