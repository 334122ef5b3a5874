"""``--selection pame`` and ``eecompile rehearse`` on a tiny model, from data to bundle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import compile_tiny
from tests.facts import tells, without_steps
from tests.integration.test_compile_tiny import images

from offramp.bundle import NEVER, Bundle, ExitPolicy
from offramp.calibration.measure import profiling
from offramp.calibration.rehearsal import REHEARSAL, Rehearsed
from offramp.certify import binomial_cdf, evaluate
from offramp.compiler.commands.cli import COMMANDS, main
from offramp.compiler.exits import policy_choice

MADE_WITH = ("--selection", "pame", "--rehearsal-batch", "24", "--max-violations", "0.1")


@pytest.fixture(scope="module")
def steady_times() -> Iterator[None]:
    """Make timed runs as long as their batch; heads and borders cost nothing."""

    def time_ms(_self: object, tensors: dict[str, np.ndarray]) -> float:
        return 4.0 + len(next(iter(tensors.values())))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", time_ms)
        patched.setattr(profiling, "_staged_ms", lambda *_: 0.0)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, steady_times: None) -> Bundle:
    folder = tmp_path_factory.mktemp("rehearsed")
    onnx.save(models.residual_cnn(), folder / "model.onnx")
    np.savez(folder / "data.npz", **images())
    arguments = ["--data", str(folder / "data.npz"), "--candidates", "3", "--epochs", "3"]
    arguments += ["--max-disagreement", "0.05", "--output", str(folder / "tiny.ee"), *MADE_WITH]
    assert main([str(folder / "model.onnx"), *arguments]) == 0
    return Bundle.open(folder / "tiny.ee")


@pytest.fixture
def bundle(compiled: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A copy of it in the current directory, with data of the same load and of a harder one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(compiled.path, "tiny.ee")
    np.savez("same.npz", **images(1000, seed=5))
    harder = images(1000, seed=6)
    patches = np.random.default_rng(7).standard_normal((1000, 3, 4, 4)) * 1.2
    blotted = harder["image"] + patches.repeat(4, axis=2).repeat(4, axis=3)
    harder["image"] = blotted.astype(np.float32)
    np.savez("harder.npz", **harder)
    return Bundle.open("tiny.ee")


def rehearsed(bundle: Bundle) -> Rehearsed:
    return Rehearsed.parse(bundle.read(REHEARSAL))


def thresholds_of(bundle: Bundle) -> np.ndarray:
    thresholds = np.full(len(bundle.manifest.exits), NEVER)
    for active in bundle.policy.active:
        thresholds[active.exit] = active.threshold
    return thresholds


def hashes(bundle: Bundle) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in bundle.manifest.files}


def assert_promise_is_what_the_records_say(bundle: Bundle) -> None:
    promise, records = bundle.policy.promise, bundle.records()
    certify = records["split"] == 2
    agrees = records["prediction"] == records["final_prediction"]
    exits = len(bundle.manifest.exits)
    found = evaluate(
        records["confidence"][:, certify],
        agrees[:, certify],
        np.ones(exits + 1),
        thresholds_of(bundle),
    )
    assert promise is not None
    assert (promise.max_disagreement, promise.confidence_level) == (0.05, 0.95)
    assert promise.certify_samples == certify.sum() == bundle.manifest.calibration.certify_samples
    assert promise.certify_errors == found.errors
    assert promise.p_value == binomial_cdf(found.errors, int(certify.sum()), 0.05) <= 0.05
    assert [e.agreement for e in bundle.manifest.exits] == [
        pytest.approx(row.mean()) for row in agrees[:, certify]
    ]


def test_exits_chosen_by_rehearsal_keep_the_same_promise(bundle: Bundle) -> None:
    assert bundle.policy.active
    assert_promise_is_what_the_records_say(bundle)
    found = rehearsed(bundle)
    assert {a.exit for a in bundle.policy.active} <= {a.exit for a in found.rehearsal.active}
    settings = found.rehearsal.settings
    assert (settings.batch_size, settings.max_violations) == (24, 0.1)
    assert settings.max_disagreement == 0.05
    assert found.rehearsal.samples == bundle.manifest.calibration.tune_samples
    assert found.data_sha256 == bundle.manifest.calibration.data_sha256
    assert 24 in bundle.profile().batch_sizes
    # 4 ms and 1 ms a row at all 24: what the batch takes without exits
    assert found.rehearsal.steps[0].limit_ms == pytest.approx(28)
    assert found.shipped.average_ms < found.shipped.source_ms == pytest.approx(28)
    assert found.shipped.violations <= 0.1
    promise = bundle.policy.promise
    assert promise is not None
    assert found.shipped.disagreement == promise.certify_errors / promise.certify_samples
    assert "Rehearsal of batches" in (bundle.path / "report.html").read_text()


def test_the_default_rehearses_nothing(tmp_path: Path, steady_times: None) -> None:
    x = np.random.default_rng(0).standard_normal((1400, 16)).astype(np.float32)
    bundle = compile_tiny(models.mlp(), {"x": x}, tmp_path, epochs=1, own_times=True)
    assert REHEARSAL not in hashes(bundle)
    assert "Rehearsal of batches" not in (bundle.path / "report.html").read_text()


def test_the_same_load_changes_little(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "tiny.ee", "--data", "same.npz", "--output", "new.ee"]) == 0
    out, _ = capfd.readouterr()
    renewed = Bundle.open("new.ee")
    assert [a.exit for a in renewed.policy.active] == [a.exit for a in bundle.policy.active]
    assert "moved" not in out
    assert "Written: new.ee" in out
    assert (thresholds_of(renewed) >= thresholds_of(bundle)).all()
    assert Bundle.open("tiny.ee") == bundle


def test_thresholds_for_a_harder_load_are_certified_again(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "tiny.ee", "--data", "harder.npz", "--output", "new.ee"]) == 0
    renewed, out = Bundle.open("new.ee"), capfd.readouterr().out
    assert renewed.policy.version == bundle.policy.version + 1
    assert_promise_is_what_the_records_say(renewed)
    before, after = thresholds_of(bundle), thresholds_of(renewed)
    stayed = [a.exit for a in renewed.policy.active if before[a.exit] < NEVER]
    assert all(after[e] >= before[e] for e in stayed)
    assert after[stayed].sum() + NEVER * (len(before) - len(stayed)) > before.sum()
    # 3/8 of the data tune, as in compiling, 5/8 certify
    calibration = renewed.manifest.calibration
    assert (calibration.tune_samples, calibration.certify_samples) == (375, 625)
    assert calibration.train_samples == bundle.manifest.calibration.train_samples
    assert len(renewed.records()["split"]) == 1000
    assert renewed.manifest.name == "new"
    renewed_files = {"policy.json", "records.npz", "report.html", REHEARSAL}
    old, new = hashes(bundle), hashes(renewed)
    assert old.keys() - new.keys() == {"measured.json"}  # it was the former policy's
    assert {name for name in new if old[name] != new[name]} == renewed_files

    found = rehearsed(renewed)
    assert found.data_sha256 != calibration.data_sha256 == bundle.manifest.calibration.data_sha256
    assert found.rehearsal.settings == rehearsed(bundle).rehearsal.settings
    assert found.rehearsal.ended == "kept"
    page = (renewed.path / "report.html").read_text()
    assert found.data_sha256 in page
    assert "Tuned and certified on" in page
    assert "of 625 certify samples disagreed" in out
    assert "Written: new.ee" in out


def test_a_dry_run_says_the_same_and_writes_nothing(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["rehearse", "tiny.ee", "--data", "harder.npz", "--dry-run"]) == 0
    dry = capfd.readouterr().out
    assert sorted(Path().rglob("*")) == before
    assert Bundle.open("tiny.ee") == bundle
    assert main(["rehearse", "tiny.ee", "--data", "harder.npz"]) == 0
    wet = capfd.readouterr().out
    assert dry.splitlines()[:-1] == wet.splitlines()[:-1]
    assert dry.splitlines()[-1] == "Dry run: nothing was written."
    assert wet.splitlines()[-1].startswith("Written: ")


def test_in_place_the_bundle_is_replaced_whole(bundle: Bundle) -> None:
    Path("link.ee").symlink_to("tiny.ee")
    assert main(["rehearse", "link.ee", "--data", "harder.npz"]) == 0
    assert Path("link.ee").is_symlink()
    renewed = Bundle.open("tiny.ee")
    assert renewed.policy.version == bundle.policy.version + 1
    assert renewed.manifest.name == "tiny"
    names = {p.name for p in Path().iterdir()}
    assert names == {"link.ee", "tiny.ee", "same.npz", "harder.npz"}
    # and once more, from what the first one left
    assert main(["rehearse", "tiny.ee", "--data", "same.npz"]) == 0
    assert Bundle.open("tiny.ee").policy.version == bundle.policy.version + 2


def test_rehearsing_with_anew_finds_the_thresholds_of_compiling(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a harder load, the easy one gets its exits back."""
    assert main(["rehearse", "tiny.ee", "--data", "harder.npz"]) == 0
    raised = thresholds_of(Bundle.open("tiny.ee"))
    assert main(["rehearse", "tiny.ee", "--data", "same.npz", "--from-scratch"]) == 0
    found = Bundle.open("tiny.ee")
    assert_promise_is_what_the_records_say(found)
    assert rehearsed(found).rehearsal.ended != "kept"
    assert thresholds_of(found).min() < raised.min()


def test_a_search_keeps_the_exits_that_gain_as_much_as_asked(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(bundle).rehearsal.settings.min_gain == 0.01
    found = {}
    for gain in ("0", "0.99"):
        asked = ["--from-scratch", "--min-gain", gain, "--output", f"{gain}.ee"]
        assert main(["rehearse", "tiny.ee", "--data", "same.npz", *asked]) == 0
        found[gain] = rehearsed(Bundle.open(f"{gain}.ee")).rehearsal
        assert found[gain].settings.min_gain == float(gain)
    assert len(found["0"].active) > len(found["0.99"].active) == 0
    assert found["0.99"].ended == "gain"
    capfd.readouterr()
    line = fails(capfd, "tiny.ee", "--data", "same.npz", "--min-gain", "0")
    tells(line, "tiny.ee", "--from-scratch")


def test_what_is_asked_for_is_promised(bundle: Bundle) -> None:
    asked = ["--max-disagreement", "0.1", "--confidence", "0.9", "--rehearsal-batch", "8"]
    asked += ["--max-violations", "0", "--output", "new.ee"]
    assert main(["rehearse", "tiny.ee", "--data", "same.npz", *asked]) == 0
    renewed = Bundle.open("new.ee")
    assert renewed.policy.promise is not None
    promise, settings = renewed.policy.promise, rehearsed(renewed).rehearsal.settings
    assert (promise.max_disagreement, promise.confidence_level) == (0.1, 0.9)
    assert (settings.batch_size, settings.max_violations) == (8, 0.0)


def test_a_load_for_which_nothing_can_be_certified_is_served_without_exits(
    bundle: Bundle, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        none = ExitPolicy(version=1, active=())
        patched.setattr(policy_choice, "certified_policy", lambda *_a, **_k: none)
        assert main(["rehearse", "tiny.ee", "--data", "harder.npz"]) == 0
    renewed = Bundle.open("tiny.ee")
    assert renewed.policy == ExitPolicy(version=bundle.policy.version + 1, active=())
    assert rehearsed(renewed).shipped.average_ms == pytest.approx(28)
    assert "No exit is in use" in capfd.readouterr().out
    assert "No exit is active" in (renewed.path / "report.html").read_text()
    # from there the exits are searched, as none is in use that could be adapted
    assert main(["rehearse", "tiny.ee", "--data", "same.npz"]) == 0
    found = Bundle.open("tiny.ee")
    assert found.policy.active
    assert_promise_is_what_the_records_say(found)


def fails(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line on standard error of a run that fails and leaves no files."""
    before = sorted(Path().rglob("*"))
    assert main(["rehearse", *arguments]) == 1
    out, err = capfd.readouterr()
    err = without_steps(err)
    assert (out, err.count("\n")) == ("", 1), err
    assert sorted(Path().rglob("*")) == before
    return err


def test_what_can_be_wrong(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez("few.npz", image=images(80)["image"])
    np.savez("other.npz", picture=images(80)["image"], second=images(80)["image"])
    Path("folder.ee").mkdir()
    assert "nothing.ee is not a bundle" in fails(capfd, "nothing.ee", "--data", "same.npz")
    assert "nothing.npz: no such file" in fails(capfd, "tiny.ee", "--data", "nothing.npz")
    assert "there is no input 'picture'; expected image" in fails(
        capfd, "tiny.ee", "--data", "other.npz"
    )
    line = fails(capfd, "tiny.ee", "--data", "few.npz")
    # 59 without an error are needed for 5 % at 95 %, and 24 others to rehearse
    tells(line, "80 samples", "59")
    assert "use at least 83" in line
    taken = ("tiny.ee", "--data", "same.npz", "--output")
    tells(fails(capfd, *taken, "folder.ee"), "folder.ee", "not a bundle")
    assert "tiny.ee exists; choose another --output" in fails(capfd, *taken, "tiny.ee")
    (bundle.path / "segments" / "00.onnx").write_bytes(b"altered")
    assert "segments/00.onnx has 7 bytes" in fails(capfd, "tiny.ee", "--data", "same.npz")


def test_a_bundle_without_exits(
    tmp_path: Path, steady_times: None, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offramp.compiler.exits.exits.net_savings_alone", lambda *_: 0.0)
    x = np.random.default_rng(0).standard_normal((1400, 16)).astype(np.float32)
    bundle = compile_tiny(
        models.mlp(),
        {"x": x},
        Path(),
        epochs=1,
        selection="pame",
        max_overhead=None,
        own_times=True,
    )
    assert bundle.manifest.exits == ()
    assert REHEARSAL not in hashes(bundle)
    assert "has no exits to rehearse" in fails(capfd, "tiny.ee", "--data", "data.npz")


@pytest.mark.parametrize(
    "arguments",
    [
        ("rehearse",),
        ("rehearse", "tiny.ee"),
        ("rehearse", "tiny.ee", "--data", "x.npz", "--max-violations", "1"),
        ("rehearse", "tiny.ee", "--data", "x.npz", "--rehearsal-batch", "0"),
        ("model.onnx", "--data", "x.npz", "--selection", "best"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("eecompile")
    assert ": error: " in first
    assert second.startswith("see eecompile")


def test_every_option_is_explained() -> None:
    for command in COMMANDS.values():
        for action in command.parser()._actions:
            assert action.help, action.dest
