"""ONNX files in place of bundles: wrapped by a process, served in mode off, removed in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.facts import facts, tells
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.bundle.locks import FileLock
from offramp.cluster.remote.tcp import parse_address
from offramp.cluster.serving.cluster_workers import ClusterWorkers, WorkerPlace
from offramp.cluster.serving.worker_devices import LocalWorkers
from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.common.errors import OptionsError
from offramp.engine.core import Engine
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.plain_serving import notes_on, options_for
from offramp.engine.onnx_files import OnnxFileError, WrappedFiles, is_onnx_file, wrap, wrapping
from offramp.engine.onnx_files.wrapped_folder import PREFIX
from offramp.engine.stages.plan import Mode

OPTIONS = EngineOptions(mode=Mode.AUDIT, backend="onnxruntime", threads=1)
LIMIT_S = 120.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.v2.onnx"
    onnx.save(models.mlp(), path)
    return path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for temporary files, which has to be empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_small(tmp_path_factory.mktemp("small"))[0].path


def folder_modes(parent: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in parent.iterdir() if path.is_dir()]


def there(*paths: Path) -> list[bool]:
    return [path.exists() for path in paths]


def test_files_are_told_from_bundles(model: Path, bundle: Path, tmp_path: Path) -> None:
    assert is_onnx_file(model)
    assert is_onnx_file(tmp_path / "absent.onnx")
    assert not is_onnx_file(bundle)
    assert not is_onnx_file(tmp_path / "absent.ee")
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    assert not is_onnx_file(folder)


def test_each_model_has_its_own_mode(model: Path, bundle: Path, temporary: Path) -> None:
    """A bundle with exits keeps the engine's mode next to an ONNX file, which has none."""

    async def serve() -> None:
        async with await Engine.open({"plain": model, "exits": bundle}, OPTIONS) as engine:
            modes = {name: found.mode for name, found in engine.statistics().items()}
            assert modes == {"plain": "off", "exits": "audit"}
            await engine.load("later", model)
            for name in ("plain", "later"):
                (note,) = engine.model(name).notes
                tells(note, "--learn", f"eecompile {model} --data")
            assert engine.model("exits").notes == ()
            rows = np.ones((5, 16), np.float32)
            result = await engine.infer("plain", {"x": rows})
            assert result.exits.tolist() == [-1] * 5
            assert folder_modes(temporary) == [0o700]

    asyncio.run(asyncio.wait_for(serve(), LIMIT_S))


def test_bundles_of_which_no_exit_paid_are_served_in_mode_off(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    bare = replace(manifest, exits=())
    assert options_for("m", bare, OPTIONS).mode is Mode.OFF
    assert "no exits, as none was worth building" in notes_on("m", bare, OPTIONS)[0]
    assert options_for("m", manifest, OPTIONS) is OPTIONS


def test_all_files_that_cannot_be_served_are_named(model: Path, tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken.onnx", tmp_path / "missing.onnx"
    broken.write_text("no model")

    async def open_all() -> None:
        async with await Engine.open({"a": broken, "b": model, "c": missing}, OPTIONS):
            pass

    with pytest.raises(OnnxFileError) as caught:
        asyncio.run(open_all())
    first, second, last = str(caught.value).splitlines()
    assert first.startswith(f"a: {broken}: not an ONNX file")
    tells(second, f"c: {missing}", "no such file", "ONNX file")
    tells(last, "b", "leave them out")


def test_a_note_says_where_exits_come_from(model: Path, tmp_path: Path) -> None:
    asyncio.run(wrap(model, tmp_path / "plain.ee"))
    manifest = Bundle.open(tmp_path / "plain.ee").manifest
    learning = replace(OPTIONS, learning=LearnOptions())
    left_out = replace(learning, models={"m": ModelOptions(learn=False)})
    assert notes_on("m", manifest, learning)[0].endswith("exits are learned from requests")
    for options in (OPTIONS, left_out):
        assert "exits come with --learn, or from eecompile" in notes_on("m", manifest, options)[0]


def test_the_output_is_named_by_the_models_options(tmp_path: Path) -> None:
    path = tmp_path / "two.onnx"
    proto = models.mlp()
    proto.graph.output.append(
        onnx.helper.make_tensor_value_info("hidden1", onnx.TensorProto.FLOAT, ["batch", 16])
    )
    onnx.save(proto, path)

    async def outputs(options: EngineOptions) -> list[str]:
        async with await Engine.open({"two": path}, options) as engine:
            return [output.name for output in engine.model("two").outputs]

    with pytest.raises(OnnxFileError, match=r"two\.onnx: 2 outputs .*--answer logits"):
        asyncio.run(outputs(OPTIONS))
    named = replace(OPTIONS, models={"two": ModelOptions(answer="hidden1")})
    assert asyncio.run(outputs(named)) == ["hidden1"]


def test_the_task_is_named_where_the_shape_does_not_tell(model: Path, tmp_path: Path) -> None:
    asyncio.run(wrap(model, tmp_path / "values.ee", task="regression"))
    assert Bundle.open(tmp_path / "values.ee").manifest.answer.task.kind == "regression"
    with pytest.raises(ValueError, match=facts("'values'", "classification, mu")):
        ModelOptions(task="values")


def test_a_missing_package_is_named_with_the_remedy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text("import sys; sys.modules['onnxslim'] = None\n")
    monkeypatch.syspath_prepend(str(without))
    with pytest.raises(OnnxFileError) as caught:
        asyncio.run(wrap(model, tmp_path / "small.ee"))
    remedy = "serving an ONNX file needs the packages of the extra `onnx`: pip install"
    assert str(caught.value).startswith(f"{model}: {remedy} 'offramp[onnx]' (")


def test_torch_is_not_needed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    monkeypatch.syspath_prepend(str(without))
    asyncio.run(wrap(model, tmp_path / "small.ee"))
    assert (tmp_path / "small.ee" / "manifest.json").is_file()


def test_files_that_cannot_be_read_keep_the_path_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noise.onnx").write_bytes(b"\xfe" * 64)
    with pytest.raises(OnnxFileError, match=r"^noise\.onnx: not an ONNX file; export"):
        asyncio.run(wrap(Path("noise.onnx"), tmp_path / "noise.ee"))


def test_a_process_that_is_killed_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BuildProcess):
        def wait(self) -> int:
            os.kill(self._process.pid, signal.SIGKILL)
            return super().wait()

    monkeypatch.setattr(wrapping, "BuildProcess", Killed)
    with pytest.raises(OnnxFileError, match=facts("signal 9", "eecompile wrap")):
        asyncio.run(wrap(model, tmp_path / "small.ee"))


def test_that_no_process_can_be_started_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> BuildProcess:
        raise OSError("no more processes")

    monkeypatch.setattr(wrapping, "BuildProcess", refuse)
    with pytest.raises(OnnxFileError, match=facts("no more processes", "free memory or processes")):
        asyncio.run(wrap(model, tmp_path / "small.ee"))


def test_cancelling_ends_the_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[BuildProcess] = []

    class Noted(BuildProcess):
        def wait(self) -> int:
            started.append(self)
            return super().wait()

    monkeypatch.setattr(wrapping, "BuildProcess", Noted)

    async def begin_and_cancel() -> None:
        task = asyncio.create_task(Engine.open({"m": model}, OPTIONS))
        while not started:  # noqa: ASYNC110 - a thread brings it about
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(begin_and_cancel(), LIMIT_S))
    assert started[0].poll() == -signal.SIGKILL


def test_folders_of_killed_processes_are_removed(model: Path, temporary: Path) -> None:
    dead, alive = temporary / f"{PREFIX}dead", temporary / f"{PREFIX}alive"
    for folder in (dead, alive):
        (folder / "1").mkdir(parents=True)
    lock = FileLock(alive.with_name(f"{alive.name}.lock"))
    # A lock binds other processes and other descriptors alike.
    assert lock.take()

    async def make() -> None:
        wrapped = WrappedFiles()
        try:
            made = await wrapped.bundle(model)
            assert there(dead, alive, made) == [False, True, True]
        finally:
            wrapped.close()

    asyncio.run(make())
    (alive / "1").rmdir()
    alive.rmdir()
    lock.release()


def test_workers_on_other_hosts_are_refused(model: Path) -> None:
    place = WorkerPlace(device_type="cpu", address=parse_address("10.0.0.2:7070"), resources=None)
    options = EngineOptions(devices=ClusterWorkers(places=(place,), file=None))
    with pytest.raises(OptionsError, match=facts("temporary folder", "other hosts")):
        asyncio.run(Engine.open({"m": model}, options))


def test_workers_on_this_host_serve_them(model: Path) -> None:
    async def serve() -> list[int]:
        options = EngineOptions(
            mode=Mode.AUDIT, backend="onnxruntime", devices=LocalWorkers(1), threads=1
        )
        async with await Engine.open({"m": model}, options) as engine:
            result = await engine.infer("m", {"x": np.ones((2, 16), np.float32)})
            return [int(exit_) for exit_ in result.exits]

    assert asyncio.run(asyncio.wait_for(serve(), LIMIT_S)) == [-1, -1]
