"""The model repository: what is loaded, replaced and unloaded, and what the index says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.facts import facts, tells
from tritonclient.utils import InferenceServerException

from offramp.client import Client
from offramp.engine.common.errors import BackendError, ModelNotServedError
from offramp.engine.models.options import ModelOptions
from offramp.server.arguments.options import (
    ModelRepositoryOptions,
    RepositoryControl,
    ServerOptions,
    VersionChoice,
)
from offramp.server.common.errors import ModelControlError, ModelLoadError, StartError
from offramp.server.repository.layout import find_models, ignored_settings
from offramp.server.repository.repository import ModelRepository
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.array([[1, 2, 3, 0.95]], np.float32)


def add_version(folder: Path, name: str, version: str, text: str = "{}") -> Path:
    """Add a bundle, which is a manifest here."""
    path = folder / name / f"{version}.ee"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(text)
    return path


def run(
    folder: Path,
    body: Callable[[ModelRepository, FakeEngine], Coroutine[Any, Any, None]],
    control: RepositoryControl = RepositoryControl.EXPLICIT,
    engine: FakeEngine | None = None,
    **options: Any,
) -> None:
    """Run ``body`` with a repository that has started."""

    async def started() -> None:
        settings = ModelRepositoryOptions(model_repository=folder, model_control=control, **options)
        fake = engine or FakeEngine(served=())
        repository = ModelRepository(fake, settings)
        await repository.start()
        try:
            await body(repository, fake)
        finally:
            await repository.stop()

    asyncio.run(asyncio.wait_for(started(), 30))


def served(repository: ModelRepository) -> list[tuple[str, str, str]]:
    return [(s.name, s.version, s.engine_name) for s in repository.catalog]


def test_versions_are_numbers_in_folders_of_models(tmp_path: Path) -> None:
    first, tenth = (add_version(tmp_path, "resnet", version) for version in ("2", "10"))
    add_version(tmp_path, "resnet", "draft")
    add_version(tmp_path, ".hidden", "1")
    add_version(tmp_path, "empty", "0")
    (tmp_path / "README").write_text("not a model")
    (tmp_path / "bert" / "1").mkdir(parents=True)
    plain, triton_file = tmp_path / "bert" / "3.onnx", tmp_path / "bert" / "1" / "model.onnx"
    plain.touch()
    triton_file.touch()
    assert find_models(tmp_path) == {
        "bert": {"3": plain, "1": triton_file},
        "resnet": {"10": tenth, "2": first},
    }
    assert list(find_models(tmp_path)["resnet"]) == ["10", "2"]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("latest", ["10"]),
        ("latest:2", ["10", "3"]),
        ("all", ["10", "3", "1"]),
        ("1,3", ["3", "1"]),
        ("01", ["1"]),
    ],
)
def test_versions_are_chosen_as_in_triton(text: str, chosen: list[str]) -> None:
    versions = dict.fromkeys(("10", "3", "1"), Path())
    assert list(VersionChoice.parse(text).choose(versions)) == chosen


@pytest.mark.parametrize("text", ["", "latest:0", "latest:x", "newest", "1,,2", "0", "-1"])
def test_other_choices_of_versions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=facts("latest, latest:N, all", "1,3")):
        VersionChoice.parse(text)


def test_all_models_are_loaded_at_the_start(tmp_path: Path) -> None:
    path = add_version(tmp_path, "a", "2")
    add_version(tmp_path, "a", "1")
    add_version(tmp_path, "b", "7")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        assert served(repository) == [("a", "2", "a:2"), ("b", "7", "b:7")]
        assert engine.loads[0] == ("a:2", path, ModelOptions())
        index = await repository.index()
        assert [(e.name, e.version, e.state, e.reason) for e in index] == [
            ("a", "1", "UNAVAILABLE", "not loaded"),
            ("a", "2", "READY", ""),
            ("b", "7", "READY", ""),
        ]
        ready = await repository.index(ready=True)
        assert [(e.name, e.version) for e in ready] == [("a", "2"), ("b", "7")]
        with pytest.raises(ModelControlError, match="start the server with --model-control expl"):
            await repository.load("a")
        with pytest.raises(ModelControlError, match="not unloaded by clients here"):
            await repository.unload("a")

    run(tmp_path, body, RepositoryControl.NONE)


def test_a_model_that_cannot_be_loaded_at_the_start_is_left_out(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        assert (served(repository), engine.models()) == ([], ())
        (entry,) = await repository.index()
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "no room")

    engine = FakeEngine(served=(), load_failure=BackendError("no room"))
    run(tmp_path, body, RepositoryControl.NONE, engine)


@pytest.mark.parametrize("mended", [True, False])
def test_a_server_is_not_ready_while_a_model_of_its_start_is_missing(
    tmp_path: Path, *, mended: bool
) -> None:
    path = add_version(tmp_path, "a", "1")
    engine = FakeEngine(served=(), load_failure=BackendError("no room"))

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        assert engine.ready()
        assert not repository.catalog.all_ready()
        if mended:
            engine.load_failure = None
            add_version(tmp_path, "a", "1", text='{"changed": 1}')
        else:
            shutil.rmtree(path.parent)
        await until(repository.catalog.all_ready)
        assert [name for name, _, _ in served(repository)] == (["a"] if mended else [])

    run(tmp_path, body, RepositoryControl.POLL, engine, repository_poll_s=0.01)


def test_a_model_that_breaks_later_leaves_the_server_ready(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")
    engine = FakeEngine(served=())

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        engine.load_failure = BackendError("no room")
        add_version(tmp_path, "b", "1")
        await until(lambda: repository.catalog.failed == {("b", "1"): "no room"})
        assert repository.catalog.all_ready()

    run(tmp_path, body, RepositoryControl.POLL, engine, repository_poll_s=0.01)


@pytest.mark.parametrize("mended", [True, False])
def test_a_version_counts_as_failed_until_it_is_loaded_or_removed(
    tmp_path: Path, *, mended: bool
) -> None:
    add_version(tmp_path, "a", "1")
    engine = FakeEngine(served=())

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        engine.load_failure = BackendError("no room")
        second = add_version(tmp_path, "a", "2")
        await until(lambda: repository.catalog.failed == {("a", "2"): "no room"})
        assert served(repository) == [("a", "1", "a:1")]
        if mended:
            engine.load_failure = None
        else:
            shutil.rmtree(second)
        await until(lambda: not repository.catalog.failed)
        assert served(repository) == [("a", "2", "a:2") if mended else ("a", "1", "a:1")]

    run(tmp_path, body, RepositoryControl.POLL, engine, repository_poll_s=0.01)


def test_a_failed_load_is_forgotten_once_the_model_is_unloaded(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        with pytest.raises(ModelLoadError, match="no room"):
            await repository.load("a")
        (entry,) = await repository.index()
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "no room")
        await repository.unload("a")
        (entry,) = await repository.index()
        assert (entry.reason, repository.catalog.failed) == ("not loaded", {})
        with pytest.raises(ModelNotServedError):
            await repository.unload("a")

    run(tmp_path, body, engine=FakeEngine(served=(), load_failure=BackendError("no room")))


def test_a_failed_version_that_is_gone_counts_no_longer_while_another_fails(tmp_path: Path) -> None:
    second = add_version(tmp_path, "a", "2")

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        with pytest.raises(ModelLoadError):
            await repository.load("a")
        shutil.rmtree(second)
        add_version(tmp_path, "a", "3")
        with pytest.raises(ModelLoadError):
            await repository.load("a")
        assert repository.catalog.failed.keys() == {("a", "3")}
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(ModelLoadError, match="no version of it"):
            await repository.load("a")
        assert not repository.catalog.failed

    run(tmp_path, body, engine=FakeEngine(served=(), load_failure=BackendError("no room")))


@pytest.mark.parametrize("mended", [True, False])
def test_a_model_that_failed_is_tried_again_with_the_configuration_file(
    tmp_path: Path, *, mended: bool
) -> None:
    path = add_version(tmp_path, "a", "1")
    engine = FakeEngine(served=(), load_failure=BackendError("no room"))

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        assert repository.catalog.missing == {"a"}
        engine.load_failure = None
        if not mended:
            shutil.rmtree(path.parent)
        await repository.change({}, {})
        assert repository.catalog.all_ready()
        assert [name for name, _, _ in served(repository)] == (["a"] if mended else [])

    run(tmp_path, body, RepositoryControl.NONE, engine)


def test_misplaced_models_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_version(tmp_path, "a", "1")
    add_version(tmp_path, "b", "draft")
    (tmp_path / "c.onnx").touch()
    (tmp_path / ".d.onnx").touch()

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        assert served(repository) == [("a", "1", "a:1")]

    run(tmp_path, body, RepositoryControl.NONE)
    assert "ignored: b/draft.ee, c.onnx; a version of a model NAME is NAME/1.ee" in caplog.text


def test_a_model_without_a_version_that_is_asked_for_is_missing(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        assert repository.catalog.missing == {"a"}

    run(tmp_path, body, RepositoryControl.NONE, model_versions=VersionChoice.parse("3"))


def test_a_load_that_its_client_gives_up_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_version(tmp_path, "a", "1")
    reason = "not loaded: the client gave up, or the server stopped"

    class Slow(FakeEngine):
        async def load(self, name: str, path: Path, **options: Any) -> None:
            await asyncio.Event().wait()

    async def body(repository: ModelRepository, _engine: FakeEngine) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(repository.load("a"), 0.05)
        (entry,) = await repository.index()
        assert (entry.state, entry.reason) == ("UNAVAILABLE", reason)
        assert not repository.catalog.failed

    run(tmp_path, body, engine=Slow(served=()))
    assert f"a, version 1: {reason}" in caplog.text


CONFIG = """
name: "a"   # a comment { with max_queue_size: 1
platform: "onnxruntime_onnx"
max_batch_size: 16
input [ { name: "x: {" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [
  { name: "y" data_type: TYPE_FP32 dims: [ 10 ] label_filename: 'labels.txt' }
]
instance_group [ { count: 2 kind: KIND_CPU }, { count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: 500 }
parameters: { key: "k" value: { string_value: "v" } }
parameters < key: "l" value { string_value: "w" } >
"""
IGNORED = (
    "max_batch_size", "label_filename", "instance_group", "dynamic_batching", "parameters",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        (CONFIG, IGNORED),
        ('name: "a" backend: "onnxruntime" input { name: "x" } output { name: "y" }', ()),
        ("", ()),
        ("}}} \xff ] name", ()),
    ],
)
def test_settings_of_a_triton_configuration_are_found(
    tmp_path: Path, text: str, ignored: tuple[str, ...]
) -> None:
    assert ignored_settings(tmp_path) == ()
    (tmp_path / "config.pbtxt").write_text(text)
    assert ignored_settings(tmp_path) == ignored


@pytest.mark.parametrize("control", [RepositoryControl.NONE, RepositoryControl.EXPLICIT])
def test_a_triton_configuration_is_reported_once(
    tmp_path: Path, control: RepositoryControl, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("a", CONFIG), ("b", 'name: "b"'), ("c", "max_batch_size: 8")):
        add_version(tmp_path, name, "1")
        (tmp_path / name / "config.pbtxt").write_text(text)

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        if control is RepositoryControl.EXPLICIT:
            for name in ("a", "b", "c", "a"):
                await repository.load(name)
        assert len(engine.loads) == 3

    run(tmp_path, body, control)
    first, second = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    tells(first, f"{tmp_path}/a/config.pbtxt is not read", ", ".join(IGNORED), "moving.md")
    tells(second, f"{tmp_path}/c/config.pbtxt is not read", "ignored: max_batch_size;")


@pytest.mark.parametrize("control", RepositoryControl)
def test_an_unreadable_folder_is_logged_at_the_start(
    tmp_path: Path, control: RepositoryControl
) -> None:
    async def body(*_: Any) -> None:
        pytest.fail("it has started")

    (tmp_path / "file").touch()
    for name, told in (("nowhere", "No such file"), ("file", "Not a directory")):
        with pytest.raises(StartError, match=facts(name, told, "expected a folder")):
            run(tmp_path / name, body, control)


def test_clients_load_and_unload(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        assert served(repository) == []
        await repository.load("a")
        await repository.load("a")  # as it is
        assert len(engine.loads) == 1
        await repository.load("a", ModelOptions(max_batch_size=3))
        assert engine.loads[1][2] == ModelOptions(max_batch_size=3)
        add_version(tmp_path, "a", "2")
        await repository.load("a")
        assert served(repository) == [("a", "2", "a:2")]
        assert [m.name for m in engine.models()] == ["a:2"]
        await repository.unload("a")
        assert (served(repository), engine.models()) == ([], ())
        index = await repository.index()
        assert [(e.version, e.reason) for e in index] == [("1", "not loaded"), ("2", "unloaded")]
        with pytest.raises(ModelNotServedError, match=facts("'a'", "served: none")):
            await repository.unload("a")

    run(tmp_path, body)


@pytest.mark.parametrize("name", ["b", "", "..", "../a", "a/1", "a\0"])
def test_what_is_no_model_of_the_repository_cannot_be_loaded(tmp_path: Path, name: str) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        with pytest.raises(ModelLoadError, match=facts("no version", "1.ee", "1/model.onnx")):
            await repository.load(name)
        assert engine.loads == []

    run(tmp_path, body)


def test_where_loading_fails_the_old_version_serves_on(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        add_version(tmp_path, "a", "2")
        engine.load_failure = BackendError("no room")
        with pytest.raises(ModelLoadError, match=facts("'a', version 2", "no room")):
            await repository.load("a")
        assert served(repository) == [("a", "1", "a:1")]
        index = await repository.index()
        assert [(e.version, e.state, e.reason) for e in index] == [
            ("1", "READY", ""),
            ("2", "UNAVAILABLE", "no room"),
        ]
        engine.load_failure = None
        await repository.load("a")
        assert [(e.version, e.state, e.reason) for e in await repository.index()] == [
            ("1", "UNAVAILABLE", "not loaded"),
            ("2", "READY", ""),
        ]

    run(tmp_path, body, load_model=("a",))


def test_several_versions_answer_and_the_newest_where_none_is_named(tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        add_version(tmp_path, "a", version)

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        catalog = repository.catalog
        assert catalog.find("a").engine_name == "a:3"
        assert catalog.find("a", "2").engine_name == "a:2"
        with pytest.raises(ModelNotServedError, match=r"no version '1'.*send '3' or '2'"):
            catalog.find("a", "1")
        (tmp_path / "a" / "3.ee" / "manifest.json").unlink()
        (tmp_path / "a" / "3.ee").rmdir()
        await repository.load("a")
        assert [s.version for s in catalog.served("a")] == ["1", "2"]
        assert sorted(m.name for m in engine.models()) == ["a:1", "a:2"]

    run(tmp_path, body, load_model=("a",), model_versions=VersionChoice(latest=2))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing sets an event
        await asyncio.sleep(0.002)


def test_the_folder_is_followed(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "1")

    async def body(repository: ModelRepository, engine: FakeEngine) -> None:
        add_version(tmp_path, "b", "1")
        await until(lambda: ("b", "1", "b:1") in served(repository))
        add_version(tmp_path, "b", "1", '{"another": "manifest"}')
        await until(lambda: len(engine.loads) == 3)
        assert [name for name, *_ in engine.loads] == ["a:1", "b:1", "b:1"]
        (tmp_path / "a" / "1.ee" / "manifest.json").unlink()
        (tmp_path / "a" / "1.ee").rmdir()
        await until(lambda: served(repository) == [("b", "1", "b:1")])
        (removed, _) = await repository.index()
        assert (removed.name, removed.reason) == ("a", "removed from the repository")

    run(tmp_path, body, RepositoryControl.POLL, repository_poll_s=0.01)


def test_what_a_configuration_file_says_anew_is_served(tmp_path: Path) -> None:
    async def body() -> None:
        engine = FakeEngine()
        repository = ModelRepository(engine, named={"fake": tmp_path / "fake.ee"})
        slow = ModelOptions(max_queue_delay_ms=5.0)
        named = {"fake": tmp_path / "fake.ee", "new": tmp_path / "new.onnx"}
        await repository.change(named, {"fake": slow})
        assert engine.loads == [
            ("fake", tmp_path / "fake.ee", slow),
            ("new", tmp_path / "new.onnx", ModelOptions()),
        ]
        engine.load_failure = BackendError("no room")
        await repository.change({**named, "broken": tmp_path / "broken.ee"}, {"fake": slow})
        await repository.change({"new": tmp_path / "new.onnx"}, {})
        assert served(repository) == [("new", "1", "new")]

    asyncio.run(body())


def test_tritons_client_manages_the_repository(tmp_path: Path) -> None:
    add_version(tmp_path, "a", "3")
    options = ServerOptions(
        repository=ModelRepositoryOptions(
            model_repository=tmp_path, model_control=RepositoryControl.EXPLICIT
        )
    )
    with (
        FakeServer(FakeEngine(), options) as server,
        triton.InferenceServerClient(server.address) as client,
        Client(server.address) as ours,
    ):
        assert not client.is_model_ready("a")
        client.load_model("a", config='{"max_batch_size": 5}')
        assert server.engine.loads == [
            ("a:3", tmp_path / "a" / "3.ee", ModelOptions(max_batch_size=5))
        ]
        assert client.is_model_ready("a", "3")
        assert not client.is_model_ready("a", "1")
        assert list(client.get_model_metadata("a").versions) == ["3"]
        index = client.get_model_repository_index().models
        assert [(m.name, m.version, m.state) for m in index] == [
            ("a", "3", "READY"),
            ("fake", "1", "READY"),
        ]
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(X)
        result = client.infer("a", [tensor])
        assert result.get_response().model_version == "3"
        np.testing.assert_array_equal(result.as_numpy("logits"), X[:, :3])
        with pytest.raises(InferenceServerException, match="has no version '4'"):
            client.infer("a", [tensor], model_version="4")
        for config in ("[]", "{", '{"max_batch": 5}', '{"max_batch_size": 0}'):
            with pytest.raises(InferenceServerException, match="parameter 'config' of model 'a'"):
                client.load_model("a", config=config)
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("a", config='{"dynamic_batching": {}}')
        tells(str(caught.value), "there is no key 'dynamic_batching' (expected", "howto/moving.md")
        client.unload_model("a")
        assert not client.is_model_ready("a")
        assert ours.model_ready("fake")
