"""``eecompile build`` and ``--backend tensorrt`` as a user meets them, with a fake GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from tests import models
from tests.engines import engine_bundle
from tests.facts import Told, tells, without_steps
from tests.fake_builder import FakeBuilder
from tests.integration.test_compile_tiny import images
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.bundle.engines import EngineStore, list_targets
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import EnginesUnavailableError
from offramp.compiler.engines import build
from offramp.engine.common.errors import BackendError
from offramp.engine.kernels.kernel_compilation import source_hash

MISSING = "TensorRT cannot be used on cuda:0: there is no NVIDIA driver here"


class CommandResult(NamedTuple):
    status: int
    out: list[str]
    err: list[str]


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> CommandResult:
        self._capsys.readouterr()
        status = main(arguments)
        said = self._capsys.readouterr()
        err = without_steps(said.err).splitlines()
        return CommandResult(status, said.out.splitlines(), err)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> Shell:
    """Run ``eecompile`` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    builder = FakeBuilder(gpu="NVIDIA H200")
    monkeypatch.setattr(build, "make_builder", lambda device: builder)
    monkeypatch.setattr(build, "check_device", lambda device: None)
    monkeypatch.setattr(build, "load_kernels", lambda *_, **__: b"cubin")
    return builder


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(device: str) -> None:
        raise BackendError(MISSING)

    monkeypatch.setattr(build, "require", require)


@pytest.fixture
def mlp(tmp_path: Path) -> Bundle:
    """Four segments, exits after 0 and 1, that after 1 in use."""
    return engine_bundle("mlp", tmp_path / "mlp.ee")


def rows(said: CommandResult) -> dict[str, list[str]]:
    """Return the rows of the table by engine name."""
    found = (line.split() for line in said.out)
    return {cells[0]: cells[1:] for cells in found if cells and cells[0][2:3] == "-"}


def test_a_table_of_what_was_built(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    said = run("build", "mlp.ee", "--precision", "tf32", "--device", "cuda:0")
    assert said.status == 0
    assert said.err == []
    assert said.out[0].split() == ["engine", "of", "profiles", "size", "build", "difference"]
    assert list(rows(said)) == [
        "00-03", "00-01-exit1", "02-03", "00-00-exit0", "01-01-exit1", "02-02", "03-03",
    ]  # fmt: skip
    assert rows(said)["00-03"][:3] == ["source", "model", "3"]
    assert rows(said)["02-03"][:2] == ["stage", "3"]
    assert {cells[-2] for cells in rows(said).values()} == {"0.0e+00"}
    assert {cells[-1] for cells in rows(said).values()} == {"built"}
    last = said.out[-2]
    assert last.startswith("NVIDIA H200 with TensorRT 10.16.0.72, tf32: 7 built, 0 fresh, ")
    folder = "mlp.ee/engines/nvidia-h200-sm90-trt10.16.0.72-tf32"
    assert last.endswith(f"for batches 1, 2-8, 9-32 in {folder}")
    assert (Path(folder) / "index.json").is_file()
    assert said.out[-1].startswith("Measured: ")


def test_again_all_is_fresh(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    run("build", "mlp.ee")
    said = run("build", "mlp.ee")
    assert said.status == 0
    assert {cells[-1] for cells in rows(said).values()} == {"fresh"}
    assert {cells[-2] for cells in rows(said).values()} == {"–"}


def test_options_reach_the_builder(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    said = run(
        "build", "mlp.ee", "--parts", "stages", "--batch-profiles", "2-3,7", "--workspace", "0.5",
        "--optimization-level", "1",
    )  # fmt: skip
    assert said.status == 0
    assert list(rows(said)) == ["00-01-exit1", "02-03"]
    (first, _) = fake.builds
    assert [(p.first_batch, p.last_batch) for p in first.profiles] == [(2, 3), (7, 7)]
    assert first.settings.workspace_bytes == 2**29
    assert first.settings.optimization_level == 1
    assert first.settings.precision == "fp32"


def test_buckets_of_a_transformer(run: Shell, fake: FakeBuilder, tmp_path: Path) -> None:
    engine_bundle("bert", tmp_path / "bert.ee")
    said = run("build", "bert.ee", "--parts", "source", "--buckets", "sequence=8,16-20")
    assert said.status == 0
    assert said.err == []
    inputs = [p.inputs["attention_mask"] for p in fake.builds[0].profiles]
    assert [(r.least, r.most) for r in inputs] == [
        ((1, 1), (1, 8)), ((1, 16), (1, 20)), ((2, 1), (8, 8)),
        ((2, 16), (8, 20)), ((9, 1), (32, 8)), ((9, 16), (32, 20)),
    ]  # fmt: skip
    without = run("build", "bert.ee", "--parts", "source")
    tells(without.err[0], "sequence", "1-16")
    assert without.err[1].startswith("rebuilding 00-05: ")


def test_sizes_at_which_the_model_fails_are_one_line(
    run: Shell, fake: FakeBuilder, tmp_path: Path
) -> None:
    """The model has 64 positions."""
    engine_bundle("bert", tmp_path / "bert.ee")
    said = run("build", "bert.ee", "--buckets", "sequence=64,100")
    assert said.status == 1
    (line,) = said.err
    tells(line, "eecompile", "sequence 65")
    assert fake.builds == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-profiles", "8-2"], ("8-2", "2-8")),
        (["--buckets", "width=8"], ("size 'width'",)),
        (["--parts", "exits"], ("part 'exits'",)),
        (["--optimization-level", "6"], ("--optimization-level 6", "0 to 5")),
        (["--data", "nowhere.npz"], ("nowhere.npz",)),
        (["--device", "gpu0"], ("--device", "'gpu0'", "TensorRT", "cuda:0, cuda:1")),
        (["--device", "gpu0", "--dry-run"], ("'gpu0'", "TensorRT")),
    ],
)
def test_what_makes_no_sense_is_one_line(
    run: Shell, fake: FakeBuilder, mlp: Bundle, arguments: list[str], said: Told
) -> None:
    refused = run("build", "mlp.ee", *arguments)
    assert refused.status == 1
    assert refused.out == []
    (line,) = refused.err
    assert line.startswith("eecompile: ")
    tells(line, *said)


@pytest.mark.parametrize(
    "command",
    [("build", "mlp.ee"), ("rehearse", "mlp.ee", "--data", "d.npz"), ("m.onnx", "--data", "d.npz")],
    ids=["build", "rehearse", "compile"],
)
@pytest.mark.parametrize("number", ["-1", str(2**63), "1.5"])
def test_a_seed_that_is_none_is_refused(
    run: Shell, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], number: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*command, f"--seed={number}")
    assert stopped.value.code == 2
    tells(capsys.readouterr().err, "--seed", f"{number!r}", "whole number from 0 to")


def test_no_bundle(run: Shell, fake: FakeBuilder) -> None:
    refused = run("build", "nowhere.ee")
    assert refused.status == 1
    (line,) = refused.err
    tells(line, "eecompile: nowhere.ee", "manifest.json", "make")


def test_a_failing_engine_is_printed_last_and_sets_the_exit_status(
    run: Shell, mlp: Bundle, fake: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = FakeBuilder(alter=lambda outputs: {n: -a for n, a in outputs.items()})
    monkeypatch.setattr(build, "make_builder", lambda device: wrong)
    said = run("build", "mlp.ee", "--parts", "source")
    assert said.status == 1
    assert rows(said)["00-03"] == ["source", "model", "–", "–", "–", "–", "failed"]
    assert said.out[-1] == "Fake GPU with TensorRT 10.16.0.72, fp32: 0 built, 0 fresh, 1 failed"
    (line,) = said.err
    tells(line, "eecompile: 00-03", "'logits'", "differs")


def test_an_interruption_says_what_is_kept(
    run: Shell, mlp: Bundle, fake: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(built: int) -> None:
        if built == 2:
            raise KeyboardInterrupt

    stopped = FakeBuilder(before_build=interrupt)
    monkeypatch.setattr(build, "make_builder", lambda device: stopped)
    said = run("build", "mlp.ee")
    assert said.status == 130
    [said] = said.err
    tells(said, "eecompile: interrupted", "engines built so far", "same command")
    (target,) = list_targets("mlp.ee")
    assert len(EngineStore.open("mlp.ee", target).index.engines) == 2


def test_a_dry_run_says_what_and_why(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    run("build", "mlp.ee", "--parts", "stages")
    said = run("build", "mlp.ee", "--dry-run", "--batch-profiles", "1,2-16")
    assert said.status == 0
    assert rows(said)["00-03"] == ["source", "model", "2", "build", "not", "there", "yet"]
    assert rows(said)["02-03"][:3] == ["stage", "2", "build"]
    assert said.out[-1] == (
        "7 of 7 engines would be built for NVIDIA H200 with TensorRT 10.16.0.72, fp32; nothing "
        "was written"
    )
    again = run("build", "mlp.ee", "--dry-run")
    assert rows(again)["02-03"] == ["stage", "3", "keep"]
    assert again.out[-1].startswith("5 of 7 engines would be built")


def test_without_a_gpu_there_is_one_line_before_any_work(run: Shell, no_gpu: None) -> None:
    """The model is not opened before."""
    Path("data.npz").touch()
    for arguments in (
        ["build", "nowhere.ee"],
        ["nowhere.onnx", "--data", "data.npz", "--backend", "tensorrt"],
    ):
        assert run(*arguments) == CommandResult(1, [], [f"eecompile: {MISSING}"])


def test_without_a_gpu_a_dry_run_lists_all_the_same(run: Shell, no_gpu: None, mlp: Bundle) -> None:
    said = run("build", "mlp.ee", "--dry-run")
    assert said.status == 0
    assert said.err == [f"{MISSING}; listing what is known without it"]
    assert len(rows(said)) == 7
    assert said.out[-1] == (
        "7 of 7 engines would be built for an unknown GPU, fp32; nothing was written"
    )


@pytest.mark.parametrize("option", ["--device", "--parts", "--accept-disagreement"])
def test_options_of_engines_are_those_of_build_alone(
    run: Shell, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("m.onnx", "--data", "d.npz", option)
    assert stopped.value.code == 2
    assert f"eecompile: error: there is no option {option}" in capsys.readouterr().err


def test_a_precision_that_breaks_the_promise_is_refused(
    run: Shell, fake: FakeBuilder, mlp: Bundle
) -> None:
    """These data are not those of the compilation: they certify nothing."""
    np.savez("data.npz", **inputs_of(sliced("mlp"), 64))
    command = ("build", "mlp.ee", "--precision", "int8", "--data", "data.npz")
    said = run(*command)
    assert said.status == 1
    tells(said.err[0], "int8", "32 samples", "0.00%")
    assert said.err[1].startswith("eecompile: int8: of 32 samples")
    assert "add --accept-disagreement" in said.err[1]
    assert fake.builds == []
    accepted = run(*command, "--accept-disagreement")
    assert accepted.status == 0
    assert len(fake.builds) == 7
    assert run(*command).status == 1  # what was accepted is not certified


def test_int8_is_measured_on_data_and_fresh_afterwards(
    run: Shell, fake: FakeBuilder, mlp: Bundle
) -> None:
    np.savez("data.npz", **inputs_of(sliced("mlp"), 64))
    command = ("build", "mlp.ee", "--precision", "int8", "--data", "data.npz",
               "--accept-disagreement")  # fmt: skip
    said = run(*command, "--parts", "stages")
    assert said.status == 0
    assert said.err[0].startswith("int8: of 32 samples the model answers")
    again = run(*command, "--parts", "stages")
    assert again.err == said.err[:1]
    assert {cells[-1] for cells in rows(again).values()} == {"fresh"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, data, and what ``eecompile --backend tensorrt`` made of them."""
    folder = tmp_path_factory.mktemp("compiled")
    onnx.save(models.residual_cnn(), folder / "model.onnx")
    np.savez(folder / "data.npz", **images())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "make_builder", lambda device: FakeBuilder())
        patched.setattr(build, "check_device", lambda device: None)
        patched.setattr(build, "load_kernels", lambda *_, **__: b"cubin")
        patched.chdir(folder)
        assert main([*COMPILE, "--backend", "tensorrt"]) == 0
    yield folder


COMPILE = (
    "model.onnx", "--data", "data.npz", "--candidates", "3", "--epochs", "3",
    "--max-disagreement", "0.05", "--max-overhead", "0.99",
)  # fmt: skip
BRIEFLY = tuple("1" if word == "3" else word for word in COMPILE)
"""Compile command with a short training."""


@pytest.fixture
def workplace(compiled: Path, tmp_path: Path, fake: FakeBuilder, monkeypatch: Any) -> Path:
    shutil.copytree(compiled, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    monkeypatch.setattr(build, "make_builder", lambda device: FakeBuilder())
    return tmp_path / "w"


def test_compiling_for_tensorrt_builds_the_engines(compiled: Path) -> None:
    (target,) = list_targets(compiled / "model.ee")
    store = EngineStore.open(compiled / "model.ee", target)
    assert target.precision == "fp32"
    assert store.entry("00-03") is not None
    assert len(store.index.engines) >= 4
    assert store.read_kernels(source_hash()) == b"cubin"
    assert Bundle.open(compiled / "model.ee").policy.version == 1


def test_rehearsing_keeps_the_engines(run: Shell, workplace: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(workplace)
    (target,) = list_targets("model.ee")
    before = EngineStore.open("model.ee", target).index
    np.savez("new.npz", **images(1000, seed=5))
    rehearsed = run("rehearse", "model.ee", "--data", "new.npz", "--from-scratch")
    assert rehearsed.status == 0
    assert Bundle.open("model.ee").policy.version == 2
    store = EngineStore.open("model.ee", target)
    assert store.index == before
    assert all(store.read(entry) for entry in store.index.engines)
    assert run("rehearse", "model.ee", "--data", "new.npz", "--output", "x.ee").status == 0
    assert EngineStore.open("x.ee", target).index == before
    said = run("build", "model.ee", "--parts", "source,segments")
    assert {cells[-1] for cells in rows(said).values()} == {"fresh"}


def test_named_engines_alone_are_built(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    said = run("build", "mlp.ee", "--units", "00-00-exit0,01-03")
    assert said.status == 0
    assert list(rows(said)) == ["00-00-exit0", "01-03"]
    assert len(fake.builds) == 2


@pytest.mark.parametrize("name", ["00-04", "02-01", "00-01-exit0", "00-02-exit1", "x", "0--1"])
def test_an_engine_that_the_bundle_cannot_have_is_refused(
    run: Shell, fake: FakeBuilder, mlp: Bundle, name: str
) -> None:
    refused = run("build", "mlp.ee", f"--units={name}")
    assert refused.status == 1
    (line,) = refused.err
    tells(line, "--units", repr(name), "00 to 03", "exit0 after 00, exit1 after 01", "00-03")
    assert fake.builds == []


def test_engines_built_while_serving_match_the_existing_ones(
    run: Shell, fake: FakeBuilder, tmp_path: Path
) -> None:
    engine_bundle("bert", tmp_path / "bert.ee")
    run("build", "bert.ee", "--batch-profiles", "1,2-4", "--buckets", "sequence=8,16-20",
        "--optimization-level", "2")  # fmt: skip
    (target,) = list_targets("bert.ee")
    before, timings = len(fake.builds), EngineStore.open("bert.ee", target).index.timing_cache
    said = run("build", "bert.ee", "--units", "01-05", "--while-serving")
    assert said.status == 0
    (built,) = fake.builds[before:]
    inputs = [p.inputs["attention_mask"] for p in built.profiles]
    assert [(r.least, r.most) for r in inputs] == [
        ((1, 1), (1, 8)), ((1, 16), (1, 20)), ((2, 1), (4, 8)), ((2, 16), (4, 20)),
    ]  # fmt: skip
    assert built.settings.optimization_level == 2
    assert built.settings.workspace_bytes == 2**30
    assert built.timing_cache  # what a quiet GPU timed is used, what a busy one timed is not kept
    store = EngineStore.open("bert.ee", target)
    assert store.index.timing_cache == timings
    assert store.entry("01-05") is not None


def test_while_serving_takes_no_more_memory_than_was_allowed(
    run: Shell, fake: FakeBuilder, mlp: Bundle
) -> None:
    run("build", "mlp.ee", "--workspace", "0.25")
    run("build", "mlp.ee", "--units", "01-03", "--while-serving")
    assert fake.builds[-1].settings.workspace_bytes == 2**28


def test_while_serving_without_engines_is_one_line(
    run: Shell, fake: FakeBuilder, mlp: Bundle
) -> None:
    refused = run("build", "mlp.ee", "--units", "01-03", "--while-serving")
    assert refused.status == 1
    (line,) = refused.err
    tells(line, "--while-serving", "mlp.ee", "H200", "10.16.0.72, fp32", "without --while-serving")


def test_a_name_of_an_engine_is_missing(run: Shell, fake: FakeBuilder, mlp: Bundle) -> None:
    refused = run("build", "mlp.ee", "--units", ",")
    assert refused.status == 1
    (line,) = refused.err
    told = "--units ',': a name is missing; for instance 00-01-exit1,02-03"
    assert line.startswith(f"eecompile: {told}")


@pytest.fixture
def fresh(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and data without a bundle, and the arguments' own folder."""
    for name in ("model.onnx", "data.npz"):
        shutil.copy(compiled / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


HINT = "GPU:    eecompile build model.ee builds TensorRT engines on the machine with the GPU"
HERE = "TensorRT is here: engines for cuda:0 are built too (--backend onnxruntime leaves them out)"


def test_by_default_engines_are_built_where_tensorrt_is(
    run: Shell, fresh: Path, fake: FakeBuilder
) -> None:
    said = run(*BRIEFLY)
    assert said.status == 0
    assert said.err[0] == HERE
    (target,) = list_targets("model.ee")
    assert (target.gpu, target.precision) == ("NVIDIA H200", "fp32")
    assert {cells[-1] for cells in rows(said).values()} == {"built"}


def test_elsewhere_a_line_says_where_they_are_built(run: Shell, fresh: Path, no_gpu: None) -> None:
    said = run(*BRIEFLY)
    assert said.status == 0
    assert said.out[-1] == HINT
    assert list_targets("model.ee") == ()


def test_for_onnx_runtime_nothing_is_built_or_said(
    run: Shell, fresh: Path, fake: FakeBuilder
) -> None:
    said = run(*BRIEFLY, "--backend", "onnxruntime")
    assert said.status == 0
    assert not any("TensorRT" in line for line in (*said.out, *said.err))
    assert list_targets("model.ee") == ()


def test_a_bundle_that_has_no_engines_says_so_where_tensorrt_is(
    run: Shell, fresh: Path, fake: FakeBuilder
) -> None:
    said = run(*BRIEFLY, "--criterion", "patience")
    assert said.status == 0
    assert said.out[-1].startswith(
        "GPU:    no TensorRT engines with --criterion: the host computes"
    )
    assert list_targets("model.ee") == ()


def test_what_fails_by_default_leaves_a_whole_bundle(
    run: Shell, fresh: Path, fake: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: str) -> None:
        raise EnginesUnavailableError("tensorrt cannot be imported")

    monkeypatch.setattr(build, "make_builder", broken)
    said = run(*COMPILE)
    assert said.status == 0
    tells(said.err[-1], "No engines", "tensorrt", "complete without")
    assert Bundle.open("model.ee").policy.active
    assert run(*BRIEFLY, "--overwrite", "--backend", "tensorrt").status == 1
