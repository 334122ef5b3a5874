"""``eecompile``: one line on standard error for each thing that can be wrong, nothing left."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console
from tests import models
from tests.facts import Told, steps_of, tells, without_steps
from tests.unit.bundle.examples import FILES, POLICY, agreeing_records, write

from offramp.bundle import Bundle
from offramp.bundle.bundle import RECORDS
from offramp.compiler.commands.cli import main
from offramp.compiler.commands.printing import print_bundle
from offramp.compiler.common.progress import STAGES, stage_of


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model and data for it, in the current directory."""
    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp(), "model.onnx")
    save()
    yield


def save(name: str = "x", samples: int = 800, dtype: str = "float32", **more: np.ndarray) -> None:
    kinds = np.random.default_rng(0).standard_normal((4, 16)) * 3
    rng = np.random.default_rng(1)
    x = kinds[rng.integers(0, 4, samples)] + rng.standard_normal((samples, 16)) / 4
    np.savez("data.npz", **{name: x.astype(dtype)}, **more)


def fails(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line, after those of steps, on standard error of a run that fails.

    It leaves no files.
    """
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    err = without_steps(err)
    assert err.startswith("eecompile: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert sorted(Path().rglob("*")) == before
    return err


def compiling(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    return fails(capfd, "model.onnx", "--data", "data.npz", *arguments)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x08\x07"])
def test_a_model_that_is_no_model(capfd, content: bytes) -> None:
    Path("model.onnx").write_bytes(content)
    assert "model.onnx: not an ONNX file" in compiling(capfd)


def test_a_model_that_is_not_there(capfd) -> None:
    Path("model.onnx").unlink()
    tells(compiling(capfd), "model.onnx", "No such file")


@pytest.mark.parametrize("named", ["", ".", "/"])
@pytest.mark.parametrize("command", [(), ("inspect",)])
def test_a_model_that_is_no_name_of_a_file(capfd, command: tuple[str, ...], named: str) -> None:
    given = () if command else ("--data", "data.npz")
    told = fails(capfd, *command, named, *given)
    tells(told, f"{str(Path(named))!r}", "ONNX file")


def test_a_model_without_a_cut_point(capfd) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [16, 3], [0.5] * 48)
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in
        (("x", 16), ("logits", 3))
    ]  # fmt: skip
    node = helper.make_node("MatMul", ["x", "w"], ["logits"])
    graph = helper.make_graph([node], "g", info[:1], info[1:], initializer=[weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, "model.onnx")
    assert "the model has no cut point" in compiling(capfd)


def test_data_that_is_not_there(capfd) -> None:
    Path("data.npz").unlink()
    assert "data.npz: no such file" in compiling(capfd)


def test_data_of_another_name(capfd) -> None:
    save("xx", dtype="float64")
    line = compiling(capfd)
    tells(line, "'xx'", "'x'", "x: float32 [batch, 16]")


def test_data_of_another_type(capfd) -> None:
    save(dtype="float64")
    tells(compiling(capfd), "'x' is float64 [800, 16]", "x: float32 [batch, 16]")


def test_data_that_are_no_numbers(capfd) -> None:
    x = np.random.default_rng(0).standard_normal((800, 16)).astype(np.float32)
    x[7, 3] = np.nan
    np.savez("data.npz", x=x)
    told = compiling(capfd)
    tells(told, "1 of 800 samples", "NaN or infinite", "sample 7")
    tells(told, "NaN or infinite", "sample 7")


def test_too_few_samples(capfd) -> None:
    save(samples=500)
    assert "500 calibration samples are too few" in compiling(capfd)
    assert "give at least 703" in compiling(capfd)


def test_data_that_the_model_fails_on(capfd) -> None:
    onnx.save(models.bert_like(mask=False), "model.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (800, 4))
    ids[:, 1] = 50  # of a vocabulary of 50
    np.savez("data.npz", input_ids=ids)
    told = "has 50 at [0, 1], and the model takes -50 to 49 there"
    assert told in compiling(capfd)
    ids[:, 1] = 0
    ids[700, 1] = 50  # of one sample alone, which is not among the first
    np.savez("data.npz", input_ids=ids)
    tells(compiling(capfd), "-50 to 49")


@pytest.mark.parametrize("arguments", [(), ("--overwrite",)])
def test_a_folder_in_the_way(capfd, arguments: tuple[str, ...]) -> None:
    Path("model.ee").mkdir()
    tells(compiling(capfd, *arguments), "model.ee", "not a bundle")


def test_an_output_below_a_file(capfd) -> None:
    line = compiling(capfd, "--output", "data.npz/a/b.ee")
    tells(line, "data.npz", "not a folder", "--output")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a head would be trained."""

    def train(*_: object, **__: object) -> None:
        pytest.fail("heads are trained")

    monkeypatch.setattr("offramp.compiler.exits.exits.train_heads", train)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="nobody can write there")
def test_a_target_that_cannot_be_written_is_told_before_the_work(
    capfd, untrained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "offramp.compiler.steps.compile.read_model", lambda *_, **__: pytest.fail("read")
    )
    line = compiling(capfd, "--output", "/proc/model.ee")
    assert "/proc/model.ee cannot be written: " in line
    tells(line, "/proc writable", "--output")


def test_missing_disk_space_for_a_bundle_is_reported_before_compiling(
    capfd, untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, usage = tmp_path / "scratch", shutil.disk_usage(".")
    folder.mkdir()

    def free(place: Path) -> object:
        return usage if Path(place) == folder else usage._replace(free=1000)

    monkeypatch.setattr("shutil.disk_usage", free)
    line = compiling(capfd, "--scratch", str(folder))
    assert "model.ee needs 0 MiB at least" in line
    tells(line, "0 MiB", "free the space", "--output")


def test_missing_scratch_space_for_weights_is_reported_before_compiling(
    capfd, untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, usage = tmp_path / "scratch", shutil.disk_usage(".")
    folder.mkdir()

    def free(place: Path) -> object:
        return usage._replace(free=1000) if Path(place) == folder else usage

    monkeypatch.setattr("shutil.disk_usage", free)
    line = compiling(capfd, "--scratch", str(folder))
    assert "the model's weights take" in line
    assert f"but {folder} has" in line
    tells(line, "1,000 bytes", "free the space", "--scratch")


def test_missing_disk_space_for_features_is_reported_before_recording(
    capfd, untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def full(*_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    line = compiling(capfd)
    assert re.search(r"features of \d+ samples take \d MiB in .*temporary", line)
    tells(line, "No space left on device", "free the space", "name a folder")


def test_no_folder_for_temporary_files_is_told_before_the_work(
    capfd, untrained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']")

    monkeypatch.setattr(
        "offramp.compiler.steps.compile.read_model", lambda *_, **__: pytest.fail("read")
    )
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "gettempdir", missing)
        line = compiling(capfd)
    assert "No usable temporary directory found in ['/x']" in line


def test_an_interruption_after_the_writing_says_that_it_is_written(
    capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "offramp.compiler.steps.compile.compile_model", lambda *_, **__: write(Path())
    )
    monkeypatch.setattr("offramp.compiler.commands.printing.print_bundle", interrupt)
    arguments = ["model.onnx", "--data", "data.npz", "--output", "small.ee"]
    assert main(arguments) == 130
    said = capfd.readouterr().err.splitlines()[-1]
    tells(said, "eecompile: interrupted", "small.ee", "completely")
    monkeypatch.setattr("offramp.compiler.steps.compile.compile_model", interrupt)
    assert main(arguments) == 130
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == "eecompile: interrupted; nothing was written"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_heads_are_trained_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "offramp.compiler.commands.cli",
        "model.onnx",
        "--data",
        "data.npz",
    ]
    process = subprocess.Popen(
        [*command, "--epochs", "1000000"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        # files have no names; the folder of what tunes comes last
        while process.poll() is None and not list(temporary.glob("offramp-features-*/*/tune")):
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    tells(err.splitlines()[-1], "eecompile", number.name, "nothing was written")
    assert list(temporary.glob("offramp-*")) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.npz", "model.onnx", "temporary"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--exits", "nothing"), ("'nothing'", "from 0 to")),
        (("--exits", "0,77"), ("cut point '77'",)),
        (("--mask", "nothing"), ("--mask 'nothing'", "[batch, tokens]")),
        (("--mask", "x"), ("--mask 'x'", "[batch, tokens, width]")),
        (("--answer", "nothing"), ("'nothing'", "'logits'")),
    ],
)
def test_names_that_are_not_there(capfd, arguments: tuple[str, ...], message: Told) -> None:
    tells(compiling(capfd, *arguments), *message)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("model.onnx", "--data", "data.npz", "--confidence", "1"),
        ("model.onnx", "--data", "data.npz", "--max-disagreement", "1%"),
        ("model.onnx", "--data", "data.npz", "--candidates", "0"),
        ("model.onnx", "--data", "data.npz", "--unknown"),
        ("inspect",),
    ],
)
def test_wrong_usage(capfd, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    first, second = capfd.readouterr().err.splitlines()
    assert re.match("eecompile( inspect)?: error: ", first)
    assert re.fullmatch("see eecompile( inspect)? --help", second)


@pytest.mark.parametrize("name", ["model.ee", "with [brackets].ee"])
def test_a_bundle_is_written_and_summed_up(capfd, name: str) -> None:
    arguments = ["model.onnx", "--data", "data.npz", "--epochs", "1", "--output", name]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert f"eeserve {name}" in out
    assert Path(name, "report.html").is_file()
    exits = len(Bundle.open(name).manifest.exits)
    assert f"{exits} exit" in out
    stages = {stage_of(title) for title in steps_of(err)}
    assert stages >= set(range(1, len(STAGES) + 1)), err
    assert [p.name for p in Path().iterdir() if p.name.startswith(".")] == []

    tells(fails(capfd, *arguments), f"{name} exists", "--output", "--overwrite")
    assert main([*arguments, "--overwrite"]) == 0


def test_the_summary_claims_what_was_promised_and_no_more(tmp_path: Path) -> None:
    assert POLICY.promise is not None
    sure = replace(POLICY.promise, confidence_level=0.9995, max_disagreement=0.00004)
    bundle = write(
        tmp_path, policy=replace(POLICY, promise=sure), files={**FILES, RECORDS: agreeing_records()}
    )
    written = io.StringIO()
    print_bundle(bundle, Console(file=written, width=300))
    lines = written.getvalue().splitlines()
    assert lines[0] == f"{bundle.path}: 1 exit built, 1 active"
    assert lines[1] == "  exit 0 after segment 0: 2×2 grid, hidden 64; leaves at confidence ≥ 0.900"
    assert lines[2] == (
        "Disagreement with the unmodified model ≤ 0.004% on unseen data like the calibration set, "
        "with 99.95% confidence (0 of 250 certify samples disagreed)."
    )
    assert lines[3].startswith("Predicted savings of time: 30.0%")
    added = "9.4% at batch 1, 3.8% at batch 8"  # 0.25 + 0.125 of 4 ms, 0.5 + 0.25 of 20 ms
    assert lines[4] == f"Where nothing exits, an answer comes later by {added} (profiled)."
    assert lines[5].startswith("The unmodified model is right on 50.0% of the labels; ")
    assert lines[6:] == [f"Report: {bundle.path}/report.html", f"Serve:  eeserve {bundle.path}"]


def test_inspect_lists_the_cut_points(capfd) -> None:
    assert main(["inspect", "model.onnx"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "x: float32 [batch, 16]" in out
    assert "logits: 3 classes, logits" in out
    assert "hidden0" in out
    assert "Gemm" in out or "Relu" in out
    assert sorted(p.name for p in Path().iterdir()) == ["data.npz", "model.onnx"]


def test_inspect_writes_it_down() -> None:
    assert main(["inspect", "model.onnx", "--json", "found.json"]) == 0
    told = json.loads(Path("found.json").read_text())
    assert told["answer"] == {"output": "logits", "classes": 3, "form": "logits"}
    assert [cut["index"] for cut in told["cut_points"]] == list(range(len(told["cut_points"])))
    assert "hidden0" in {cut["tensor"] for cut in told["cut_points"]}
    assert all(place["reason"] for place in told["rejected"])


def test_inspect_says_what_is_wrong(capfd) -> None:
    Path("model.onnx").write_bytes(b"no")
    assert "not an ONNX file" in fails(capfd, "inspect", "model.onnx")
